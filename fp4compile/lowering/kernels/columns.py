"""Quantization along columns, with or without the Hadamard rotation: the weight gradient's operands.

x [T, K] is read in its own layout, T tokens; codes and scales are those of x^T, blocks along the tokens. One thread has
a block of tokens of a few adjacent columns in registers, so the butterfly is plain arithmetic and nothing goes through
shared memory. Twin: ``rotation.rotate(x.t())``, then ``nvfp4.quantize`` or ``mxfp4.quantize``.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import torch
from torch import Tensor

from ...formats import layout
from ...ops.library import BLOCKS
from ..targets import Isa
from . import common, tuning
from .kernel import Kernel, render

Shape = Literal["full", "ragged"]
COLUMNS = {16: {2: 8, 4: 4}, 32: {2: 4, 4: 2}}
"""Columns of a thread, by block size and bytes an element: 64 registers of x."""


@dataclasses.dataclass(frozen=True)
class Config:
    """``groups`` blocks of tokens x ``units`` threads across."""

    groups: int = 16
    units: int = 8


def choose(tokens: int, units: int, size: int) -> tuple[Config, Shape]:
    """The same tile for all; masks only where there is something to mask."""
    config = Config()
    full = tokens % (size * config.groups) == 0 and units % config.units == 0
    return config, "full" if full else "ragged"


@functools.cache
def candidates(tokens: int, units: int, size: int) -> list[tuple[Config, Shape]]:
    """What autotuning tries, the choice first."""
    first = choose(tokens, units, size)
    return [first, *((Config(groups, across), "ragged") for groups, across in ((4, 32), (8, 16), (8, 8)))]


@functools.cache
def kernel(
    isa: Isa,
    dtype: torch.dtype,
    format: common.Format,
    stochastic: bool,
    rotate: bool,
    signs: int,
    config: Config,
    shape: Shape,
    tiled: bool = False,
) -> Kernel:
    rounding = "stochastic" if stochastic else "nearest"
    columns = COLUMNS[BLOCKS[format]][dtype.itemsize]
    name = f"quantize_{'rotated_' if rotate else ''}columns_{format}_{rounding}_{common.DTYPES[dtype]}_{shape}"
    name += "_tiled" if tiled else ""
    values = {"isa": isa, "dtype": common.DTYPES[dtype], "format": format, "rounding": rounding, "tiled": tiled}
    values |= {"rotate": rotate, "signs": signs, "columns": columns, "shape": shape}
    signature = {"x_ptr": common.element_type(dtype), **common.scalar_types(stochastic, format)}
    signature |= {"codes_ptr": "*i32", "scales_ptr": "*u8", "tokens": "i32", "blocks": "i32", "units": "i32"}
    signature |= {"across_scales": "i32", "scaled": "i32"} if tiled else {}
    signature |= {"one": "i32", "G": "constexpr", "C": "constexpr"}
    return Kernel(
        family="quantize columns",
        name=name,
        source=render("columns.py.jinja", name=name, **values),
        signature=signature,
        constants={"G": config.groups, "C": config.units},
        aligned=("x_ptr", "codes_ptr", "scales_ptr", "units", *(("tokens", "blocks") if shape == "full" else ())),
        num_warps=config.groups * config.units // 32,
        maxnreg=_register_limit(dtype, format, stochastic, tiled),
    )


def _register_limit(dtype: torch.dtype, format: common.Format, stochastic: bool, tiled: bool) -> int | None:
    """Registers of a thread, so that 5 programs fit on a multiprocessor, or 4 where 5 would spill."""
    if dtype != torch.bfloat16 or tiled:
        return None
    return 128 if stochastic or format == "mxfp4" else 96


def quantize(
    x: Tensor,
    amax: Tensor | None,
    seed: Tensor | None,
    format: common.Format,
    site: int,
    signs: int | None,
    tiled: bool = False,
) -> tuple[Tensor, Tensor]:
    """[T, K] bfloat16, float16 or float32 -> codes uint8 [K, nb * B/2] and scales [K, nb] of x^T, nb = ceil(T / B).

    signs: of the rotation by groups of B tokens; None for no rotation.
    """
    size, width = BLOCKS[format], x.shape[1]
    columns = COLUMNS[size][x.dtype.itemsize]
    x = common.padded(x, columns)
    blocks, units = -(-x.shape[0] // size), x.shape[1] // columns
    codes, scales = common.empty_quantized(x, x.shape[1], blocks, format, tiled, width)
    if blocks and units:
        variant = (common.isa_of(x.device), x.dtype, format, seed is not None, signs is not None, signs or 0)
        arguments = (x, *common.scalars(amax, seed, site), codes, scales)
        arguments += (x.shape[0], blocks, units, *((-(-blocks // layout.TILE_COLS), width) if tiled else ()), 1)

        def launch(choice: tuple[Config, Shape]) -> None:
            config, shape = choice
            programs = -(-blocks // config.groups) * -(-units // config.units)
            kernel(*variant, config, shape, tiled).run(programs, *arguments)

        with common.on_device_of(x):
            kind = ("columns", variant, tiled, x.shape, x.device)
            tuning.launch(kind, candidates(x.shape[0], units, size), launch)
    if tiled:  # the tiles of columns that only fill up are zero, and no more of them are kept than there are
        return common.with_scale_dtype(codes[:width], scales[: -(-width // layout.TILE_ROWS)], format)
    return common.with_scale_dtype(codes[:width], scales[:width], format)
