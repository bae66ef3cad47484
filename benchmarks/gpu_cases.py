"""The operations of the generated kernels, each with its formulas in PyTorch: what kernels_gpu.py checks and times.

A case takes an ``Operand``, a tensor and what belongs to it, and gives a tuple of tensors.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import fp4compile  # noqa: F401  (registers the operators)
from fp4compile.formats.rotation import SIGNS
from fp4compile.lowering.kernels import amax as amaxes
from fp4compile.lowering.kernels import columns, decode, produced, rows, weights
from fp4compile.ops.library import BLOCKS, REFERENCE, SCALE_DTYPES
from fp4compile.ops.produced import DTYPES, Program, Value

fp4 = torch.ops.fp4
FORMATS = ("nvfp4", "mxfp4")
ROUNDINGS = ("nearest", "stochastic")
SITE = 5
SEED = 1234567890123
Size = tuple[int, int]
Tensors = tuple[Tensor, ...]


@dataclasses.dataclass(frozen=True)
class Operand:
    """x [R, C], the amax of it and of its rotated transpose, a seed, and by format codes and scales to decode."""

    x: Tensor
    amax: Tensor
    rotated_amax: Tensor
    seed: Tensor
    packed: dict[str, tuple[Tensor, Tensor]]

    def to(self, device: torch.device) -> Operand:
        packed = {name: (codes.to(device), scales.to(device)) for name, (codes, scales) in self.packed.items()}
        x, amax, rotated_amax, seed = (t.to(device) for t in (self.x, self.amax, self.rotated_amax, self.seed))
        return Operand(x, amax, rotated_amax, seed, packed)

    def first_rows(self, count: int) -> Operand:
        """With the tensor scales of the whole."""
        packed = {name: (codes[:count], scales[:count]) for name, (codes, scales) in self.packed.items()}
        return dataclasses.replace(self, x=self.x[:count], packed=packed)

    def first_columns(self, count: int) -> Operand:
        """With the tensor scales of the whole."""
        return dataclasses.replace(self, x=self.x[:, :count])


def spread(size: Size, dtype: torch.dtype) -> Tensor:
    """Values over many magnitudes, some rows and elements zero, the same on every machine."""
    height, width = size
    generator = torch.Generator().manual_seed(height * 1000 + width)
    scale = torch.exp2(torch.randint(-18, 12, (height, 1), generator=generator).float())
    x = torch.randn(height, width, generator=generator) * scale
    x[::7, ::5] = 0
    x[3::97] = 0
    return x.to(dtype)


def any_packed(size: Size, format: str) -> tuple[Tensor, Tensor]:
    """Every code with every finite scale, [height, ceil(width / B)] blocks of a [height, width] tensor."""
    height, width = size
    generator = torch.Generator().manual_seed(height + width)
    blocks, last = -(-width // BLOCKS[format]), 126 if format == "nvfp4" else 254
    codes = torch.randint(256, (height, blocks * BLOCKS[format] // 2), generator=generator, dtype=torch.uint8)
    scales = torch.randint(last + 1, (height, blocks), generator=generator, dtype=torch.uint8)
    return codes, scales.view(SCALE_DTYPES[format])


def operand(size: Size, dtype: torch.dtype, device: torch.device) -> Operand:
    """Made on the CPU and moved; the amaxes by the reference on ``device``."""
    x = spread(size, dtype).to(device)
    packed = {format: any_packed(size, format) for format in FORMATS}
    packed = {format: (codes.to(device), scales.to(device)) for format, (codes, scales) in packed.items()}
    rotated_amax = fp4.amax(fp4.rotate(x.t(), BLOCKS["nvfp4"], SIGNS))
    return Operand(x, fp4.amax(x), rotated_amax, torch.tensor(SEED, device=device), packed)


def blank(size: Size, device: torch.device, random: bool = False) -> Operand:
    """bfloat16, made on the device, for timing; decodes nvfp4 only."""
    height, width = size
    x = torch.zeros(size, dtype=torch.bfloat16, device=device)
    if random:
        x.normal_()
    amax, rotated_amax = (torch.full((), 6.0, device=device) for _ in range(2))
    blocks = -(-width // BLOCKS["nvfp4"])
    codes = torch.randint(256, (height, blocks * 8), dtype=torch.uint8, device=device)
    scales = torch.randint(120, (height, blocks), dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    return Operand(x, amax, rotated_amax, torch.tensor(SEED, device=device), {"nvfp4": (codes, scales)})


@dataclasses.dataclass(frozen=True)
class Case:
    """kernel and formulas: the same results. axes: of each result, what its leading dimension is of x."""

    name: str
    kernel: Callable[[Operand], Tensors]
    formulas: Callable[[Operand], Tensors]
    axes: tuple[str, ...]


def checked() -> Iterator[Case]:
    """Every kernel family in every variant; formulas are the operators themselves."""
    for format, rounding in itertools.product(FORMATS, ROUNDINGS):
        yield _rows(format, rounding, fp4.quantize)
        for signs in (SIGNS, None):
            yield _columns(format, rounding, signs, fp4.rotate, fp4.quantize)
    yield from (_rows(format, "nearest", fp4.quantize, tiled=True) for format in FORMATS)
    yield _columns("nvfp4", "nearest", SIGNS, fp4.rotate, fp4.quantize, tiled=True)
    yield _weights((True, True), fp4.quantize, tiled=True)
    yield from (_weights(which, fp4.quantize) for which in ((True, True), (True, False), (False, True)))
    yield from _amaxes(fp4.amax, fp4.rotate)
    for format, rounding in itertools.product(FORMATS, ROUNDINGS):
        yield _decoded("rows", format, rounding, fp4.quantize_decoded)
        yield _decoded("columns", format, rounding, fp4.rotate_quantize_decoded)
    yield _decoded("weights", "nvfp4", "nearest", fp4.quantize_decoded)
    yield from (_by_row(fp4.quantize), _produced(fp4.quantize_decoded))
    for format, dtype in itertools.product(FORMATS, (torch.bfloat16, torch.float32)):
        yield _decode(format, dtype, fp4.decode)


@dataclasses.dataclass(frozen=True)
class Timed:
    """bytes: an element's, the fewest possible. mark: the share of the copy bandwidth that is aimed at."""

    case: Case
    bytes: float
    mark: float | None = None


def timed() -> list[Timed]:
    """nvfp4; formulas are the operators' references, to be compiled."""

    def formulas(name: str) -> Callable[..., Any]:
        return REFERENCE[getattr(fp4, name).default]

    quantize, rotate, amax_, decode_ = map(formulas, ("quantize", "rotate", "amax", "decode"))
    by_rows = [_rows("nvfp4", rounding, quantize) for rounding in ROUNDINGS]
    by_columns = [_columns("nvfp4", rounding, SIGNS, rotate, quantize) for rounding in ROUNDINGS]
    largest = {case.name: case for case in _amaxes(amax_, rotate)}
    return [
        *map(Timed, by_rows, (2.5625, 2.5625), (0.88, 0.75)),
        *map(Timed, by_columns, (2.5625, 2.5625)),
        *map(Timed, map(_together, by_rows, by_columns, ROUNDINGS), (3.125, 3.125), (0.60, 0.48)),
        Timed(_weights((True, True), quantize), 3.125, 0.75),
        Timed(_decoded("rows", "nvfp4", "nearest", formulas("quantize_decoded")), 4),
        Timed(_decoded("columns", "nvfp4", "stochastic", formulas("rotate_quantize_decoded")), 4),
        Timed(_decoded("weights", "nvfp4", "nearest", formulas("quantize_decoded")), 4),
        Timed(_produced(formulas("quantize_decoded")), 4),
        Timed(largest["amax"], 2),
        Timed(largest["amax both"], 2, 0.85),
        Timed(_decode("nvfp4", torch.bfloat16, decode_), 2.5625, 0.90),
    ]


def _together(first: Case, second: Case, rounding: str) -> Case:
    return Case(
        f"rows + rotated columns nvfp4 {rounding}",
        lambda o: first.kernel(o) + second.kernel(o),
        lambda o: first.formulas(o) + second.formulas(o),
        first.axes + second.axes,
    )


def _seed(o: Operand, rounding: str) -> Tensor | None:
    return o.seed if rounding == "stochastic" else None


def _rows(format: Any, rounding: str, quantize: Callable[..., Tensors], tiled: bool = False) -> Case:
    def scale(o: Operand) -> Tensor | None:
        return o.amax if format == "nvfp4" else None

    return Case(
        f"rows {format} {rounding}{' tiled' if tiled else ''}",
        lambda o: rows.quantize(o.x, scale(o), _seed(o, rounding), format, SITE, tiled),
        lambda o: quantize(o.x, scale(o), _seed(o, rounding), format, [1, BLOCKS[format]], rounding, SITE, tiled),
        ("rows", "rows"),
    )


def _columns(
    format: Any,
    rounding: str,
    signs: int | None,
    rotate: Callable[..., Tensor],
    quantize: Callable[..., Tensors],
    tiled: bool = False,
) -> Case:
    size = BLOCKS[format]

    def scale(o: Operand) -> Tensor | None:
        return None if format == "mxfp4" else o.amax if signs is None else o.rotated_amax

    def formulas(o: Operand) -> Tensors:
        turned = o.x.t() if signs is None else rotate(o.x.t(), size, signs)
        return quantize(turned, scale(o), _seed(o, rounding), format, [1, size], rounding, SITE, tiled)

    return Case(
        f"{'' if signs is None else 'rotated '}columns {format} {rounding}{' tiled' if tiled else ''}",
        lambda o: columns.quantize(o.x, scale(o), _seed(o, rounding), format, SITE, signs, tiled),
        formulas,
        ("columns", "columns"),
    )


def _decoded(family: str, format: Any, rounding: str, quantize: Callable[..., Tensor]) -> Case:
    """Values in the place of codes; columns rotated."""
    size = BLOCKS[format]

    def scale(o: Operand) -> Tensor | None:
        return None if format == "mxfp4" else o.rotated_amax if family == "columns" else o.amax

    def kernel(o: Operand) -> Tensors:
        if family == "weights":
            return (weights.decoded(o.x, o.amax),)
        if family == "rows":
            return (rows.decoded(o.x, scale(o), _seed(o, rounding), format, SITE),)
        return (columns.decoded(o.x, scale(o), _seed(o, rounding), format, SITE, SIGNS),)

    def formulas(o: Operand) -> Tensors:
        if family == "columns":
            return (quantize(o.x.t(), scale(o), _seed(o, rounding), format, rounding, SITE, size, SIGNS),)
        block = [size, size] if family == "weights" else [1, size]
        return (quantize(o.x, scale(o), _seed(o, rounding), format, block, rounding, SITE),)

    name = f"{'rotated ' if family == 'columns' else ''}{family} {format} {rounding}, decoded"
    return Case(name, kernel, formulas, ("columns" if family == "columns" else "rows",))


def _maxima(x: Tensor) -> Tensor:
    return x.abs().amax(-1)


def _by_row(quantize: Callable[..., Tensors]) -> Case:
    return Case(
        "rows nvfp4 nearest, a scale a row",
        lambda o: rows.quantize(o.x, _maxima(o.x), None, "nvfp4", SITE),
        lambda o: quantize(o.x, _maxima(o.x), None, "nvfp4", [1, 16], "nearest", SITE),
        ("rows", "rows"),
    )


def _produced(quantize: Callable[..., Tensor]) -> Case:
    """A program without steps, of whole blocks, in one of its dtypes."""

    def matrix(o: Operand) -> Tensor:
        x = o.x if o.x.dtype in DTYPES.values() else o.x.float()
        return x[:, : x.shape[1] // 16 * 16]

    def kernel(o: Operand) -> Tensors:
        x = matrix(o)
        value = Value("i0", "full", str(x.dtype).removeprefix("torch."))
        return tuple(produced.produce([x], Program("values", x.shape[1], (value,), (), value, ())))

    def formulas(o: Operand) -> Tensors:
        x = matrix(o)
        return quantize(x, _maxima(x), None, "nvfp4", [1, 16], "nearest", 0), _maxima(x)

    return Case("rows with their amaxes nvfp4 nearest, decoded", kernel, formulas, ("rows", "rows"))


def _weights(which: tuple[bool, bool], quantize: Callable[..., Tensors], tiled: bool = False) -> Case:
    def kernel(o: Operand) -> Tensors:
        pairs = weights.quantize(o.x, o.amax, *which, tiled)
        return tuple(tensor for pair in pairs if pair is not None for tensor in pair)

    def formulas(o: Operand) -> Tensors:
        sides = [side for side, wanted in zip((o.x, o.x.t()), which, strict=True) if wanted]
        pairs = [quantize(side, o.amax, None, "nvfp4", [16, 16], "nearest", 0, tiled) for side in sides]
        return tuple(tensor for pair in pairs for tensor in pair)

    axes = [axis for axis, wanted in zip(("rows", "columns"), which, strict=True) if wanted for _ in range(2)]
    name = {(True, True): "both ways", (True, False): "rows", (False, True): "columns"}[which]
    return Case(f"weights {name}{' tiled' if tiled else ''}", kernel, formulas, tuple(axes))


def _amaxes(largest: Callable[..., Tensor], rotate: Callable[..., Tensor]) -> list[Case]:
    def rotated(o: Operand) -> Tensor:
        return largest(rotate(o.x.t(), BLOCKS["nvfp4"], SIGNS))

    def both(o: Operand) -> Tensors:
        plain, of_rotated = amaxes.amax_both(o.x, SIGNS)
        assert plain is not None
        return plain, of_rotated

    return [
        Case("amax", lambda o: (amaxes.amax(o.x),), lambda o: (largest(o.x),), ("all",)),
        Case("amax both", both, lambda o: (largest(o.x), rotated(o)), ("all", "all")),
        Case(
            "amax rotated",
            lambda o: (amaxes.amax_both(o.x, SIGNS, plain=False)[1],),
            lambda o: (rotated(o),),
            ("all",),
        ),
    ]


def _decode(format: Any, dtype: torch.dtype, reference: Callable[..., Tensor]) -> Case:
    return Case(
        f"decode {format} to {str(dtype).removeprefix('torch.')}",
        lambda o: (decode.decode(*o.packed[format], format, dtype),),
        lambda o: (reference(*o.packed[format], format, dtype),),
        ("rows",),
    )
