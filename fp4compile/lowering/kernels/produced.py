"""A tensor computed, and its rows quantized, in one read of what it is computed from: one program, one row.

Twin: ``fp4compile.ops.produced``. Steps are written as Inductor writes them, so elementwise programs give its bits;
sums are added in another order. Against PyTorch a zero may have the other sign: Triton's ``-x`` is 0 - x.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...ops.produced import SUM, Argument, Kind, Program, Step, Value, empty_written, rows_of
from ..targets import Isa
from . import common
from .kernel import Kernel, render

SIZE = 16
"""Elements of a thread: one block."""

EXPRESSIONS = {
    "add": "{} + {}",
    "sub": "{} - {}",
    "mul": "{} * {}",
    "div": "{} / {}",
    "neg": "-{}",
    "abs": "tl.abs({})",
    "relu": "tl.maximum({}, 0.0, propagate_nan=tl.PropagateNan.ALL)",
    "reciprocal": "1.0 / {}",
    "rsqrt": "libdevice.rsqrt({})",
    "exp": "libdevice.exp({})",
    "sigmoid": "tl.sigmoid({})",
    "tanh": "libdevice.tanh({})",
    "erf": "libdevice.erf({})",
}
"""Elementwise step -> Triton, of float32."""

_POINTERS = {"bfloat16": {"vector": "*i32", "number": "*i16"}, "float32": {"vector": "*fp32", "number": "*fp32"}}


EXAMPLE = Program(
    result="values",
    columns=4096,
    inputs=(Value("i0", "full", "bfloat16"), Value("i1", "full", "bfloat16"), Value("i2", "column", "bfloat16")),
    steps=(
        Step("s0", "add", ("i0", "i1"), "full"),
        Step("s1", "mul", ("s0", "s0"), "full"),
        Step("s2", "sum", ("s1",), "row"),
        Step("s3", "div", ("s2", 4096.0), "row"),
        Step("s4", "add", ("s3", 1e-6), "row"),
        Step("s5", "rsqrt", ("s4",), "row"),
        Step("s6", "mul", ("s0", "s5"), "full"),
        Step("s7", "mul", ("s6", "i2"), "full"),
    ),
    x=Value("s7", "full", "bfloat16"),
    outputs=(Value("s0", "full", "bfloat16"), Value("s5", "row", "float32")),
)
"""The RMSNorm of a residual: of the programs that graphs give, one to look at."""


def threads(columns: int) -> int:
    """Of one program: a power of two, whole warps, one block each."""
    return max(32, 1 << (columns // SIZE - 1).bit_length())


@functools.cache
def kernel(isa: Isa, program: Program) -> Kernel:
    digest = hashlib.sha256(program.to_json().encode()).hexdigest()[:8]
    name, count = f"quantize_produced_rows_{digest}", threads(program.columns)
    return Kernel(
        family="quantize produced rows",
        name=name,
        source=render("produced.py.jinja", name=name, isa=isa, program=program, body=list(_body(program))),
        signature=_signature(program),
        constants={"N": count},
        aligned=tuple(_aligned(program)),
        num_warps=count // 32,
    )


def _signature(program: Program) -> dict[str, str]:
    signature: dict[str, str] = {}
    for value in program.inputs:
        vector = value.kind in ("full", "column")
        signature[f"{value.name}_ptr"] = _POINTERS[value.dtype]["vector" if vector else "number"]
        if value.kind == "full":
            signature[f"{value.name}_stride"] = "i32"
    signature |= common.output_types(program.result == "values")
    signature["amax_ptr"] = _POINTERS[program.x.dtype]["number"]
    for index, value in enumerate(program.outputs):
        signature[f"out{index}_ptr"] = _POINTERS[value.dtype]["vector" if value.kind == "full" else "number"]
    return {**signature, "one": "i32", "N": "constexpr"}


def _aligned(program: Program) -> Iterator[str]:
    """Rows begin at multiples of 16 bytes where pointers and strides, in words, are multiples of 16."""
    for value in program.inputs:
        if value.kind in ("full", "column"):
            yield f"{value.name}_ptr"
        if value.kind == "full":
            yield f"{value.name}_stride"
    yield from common.output_types(program.result == "values")
    yield from (f"out{index}_ptr" for index, value in enumerate(program.outputs) if value.kind == "full")


def _body(program: Program) -> Iterator[str]:
    """The steps, a line each, or one for each element of a block."""
    kinds: dict[str, Kind] = {value.name: value.kind for value in program.inputs}
    for step in program.steps:
        yield from _lines(step, kinds)
        kinds[step.name] = step.kind


def _lines(step: Step, kinds: dict[str, Kind]) -> Iterator[str]:
    if step.op == SUM:
        terms = _added([_at(step.args[0], kinds, i) for i in range(SIZE)])
        yield f"{step.name} = tl.sum(tl.where(inside, {terms}, 0.0), 0)"
        return
    for i in range(SIZE) if step.kind in ("full", "column") else (None,):
        arguments = [_at(argument, kinds, i) for argument in step.args]
        target = step.name if i is None else f"{step.name}_{i}"
        yield f"{target} = {EXPRESSIONS[step.op].format(*arguments)}"


def _at(argument: Argument, kinds: dict[str, Kind], index: int | None) -> str:
    """The variable of an argument for one element of a block, or a number."""
    if not isinstance(argument, str):
        return repr(float(argument)) if argument >= 0 else f"({float(argument)!r})"
    return f"{argument}_{index}" if kinds[argument] in ("full", "column") else argument


def _added(terms: Sequence[str]) -> str:
    """A sum in pairs, so that additions do not wait for each other."""
    if len(terms) == 1:
        return terms[0]
    half = len(terms) // 2
    return f"({_added(terms[:half])} + {_added(terms[half:])})"


def produce(inputs: Sequence[Tensor], program: Program) -> list[Tensor]:
    """As ``fp4::produce``."""
    like, rows, columns = inputs[0], rows_of(program, inputs), program.columns
    if program.result == "values":
        quantized: tuple[Tensor, ...] = (like.new_empty((rows, columns), dtype=torch.bfloat16),)
    else:
        quantized = common.empty_quantized(like, rows, columns // SIZE, "nvfp4", program.result == "tiles")
    amaxes, outputs = empty_written(program, like, rows)
    if rows:
        with common.on_device_of(like):
            one = kernel(common.isa_of(like.device), program)
            one.run(rows, *_arguments(inputs, program), *quantized, amaxes, *outputs, 1)
    if program.result != "values":
        codes, scales = quantized
        quantized = common.with_scale_dtype(codes, scales, "nvfp4")
    return [*quantized, amaxes, *outputs]


def _arguments(inputs: Sequence[Tensor], program: Program) -> Iterator[Any]:
    for value, tensor in zip(program.inputs, inputs, strict=True):
        if value.kind != "full":
            yield common.aligned(tensor)
            continue
        matrix = tensor.reshape(-1, program.columns)
        per_word = 4 // matrix.element_size()
        if matrix.stride(1) != 1 or matrix.stride(0) % per_word or matrix.storage_offset() % per_word:
            matrix = common.aligned(matrix.contiguous())
        yield matrix
        yield matrix.stride(0) // per_word
