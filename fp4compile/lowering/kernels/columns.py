"""Quantization along columns, with or without the Hadamard rotation: the weight gradient's operands.

x [T, K] is read in its own layout, T tokens; codes and scales are those of x^T, blocks along the tokens. One thread has
a block of tokens of a few adjacent columns in registers, so the butterfly is plain arithmetic and nothing goes through
shared memory. Twin: ``rotation.rotate(x.t())``, then ``nvfp4.quantize`` or ``mxfp4.quantize``, and maybe ``decode``.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

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
DECODED_COLUMNS = {16: {2: 4, 4: 2}, 32: {2: 2, 4: 1}}
"""The same where values are written, half as many: the assembler leaves all stores to the end, and until then the
values of all columns are in registers too. Of 8 columns it spills some under any limit; without one it takes 151."""


@dataclasses.dataclass(frozen=True)
class Config:
    """``groups`` blocks of tokens x ``units`` threads across."""

    groups: int = 16
    units: int = 8


def columns_of(format: common.Format, dtype: torch.dtype, decoded: bool) -> int:
    """Columns of a thread."""
    return (DECODED_COLUMNS if decoded else COLUMNS)[BLOCKS[format]][dtype.itemsize]


def choose(tokens: int, units: int, size: int, decoded: bool = False) -> tuple[Config, Shape]:
    """64 columns of 2 bytes for all, whole lines; masks only where there is something to mask."""
    config = Config(8, 16) if decoded else Config()
    full = tokens % (size * config.groups) == 0 and units % config.units == 0
    return config, "full" if full else "ragged"


@functools.cache
def candidates(tokens: int, units: int, size: int, decoded: bool = False) -> list[tuple[Config, Shape]]:
    """What autotuning tries, the choice first."""
    first = choose(tokens, units, size, decoded)
    others = ((4, 32), (16, 8), (8, 8)) if decoded else ((4, 32), (8, 16), (8, 8))
    return [first, *((Config(*other), "ragged") for other in others)]


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
    decoded: bool = False,
) -> Kernel:
    """tiled: scales in tiles of 128 x 4 (formats/layout.py) instead of row-major.

    decoded: values are written instead of codes and scales.
    """
    rounding = "stochastic" if stochastic else "nearest"
    columns = columns_of(format, dtype, decoded)
    name = f"quantize_{'rotated_' if rotate else ''}columns_{format}_{rounding}_{common.DTYPES[dtype]}_{shape}"
    name += common.suffix(tiled, decoded)
    values = {"isa": isa, "dtype": common.DTYPES[dtype], "format": format, "rounding": rounding}
    values |= {"tiled": tiled, "decoded": decoded, "rotate": rotate, "signs": signs, "columns": columns, "shape": shape}
    signature = {"x_ptr": common.element_type(dtype), **common.scalar_types(stochastic, format)}
    signature |= {**common.output_types(decoded), "tokens": "i32", "blocks": "i32", "units": "i32"}
    signature |= {"across_scales": "i32", "scaled": "i32"} if tiled else {}
    signature |= {"one": "i32", "G": "constexpr", "C": "constexpr"}
    return Kernel(
        family="quantize columns",
        name=name,
        source=render("columns.py.jinja", name=name, **values),
        signature=signature,
        constants={"G": config.groups, "C": config.units},
        aligned=("x_ptr", *common.output_types(decoded), "units", *(("tokens", "blocks") if shape == "full" else ())),
        num_warps=config.groups * config.units // 32,
        maxnreg=None if tiled or decoded else _register_limit(dtype, format, stochastic),
    )


def _register_limit(dtype: torch.dtype, format: common.Format, stochastic: bool) -> int | None:
    """Registers of a thread, so that 5 programs fit on a multiprocessor, or 4 where 5 would spill."""
    if dtype != torch.bfloat16:
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
    width = x.shape[1]
    x, blocks = _padded(x, format)
    codes, scales = common.empty_quantized(x, x.shape[1], blocks, format, tiled, width)
    variant = (format, seed is not None, signs is not None, signs or 0)
    tiles = (-(-blocks // layout.TILE_COLS), width) if tiled else ()
    _launch(x, common.scalars(amax, seed, site), (codes, scales), variant, tiles)
    if tiled:  # the tiles of columns that only fill up are zero, and no more of them are kept than there are
        return common.with_scale_dtype(codes[:width], scales[: -(-width // layout.TILE_ROWS)], format)
    return common.with_scale_dtype(codes[:width], scales[:width], format)


def decoded(
    x: Tensor, amax: Tensor | None, seed: Tensor | None, format: common.Format, site: int, signs: int | None
) -> Tensor:
    """[T, K] bfloat16, float16 or float32 -> bfloat16 [K, nb * B], what ``quantize`` gives decoded."""
    width = x.shape[1]
    x, blocks = _padded(x, format, decoded=True)
    values = x.new_empty((x.shape[1], blocks * BLOCKS[format]), dtype=torch.bfloat16)
    variant = (format, seed is not None, signs is not None, signs or 0)
    _launch(x, common.scalars(amax, seed, site), (values,), variant, decoded=True)
    return values if x.shape[1] == width else values[:width]


def _padded(x: Tensor, format: common.Format, decoded: bool = False) -> tuple[Tensor, int]:
    """x of whole threads across, and how many blocks of tokens it has."""
    return common.padded(x, columns_of(format, x.dtype, decoded)), -(-x.shape[0] // BLOCKS[format])


def _launch(
    x: Tensor,
    scalars: tuple[Any, ...],
    outputs: tuple[Tensor, ...],
    variant: tuple[common.Format, bool, bool, int],
    tiles: tuple[int, ...] = (),
    decoded: bool = False,
) -> None:
    """variant: format, whether stochastic, whether rotated, by which signs. tiles: what a tiled kernel is told."""
    size = BLOCKS[variant[0]]
    tokens, width = x.shape
    blocks, units = -(-tokens // size), width // columns_of(variant[0], x.dtype, decoded)
    if not blocks or not units:
        return
    isa, tiled = common.isa_of(x.device), bool(tiles)
    arguments = (x, *scalars, *outputs, tokens, blocks, units, *tiles, 1)

    def launch(choice: tuple[Config, Shape]) -> None:
        config, shape = choice
        programs = -(-blocks // config.groups) * -(-units // config.units)
        kernel(isa, x.dtype, *variant, config, shape, tiled, decoded).run(programs, *arguments)

    with common.on_device_of(x):
        kind = ("columns", isa, x.dtype, variant, tiled, decoded, x.shape, x.device)
        tuning.launch(kind, candidates(tokens, units, size, decoded), launch)
