"""fp4::scaled_mm: [M, K] x [N, K]^T -> [M, N] of quantized operands.

Each operand is (tensor, scales, amax, format):

| format | tensor | scales | amax |
|---|---|---|---|
| nvfp4 | packed uint8 [rows, nb * 8] | float8_e4m3fn [rows, nb] | 0-d float32 |
| mxfp4 | packed uint8 [rows, nb * 16] | float8_e8m0fnu [rows, nb] | None |
| bf16 | [rows, K] bfloat16, float16 or float32, any strides | None | None |

    D = (gamaxA * gamaxB / (2688 * 2688)) * sum_k decode(a)[m, k] * decode(b)[n, k]

An operand without a tensor scale leaves its gamax / 2688 out. The reference decodes to float32, accumulates
in float32, multiplies by the float32 factor and casts; an implementation may only differ in the order of
accumulation. Operands whose padded K differ are cut to the shorter one: the tail of the longer is padding,
zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ConfigError, UnsupportedDtypeError
from ..formats import nvfp4
from . import decode
from .library import BLOCKS, INPUT_DTYPES, check_codes, check_format, check_input, check_scalar, define

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
) -> Tensor:
    _check(a, a_scales, a_amax, a_format, b, b_scales, b_amax, b_format, out_dtype)
    return formulas(a, a_scales, a_amax, a_format, b, b_scales, b_amax, b_format, out_dtype)


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
) -> Tensor:
    """The same without checks; mxfp4 scales may also be their bytes, uint8."""
    left, right = _operand(a, a_scales, a_format), _operand(b, b_scales, b_format)
    k = min(left.shape[1], right.shape[1])
    out = left[:, :k] @ right[:, :k].t()
    factor = nvfp4.gemm_factor(a_amax, b_amax)
    return (out if factor is None else out * factor).to(out_dtype).contiguous()


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
) -> Tensor:
    _check(a, a_scales, a_amax, a_format, b, b_scales, b_amax, b_format, out_dtype)
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
) -> None:
    _check_operand("a", a, a_scales, a_amax, a_format)
    _check_operand("b", b, b_scales, b_amax, b_format)
    if out_dtype not in INPUT_DTYPES:
        raise UnsupportedDtypeError(
            f"fp4::scaled_mm: out_dtype is {out_dtype}; one of torch.bfloat16, float16 and float32 is needed"
        )
    k_a, k_b = _k(a, a_scales, a_format), _k(b, b_scales, b_format)
    if abs(k_a - k_b) >= WIDEST_BLOCK:
        raise ConfigError(
            f"fp4::scaled_mm: a has K = {k_a} and b has K = {k_b}; both are [rows, K], and only padding, "
            f"less than {WIDEST_BLOCK}, may differ"
        )


def _k(x: Tensor, scales: Tensor | None, format: str) -> int:
    return x.shape[1] if scales is None else scales.shape[1] * BLOCKS[format]


def _check_operand(name: str, x: Tensor, scales: Tensor | None, amax: Tensor | None, format: str) -> None:
    if format == "bf16":
        check_input("scaled_mm", x, name)
        if scales is not None or amax is not None:
            raise ConfigError(f"fp4::scaled_mm: {name} is 'bf16', a plain tensor; leave scales and amax None")
        return
    check_format("scaled_mm", f"{name}_format", format)
    if scales is None:
        raise ConfigError(f"fp4::scaled_mm: {name} is {format} and needs its block scales")
    check_codes("scaled_mm", name, x, scales, format)
    if amax is None and format == "nvfp4":
        raise ConfigError(f"fp4::scaled_mm: {name} is nvfp4 and needs its amax")
    if amax is not None and format != "nvfp4":
        raise ConfigError(f"fp4::scaled_mm: {name} is {format}, without a tensor scale; leave its amax None")
    if amax is not None:
        check_scalar("scaled_mm", f"{name}_amax", amax, torch.float32)


define(
    "scaled_mm(Tensor a, Tensor? a_scales, Tensor? a_amax, str a_format,"
    " Tensor b, Tensor? b_scales, Tensor? b_amax, str b_format, ScalarType out_dtype) -> Tensor",
    scaled_mm,
    _fake,
    formulas,
)
