"""The one `torch.library.Library` of the namespace `fp4`, and the checks that several operators share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError, UnsupportedDtypeError
from ..formats import layout

library = torch.library.Library("fp4", "DEF")

BLOCKS = {"nvfp4": 16, "mxfp4": 32}  # elements that share a scale along the last dimension
SCALE_DTYPES = {"nvfp4": torch.float8_e4m3fn, "mxfp4": torch.float8_e8m0fnu}
REFERENCE: dict[Any, Callable[..., Any]] = {}  # each operator's formulas, for lowerings to trace
CHECKS: dict[Any, Callable[..., Any]] = {}  # what raises where an operator's arguments are wrong
INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def define(
    schema: str,
    reference: Callable[..., object],
    fake: Callable[..., object],
    formulas: Callable[..., object] | None = None,
    check: Callable[..., object] | None = None,
) -> None:
    """Registers `fp4::<schema>` with one implementation for every device and its shape function.

    formulas: the reference without checks that a tracer cannot follow, if it has such. check: the checks alone, of the
    same arguments, for other implementations.
    """
    name = schema.split("(", 1)[0]
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fp4::{name}", fake, lib=library)
    operator = getattr(torch.ops.fp4, name).default
    REFERENCE[operator] = formulas or reference
    CHECKS[operator] = check or fake


def check_input(op: str, x: Tensor, name: str = "x") -> None:
    """A 2-D bfloat16, float16 or float32 tensor."""
    check_dtype(op, name, x)
    if x.dim() != 2:
        raise ConfigError(
            f"fp4::{op}: {name} has shape {list(x.shape)}; a 2-D tensor is needed, "
            "reshape it with the blocked dimension last, such as x.reshape(-1, x.shape[-1])"
        )


def check_dtype(op: str, name: str, x: Tensor) -> None:
    if x.dtype not in INPUT_DTYPES:
        raise UnsupportedDtypeError(
            f"fp4::{op}: {name} is {x.dtype}; cast it to torch.bfloat16, torch.float16 or torch.float32 first"
        )


def is_scalar(x: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    return x.dim() == 0 and x.dtype == dtype


def check_scalar(op: str, name: str, x: Tensor, dtype: torch.dtype) -> None:
    if not is_scalar(x, dtype):
        raise ConfigError(f"fp4::{op}: {name} has shape {list(x.shape)}, {x.dtype}; a 0-d {dtype} tensor is needed")


def check_row_amax(op: str, name: str, amax: Tensor, rows: Any, dtypes: tuple[torch.dtype, ...]) -> None:
    """[rows], of one of the dtypes."""
    if amax.dim() != 1 or amax.shape[0] != rows or amax.dtype not in dtypes:
        allowed = " or ".join(map(str, dtypes))
        raise ConfigError(
            f"fp4::{op}: {name} has shape {list(amax.shape)}, {amax.dtype}; a 0-d torch.float32 tensor is needed, or, "
            f"of a scale a row, [{rows}] in {allowed}, x.abs().amax(-1)"
        )


def check_format(op: str, name: str, value: str) -> None:
    if value not in BLOCKS:
        formats = ", ".join(map(repr, BLOCKS))
        raise ConfigError(f"fp4::{op}: {name} is {value!r}; one of {formats} is needed")


def check_codes(op: str, name: str, codes: Tensor, scales: Tensor, fmt: str, tiled: bool = False) -> None:
    """uint8 [R, nb * B/2] with scales [R, nb] of the format's dtype, or their tiles."""
    bytes_a_block = BLOCKS[fmt] // 2
    if codes.dtype != torch.uint8 or codes.dim() != 2:
        raise ConfigError(f"fp4::{op}: {name} has shape {list(codes.shape)}, {codes.dtype}; packed codes are 2-D uint8")
    needed = SCALE_DTYPES[fmt]
    if scales.dtype != needed:
        raise ConfigError(f"fp4::{op}: the scales of {name} are {scales.dtype}; {fmt} has {needed}")
    expected: tuple[int, ...] = (codes.shape[0], codes.shape[1] // bytes_a_block)
    if tiled:
        expected = layout.tiles_shape(*expected)
    if tuple(scales.shape) != expected or codes.shape[1] % bytes_a_block != 0:
        raise ConfigError(
            f"fp4::{op}: {name} is {list(codes.shape)} and its scales {list(scales.shape)}; "
            f"{fmt} has one scale for {bytes_a_block} bytes of a row"
        )
