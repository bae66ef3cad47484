"""A tensor computed and quantized by one operator, with a scale a row, where nothing else needs it in memory.

| operator | takes | gives |
|---|---|---|
| fp4::produce | inputs, a program | codes and scales or values, amaxes [R], then the program's outputs |

A ``Program`` computes x [R, C] row by row: elementwise steps and sums of rows. The operator gives, of x rounded to its
dtype, ``amaxes = x.abs().amax(-1)`` in that dtype and, by the program's ``result``,

| result | first |
|---|---|
| "values" | fp4::quantize_decoded(x, amaxes, None, "nvfp4", [1, 16], "nearest", 0) |
| "codes", "tiles" | the codes and scales of fp4::quantize of the same, tiled or not |

Steps are computed in float32 and not rounded between, as Inductor computes what it joins in one kernel; outputs and x
are rounded once.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ..errors import ConfigError
from . import decoded, quantize
from .library import define

Kind = Literal["full", "row", "column", "scalar"]
"""The shape of a value: [R, C], [R, 1], [1, C] or one number."""
ROWS: tuple[Kind, ...] = ("full", "row")
"""Kinds that have R."""
Result = Literal["values", "codes", "tiles"]
Argument = str | float
"""The name of a value, or a number."""

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "neg": torch.neg,
    "abs": torch.abs,
    "relu": torch.relu,
    "reciprocal": torch.reciprocal,
    "rsqrt": torch.rsqrt,
    "exp": torch.exp,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "erf": torch.erf,
}
SUM = "sum"
"""The step that adds up the elements of a row: "full" -> "row"."""
OPERANDS = {SUM: 1, **{op: 2 if op in ("add", "sub", "mul", "div") else 1 for op in ELEMENTWISE}}
WIDEST = 16384
"""Columns of the widest row that a kernel holds."""
MOST = torch.finfo(torch.float32).max
"""The largest number in a step."""
NAME = re.compile(r"[is]\d+")
"""Of inputs and steps: no name of anything else in a kernel."""


@dataclasses.dataclass(frozen=True)
class Value:
    """A value of a program that is a tensor outside, and its dtype there, of ``DTYPES``."""

    name: str
    kind: Kind
    dtype: str


@dataclasses.dataclass(frozen=True)
class Step:
    """``name`` = ``op`` of ``args``. op: ``SUM`` or of ``ELEMENTWISE``."""

    name: str
    op: str
    args: tuple[Argument, ...]
    kind: Kind


@dataclasses.dataclass(frozen=True)
class Program:
    """x, of ``columns``, from ``inputs`` by ``steps``. outputs: what else is written, "full" or "row"."""

    result: Result
    columns: int
    inputs: tuple[Value, ...]
    steps: tuple[Step, ...]
    x: Value
    outputs: tuple[Value, ...]

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        """Once: every launch looks its kernel up by the program."""
        return hash(self.to_json())

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @staticmethod
    @functools.cache
    def from_json(text: str) -> Program:
        """Raises ConfigError if the text is none, or one that computes nothing sensible."""
        try:
            program = Program._parsed(json.loads(text))
            _check_program(program)
        except ConfigError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"fp4::produce: not a program ({error})") from None
        return program

    @staticmethod
    def _parsed(fields: Any) -> Program:
        steps = tuple(Step(**{**step, "args": tuple(step["args"])}) for step in fields["steps"])
        inputs, outputs = (tuple(Value(**value) for value in fields[name]) for name in ("inputs", "outputs"))
        return Program(fields["result"], fields["columns"], inputs, steps, Value(**fields["x"]), outputs)


def rows_of(program: Program, inputs: Sequence[Tensor]) -> int:
    """R. An input has it: nothing else makes x full."""
    has_rows = ((value.kind, one) for value, one in zip(program.inputs, inputs, strict=True) if value.kind in ROWS)
    kind, tensor = next(has_rows)
    return math.prod(tensor.shape) // (program.columns if kind == "full" else 1)


def empty_written(program: Program, like: Tensor, rows: int) -> tuple[Tensor, list[Tensor]]:
    """The amaxes and the outputs, to be filled."""
    shapes = {"full": (rows, program.columns), "row": (rows,)}
    amaxes = like.new_empty((rows,), dtype=DTYPES[program.x.dtype])
    return amaxes, [like.new_empty(shapes[one.kind], dtype=DTYPES[one.dtype]) for one in program.outputs]


def produce(inputs: Sequence[Tensor], program: str) -> list[Tensor]:
    _check(inputs, program)
    parsed = Program.from_json(program)
    rows, columns = rows_of(parsed, inputs), parsed.columns
    shapes = {"full": (rows, columns), "row": (rows, 1), "column": (1, columns), "scalar": ()}
    values: dict[str, Tensor] = {
        value.name: tensor.reshape(shapes[value.kind]).to(torch.float32)
        for value, tensor in zip(parsed.inputs, inputs, strict=True)
    }
    for step in parsed.steps:
        values[step.name] = _run(step, [values[arg] if isinstance(arg, str) else arg for arg in step.args])

    def written(value: Value) -> Tensor:
        tensor = values[value.name].to(DTYPES[value.dtype])
        return tensor.expand(shapes["full"]).contiguous() if value.kind == "full" else tensor.reshape(rows)

    x = written(parsed.x)
    amaxes = x.abs().amax(-1)
    return [*quantized(parsed.result, x, amaxes), amaxes, *map(written, parsed.outputs)]


def quantized(result: Result, x: Tensor, amaxes: Tensor) -> tuple[Tensor, ...]:
    """By the operators that quantize what has been written."""
    how = (amaxes, None, "nvfp4", [1, 16], "nearest", 0)
    if result == "values":
        return (decoded.quantize_decoded(x, *how),)
    return quantize.quantize(x, *how, result == "tiles")


def _run(step: Step, arguments: list[Any]) -> Tensor:
    if step.op == SUM:
        return torch.sum(arguments[0], -1, keepdim=True)
    result: Tensor = ELEMENTWISE[step.op](*arguments)
    return result


def _fake(inputs: Sequence[Tensor], program: str) -> list[Tensor]:
    _check(inputs, program)
    parsed = Program.from_json(program)
    rows, columns = rows_of(parsed, inputs), parsed.columns
    amaxes, outputs = empty_written(parsed, inputs[0], rows)
    if parsed.result == "values":
        return [inputs[0].new_empty((rows, columns), dtype=torch.bfloat16), amaxes, *outputs]
    x = inputs[0].new_empty((rows, columns), dtype=amaxes.dtype)
    codes = quantize._fake(x, amaxes, None, "nvfp4", [1, 16], "nearest", 0, parsed.result == "tiles")
    return [*codes, amaxes, *outputs]


def _check(inputs: Sequence[Tensor], program: str) -> None:
    parsed = Program.from_json(program)
    if len(inputs) != len(parsed.inputs):
        raise ConfigError(f"fp4::produce: the program takes {len(parsed.inputs)} inputs, got {len(inputs)}")
    rows = rows_of(parsed, inputs)
    elements = {"full": rows * parsed.columns, "row": rows, "column": parsed.columns, "scalar": 1}
    for value, tensor in zip(parsed.inputs, inputs, strict=True):
        if tensor.dtype != DTYPES[value.dtype] or math.prod(tensor.shape) != elements[value.kind]:
            raise ConfigError(
                f"fp4::produce: input {value.name} is {list(tensor.shape)}, {tensor.dtype}; the program takes "
                f"{elements[value.kind]} elements, {DTYPES[value.dtype]}"
            )


def spread(kinds: Iterable[Kind]) -> Kind:
    """What an elementwise step of such operands gives."""
    found = set(kinds)
    if "full" in found or {"row", "column"} <= found:
        return "full"
    return "row" if "row" in found else "column" if "column" in found else "scalar"


def _check_program(program: Program) -> None:
    """A kernel's source is made of it, so every name and number is looked at."""
    _need(program.result in get_args(Result), f"there is no result {program.result!r}")
    fits = type(program.columns) is int and program.columns % 16 == 0 and 0 < program.columns <= WIDEST
    _need(fits, f"{program.columns} columns; a multiple of 16 up to {WIDEST} is needed")
    kinds: dict[Argument, Kind] = {}
    for value in program.inputs:
        _check_new(value.name, value.kind, kinds)
        kinds[value.name] = value.kind
    for step in program.steps:
        _check_new(step.name, step.kind, kinds)
        _check_step(step, kinds)
        kinds[step.name] = step.kind
    _need(program.x.kind == "full", f"x is a {program.x.kind}")
    for value in (*program.inputs, program.x, *program.outputs):
        _need(value.dtype in DTYPES, f"{value.name} of dtype {value.dtype}")
        _need(kinds.get(value.name) == value.kind, f"{value.name} is no {value.kind} of the program")
    for value in program.outputs:
        written = value.kind == "full" or (value.kind == "row" and value.dtype == "float32")
        _need(written, f"an output is full, or a row of float32, not a {value.kind} of {value.dtype}")


def _check_new(name: str, kind: Kind, kinds: Mapping[Argument, Kind]) -> None:
    _need(NAME.fullmatch(name) is not None, f"{name!r} is no name")
    _need(name not in kinds, f"{name} is computed twice")
    _need(kind in get_args(Kind), f"{name} is a {kind}")


def _check_step(step: Step, kinds: Mapping[Argument, Kind]) -> None:
    _need(step.op in OPERANDS, f"there is no step {step.op!r}")
    _need(len(step.args) == OPERANDS[step.op], f"{step.op} of {len(step.args)} arguments")
    numbers = [arg for arg in step.args if not isinstance(arg, str)]
    _need(all(type(arg) in (int, float) and abs(arg) <= MOST for arg in numbers), f"{step.op} of {numbers}")
    read = [arg for arg in step.args if isinstance(arg, str)]
    _need(all(arg in kinds for arg in read), f"{step.name} reads {', '.join(read)} before it is computed")
    given = spread(kinds[arg] for arg in read)
    fits = (given, step.kind) == ("full", "row") if step.op == SUM else step.kind == given
    _need(fits, f"{step.op} of a {given} is no {step.kind}")


def _need(holds: bool, what: str) -> None:
    if not holds:
        raise ConfigError(f"fp4::produce: {what}")


define("produce(Tensor[] inputs, str program) -> Tensor[]", produce, _fake, check=_check)
