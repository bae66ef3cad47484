"""The random bits of stochastic rounding: a function of (seed, site, row, column), nothing else.

So they do not depend on the device, on tiles or threads, on other elements, or on anything drawn before; the
same tensor quantized again (a recomputed forward, another device) gets the same bits. Counter based: row r,
columns 2j and 2j + 1 are the low and the high half of

    hash(r * cols/2 + j)    x += key0;  x ^= x >> 16;  x *= 0x7FEB352D;  x ^= x >> 15;
                            x ^= key1;  x *= 0x446CA68B;  x ^= x >> 16      (modulo 2^32)

with two keys mixed from seed and site by the same steps. Two multiplications for two elements, because on a
GPU the noise costs more than the rounding. Both factors are below 2^31: in the int64 used here no product
overflows. It is no cryptographic generator; measured on 2^21 words for 16 keys: bits and 16-bit halves
uniform, flipping any input bit flips any output bit with probability 0.5 +- 0.005, correlations at lags of 1
to 2^17 below 0.004.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ConfigError

MAX_ELEMENTS = 2**33  # a 32-bit word index, two elements a word
_MASK = 0xFFFFFFFF


def noise16(seed: Tensor, site: int | Tensor, rows: int, cols: int, device: torch.device) -> Tensor:
    """[rows, cols] int32, 16 uniform random bits an element.

    seed: 0-d int64. site: 32 bits. cols: even; noise of another width is other noise.
    """
    check_size(rows, cols)
    row = torch.arange(rows, dtype=torch.int64, device=device).unsqueeze(1)
    pair = torch.arange(cols // 2, dtype=torch.int64, device=device)
    words = _hash(row * (cols // 2) + pair, *keys(seed, site)).unsqueeze(-1)
    shifts = torch.arange(0, 32, 16, dtype=torch.int64, device=device)
    return ((words >> shifts) & 0xFFFF).to(torch.int32).flatten(-2)


def check_size(rows: int, cols: int) -> None:
    """ConfigError beyond 2^33 elements, where the noise would repeat."""
    if rows * cols > MAX_ELEMENTS:
        raise ConfigError(
            f"stochastic rounding of a [{rows}, {cols}] tensor: the noise repeats beyond 2^33 elements; "
            "quantize it in pieces, with a site each"
        )


def keys(seed: Tensor, site: int | Tensor) -> tuple[Tensor, Tensor]:
    """key0 and key1, 0-d int64 of 32 bits."""
    low, high = seed & _MASK, (seed >> 32) & _MASK
    return _key(low, high, site, 0x1B873593), _key(low, high, site, 0x4CF5AD43)


def _key(low: Tensor, high: Tensor, site: int | Tensor, tweak: int) -> Tensor:
    x = _mix((low + tweak) & _MASK)
    x = _mix((x + high) & _MASK)
    return _mix((x + (site ^ tweak)) & _MASK)


def _hash(word: Tensor, key0: Tensor, key1: Tensor) -> Tensor:
    return _second_half(_first_half((word + key0) & _MASK) ^ key1)


def _mix(x: Tensor) -> Tensor:
    return _second_half(_first_half(x))


def _first_half(x: Tensor) -> Tensor:
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    return x ^ (x >> 15)


def _second_half(x: Tensor) -> Tensor:
    x = (x * 0x446CA68B) & _MASK
    return x ^ (x >> 16)
