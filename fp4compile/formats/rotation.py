"""The random Hadamard transform of groups of `size` elements along the last dimension.

    y = round_bf16(H(s * round_bf16(x)) / sqrt(size)),  s in +-1, H the Sylvester matrix

One sign vector is shared by every layer, step and rank, so both operands of a GEMM rotate alike and, H being
orthogonal, their product is unchanged. Source: arXiv 2509.25149; signs and roundings of NVIDIA's Transformer
Engine.

No element grows beyond growth(size) times the largest of its group, whatever the signs: see there.

Load-bearing detail: the float32 sum has one order on every device: signs, then the butterfly (a + b, a - b)
with strides 1, 2, 4, ...; the division by sqrt(size) comes first where it is exact, so that no sum overflows whose
result does not, and last, as a product with float32(1/sqrt(size)), where that is no power of two.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .packing import pad_columns
from .rounding import round_to_bfloat16

SIZE = 16
SIGNS = 0xD7E8  # Transformer Engine's
SIGN_BITS = 16
SIZES = (4, 8, 16, 32, 64, 128)


def growth(size: int) -> float:
    """A power of two that no rotation by groups of ``size`` makes the largest magnitude grow by more than: 2 for 4, 4
    for 8 and 16, 8 for 32 and 64, 16 for 128.

    By Cauchy-Schwarz the factor is sqrt(size) at most, reached where the signs are those of a row of the matrix. The
    float32 additions and the last rounding to bfloat16 keep the bound: rounding is monotone, and each of them has a
    bound that is a number itself, namely the largest element in bfloat16 times a power of two. Where x is not bfloat16,
    its first rounding may make that element larger by 2^-8 of itself, and the bound may be exceeded by as much. NVFP4's
    largest block scale and its largest code, which both saturate, take no notice of so little.

    The largest magnitude may also shrink, by sqrt(size) at most, as one large element in a group of zeros does. The
    bound is then growth * sqrt(size) times what it bounds, 16 times for 16.
    """
    return 2.0 ** -(-(size.bit_length() - 1) // 2)


def bound_factors(size: int) -> tuple[float, ...]:
    """``growth(size)`` as factors. A float32 amax times one after the other overflows wherever a sum of ``rotate`` can:
    for 8, 32 and 128 those sums are divided last, so the bound has to go as high as they do."""
    if _divides_first(size):
        return (growth(size),)
    return float(size), growth(size) / size


def _divides_first(size: int) -> bool:
    """Whether 1/sqrt(size) is a power of two: multiplying by it is exact."""
    return math.frexp(1 / math.sqrt(size))[0] == 0.5


def rotate(x: Tensor, size: int = SIZE, signs: int = SIGNS) -> Tensor:
    """[R, C] -> bfloat16 [R, ceil(C / size) * size]; the ragged last group is filled with zeros.

    signs: 16 bits; element i of a group is negated where bit (i mod 16), counted from the lowest, is set.
    NaN and Inf spread over their group.
    """
    y = pad_columns(x, size).to(torch.float32)
    if x.dtype != torch.bfloat16:
        y = round_to_bfloat16(y)
    factor, exact = 1 / math.sqrt(size), _divides_first(size)
    if exact:
        y = y * factor
    # The elements of a group are separate values, so that a compiler keeps the butterfly in registers.
    parts = list(y.unflatten(-1, (-1, size)).unbind(-1))
    for i in (i for i in range(size) if signs >> (i % SIGN_BITS) & 1):
        parts[i] = -parts[i]
    for stride in (1 << i for i in range(size.bit_length() - 1)):
        for i in (i for i in range(size) if not i & stride):
            parts[i], parts[i + stride] = parts[i] + parts[i + stride], parts[i] - parts[i + stride]
    y = torch.stack(parts, -1)
    if not exact:
        y = y * factor
    return round_to_bfloat16(y).flatten(-2).to(torch.bfloat16)
