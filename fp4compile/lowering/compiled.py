"""The operators' reference formulas, compiled by Inductor once for all sites and shapes.

Each operator of ``fp4`` has a twin of the same schema in ``fp4_compiled``. Its body is the reference traced into
Inductor's primitives with symbolic sizes, so that block amax, rounding and packing are one fused C++ loop. A variant is
compiled at its first call and serves every later one; Inductor's disk cache keeps it for the next process.

Inlined at every site instead, the same primitives give the same bits, but then Inductor generates and compiles them
again for each site and shape, and compile time grows with the number of layers (docs/design.md).
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compat import below_autograd, schema_of
from ..ops import REFERENCE
from ..ops.library import SCALE_DTYPES

library = torch.library.Library("fp4_compiled", "DEF")

COMPILED: dict[Any, Any] = {}
"""Operator of ``fp4`` -> its compiled twin."""


def _define(operator: Any) -> None:
    schema = schema_of(operator)
    name = schema.name.partition("::")[2]

    varying = [index for index, argument in enumerate(schema.arguments) if argument.name == "site"]

    def run(*args: Any) -> Any:
        if any(isinstance(arg, Tensor) and arg.numel() == 0 for arg in args):
            return operator(*args)  # nothing to compute, and Inductor cannot lower views of empty tensors on torch 2.11
        args = tuple(torch.tensor(arg) if index in varying else arg for index, arg in enumerate(args))
        positions = tuple(index for index, arg in enumerate(args) if isinstance(arg, Tensor))
        fixed = tuple(None if isinstance(arg, Tensor) else _hashable(arg) for arg in args)
        with torch.no_grad(), below_autograd():  # in a graph's first call and in the later ones alike
            tensors = [args[index].detach() for index in positions]  # sizes of a Parameter are never symbolic
            return _variant(operator, positions, fixed, tuple(map(Kind.of, tensors)))(*tensors)

    library.define(str(schema).partition("::")[2])
    library.impl(name, run, "CPU")
    torch.library.register_fake(f"fp4_compiled::{name}", operator, lib=library)
    COMPILED[operator] = getattr(torch.ops.fp4_compiled, name).default


def _hashable(arg: Any) -> Any:
    return tuple(arg) if isinstance(arg, list) else arg


class Kind(NamedTuple):
    """What of a tensor Dynamo compiles anew for even with symbolic sizes."""

    dtype: torch.dtype
    dim: int
    contiguous: bool
    small: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Kind:
        return cls(tensor.dtype, tensor.dim(), tensor.is_contiguous(), tuple(size for size in tensor.shape if size < 2))


@functools.cache
def _variant(
    operator: Any, positions: tuple[int, ...], fixed: tuple[Any, ...], kinds: tuple[Kind, ...]
) -> Callable[..., Any]:
    """The compiled reference of one operator: tensors at ``positions``, the other arguments as in ``fixed``.

    It is compiled for tensors of ``_typical`` shape. Otherwise the first call of a process would decide, for all that
    follow, which loops are made parallel, and which sizes are taken to be equal.
    """
    reference = REFERENCE[operator]

    def body(*tensors: Tensor) -> Any:
        args = list(fixed)
        for position, tensor in zip(positions, tensors, strict=True):
            args[position] = tensor
        return reference(*args)

    # Dynamo keeps compiled code by code object and gives up after a few variants of one: each gets its own.
    own = types.FunctionType(body.__code__.replace(), globals(), body.__name__, None, body.__closure__)
    compiled = torch.compile(own, dynamic=True, fullgraph=True)
    if not any(kind.small for kind in kinds):  # also below autograd: ``run`` calls this there
        compiled(*_typical(kinds))
    return compiled


def forget() -> None:
    """Compile again at the next call, for typical shapes. To be called after ``torch.compiler.reset``."""
    _variant.cache_clear()


_ROWS = (1536, 768)
_COLUMNS = {torch.uint8: 1024, torch.float8_e4m3fn: 128, torch.float8_e8m0fnu: 64}
_PLAIN_COLUMNS = 2048
_SCALES = tuple(SCALE_DTYPES.values())


def _typical(kinds: Sequence[Kind]) -> Iterator[Tensor]:
    """Zeros of the shapes that operands of one product have; no two sizes are equal that need not be."""
    rows, count = iter(_ROWS), 0
    for kind in kinds:
        if kind.dim == 0:
            yield torch.zeros((), dtype=kind.dtype)
            continue
        if kind.dim == 1:  # the amaxes of rows come behind the tensor that has the rows
            yield torch.zeros(count, dtype=kind.dtype)
            continue
        if kind.dtype not in _SCALES:  # scales have the rows of the codes before them
            count = next(rows)
        columns = _COLUMNS.get(kind.dtype, _PLAIN_COLUMNS)
        if kind.contiguous:
            yield torch.zeros(count, columns, dtype=kind.dtype)
        else:
            yield torch.zeros(columns, count, dtype=kind.dtype).t()


for _operator in REFERENCE:
    if _operator is not torch.ops.fp4.produce.default:  # lowering makes it, for devices with kernels
        _define(_operator)
