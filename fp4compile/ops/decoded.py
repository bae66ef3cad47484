"""Values in the place of codes, for products on devices whose tensor cores do not multiply codes.

What fp4::decode gives of codes and scales that nothing else reads, without writing and reading them:

| operator | takes | gives |
|---|---|---|
| fp4::quantize_decoded | x [R, C] as fp4::quantize does | decode(quantize(x, ...)), bfloat16 [R, nb * B] |
| fp4::rotate_quantize_decoded | x [R, C] as fp4::rotate_quantize does | decode(rotate_quantize(x, ...)), the same |
| fp4::decoded_mm | a [M, K] and b [N, K], bfloat16 | their product, [M, N] in out_dtype |

nb = ceil(C / B), of the rotated columns where x is rotated. All results are contiguous. The values are fp4::decode's,
code * block scale, exact in bfloat16; the tensor scale is left to the product:

    D = (gamaxA * gamaxB / (2688 * 2688)) * sum_k a[m, k] * b[n, k]

a_amax, b_amax: 0-d float32, or None of an operand without a tensor scale. a_amax may be [M], of a scale a row, in any
of bfloat16, float16 and float32; then, each product rounded to float32 (why so: fp4::scaled_mm),

    D = (sum_k a[m, k] * b[n, k] * (gamaxB / 2688)) * (gamaxA[m] * float32(1 / 2688))

Accumulated in float32, multiplied, rounded
once; an implementation may only differ in the order of accumulation. Operands have any strides; those whose rows or
whose columns are contiguous are read where they are. Where K differs, by less than 32, the tail of the longer is
padding and is left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import ConfigError, UnsupportedDtypeError
from ..formats import rotation
from . import decode, rotated
from . import quantize as _quantize
from . import scaled_mm as products
from .library import BLOCKS, define


def quantize_decoded(
    x: Tensor,
    amax: Tensor | None,
    seed: Tensor | None,
    format: str,
    block: Sequence[int],
    rounding: str,
    site: int,
) -> Tensor:
    _quantize._check(x, amax, seed, format, block, rounding, site)
    return _formulas(x, amax, seed, format, block, rounding, site)


def _formulas(
    x: Tensor,
    amax: Tensor | None,
    seed: Tensor | None,
    format: str,
    block: Sequence[int],
    rounding: str,
    site: int | Tensor,
) -> Tensor:
    codes, scales = _quantize.formulas(x, amax, seed, format, block, rounding, site)
    return decode.formulas(codes, scales, format, torch.bfloat16)


def _fake(
    x: Tensor,
    amax: Tensor | None,
    seed: Tensor | None,
    format: str,
    block: Sequence[int],
    rounding: str,
    site: int,
) -> Tensor:
    _quantize._check(x, amax, seed, format, block, rounding, site)
    return _empty(x, x.shape[1], format)


def _empty(x: Tensor, columns: int, format: str) -> Tensor:
    size = BLOCKS[format]
    return x.new_empty((x.shape[0], (columns + size - 1) // size * size), dtype=torch.bfloat16)


def rotate_quantize_decoded(
    x: Tensor,
    amax: Tensor | None,
    seed: Tensor | None,
    format: str,
    rounding: str,
    site: int,
    size: int,
    signs: int,
) -> Tensor:
    rotated._check_rotate_quantize(x, amax, seed, format, rounding, site, size, signs)
    return _rotated_formulas(x, amax, seed, format, rounding, site, size, signs)


def _rotated_formulas(
    x: Tensor,
    amax: Tensor | None,
    seed: Tensor | None,
    format: str,
    rounding: str,
    site: int | Tensor,
    size: int,
    signs: int,
) -> Tensor:
    y = rotation.rotate(x, size, signs)
    return _formulas(y, amax, seed, format, [1, BLOCKS[format]], rounding, site)


def _rotated_fake(
    x: Tensor,
    amax: Tensor | None,
    seed: Tensor | None,
    format: str,
    rounding: str,
    site: int,
    size: int,
    signs: int,
) -> Tensor:
    rotated._check_rotate_quantize(x, amax, seed, format, rounding, site, size, signs)
    return _empty(x, (x.shape[1] + size - 1) // size * size, format)


def decoded_mm(a: Tensor, a_amax: Tensor | None, b: Tensor, b_amax: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    _check_product(a, a_amax, b, b_amax, out_dtype)
    return _product_formulas(a, a_amax, b, b_amax, out_dtype)


def _product_formulas(
    a: Tensor, a_amax: Tensor | None, b: Tensor, b_amax: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    return products.product(a.to(torch.float32), a_amax, b.to(torch.float32), b_amax, out_dtype)


def _product_fake(a: Tensor, a_amax: Tensor | None, b: Tensor, b_amax: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    _check_product(a, a_amax, b, b_amax, out_dtype)
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


def _check_product(a: Tensor, a_amax: Tensor | None, b: Tensor, b_amax: Tensor | None, out_dtype: torch.dtype) -> None:
    for name, x, amax in (("a", a, a_amax), ("b", b, b_amax)):
        if x.dtype != torch.bfloat16:
            raise UnsupportedDtypeError(f"fp4::decoded_mm: {name} is {x.dtype}; decoded values are torch.bfloat16")
        if x.dim() != 2:
            raise ConfigError(f"fp4::decoded_mm: {name} has shape {list(x.shape)}; a 2-D tensor, [rows, K], is needed")
        if amax is not None:
            products.check_amax("decoded_mm", name, x, amax)
    products.check_product("decoded_mm", a.shape[1], b.shape[1], out_dtype)


define(
    "quantize_decoded(Tensor x, Tensor? amax, Tensor? seed, str format, int[] block, str rounding, int site) -> Tensor",
    quantize_decoded,
    _fake,
    _formulas,
    _quantize._check,
)
define(
    "rotate_quantize_decoded(Tensor x, Tensor? amax, Tensor? seed, str format, str rounding, int site, int size,"
    " int signs) -> Tensor",
    rotate_quantize_decoded,
    _rotated_fake,
    _rotated_formulas,
    rotated._check_rotate_quantize,
)
define(
    "decoded_mm(Tensor a, Tensor? a_amax, Tensor b, Tensor? b_amax, ScalarType out_dtype) -> Tensor",
    decoded_mm,
    _product_fake,
    _product_formulas,
    _check_product,
)
