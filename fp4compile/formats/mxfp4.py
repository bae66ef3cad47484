"""MXFP4: E2M1 elements and one power-of-two scale (UE8M0) for 32 elements; no tensor scale.

    scale = 2^ceil(log2(bamax / 6))       so that nothing saturates; at least 2^-127
    code  = e2m1(x / scale)               value = e2m1(code) * scale

The stored byte is the exponent + 127; 255 is NaN, stored for a block that holds NaN or Inf. A zero block has
the smallest scale. Formats of elements and scales: OCP Microscaling Formats specification v1.0; rounding the
scale up: "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149).

The bytes stay uint8 here, as Inductor's C++ backend has no float8_e8m0fnu; the operators view them as that
dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import packing, rounding
from .noise import noise16

BLOCK = 32
_NAN_BYTE = 255


def quantize(x: Tensor, *, seed: Tensor | None = None, site: int | Tensor = 0) -> tuple[Tensor, Tensor]:
    """[R, C] floating point, any strides -> (packed uint8 [R, nb * 16], scale bytes uint8 [R, nb]).

    nb = ceil(C / 32) blocks run along the last dimension; a ragged last block is filled with zeros.
    seed: 0-d int64 makes the codes (never the scales) stochastic.
    """
    blocks = packing.pad_columns(x, BLOCK).to(torch.float32).unflatten(-1, (-1, BLOCK))
    scales = scale_bytes(blocks.abs().amax(-1))
    v = blocks * _power_of_two(254 - scales).unsqueeze(-1)
    if seed is None:
        codes = rounding.e2m1_codes(v)
    else:
        noise = noise16(seed, site, x.shape[0], blocks.shape[1] * BLOCK, x.device)
        codes = rounding.e2m1_codes_stochastic(v, noise.unflatten(-1, (-1, BLOCK)))
    words = codes.unflatten(-1, (-1, packing.WORD)).flatten(1, 2)
    return packing.pack_codes(words), scales.to(torch.uint8)


def scale_bytes(bamax: Tensor) -> Tensor:
    """The biased exponents, int32.

    6 * 2^e = 1.5 * 2^(e + 2), so e is the exponent of bamax - 2, and 1 more where its significand is above
    1.5: adding 2^22 - 1 to the bits of the float carries into the exponent just then.
    """
    biased = ((bamax.view(torch.int32) + 0x3FFFFF) >> 23) - 2
    return torch.where(bamax.isfinite(), biased.clamp(min=0), _NAN_BYTE)


def decode(packed: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """code * scale, [R, nb * 32], of packed codes and scale bytes; exact in float32 and bfloat16."""
    values = rounding.e2m1_values(packing.unpack_codes(packed, scales.shape[1] * 2))
    return (values * packing.repeat_columns(_power_of_two(scales.to(torch.int32)), BLOCK)).to(dtype)


def _power_of_two(biased: Tensor) -> Tensor:
    """float32 2^(biased - 127) of an int32; NaN for the byte 255 and for its complement 254 - 255."""
    bits = torch.where(biased == 0, 1 << 22, biased << 23)  # 2^-127 is subnormal
    bits = torch.where((biased == _NAN_BYTE) | (biased < 0), 0x7FC00000, bits)
    return bits.to(torch.int32).view(torch.float32)
