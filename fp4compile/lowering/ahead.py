"""Begin to compile the kernels of a graph when it is lowered, beside all that Inductor still does.

Which kernels an operator launches is known by calling it on the graph's fake tensors with launches gathered instead.
Processes compile them, Inductor's own, since much of Triton's compiler is Python. It is only an advance: what is not
found in Triton's cache later is compiled at its first launch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from .. import compat
from .kernels.kernel import Kernel, collecting


def compile_ahead(node: fx.Node, implementation: Any, device: torch.device) -> None:
    """Begin with the kernels of one node whose operator ``implementation`` is, unless its shapes are symbolic."""
    pool = compat.compile_pool()
    arguments = fx.node.map_arg(node.args, lambda argument: argument.meta["val"])
    if pool is None or any(_is_symbolic(value) for value in arguments):
        return
    for kernel in launched(implementation, *arguments):
        kernel.compile_in(pool, torch.cuda.current_device() if device.index is None else device.index)


def launched(implementation: Any, *arguments: Any) -> list[Kernel]:
    """The kernels that a call would launch."""
    with collecting() as kernels:
        implementation(*arguments)
    return kernels


def _is_symbolic(value: Any) -> bool:
    sizes = value.shape if isinstance(value, Tensor) else (value,)
    return any(isinstance(size, torch.SymInt) for size in sizes)
