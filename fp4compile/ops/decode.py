"""fp4::decode: code * block scale, exactly.

codes uint8 [R, nb * B/2], scales [R, nb] as fp4::quantize makes them -> [R, nb * B] contiguous, bfloat16 or
float32. The tensor scale is not in it: it belongs to the GEMM's float32 accumulator, where it costs no
rounding of operands.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import UnsupportedDtypeError
from ..formats import mxfp4, nvfp4
from .library import BLOCKS, check_codes, check_format, define

EXACT_DTYPES = (torch.bfloat16, torch.float32)


def decode(codes: Tensor, scales: Tensor, format: str, dtype: torch.dtype) -> Tensor:
    _check(codes, scales, format, dtype)
    return formulas(codes, scales, format, dtype)


def formulas(codes: Tensor, scales: Tensor, format: str, dtype: torch.dtype) -> Tensor:
    """The same without checks; mxfp4 scales may also be their bytes, uint8."""
    if format == "nvfp4":
        return nvfp4.decode(codes.contiguous(), scales, dtype).contiguous()
    return mxfp4.decode(codes.contiguous(), scales.view(torch.uint8), dtype).contiguous()


def _fake(codes: Tensor, scales: Tensor, format: str, dtype: torch.dtype) -> Tensor:
    _check(codes, scales, format, dtype)
    return codes.new_empty((scales.shape[0], scales.shape[1] * BLOCKS[format]), dtype=dtype)


def _check(codes: Tensor, scales: Tensor, format: str, dtype: torch.dtype) -> None:
    check_format("decode", "format", format)
    check_codes("decode", "codes", codes, scales, format)
    if dtype not in EXACT_DTYPES:
        raise UnsupportedDtypeError(
            f"fp4::decode: {dtype} does not hold code * scale; decode to torch.bfloat16 or torch.float32"
        )


define("decode(Tensor codes, Tensor scales, str format, ScalarType dtype) -> Tensor", decode, _fake, formulas, _check)
