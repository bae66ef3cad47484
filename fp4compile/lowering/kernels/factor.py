"""The product's factor of one or two amaxes, by one thread: as tensor arithmetic it would be eight launches.

Twin: ``nvfp4.gemm_factor``.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from . import common
from .kernel import Kernel, render


@functools.cache
def kernel(operands: int, beside: float = 0.0) -> Kernel:
    name = f"gemm_factor_{operands}" + ("_and_1" if beside else "")
    pointers = [*(f"amax{i}_ptr" for i in range(operands)), "factor_ptr"]
    return Kernel(
        family="gemm factor",
        name=name,
        source=render("factor.py.jinja", name=name, operands=operands, beside=beside),
        signature=dict.fromkeys(pointers, "*fp32"),
        constants={},
        aligned=(),
        num_warps=1,
    )


def factors(*amaxes: Tensor | None, beside: float = 0.0) -> Tensor | None:
    """The factor and the number 0 or 1, as cuBLAS reads them, float32 [2], of 0-d float32 amaxes; None of none."""
    present = [amax for amax in amaxes if amax is not None]
    if not present:
        return None
    result = present[0].new_empty((2,), dtype=torch.float32)
    with common.on_device_of(result):
        kernel(len(present), beside).run(1, *present, result)
    return result
