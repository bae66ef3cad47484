"""Begin to compile the kernels of a graph when it is lowered, beside all that Inductor still does.

Which kernels an operator launches is known by calling it on the graph's fake tensors with launches gathered instead. It
is only an advance: what is not found here is compiled at its first launch.
"""

from __future__ import annotations

import functools
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, fx

from .kernels.kernel import Kernel, Odd, collecting

MOST_THREADS = 8
_known: set[Any] = set()
"""Calls whose kernels have been begun with."""


def compile_ahead(node: fx.Node, implementation: Any, device: torch.device) -> None:
    """Begin with the kernels of one node whose operator ``implementation`` is, unless its shapes are symbolic."""
    arguments = fx.node.map_arg(node.args, lambda argument: argument.meta["val"])
    if any(_is_symbolic(value) for value in arguments):
        return
    call = (implementation, device, *map(_described, arguments))
    if call in _known:  # most layers are like another
        return
    _known.add(call)
    for kernel, odd in launched(implementation, *arguments):
        kernel.compile_in(_pool(), torch.cuda.current_device() if device.index is None else device.index, odd)


def _described(value: Any) -> Any:
    """What of an argument kernels can depend on."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.stride()
    return tuple(map(_described, value)) if isinstance(value, (list, tuple)) else value


def launched(implementation: Any, *arguments: Any) -> list[tuple[Kernel, Odd]]:
    """The kernels that a call would launch, with tensors that are aligned."""
    with collecting() as found:
        implementation(*arguments)
    return found


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_is_symbolic, value))
    sizes = (*value.shape, *value.stride(), value.storage_offset()) if isinstance(value, Tensor) else (value,)
    return any(isinstance(size, torch.SymInt) for size in sizes)


@functools.cache
def _pool() -> ThreadPoolExecutor:
    """Of threads: most of the time is spent in C++ and in the assembler, without Python's lock. Inductor's processes
    would have to import this package first."""
    return ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1), thread_name_prefix="fp4compile")
