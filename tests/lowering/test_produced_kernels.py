"""The kernels of programs, run by Triton's interpreter, and their machine code."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from comparing import assert_same
from graphs import fp4
from interpreter import interpreted
from torch import Tensor

from fp4compile.lowering import aot, cuda, sass
from fp4compile.lowering.kernels import produced
from fp4compile.lowering.targets import ISAS
from fp4compile.ops.produced import DTYPES, ELEMENTWISE, Kind, Program, Step, Value

WIDTH = 64


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.fixture
def on_a_cpu() -> Iterator[None]:
    with interpreted():
        yield


def assert_twins(inputs: list[Tensor], program: Program) -> None:
    found = cuda.produce(inputs, program.to_json())
    for one, other in zip(found, fp4.produce(inputs, program.to_json()), strict=True):
        assert one.dtype == other.dtype and one.is_contiguous()
        assert_same(one, other)


def of_one(dtype: str, *steps: Step, width: int = WIDTH, outputs: tuple[Value, ...] = ()) -> Program:
    x = Value(steps[-1].name if steps else "i0", "full", dtype)
    return Program("values", width, (Value("i0", "full", dtype),), steps, x, outputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 16), (7, 48), (5, 1040), (0, 32)], ids=str)
def test_rows_as_they_are(shape: tuple[int, int], dtype: str, on_a_cpu: None) -> None:
    """NaN and Inf stay in their row, zeros are a row of zeros."""
    x = random(*shape) * 2.0 ** torch.randint(-30, 30, (shape[0], 1), generator=torch.Generator().manual_seed(1))
    x[2::3] = 0
    x[3::4, 5], x[4::4, -1] = torch.nan, torch.inf
    assert_twins([x.to(DTYPES[dtype])], of_one(dtype, width=shape[1]))


@pytest.mark.parametrize("result", ["codes", "tiles"])
@pytest.mark.parametrize("shape", [(1, 16), (7, 48), (130, 80), (129, 1040), (0, 32)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_of_rows(shape: tuple[int, int], result: Any, dtype: str, on_a_cpu: None) -> None:
    """In tiles what no row fills is zero."""
    x = random(*shape).to(DTYPES[dtype])
    program = dataclasses.replace(of_one(dtype, Step("s0", "neg", ("i0",), "full"), width=shape[1]), result=result)
    found = cuda.produce([x], program.to_json())
    for one, other in zip(found, fp4.produce([x], program.to_json()), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape) and one.is_contiguous()
        assert_same(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("op", sorted(set(ELEMENTWISE) - {"sigmoid"}))
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_step(op: str, dtype: str, on_a_cpu: None) -> None:
    two = op in ("add", "sub", "mul", "div")
    step = Step("s0", op, ("i0", -1.5) if two else ("i0",), "full")
    outputs = (Value("s0", "full", "float32"), Value("s0", "full", "bfloat16"))
    assert_twins([random(5, WIDTH).to(DTYPES[dtype])], of_one(dtype, step, outputs=outputs))


def test_sigmoid_by_the_kernel(on_a_cpu: None) -> None:
    """Triton's is 1 / (1 + exp(-x)), which PyTorch's on a CPU differs from in the last bit."""
    program = of_one("float32", Step("s0", "sigmoid", ("i0",), "full"), outputs=(Value("s0", "full", "float32"),))
    x = random(5, WIDTH)
    found = cuda.produce([x], program.to_json())[2]
    torch.testing.assert_close(found, x.sigmoid(), rtol=2.0**-22, atol=0)


@pytest.mark.parametrize("width", [16, 48, 512, 528])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_by_the_kernel(width: int, dtype: str, on_a_cpu: None) -> None:
    """Of integers, whose sums are exact in any order. What a row does not fill is not added: 1 is, if it were."""
    steps = (
        Step("s0", "add", ("i0", "i1"), "full"),
        Step("s1", "add", ("s0", 1.0), "full"),
        Step("s2", "mul", ("s1", "s1"), "full"),
        Step("s3", "sum", ("s2",), "row"),
        Step("s4", "div", ("s3", float(width)), "row"),
        Step("s5", "rsqrt", ("s4",), "row"),
        Step("s6", "mul", ("s5", "i3"), "row"),
        Step("s7", "mul", ("s1", "s6"), "full"),
        Step("s8", "mul", ("i2", "i4"), "column"),
        Step("s9", "mul", ("s7", "s8"), "full"),
        Step("s10", "exp", ("s9",), "full"),
    )
    kinds: list[Kind] = ["full", "full", "column", "row", "scalar"]
    inputs = tuple(Value(f"i{i}", kind, dtype if i else "float32") for i, kind in enumerate(kinds))
    outputs = (Value("s0", "full", dtype), Value("s5", "row", "float32"), Value("s9", "full", "float32"))
    program = Program("values", width, inputs, steps, Value("s10", "full", dtype), outputs)
    generator = torch.Generator().manual_seed(width)
    shapes = [(6, width), (6, width), (width,), (6, 1), ()]
    tensors = [torch.randint(-3, 4, shape, generator=generator) for shape in shapes]
    assert_twins([x.to(DTYPES[value.dtype]) for x, value in zip(tensors, inputs, strict=True)], program)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "of three dimensions": lambda x: x.view(2, 6, 48),
    "a part of wider rows": lambda x: x.view(6, 96)[:, 16:64],
    "a part at an odd offset": lambda x: x.view(6, 96)[:, 1:49],
    "every other column": lambda x: x.view(6, 96)[:, ::2],
    "transposed": lambda x: x.view(48, 12).t(),
    "rows of an odd stride": lambda x: x.view(-1)[: 7 * 71].view(7, 71)[:, :48],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_layout(view: str, dtype: str, on_a_cpu: None) -> None:
    x = VIEWS[view](random(12, 48).to(DTYPES[dtype]))
    assert_twins([x], of_one(dtype, Step("s0", "neg", ("i0",), "full"), width=48))


def test_a_part_of_wider_rows_is_not_copied(on_a_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(x: Tensor) -> Tensor:
        raise AssertionError("copied")

    monkeypatch.setattr(produced.common, "aligned", refused)
    x = random(6, 96, dtype=torch.bfloat16)[:, 16:64]
    assert_twins([x], of_one("bfloat16", width=48))


def swiglu(width: int) -> Program:
    steps = (
        Step("s0", "mul", ("i1", "i0"), "full"),
        Step("s1", "neg", ("s0",), "full"),
        Step("s2", "exp", ("s1",), "full"),
        Step("s3", "add", ("s2", 1.0), "full"),
        Step("s4", "div", ("s0", "s3"), "full"),
        Step("s5", "mul", ("i2", "i0"), "full"),
        Step("s6", "mul", ("s4", "s5"), "full"),
    )
    inputs = (Value("i0", "row", "float32"), Value("i1", "full", "float32"), Value("i2", "full", "float32"))
    outputs = (Value("s0", "full", "bfloat16"), Value("s5", "full", "bfloat16"))
    return Program("values", width, inputs, steps, Value("s6", "full", "bfloat16"), outputs)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100a"])
@pytest.mark.parametrize("width", [2048, 5632])
def test_machine_code(width: int, arch: str) -> None:
    """Matrices are read and written by 16 bytes of a thread, once, and no register is spilled."""
    one = produced.kernel(ISAS[aot.CAPABILITIES[arch]], swiglu(width))
    compiled = aot.compile_kernel(one, arch)
    assert compiled.spilled == 0 and compiled.warps == one.num_warps == (4 if width == 2048 else 16)
    if compiled.sass is not None:
        found = sass.count_what_matters(compiled.opcodes)
        assert compiled.opcodes["LDG.E.128"] == 2 * 4 and found["global loads"] == 2 * 4 + 1
        assert compiled.opcodes["STG.E.128"] == 3 * 2 and found["global stores"] == 3 * 2 + 1
        assert found["local loads"] == found["local stores"] == 0


@pytest.mark.parametrize(("width", "count"), [(16, 32), (512, 32), (528, 64), (4096, 256), (16384, 1024)])
def test_a_program_has_a_thread_for_every_block(width: int, count: int) -> None:
    assert produced.threads(width) == count
