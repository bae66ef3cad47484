"""What the quantization kernel families share: block sizes, how tensors are handed over, launches."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ...errors import ConfigError
from ...formats import layout
from ...ops.library import BLOCKS, SCALE_DTYPES
from ..targets import INTERPRETER, Isa, capability_of, target_for

Format = Literal["nvfp4", "mxfp4"]
DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


@functools.cache
def isa_of(device: torch.device) -> Isa:
    """The instructions of a device with kernels. On a CPU kernels only run in Triton's interpreter."""
    if device.type == "cpu":
        return INTERPRETER
    isa = target_for(device.type, capability_of(device)).isa
    assert isa is not None, f"lowering gave a kernel to {device}, which has none"
    return isa


@functools.cache
def processors_of(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 elsewhere."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def element_type(dtype: torch.dtype) -> str:
    """Triton's pointer type of a tensor: float32 as it is, two elements of 2 bytes as one int32."""
    return "*fp32" if dtype == torch.float32 else "*i32"


MOST_COLUMNS = 2**26
"""Offsets within 32 rows are counted in 32 bits."""


def padded(x: Tensor, multiple: int) -> Tensor:
    """[R, C] contiguous and aligned, zero columns appended up to a multiple: a copy only where it must be one."""
    if x.shape[1] > MOST_COLUMNS:
        raise ConfigError(
            f"a matrix of {list(x.shape)} has too many columns for a kernel, which takes {MOST_COLUMNS}: "
            "reshape it, or quantize it in pieces"
        )
    missing = -x.shape[1] % multiple
    return F.pad(x, (0, missing)) if missing else aligned(x)  # padding by nothing would copy


def aligned(x: Tensor) -> Tensor:
    """Contiguous, and a view of 32-bit words: begins at one, and no row of its own pretends another stride."""
    x = x.contiguous()
    per_word = 4 // x.element_size()
    if x.storage_offset() % per_word or any(stride % per_word for stride in x.stride()[:-1]):
        return x.clone(memory_format=torch.contiguous_format)
    return x


def empty_quantized(
    x: Tensor, rows: int, blocks: int, format: Format, tiled: bool = False, filled: int | None = None
) -> tuple[Tensor, Tensor]:
    """Codes uint8 [rows, blocks * B/2] and scale bytes uint8 [rows, blocks] to be filled; or their tiles, of which what
    no scale fills is zero. filled: how many rows get scales in tiles, if not all."""
    codes = x.new_empty((rows, blocks * (BLOCKS[format] // 2)), dtype=torch.uint8)
    if not tiled:
        return codes, x.new_empty((rows, blocks), dtype=torch.uint8)
    whole = (rows if filled is None else filled) % layout.TILE_ROWS == 0 and blocks % layout.TILE_COLS == 0
    make = x.new_empty if whole else x.new_zeros
    return codes, make(layout.tiles_shape(rows, blocks), dtype=torch.uint8)


def output_types(decoded: bool, prefix: str = "") -> dict[str, str]:
    """Types of the pointers that a quantization kernel writes to: codes and scales, or two values a word."""
    if decoded:
        return {f"{prefix}values_ptr": "*i32"}
    return {f"{prefix}codes_ptr": "*i32", f"{prefix}scales_ptr": "*u8"}


def suffix(tiled: bool, decoded: bool, by_row: torch.dtype | None = None) -> str:
    """What tells the names of a quantization kernel's variants apart; values have no scales to be tiled."""
    assert not (tiled and decoded)
    scale = f"_by_{DTYPES[by_row]}_row" if by_row else ""
    return scale + ("_decoded" if decoded else "_tiled" if tiled else "")


def with_scale_dtype(codes: Tensor, scales: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    return codes, scales.view(SCALE_DTYPES[format])


def on_device_of(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device: make it the tensor's."""
    if x.device.type != "cuda" or x.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)


# bfloat16 as its bits: Triton's interpreter makes zeros of its subnormal numbers.
_AMAX_TYPES = {torch.bfloat16: "*i16", torch.float16: "*fp16", torch.float32: "*fp32"}


def scalar_types(stochastic: bool, format: Format, by_row: torch.dtype | None = None) -> dict[str, str]:
    """Types of the amax, seed and site arguments that a quantization kernel has. by_row: dtype of amaxes of rows."""
    amax = {"amax_ptr": _AMAX_TYPES[by_row or torch.float32]} if format == "nvfp4" else {}
    return amax | ({"seed_ptr": "*i64", "site": "i64"} if stochastic else {})


def scalars(amax: Tensor | None, seed: Tensor | None, site: int) -> tuple[Any, ...]:
    """The arguments of ``scalar_types``."""
    return (() if amax is None else (amax,)) + (() if seed is None else (seed, site))
