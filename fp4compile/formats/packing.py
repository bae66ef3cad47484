"""Packing codes two a byte, and the padding and repetition of columns that blocks need.

The even element is in the low nibble. How things are written here is what makes a compiler's loops fast on a
CPU; the bytes would be the same otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

WORD = 16  # codes in 64 bits


def pack_codes(codes: Tensor) -> Tensor:
    """[..., n, 16] float32 codes -> [..., n * 8] uint8.

    Sixteen codes become one 64-bit word by sums over the same axis as the block amax, so a compiler makes one
    loop of both. Six codes are 24 bits, which float32 sums exactly; a sum of int64 is twice as slow on a CPU.
    The bytes of a word are in order on a little-endian machine.
    """
    parts = [(codes * weights).sum(-1).to(torch.int64) for weights in _pack_weights(codes.device)]
    return (parts[0] | (parts[1] << 24) | (parts[2] << 48)).view(torch.uint8)


def _pack_weights(device: torch.device) -> Iterable[Tensor]:
    """Three rows of 16: row p has 16^0 .. 16^5 at the lanes 6p .. 6p + 5 and 0 elsewhere.

    A product over 16 factors instead of a power: a compiler stores the result of a reduction of that size,
    where it would compute anything else again for each element.
    """
    lane = torch.arange(WORD, device=device)
    exponent = (lane - 6 * torch.arange(3, device=device).unsqueeze(1)).unsqueeze(-1)
    inside = (exponent >= 0) & (exponent < 6)
    factors = torch.where(inside, torch.where(lane < exponent, 16.0, 1.0), 0.0)
    return factors.to(torch.float32).prod(-1).unbind()


def unpack_codes(packed: Tensor, words: int) -> Tensor:
    """[R, words * 8] uint8, contiguous -> [R, words * 16] float32 codes.

    The shift is a function of the column, not of a second axis merged later: that keeps a vector loop. So does the
    number of words, given as the one the scales have: a compiler cannot know that two symbolic sizes are related.
    """
    columns = repeat_columns(packed.unflatten(1, (words, WORD // 2)).view(torch.int64).squeeze(-1), WORD)
    shifts = (torch.arange(columns.shape[1], dtype=torch.int64, device=packed.device) & (WORD - 1)) << 2
    return ((columns >> shifts) & 15).to(torch.float32)


def repeat_columns(x: Tensor, times: int) -> Tensor:
    """[R, n] -> [R, n * times], each element `times` times."""
    return x.unsqueeze(-1).expand(-1, -1, times).flatten(1)


def pad_columns(x: Tensor, multiple: int) -> Tensor:
    """[R, C] with zero columns appended up to a multiple; x itself where none are needed."""
    return _pad(x, (0, -x.shape[1] % multiple))


def pad_rows(x: Tensor, multiple: int) -> Tensor:
    """[R, C] with zero rows appended up to a multiple; x itself where none are needed."""
    return _pad(x, (0, 0, 0, -x.shape[0] % multiple))


def _pad(x: Tensor, pad: tuple[int, ...]) -> Tensor:
    return x if pad[-1] == 0 else F.pad(x, pad)
