"""fp4::quantize: a 2-D tensor to packed codes and block scales, blocks along the last dimension.

x [R, C] bfloat16, float16 or float32, any strides -> codes uint8 [R, nb * B/2], scales [R, nb], both
contiguous, nb = ceil(C / B). A ragged last block is filled with zeros, which change no amax and no real
element.

| format | block | scales | amax |
|---|---|---|---|
| nvfp4 | (1, 16) | float8_e4m3fn | 0-d float32, of the whole tensor |
| nvfp4 | (16, 16) | float8_e4m3fn, repeated over a tile's 16 rows | 0-d float32, of the whole tensor |
| mxfp4 | (1, 32) | float8_e8m0fnu | None |

nvfp4 with blocks (1, 16) may have a scale a row in place of one a tensor: amax is then [R], max |x| of each
row, in x's dtype or float32. Each row is quantized as if it were the whole tensor.

tiled: scales in the order of tensor cores, [ceil(R / 128), ceil(nb / 4), 32, 4, 4], the rest of the last tiles zero
(formats/layout.py).

rounding: "nearest" (seed None) or "stochastic" (seed 0-d int64; site tells tensors rounded with one seed
apart).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import ConfigError
from ..formats import layout, mxfp4, noise, nvfp4
from .library import (
    BLOCKS,
    SCALE_DTYPES,
    check_format,
    check_input,
    check_row_amax,
    check_scalar,
    define,
    is_scalar,
)

ALLOWED_BLOCKS = {"nvfp4": ((1, 16), (16, 16)), "mxfp4": ((1, 32),)}


def quantize(
    x: Tensor,
    amax: Tensor | None,
    seed: Tensor | None,
    format: str,
    block: Sequence[int],
    rounding: str,
    site: int,
    tiled: bool = False,
) -> tuple[Tensor, Tensor]:
    _check(x, amax, seed, format, block, rounding, site, tiled)
    codes, scales = formulas(x, amax, seed, format, block, rounding, site, tiled)
    return codes, scales.view(SCALE_DTYPES[format])


def formulas(
    x: Tensor,
    amax: Tensor | None,
    seed: Tensor | None,
    format: str,
    block: Sequence[int],
    rounding: str,
    site: int | Tensor,
    tiled: bool = False,
) -> tuple[Tensor, Tensor]:
    """The same for tracing: without checks, which look at values; `site` may be a 0-d int64 tensor; mxfp4 scales
    are their bytes, uint8, because Inductor's C++ backend has no float8_e8m0fnu."""
    if amax is None:
        codes, scales = mxfp4.quantize(x, seed=seed, site=site)
    else:
        codes, scales = nvfp4.quantize(x, amax.to(torch.float32), square=block[0] != 1, seed=seed, site=site)
    return codes.contiguous(), layout.to_tiles(scales) if tiled else scales.contiguous()


def _fake(
    x: Tensor,
    amax: Tensor | None,
    seed: Tensor | None,
    format: str,
    block: Sequence[int],
    rounding: str,
    site: int,
    tiled: bool = False,
) -> tuple[Tensor, Tensor]:
    _check(x, amax, seed, format, block, rounding, site, tiled)
    rows, blocks, width = x.shape[0], _block_count(x, format), BLOCKS[format]
    codes = x.new_empty((rows, blocks * (width // 2)), dtype=torch.uint8)
    shape = layout.tiles_shape(rows, blocks) if tiled else (rows, blocks)
    return codes, x.new_empty(shape, dtype=SCALE_DTYPES[format])


def _block_count(x: Tensor, format: str) -> int:
    return (x.shape[1] + BLOCKS[format] - 1) // BLOCKS[format]


def _check(
    x: Tensor,
    amax: Tensor | None,
    seed: Tensor | None,
    format: str,
    block: Sequence[int],
    rounding: str,
    site: int,
    tiled: bool = False,
) -> None:
    check_input("quantize", x)
    check_format("quantize", "format", format)
    if tuple(block) not in ALLOWED_BLOCKS[format]:
        allowed = " or ".join(map(str, ALLOWED_BLOCKS[format]))
        raise ConfigError(f"fp4::quantize: block is {tuple(block)}; {format} has {allowed}")
    _check_amax(x, amax, format, block)
    _check_rounding(seed, rounding, site)
    if seed is not None:
        noise.check_size(x.shape[0], _block_count(x, format) * BLOCKS[format])


def _check_amax(x: Tensor, amax: Tensor | None, format: str, block: Sequence[int]) -> None:
    if amax is None and format == "nvfp4":
        raise ConfigError("fp4::quantize: nvfp4 needs the amax of the tensor, torch.ops.fp4.amax(x)")
    if amax is not None and format != "nvfp4":
        raise ConfigError(f"fp4::quantize: {format} has no tensor scale; leave amax None")
    if amax is None or is_scalar(amax):
        return
    check_row_amax("quantize", "amax", amax, x.shape[0], (torch.float32, x.dtype))
    if block[0] != 1:
        raise ConfigError(
            f"fp4::quantize: amax has shape {list(amax.shape)}, a scale a row, with block {tuple(block)}; that needs "
            "block (1, 16), or amax 0-d"
        )


def _check_rounding(seed: Tensor | None, rounding: str, site: int) -> None:
    if rounding not in ("nearest", "stochastic"):
        raise ConfigError(f"fp4::quantize: rounding is {rounding!r}; 'nearest' or 'stochastic' is needed")
    if seed is None and rounding == "stochastic":
        raise ConfigError("fp4::quantize: rounding 'stochastic' needs a seed, a 0-d torch.int64 tensor")
    if seed is not None and rounding == "nearest":
        raise ConfigError("fp4::quantize: rounding 'nearest' takes no seed; leave it None")
    if seed is not None:
        check_scalar("quantize", "seed", seed, torch.int64)
    if not 0 <= site < 2**32:
        raise ConfigError(f"fp4::quantize: site is {site}; an unsigned number of 32 bits is needed")


define(
    "quantize(Tensor x, Tensor? amax, Tensor? seed, str format, int[] block, str rounding, int site,"
    " bool tiled=False)"
    " -> (Tensor codes, Tensor scales)",
    quantize,
    _fake,
    formulas,
    _check,
)
