"""Quantization along rows: one thread, one block; x is read once, nothing else is.

Twin: ``fp4compile.formats.nvfp4.quantize`` and ``mxfp4.quantize``, of 1 x B blocks.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from ...ops.library import BLOCKS
from ..targets import Isa
from . import common, tuning
from .kernel import Kernel, render


@dataclasses.dataclass(frozen=True)
class Config:
    """``threads`` blocks at a time, ``loop`` times, by one program: its constants are computed once."""

    threads: int = 128
    loop: int = 4


def choose(blocks: int, stochastic: bool, processors: int) -> Config:
    """Programs long enough to forget their start, short where a GPU would otherwise stand idle."""
    loop = 8 if stochastic else 4
    return Config(loop=loop if blocks >= 128 * loop * processors * 8 else 1)


@functools.cache
def candidates(blocks: int, stochastic: bool, processors: int) -> list[Config]:
    """What autotuning tries, the choice first."""
    first = choose(blocks, stochastic, processors)
    return [first, *(Config(loop=loop) for loop in (1, 2, 4, 8, 16) if loop != first.loop)]


@functools.cache
def kernel(
    isa: Isa, dtype: torch.dtype, format: common.Format, stochastic: bool, config: Config, tiled: bool = False
) -> Kernel:
    """tiled: scales in tiles of 128 x 4 (formats/layout.py) instead of row-major."""
    rounding = "stochastic" if stochastic else "nearest"
    name = f"quantize_rows_{format}_{rounding}_{common.DTYPES[dtype]}{'_tiled' if tiled else ''}"
    values = {"isa": isa, "dtype": common.DTYPES[dtype], "format": format, "rounding": rounding, "tiled": tiled}
    signature = {"x_ptr": common.element_type(dtype), **common.scalar_types(stochastic, format)}
    signature |= {"codes_ptr": "*i32", "scales_ptr": "*u8", "blocks": "i32"}
    signature |= {"across": "i32"} if tiled else {}
    signature |= {"one": "i32", "N": "constexpr", "LOOP": "constexpr"}
    return Kernel(
        family="quantize rows",
        name=name,
        source=render("rows.py.jinja", name=name, **values),
        signature=signature,
        constants={"N": config.threads, "LOOP": config.loop},
        aligned=("x_ptr", "codes_ptr", "scales_ptr", "blocks"),
        num_warps=config.threads // 32,
    )


def quantize(
    x: Tensor, amax: Tensor | None, seed: Tensor | None, format: common.Format, site: int, tiled: bool = False
) -> tuple[Tensor, Tensor]:
    """[R, C] bfloat16, float16 or float32 -> as ``fp4::quantize`` with 1 x B blocks."""
    size = BLOCKS[format]
    x = common.padded(x, size)
    across = x.shape[1] // size
    codes, scales = common.empty_quantized(x, x.shape[0], across, format, tiled)
    blocks = x.shape[0] * across
    if blocks:
        variant = (common.isa_of(x.device), x.dtype, format, seed is not None)
        arguments = (x, *common.scalars(amax, seed, site), codes, scales, blocks)
        arguments += (across, 1) if tiled else (1,)

        def launch(config: Config) -> None:
            programs = -(-blocks // (config.threads * config.loop))
            kernel(*variant, config, tiled).run(programs, *arguments)

        with common.on_device_of(x):
            configs = candidates(blocks, seed is not None, common.processors_of(x.device))
            tuning.launch(("rows", variant, tiled, blocks, x.device), configs, launch)
    return common.with_scale_dtype(codes, scales, format)
