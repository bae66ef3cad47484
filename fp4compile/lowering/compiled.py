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
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ops import REFERENCE

library = torch.library.Library("fp4_compiled", "DEF")

COMPILED: dict[Any, Any] = {}
"""Operator of ``fp4`` -> its compiled twin."""


def _define(operator: Any) -> None:
    schema = operator._schema
    name = schema.name.partition("::")[2]

    varying = [index for index, argument in enumerate(schema.arguments) if argument.name == "site"]

    def run(*args: Any) -> Any:
        args = tuple(torch.tensor(arg) if index in varying else arg for index, arg in enumerate(args))
        positions = tuple(index for index, arg in enumerate(args) if isinstance(arg, Tensor))
        fixed = tuple(None if isinstance(arg, Tensor) else _hashable(arg) for arg in args)
        with torch.no_grad():
            tensors = [args[index] for index in positions]
            return _variant(operator, positions, fixed, tuple(map(_kind, tensors)))(*tensors)

    library.define(str(schema).partition("::")[2])
    library.impl(name, run, "CPU")
    torch.library.register_fake(f"fp4_compiled::{name}", operator, lib=library)
    COMPILED[operator] = getattr(torch.ops.fp4_compiled, name).default


def _hashable(arg: Any) -> Any:
    return tuple(arg) if isinstance(arg, list) else arg


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    """What of a tensor Dynamo compiles anew for even with symbolic sizes."""
    return tensor.dtype, tensor.is_contiguous(), tuple(size for size in tensor.shape if size < 2)


@functools.cache
def _variant(
    operator: Any, positions: tuple[int, ...], fixed: tuple[Any, ...], kinds: tuple[Any, ...]
) -> Callable[..., Any]:
    """The compiled reference of one operator: tensors at ``positions``, the other arguments as in ``fixed``.

    ``kinds`` only tells variants apart.
    """
    reference = REFERENCE[operator]

    def body(*tensors: Tensor) -> Any:
        args = list(fixed)
        for position, tensor in zip(positions, tensors, strict=True):
            args[position] = tensor
        return reference(*args)

    # Dynamo keeps compiled code by code object and gives up after a few variants of one: each gets its own.
    own = types.FunctionType(body.__code__.replace(), globals(), body.__name__, None, body.__closure__)
    return torch.compile(own, dynamic=True, fullgraph=True)


for _operator in REFERENCE:
    _define(_operator)
