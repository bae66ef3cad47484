"""fp4::rotate: the random Hadamard transform along the last dimension.

x [R, C] bfloat16, float16 or float32, any strides -> bfloat16 [R, ceil(C / size) * size], contiguous.
size: a power of two, 4 to 128. signs: 16 bits, see `fp4compile.formats.rotation`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ConfigError
from ..formats import rotation
from .library import check_input, define


def rotate(x: Tensor, size: int, signs: int) -> Tensor:
    _check(x, size, signs)
    return rotation.rotate(x, size, signs).contiguous()


def _fake(x: Tensor, size: int, signs: int) -> Tensor:
    _check(x, size, signs)
    return x.new_empty((x.shape[0], (x.shape[1] + size - 1) // size * size), dtype=torch.bfloat16)


def _check(x: Tensor, size: int, signs: int) -> None:
    check_input("rotate", x)
    if size not in rotation.SIZES:
        sizes = ", ".join(map(str, rotation.SIZES))
        raise ConfigError(f"fp4::rotate: size is {size}; one of {sizes} is needed")
    if not 0 <= signs < 1 << rotation.SIGN_BITS:
        raise ConfigError(f"fp4::rotate: signs is {signs:#x}; a mask of {rotation.SIGN_BITS} bits is needed")


define("rotate(Tensor x, int size, int signs) -> Tensor", rotate, _fake, check=_check)
