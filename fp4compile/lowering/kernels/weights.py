"""Quantization in 16x16 tiles: W, W^T or both from one read, as both have the same codes.

Twin: ``nvfp4.quantize(square=True)`` of w and of w.t(), and maybe ``nvfp4.decode``.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from ...formats import layout
from ...ops.library import BLOCKS
from ..targets import Isa
from . import common, tuning
from .kernel import Kernel, render

TILE = BLOCKS["nvfp4"]


@dataclasses.dataclass(frozen=True)
class Config:
    """``groups`` tiles down x ``units`` half tiles across."""

    groups: int = 4
    units: int = 32


def choose() -> Config:
    return Config()


@functools.cache
def candidates() -> list[Config]:
    """What autotuning tries, the choice first."""
    return [choose(), Config(8, 16), Config(4, 16), Config(16, 8)]


@functools.cache
def kernel(
    isa: Isa,
    dtype: torch.dtype,
    rows: bool,
    turned: bool,
    config: Config,
    tiled: bool = False,
    decoded: bool = False,
) -> Kernel:
    """tiled: scales in tiles of 128 x 4 (formats/layout.py) instead of row-major.

    decoded: values of the rows are written instead of codes and scales; those of w^T are their transpose.
    """
    assert not (decoded and turned)
    which = "both" if rows and turned else "rows" if rows else "turned"
    name = f"quantize_weights_{which}_{common.DTYPES[dtype]}{common.suffix(tiled, decoded)}"
    values = {"isa": isa, "dtype": common.DTYPES[dtype], "rows": rows, "turned": turned}
    values |= {"tiled": tiled, "decoded": decoded}
    outputs = [prefix for prefix, wanted in (("", rows), ("turned_", turned)) if wanted]
    signature = {"w_ptr": common.element_type(dtype), "amax_ptr": "*fp32"}
    for prefix in outputs:
        signature |= common.output_types(decoded, prefix)
    signature |= {"height": "i32", "groups": "i32", "tiles": "i32", **({"columns": "i32"} if tiled else {})}
    signature |= {"one": "i32", "G": "constexpr", "C": "constexpr"}
    return Kernel(
        family="quantize weights",
        name=name,
        source=render("weights.py.jinja", name=name, **values),
        signature=signature,
        constants={"G": config.groups, "C": config.units},
        aligned=(
            *(argument for argument in signature if argument.endswith("_ptr") and argument != "amax_ptr"),
            "tiles",
        ),
        num_warps=config.groups * config.units // 32,
    )


def quantize(
    w: Tensor, amax: Tensor, rows: bool, turned: bool, tiled: bool = False
) -> tuple[tuple[Tensor, Tensor] | None, tuple[Tensor, Tensor] | None]:
    """[N, K] -> (codes, scales) of w [N, ...] and of w^T [K, ...], each None unless asked for."""
    height, width = w.shape
    w = common.padded(w, TILE)
    groups, tiles = -(-height // TILE), w.shape[1] // TILE
    row_outputs = common.empty_quantized(w, height, tiles, "nvfp4", tiled) if rows else None
    turned_outputs = common.empty_quantized(w, w.shape[1], groups, "nvfp4", tiled, width) if turned else None
    outputs = [tensor for pair in (row_outputs, turned_outputs) if pair for tensor in pair]
    _launch(w, amax, outputs, rows, turned, (width,) if tiled else ())
    if turned_outputs:
        kept = -(-width // layout.TILE_ROWS) if tiled else width
        turned_outputs = turned_outputs[0][:width], turned_outputs[1][:kept]
    return (
        common.with_scale_dtype(*row_outputs, "nvfp4") if row_outputs else None,
        common.with_scale_dtype(*turned_outputs, "nvfp4") if turned_outputs else None,
    )


def decoded(w: Tensor, amax: Tensor) -> Tensor:
    """[N, K] -> bfloat16 [N, nb * 16], what ``quantize`` gives of the rows decoded."""
    w = common.padded(w, TILE)
    values = w.new_empty(w.shape, dtype=torch.bfloat16)
    _launch(w, amax, [values], rows=True, turned=False, decoded=True)
    return values


def _launch(
    w: Tensor,
    amax: Tensor,
    outputs: list[Tensor],
    rows: bool,
    turned: bool,
    columns: tuple[int, ...] = (),
    decoded: bool = False,
) -> None:
    """w: of whole tiles across, contiguous. columns: how many are not padding, which a kernel with tiles is told."""
    height, tiles = w.shape[0], w.shape[1] // TILE
    groups = -(-height // TILE)
    if not groups or not tiles:
        return
    variant, tiled = (common.isa_of(w.device), w.dtype, rows, turned), bool(columns)
    arguments = (w, amax, *outputs, height, groups, tiles, *columns, 1)

    def launch(config: Config) -> None:
        programs = -(-groups // config.groups) * -(-2 * tiles // config.units)
        kernel(*variant, config, tiled, decoded).run(programs, *arguments)

    with common.on_device_of(w):
        tuning.launch(("weights", variant, tiled, decoded, w.shape, w.device), candidates(), launch)
