"""The operators' reference formulas, compiled by Inductor once for all sites and shapes.

Each operator of ``fp4`` has a twin of the same schema in ``fp4_compiled``. Its body is the reference traced into
Inductor's primitives with symbolic sizes, so that block amax, rounding and packing are one fused C++ loop. A variant is
compiled at its first call and serves every later one; Inductor's disk cache keeps it for the next process.

Inlining the primitives at every site instead gives the same bits and was measured to cost seconds of code generation a
linear layer (docs/design.md).
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
        tensors = tuple(arg for arg in args if isinstance(arg, Tensor))
        static = tuple(_TENSOR if isinstance(arg, Tensor) else _hashable(arg) for arg in args)
        with torch.no_grad():
            return _variant(operator, static)(*tensors)

    library.define(str(schema).partition("::")[2])
    library.impl(name, run, "CPU")
    torch.library.register_fake(f"fp4_compiled::{name}", operator, lib=library)
    COMPILED[operator] = getattr(torch.ops.fp4_compiled, name).default


_TENSOR = object()


def _hashable(arg: Any) -> Any:
    return tuple(arg) if isinstance(arg, list) else arg


@functools.cache
def _variant(operator: Any, static: tuple[Any, ...]) -> Callable[..., Any]:
    """The compiled reference of one operator with its non-tensor arguments fixed."""
    reference = REFERENCE[operator]

    def body(*tensors: Tensor) -> Any:
        left = iter(tensors)
        return reference(*(next(left) if arg is _TENSOR else arg for arg in static))

    # Dynamo keeps compiled code by code object and gives up after a few variants of one: each variant gets its own.
    own = types.FunctionType(body.__code__.replace(), globals(), body.__name__, None, body.__closure__)
    return torch.compile(own, dynamic=True, fullgraph=True)


for _operator in REFERENCE:
    _define(_operator)
