"""Rounding: float32 to E2M1 codes, nearest or stochastic, codes to values, and float32 to bfloat16.

E2M1 has the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6; a code is the index of the magnitude in bits 0..2 and the
sign in bit 3. The index is a concave piecewise-linear function of the magnitude,
`g(a) = min(2a, a + 2, a/2 + 4, 7)`: its whole numbers are the magnitudes, its halves the midpoints between
them. So rounding to a code is rounding g, and a stochastic code is g plus noise, truncated.

Load-bearing details
- g is rounded by adding a power of two that leaves no room for the fraction: 2^23 for whole numbers, 2^7 for
  16 fractional bits. 2a and a/2 are exact, so each branch is rounded once, and as rounding is monotone the
  minimum of the rounded branches is the rounded minimum. A fused multiply-add gives the same bits.
- A code cannot carry NaN, the scales must: the codes of a block that holds NaN mean nothing.
- The sign is the sign bit, as in NVIDIA's conversion instructions: -0.0 becomes code 8, which is -0.0 again.
- Noise is part of the addend, as a fraction below 1, so that a stochastic code costs no more additions than a nearest.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Constants are int here and in nvfp4: torch.compile(dynamic=True) makes inputs, in float64, of global floats.
E2M1_MAX = 6
_TOP_CODE = 7
_SIGN = 8
_WHOLE = 2**23  # a float32 in [2^23, 2^24) is a whole number
_FIXED16 = 2**7  # a float32 in [2^7, 2^8) is a multiple of 2^-16


def e2m1_codes(v: Tensor) -> Tensor:
    """Nearest-even, saturating codes of float32 `v`: whole numbers 0 to 15 in float32, same shape."""
    return _with_sign(_index(v, _WHOLE) - _WHOLE, v)


def e2m1_codes_stochastic(v: Tensor, noise: Tensor) -> Tensor:
    """Codes of float32 `v` rounded to one of its two neighbours, with a probability by distance; saturating.

    `noise` int32, same shape, 16 uniform bits an element. Inside the range |E[value] - v| <= step * 2^-17,
    where step is the distance of the two neighbours: g + noise is rounded to a multiple of 2^-16, then truncated.
    """
    index = _index(v, noise.to(torch.float32) * 2.0**-16 + _FIXED16)
    return _with_sign(index.to(torch.int32).to(torch.float32) - _FIXED16, v)


def _index(v: Tensor, addend: int | Tensor) -> Tensor:
    """addend + g(|v|), rounded to a multiple of the spacing of float32 at the addend."""
    a = v.abs()
    g = torch.minimum(torch.minimum(a * 2 + addend, a + (addend + 2)), a * 0.5 + (addend + 4))
    # Not a minimum with 7: the comparison is false for NaN too.
    return torch.where(a < E2M1_MAX, g, addend + _TOP_CODE)


def _with_sign(index: Tensor, v: Tensor) -> Tensor:
    return torch.where(v.view(torch.int32) < 0, index + _SIGN, index)


def e2m1_values(codes: Tensor) -> Tensor:
    """float32 values of float32 codes 0 to 15: the convex inverse of g, with the sign."""
    negative = codes >= _SIGN
    index = torch.where(negative, codes - _SIGN, codes)
    magnitude = torch.maximum(torch.maximum(index * 0.5, index - 2), index * 2 - 8)
    return torch.where(negative, -magnitude, magnitude)


def round_to_bfloat16(x: Tensor) -> Tensor:
    """float32 -> the nearest-even bfloat16, kept as float32.

    Written in integers because a compiler may drop a cast to bfloat16 and back.
    """
    bits = x.view(torch.int32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
    return torch.where(x.isnan(), x, rounded.view(torch.float32))
