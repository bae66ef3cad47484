"""What a program computes is quantized as if it had been written first."""

import dataclasses
import math

import pytest
import torch
from torch.nn import functional as F

from fp4compile.errors import ConfigError
from fp4compile.ops.produced import DTYPES, ELEMENTWISE, Program, Step, Value

fp4 = torch.ops.fp4
COLUMNS = 48


def norm_program(dtype="bfloat16", columns=COLUMNS):
    """x = (i0 + i1) / its root mean square * i2; also the sum, the reciprocal root, and x."""
    steps = (
        Step("s0", "add", ("i0", "i1"), "full"),
        Step("s1", "mul", ("s0", "s0"), "full"),
        Step("s2", "sum", ("s1",), "row"),
        Step("s3", "div", ("s2", float(columns)), "row"),
        Step("s4", "add", ("s3", 1e-6), "row"),
        Step("s5", "rsqrt", ("s4",), "row"),
        Step("s6", "mul", ("s0", "s5"), "full"),
        Step("s7", "mul", ("s6", "i2"), "full"),
    )
    inputs = (Value("i0", "full", dtype), Value("i1", "full", "float32"), Value("i2", "column", dtype))
    outputs = (Value("s0", "full", dtype), Value("s5", "row", "float32"), Value("s7", "full", dtype))
    return Program("values", columns, inputs, steps, Value("s7", "full", dtype), outputs)


def norm_inputs(dtype="bfloat16", rows=7, columns=COLUMNS):
    random = torch.Generator().manual_seed(rows * 100 + columns)
    x, y = (torch.randn(rows, columns, generator=random) for _ in range(2))
    return [x.to(DTYPES[dtype]), y, torch.rand(columns, generator=random).to(DTYPES[dtype])]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm(dtype):
    """Computed in float32; written, and its rows' amaxes found, in x's dtype."""
    x, y, weight = norm_inputs(dtype)
    program = norm_program(dtype)
    values, amaxes, total, roots, written = fp4.produce([x, y, weight], program.to_json())
    exact = x.float() + y
    assert torch.equal(total, exact.to(DTYPES[dtype]))
    assert roots.shape == (7,) and roots.dtype == torch.float32
    expected = F.rms_norm(exact, (COLUMNS,), weight.float(), 1e-6)
    torch.testing.assert_close(written, expected.to(DTYPES[dtype]))
    assert torch.equal(amaxes, written.abs().amax(-1)) and amaxes.dtype == DTYPES[dtype]
    how = (amaxes, None, "nvfp4", [1, 16], "nearest", 0)
    assert torch.equal(values, fp4.quantize_decoded(written, *how)) and values.dtype == torch.bfloat16


def test_a_matrix_of_any_number_of_dimensions_has_rows():
    x, y, weight = norm_inputs(rows=6)
    program = norm_program().to_json()
    flat = fp4.produce([x, y, weight], program)
    shaped = fp4.produce([x.view(2, 3, COLUMNS), y.view(6, 1, COLUMNS), weight.view(1, 1, COLUMNS)], program)
    assert all(map(torch.equal, flat, shaped))


def test_the_operator_keeps_to_what_it_says_of_itself():
    program = norm_program()
    assert Program.from_json(program.to_json()) == program
    torch.library.opcheck(fp4.produce.default, (norm_inputs(), program.to_json()))


def changed(**values):
    return dataclasses.replace(norm_program(), **values)


def step(op, *args, name="s0", kind="full"):
    return changed(steps=(Step(name, op, args, kind),), x=Value(name, kind, "bfloat16"), outputs=())


FULL = Value("i0", "full", "bfloat16")
WRONG = {
    "result": (changed(result="bits"), "no result 'bits'"),
    "columns": (changed(columns=40), "multiple of 16"),
    "too wide": (changed(columns=32768), "up to 16384"),
    "inputs": (changed(inputs=norm_program().inputs[:2]), "before it is computed"),
    "too few inputs": (changed(inputs=(FULL,), steps=(), x=FULL, outputs=()), "takes 1 inputs"),
    "step": (step("log", "i0"), "no step 'log'"),
    "arguments": (step("add", "i0", "i1", 2.0), "add of 3 arguments"),
    "a number": (step("mul", "i0", math.nan), "mul of"),
    "too large a number": (step("mul", "i0", 10**400), "mul of"),
    "no number": (step("mul", "i0", True), "mul of"),
    "a part of a column": (changed(columns=48.0), "multiple of 16"),
    "a kind": (step("mul", "i0", "i2", kind="column"), "no column"),
    "a sum of a row": (step("sum", "i2", kind="row"), "sum of a column"),
    "a row for x": (step("sum", "i0", kind="row"), "x is a row"),
    "order": (changed(steps=norm_program().steps[::-1]), "before it is computed"),
    "twice": (step("neg", "i0", name="i1"), "computed twice"),
    "dtype": (changed(x=Value("s7", "full", "float16")), "dtype float16"),
    "an output": (changed(outputs=(Value("s5", "row", "bfloat16"),)), "row of float32"),
    "code": (step("neg", "i0", name="s0 = 0\nprint(1)\ns"), "is no name"),
    "a kernel's name": (step("neg", "i0", name="row"), "is no name"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_program_is_an_error(what):
    program, message = WRONG[what]
    with pytest.raises(ConfigError, match=message):
        fp4.produce(norm_inputs(), program.to_json())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        norm_program().to_json().replace('"s0"', "null"),
        '{"columns": 16}',
        norm_program().to_json().replace('"kind"', '"sort"'),
    ],
)
def test_another_text_is_an_error(text):
    with pytest.raises(ConfigError, match="not a program"):
        fp4.produce(norm_inputs(), text)


def test_rows_may_come_from_a_number_a_row_alone():
    weight = Value("i0", "column", "bfloat16")
    steps = (Step("s0", "add", ("i0", "i1"), "full"),)
    program = changed(inputs=(weight, Value("i1", "row", "bfloat16")), steps=steps, x=Value("s0", "full", "bfloat16"))
    program = dataclasses.replace(program, outputs=())
    x = torch.ones(3, 1, dtype=torch.bfloat16)
    assert fp4.produce([norm_inputs()[2], x], program.to_json())[0].shape == (3, COLUMNS)


def test_inputs_that_are_not_the_programs_are_an_error():
    x, y, weight = norm_inputs()
    for inputs in ([x.float(), y, weight], [x, y[:3], weight], [x, y, weight[:16]], [x, y]):
        with pytest.raises(ConfigError, match="the program takes"):
            fp4.produce(inputs, norm_program().to_json())


def test_every_step_has_an_expression():
    from fp4compile.lowering.kernels.produced import EXPRESSIONS

    assert set(EXPRESSIONS) == set(ELEMENTWISE)
