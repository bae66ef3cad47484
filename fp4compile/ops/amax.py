"""fp4::amax: the largest magnitude of a whole tensor; fp4::row_amax: of each row.

amax: x bfloat16, float16 or float32 of any shape and strides. Result: 0-d float32; NaN propagates; 0 for an empty
tensor.

row_amax: x [R, C] -> [R] in x's dtype; NaN propagates; 0 for rows of nothing. Opaque until a graph is partitioned, then
plain operators (lowering/fold.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats import nvfp4
from .library import check_dtype, check_input, define


def amax(x: Tensor) -> Tensor:
    check_dtype("amax", "x", x)
    return nvfp4.amax(x)


def _fake(x: Tensor) -> Tensor:
    check_dtype("amax", "x", x)
    return x.new_empty((), dtype=torch.float32)


def _check(x: Tensor) -> None:
    check_dtype("amax", "x", x)


def row_amax(x: Tensor) -> Tensor:
    _check_rows(x)
    return row_formulas(x)


def row_formulas(x: Tensor) -> Tensor:
    if isinstance(x.shape[1], int) and x.shape[1] == 0:  # there is no maximum of nothing
        return x.new_zeros(x.shape[0])
    return x.abs().amax(-1)


def _row_fake(x: Tensor) -> Tensor:
    _check_rows(x)
    return x.new_empty((x.shape[0],))


def _check_rows(x: Tensor) -> None:
    check_input("row_amax", x)


define("amax(Tensor x) -> Tensor", amax, _fake, check=_check)
define("row_amax(Tensor x) -> Tensor", row_amax, _row_fake, row_formulas, _check_rows)
