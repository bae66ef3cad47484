"""fp4::amax: the largest magnitude of a whole tensor.

x: bfloat16, float16 or float32 of any shape and strides. Result: 0-d float32; NaN propagates; 0 for an empty
tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats import nvfp4
from .library import check_dtype, define


def amax(x: Tensor) -> Tensor:
    check_dtype("amax", "x", x)
    return nvfp4.amax(x)


def _fake(x: Tensor) -> Tensor:
    check_dtype("amax", "x", x)
    return x.new_empty((), dtype=torch.float32)


def _check(x: Tensor) -> None:
    check_dtype("amax", "x", x)


define("amax(Tensor x) -> Tensor", amax, _fake, check=_check)
