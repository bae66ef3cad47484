"""What generated kernels do in one read of a tensor, as operators: the rotation fused with what reads it.

fp4::rotated_amax: amax(rotate(x)), 0-d float32.
fp4::amax_both: amax(x) and amax(rotate(x.t())), x [T, K].
fp4::rotate_quantize: quantize(rotate(x), ...) with 1 x B blocks; the rotated tensor is never written.

``passes/fuse.py`` puts them in the place of fp4::rotate and its readers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import amax as _amax
from . import quantize as _quantize
from . import rotate as _rotate
from .library import BLOCKS, check_scalar, define


def rotated_amax(x: Tensor, size: int, signs: int) -> Tensor:
    return _amax.amax(_rotate.rotate(x, size, signs))


def _rotated_amax_fake(x: Tensor, size: int, signs: int) -> Tensor:
    _rotate._check(x, size, signs)
    return x.new_empty((), dtype=torch.float32)


def amax_both(x: Tensor, size: int, signs: int) -> tuple[Tensor, Tensor]:
    return _amax.amax(x), rotated_amax(x.t(), size, signs)


def _amax_both_fake(x: Tensor, size: int, signs: int) -> tuple[Tensor, Tensor]:
    _rotate._check(x, size, signs)
    return x.new_empty((), dtype=torch.float32), x.new_empty((), dtype=torch.float32)


def rotate_quantize(
    x: Tensor,
    amax: Tensor | None,
    seed: Tensor | None,
    format: str,
    rounding: str,
    site: int,
    size: int,
    signs: int,
    tiled: bool = False,
) -> tuple[Tensor, Tensor]:
    _check_amax(amax)
    rotated, block = _rotate.rotate(x, size, signs), [1, BLOCKS[format]]
    return _quantize.quantize(rotated, amax, seed, format, block, rounding, site, tiled)


def _rotate_quantize_fake(
    x: Tensor,
    amax: Tensor | None,
    seed: Tensor | None,
    format: str,
    rounding: str,
    site: int,
    size: int,
    signs: int,
    tiled: bool = False,
) -> tuple[Tensor, Tensor]:
    _check_amax(amax)
    rotated, block = _rotate._fake(x, size, signs), [1, BLOCKS[format]]
    return _quantize._fake(rotated, amax, seed, format, block, rounding, site, tiled)


def _check_rotate_quantize(
    x: Tensor,
    amax: Tensor | None,
    seed: Tensor | None,
    format: str,
    rounding: str,
    site: int,
    size: int,
    signs: int,
    tiled: bool = False,
) -> None:
    _rotate._check(x, size, signs)
    _quantize._check(x, amax, seed, format, [1, BLOCKS.get(format, 0)], rounding, site)
    _check_amax(amax)


def _check_amax(amax: Tensor | None) -> None:
    """Of the whole tensor: no recipe has rotated operands with a scale a row."""
    if amax is not None:
        check_scalar("rotate_quantize", "amax", amax, torch.float32)


define("rotated_amax(Tensor x, int size, int signs) -> Tensor", rotated_amax, _rotated_amax_fake, check=_rotate._check)
define(
    "amax_both(Tensor x, int size, int signs) -> (Tensor amax, Tensor rotated_amax)",
    amax_both,
    _amax_both_fake,
    check=_rotate._check,
)
define(
    "rotate_quantize(Tensor x, Tensor? amax, Tensor? seed, str format, str rounding, int site, int size, int signs,"
    " bool tiled=False) -> (Tensor codes, Tensor scales)",
    rotate_quantize,
    _rotate_quantize_fake,
    check=_check_rotate_quantize,
)
