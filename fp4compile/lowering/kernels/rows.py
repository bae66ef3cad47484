"""Quantization along rows: one thread, one block; x is read once, nothing else is but amaxes.

Twin: ``fp4compile.formats.nvfp4.quantize`` and ``mxfp4.quantize``, of 1 x B blocks; ``decode`` of what they give.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

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
    loops = (16, 8) if stochastic else (4,)
    return Config(loop=next((loop for loop in loops if blocks >= 128 * loop * processors * 8), 1))


@functools.cache
def candidates(blocks: int, stochastic: bool, processors: int) -> list[Config]:
    """What autotuning tries, the choice first."""
    first = choose(blocks, stochastic, processors)
    return [first, *(Config(loop=loop) for loop in (1, 2, 4, 8, 16) if loop != first.loop)]


@functools.cache
def kernel(
    isa: Isa,
    dtype: torch.dtype,
    format: common.Format,
    stochastic: bool,
    config: Config,
    tiled: bool = False,
    decoded: bool = False,
    by_row: torch.dtype | None = None,
) -> Kernel:
    """tiled: scales in tiles of 128 x 4 (formats/layout.py) instead of row-major.

    decoded: values are written instead of codes and scales.

    by_row: if given, there is an amax for each row, and this is its dtype.
    """
    rounding = "stochastic" if stochastic else "nearest"
    name = f"quantize_rows_{format}_{rounding}_{common.DTYPES[dtype]}{common.suffix(tiled, decoded, by_row)}"
    values = {"isa": isa, "dtype": common.DTYPES[dtype], "format": format, "rounding": rounding}
    values |= {"tiled": tiled, "decoded": decoded, "by_row": common.DTYPES[by_row] if by_row else ""}
    signature = {"x_ptr": common.element_type(dtype), **common.scalar_types(stochastic, format, by_row)}
    signature |= {**common.output_types(decoded), "blocks": "i32"}
    signature |= {"across": "i32"} if tiled or by_row else {}
    signature |= {"one": "i32", "N": "constexpr", "LOOP": "constexpr"}
    return Kernel(
        family="quantize rows",
        name=name,
        source=render("rows.py.jinja", name=name, **values),
        signature=signature,
        constants={"N": config.threads, "LOOP": config.loop},
        aligned=("x_ptr", *common.output_types(decoded), "blocks"),
        num_warps=config.threads // 32,
    )


def quantize(
    x: Tensor, amax: Tensor | None, seed: Tensor | None, format: common.Format, site: int, tiled: bool = False
) -> tuple[Tensor, Tensor]:
    """[R, C] bfloat16, float16 or float32 -> as ``fp4::quantize`` with 1 x B blocks. amax: 0-d, or [R] contiguous."""
    x = common.padded(x, BLOCKS[format])
    across = x.shape[1] // BLOCKS[format]
    outputs = common.empty_quantized(x, x.shape[0], across, format, tiled)
    _launch(x, common.scalars(amax, seed, site), outputs, format, seed is not None, tiled, by_row=_rows_of(amax))
    return common.with_scale_dtype(*outputs, format)


def decoded(x: Tensor, amax: Tensor | None, seed: Tensor | None, format: common.Format, site: int) -> Tensor:
    """[R, C] bfloat16, float16 or float32 -> bfloat16 [R, nb * B], what ``quantize`` of the same gives decoded."""
    x = common.padded(x, BLOCKS[format])
    values = x.new_empty(x.shape, dtype=torch.bfloat16)
    scalars = common.scalars(amax, seed, site)
    _launch(x, scalars, (values,), format, seed is not None, decoded=True, by_row=_rows_of(amax))
    return values


def _rows_of(amax: Tensor | None) -> torch.dtype | None:
    """The dtype of amaxes of rows; None of a tensor's."""
    return None if amax is None or amax.dim() == 0 else amax.dtype


def _launch(
    x: Tensor,
    scalars: tuple[Any, ...],
    outputs: tuple[Tensor, ...],
    format: common.Format,
    stochastic: bool,
    tiled: bool = False,
    decoded: bool = False,
    by_row: torch.dtype | None = None,
) -> None:
    """x: of whole blocks, contiguous."""
    across = x.shape[1] // BLOCKS[format]
    blocks = x.shape[0] * across
    if not blocks:
        return
    variant = (common.isa_of(x.device), x.dtype, format, stochastic)
    arguments = (x, *scalars, *outputs, blocks, *((across,) if tiled or by_row else ()), 1)

    def launch(config: Config) -> None:
        programs = -(-blocks // (config.threads * config.loop))
        kernel(*variant, config, tiled, decoded, by_row).run(programs, *arguments)

    with common.on_device_of(x):
        configs = candidates(blocks, stochastic, common.processors_of(x.device))
        tuning.launch(("rows", variant, tiled, decoded, by_row, blocks, x.device), configs, launch)
