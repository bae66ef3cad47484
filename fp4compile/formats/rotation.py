"""The random Hadamard transform of groups of `size` elements along the last dimension.

    y = round_bf16(H(s * round_bf16(x)) / sqrt(size)),  s in +-1, H the Sylvester matrix

One sign vector is shared by every layer, step and rank, so both operands of a GEMM rotate alike and, H being
orthogonal, their product is unchanged. Source: arXiv 2509.25149; signs and roundings of NVIDIA's Transformer
Engine.

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


def rotate(x: Tensor, size: int = SIZE, signs: int = SIGNS) -> Tensor:
    """[R, C] -> bfloat16 [R, ceil(C / size) * size]; the ragged last group is filled with zeros.

    signs: 16 bits; element i of a group is negated where bit (i mod 16), counted from the lowest, is set.
    NaN and Inf spread over their group.
    """
    y = pad_columns(x, size).to(torch.float32)
    if x.dtype != torch.bfloat16:
        y = round_to_bfloat16(y)
    factor = 1 / math.sqrt(size)
    exact = math.frexp(factor)[0] == 0.5
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
