"""fp4::scaled_mm: [M, K] x [N, K]^T -> [M, N] of quantized operands.

Each operand is (tensor, scales, amax, format):

| format | tensor | scales | amax |
|---|---|---|---|
| nvfp4 | packed uint8 [rows, nb * 8] | float8_e4m3fn [rows, nb] | 0-d float32; see below |
| mxfp4 | packed uint8 [rows, nb * 16] | float8_e8m0fnu [rows, nb] | None |
| bf16 | [rows, K] bfloat16, float16 or float32, any strides | None | None |

    D = (gamaxA * gamaxB / (2688 * 2688)) * sum_k decode(a)[m, k] * decode(b)[n, k]

The left operand may have a scale a row (``fp4::quantize``): its amax is then [M], bfloat16, float16 or float32. Its
factor comes behind the other's, so that a device can multiply by a number first and rows afterwards:

    D = (sum_k decode(a)[m, k] * decode(b)[n, k] * (gamaxB / 2688)) * (gamaxA[m] * float32(1 / 2688))

each product rounded to float32, from left to right. The last factor is a product, not a division, because generated
code divides only nearly right on a GPU.

tiled: both scales are in the order of tensor cores, as fp4::quantize writes them with tiled=True.

An operand without a tensor scale leaves its gamax / 2688 out. The reference decodes to float32, accumulates
in float32, multiplies by the float32 factor and casts; an implementation may only differ in the order of
accumulation. Operands whose padded K differ are cut to the shorter one: the tail of the longer is padding,
zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ConfigError, UnsupportedDtypeError
from ..formats import layout, nvfp4
from . import decode
from .library import (
    BLOCKS,
    INPUT_DTYPES,
    check_codes,
    check_format,
    check_input,
    check_row_amax,
    check_scalar,
    define,
    is_scalar,
)

WIDEST_BLOCK = max(BLOCKS.values())


def scaled_mm(
    a: Tensor,
    a_scales: Tensor | None,
    a_amax: Tensor | None,
    a_format: str,
    b: Tensor,
    b_scales: Tensor | None,
    b_amax: Tensor | None,
    b_format: str,
    out_dtype: torch.dtype,
    tiled: bool = False,
) -> Tensor:
    _check(a, a_scales, a_amax, a_format, b, b_scales, b_amax, b_format, out_dtype, tiled)
    return formulas(a, a_scales, a_amax, a_format, b, b_scales, b_amax, b_format, out_dtype, tiled)


def formulas(
    a: Tensor,
    a_scales: Tensor | None,
    a_amax: Tensor | None,
    a_format: str,
    b: Tensor,
    b_scales: Tensor | None,
    b_amax: Tensor | None,
    b_format: str,
    out_dtype: torch.dtype,
    tiled: bool = False,
) -> Tensor:
    """The same without checks; mxfp4 scales may also be their bytes, uint8."""
    if tiled:
        a_scales, b_scales = _rows_of_tiles(a, a_scales, a_format), _rows_of_tiles(b, b_scales, b_format)
    left, right = _operand(a, a_scales, a_format), _operand(b, b_scales, b_format)
    return product(left, a_amax, right, b_amax, out_dtype)


def product(
    left: Tensor, a_amax: Tensor | None, right: Tensor, b_amax: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """Of float32 [M, K] and [N, K], K the shorter of the two, times the factor of the tensor scales, then of rows."""
    k = min(left.shape[1], right.shape[1])
    out = left[:, :k] @ right[:, :k].t()
    by_row = a_amax is not None and a_amax.dim() == 1
    factor = nvfp4.gemm_factor(None if by_row else a_amax, b_amax)
    if factor is not None:
        out = out * factor
    if by_row:
        assert a_amax is not None
        out = out * nvfp4.row_factors(a_amax)
    return out.to(out_dtype).contiguous()


def _rows_of_tiles(codes: Tensor, tiles: Tensor | None, format: str) -> Tensor:
    assert tiles is not None
    return layout.from_tiles(tiles, codes.shape[0], codes.shape[1] * 2 // BLOCKS[format])


def _operand(x: Tensor, scales: Tensor | None, format: str) -> Tensor:
    return x.to(torch.float32) if scales is None else decode.formulas(x, scales, format, torch.float32)


def _fake(
    a: Tensor,
    a_scales: Tensor | None,
    a_amax: Tensor | None,
    a_format: str,
    b: Tensor,
    b_scales: Tensor | None,
    b_amax: Tensor | None,
    b_format: str,
    out_dtype: torch.dtype,
    tiled: bool = False,
) -> Tensor:
    _check(a, a_scales, a_amax, a_format, b, b_scales, b_amax, b_format, out_dtype, tiled)
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


def _check(
    a: Tensor,
    a_scales: Tensor | None,
    a_amax: Tensor | None,
    a_format: str,
    b: Tensor,
    b_scales: Tensor | None,
    b_amax: Tensor | None,
    b_format: str,
    out_dtype: torch.dtype,
    tiled: bool = False,
) -> None:
    _check_operand("a", a, a_scales, a_amax, a_format, tiled)
    _check_operand("b", b, b_scales, b_amax, b_format, tiled)
    check_product("scaled_mm", _k(a, a_scales, a_format), _k(b, b_scales, b_format), out_dtype)


def check_product(op: str, k_a: int, k_b: int, out_dtype: torch.dtype) -> None:
    """What products of any operands need."""
    if out_dtype not in INPUT_DTYPES:
        raise UnsupportedDtypeError(
            f"fp4::{op}: out_dtype is {out_dtype}; one of torch.bfloat16, float16 and float32 is needed"
        )
    if abs(k_a - k_b) >= WIDEST_BLOCK:
        raise ConfigError(
            f"fp4::{op}: a has K = {k_a} and b has K = {k_b}; both are [rows, K], and only padding, "
            f"less than {WIDEST_BLOCK}, may differ"
        )


def _k(x: Tensor, scales: Tensor | None, format: str) -> int:
    return x.shape[1] if scales is None else x.shape[1] * 2


def _check_operand(name: str, x: Tensor, scales: Tensor | None, amax: Tensor | None, format: str, tiled: bool) -> None:
    if format == "bf16":
        check_input("scaled_mm", x, name)
        if tiled or scales is not None or amax is not None:
            raise ConfigError(
                f"fp4::scaled_mm: {name} is 'bf16', a plain tensor; leave scales and amax None, tiled False"
            )
        return
    check_format("scaled_mm", f"{name}_format", format)
    if scales is None:
        raise ConfigError(f"fp4::scaled_mm: {name} is {format} and needs its block scales")
    check_codes("scaled_mm", name, x, scales, format, tiled)
    if amax is None and format == "nvfp4":
        raise ConfigError(f"fp4::scaled_mm: {name} is nvfp4 and needs its amax")
    if amax is not None and format != "nvfp4":
        raise ConfigError(f"fp4::scaled_mm: {name} is {format}, without a tensor scale; leave its amax None")
    if amax is not None:
        check_amax("scaled_mm", name, x, amax)


def check_amax(op: str, name: str, x: Tensor, amax: Tensor) -> None:
    """Of an operand of a product: of the tensor, or, on the left, of its rows."""
    if name == "a" and not is_scalar(amax):
        check_row_amax(op, "a_amax", amax, x.shape[0], INPUT_DTYPES)
    else:
        check_scalar(op, f"{name}_amax", amax, torch.float32)


define(
    "scaled_mm(Tensor a, Tensor? a_scales, Tensor? a_amax, str a_format,"
    " Tensor b, Tensor? b_scales, Tensor? b_amax, str b_format, ScalarType out_dtype,"
    " bool tiled=False) -> Tensor",
    scaled_mm,
    _fake,
    formulas,
    _check,
)
