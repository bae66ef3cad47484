"""A tensor computed and quantized in one kernel: which nodes join, and the same bits."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import fake_gpu
import graphs
import models
import pytest
import torch
from comparing import assert_same
from graphs import fp4
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn import functional as F

import fp4compile
from fp4compile import Policy, Recipe, compat, lowering, passes
from fp4compile.lowering.emulate import emulate
from fp4compile.lowering.produce import MOST_INPUTS, produce
from fp4compile.lowering.targets import target_for
from fp4compile.ops.produced import Program
from fp4compile.passes.fuse import fuse

aten = torch.ops.aten
ROWS, WIDTH = 24, 64
PRODUCE = fp4.produce.default


def everywhere(device: torch.device) -> bool:
    return True


# --- the graph


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    amaxes = fp4.row_amax(x)
    return fp4.quantize_decoded(x, amaxes, None, "nvfp4", [1, 16], "nearest", 0), amaxes


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def traced(function: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    gm = compat.trace(function, [mode.from_tensor(x, static_shapes=True) for x in inputs], mode)
    gm.recompile()
    return gm


def joined(function: Callable[..., Any], *inputs: Tensor) -> tuple[fx.GraphModule, list[tuple[list[str], Program]]]:
    """The graph, and the inputs and programs in it. It gives the same bits as before."""
    gm = traced(function, *inputs)
    expected = graphs.run(gm, list(inputs))
    produce(gm.graph, everywhere)
    gm.graph.lint()
    gm.recompile()
    for found, wanted in zip(graphs.run(gm, list(inputs)), expected, strict=True):
        assert (found.dtype, found.shape, found.stride()) == (wanted.dtype, wanted.shape, wanted.stride())
        assert_same(*(one.view(torch.uint8) if one.dtype == torch.float8_e4m3fn else one for one in (found, wanted)))
    nodes = graphs.calls(gm, PRODUCE)
    return gm, [([one.name for one in node.args[0]], Program.from_json(node.args[1])) for node in nodes]


def operations(program: Program) -> list[str]:
    return [step.op for step in program.steps]


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Without the operations in place that F.rms_norm has before autograd makes functions of them."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def test_a_norm_is_computed_where_it_is_quantized() -> None:
    """It is not written."""

    def function(x: Tensor, weight: Tensor) -> list[Tensor]:
        return [*quantized(rms_norm(x, weight))]

    gm, [(inputs, program)] = joined(function, random(ROWS, WIDTH), random(WIDTH))
    assert len(inputs) == 2 and not program.outputs
    assert [value.kind for value in program.inputs] == ["full", "column"]
    assert operations(program) == ["mul", "sum", "div", "add", "rsqrt", "mul", "mul"]
    assert not graphs.calls(gm, fp4.quantize_decoded.default) and not graphs.calls(gm, aten.rsqrt.default)


def test_a_residual_before_it_and_what_the_backward_keeps_are_outputs() -> None:
    def function(x: Tensor, y: Tensor, weight: Tensor) -> list[Tensor]:
        total = x + y.view(2, -1, WIDTH)
        root = torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-6)
        x = (total * root * weight).flatten(0, 1)
        return [total, root, x.t().contiguous(), *quantized(x)]

    inputs = random(2, ROWS // 2, WIDTH), random(ROWS, WIDTH, seed=1), random(WIDTH)
    _, [(names, program)] = joined(function, *inputs)
    assert len(names) == 3
    assert [(value.kind, value.dtype) for value in program.outputs] == [
        ("full", "float32"),
        ("row", "float32"),
        ("full", "float32"),
    ]


def test_swiglu_of_two_products_with_scales_of_rows() -> None:
    def function(gate: Tensor, up: Tensor, amaxes: Tensor) -> list[Tensor]:
        factors = (amaxes * 0.5).unsqueeze(1)
        return [*quantized(F.silu(gate * factors) * (up * factors))]

    inputs = random(ROWS, WIDTH), random(ROWS, WIDTH, seed=1), random(ROWS).abs()
    gm, [(names, program)] = joined(function, *inputs)
    assert len(names) == 3 and [value.kind for value in program.inputs] == ["row", "full", "full"]
    assert "exp" in operations(program) and "div" in operations(program)
    assert not graphs.calls(gm, aten.mul.Tensor)


@pytest.mark.parametrize("tiled", [False, True], ids=["codes", "tiles"])
def test_codes_instead_of_values(tiled: bool) -> None:
    def function(x: Tensor) -> list[Tensor]:
        y = x * 2
        amaxes = fp4.row_amax(y)
        return [*fp4.quantize(y, amaxes, None, "nvfp4", [1, 16], "nearest", 0, tiled), amaxes]

    gm, [(_, program)] = joined(function, random(ROWS, WIDTH))
    assert program.result == ("tiles" if tiled else "codes") and operations(program) == ["mul"]
    assert not graphs.calls(gm, fp4.quantize.default)


def test_what_follows_a_product_of_codes_stays_in_its_epilogue() -> None:
    """The norm of a residual begins behind the residual; SwiGLU is its second product's."""

    def product(x: Tensor) -> Tensor:
        amax = fp4.amax(x)
        left = fp4.quantize(x, amax, None, "nvfp4", [1, 16], "nearest", 0, True)
        return fp4.scaled_mm(*left, amax, "nvfp4", *left, amax, "nvfp4", torch.float32, True)

    x = random(WIDTH, WIDTH)
    _, [(names, program)] = joined(lambda x, w: [*quantized(rms_norm(x + product(x), w))], x, random(WIDTH))
    assert operations(program)[0] == "mul" and not program.outputs and len(names) == 2
    _, [(names, program)] = joined(lambda x: [*quantized(F.silu(product(x)) * product(-x))], x)
    assert not program.steps and len(names) == 1


def test_what_nothing_computes_is_read_once() -> None:
    gm, [(names, program)] = joined(lambda x: [*quantized(x)], random(ROWS, WIDTH))
    assert len(names) == 1 and not program.steps and not program.outputs
    assert not graphs.calls(gm, fp4.row_amax.default)


@pytest.mark.parametrize("width", [8192, 8208])
def test_very_wide_rows_that_nothing_computes_are_read_twice(width: int) -> None:
    _, found = joined(lambda x: [*quantized(x)], random(2, width))
    assert len(found) == (width == 8192)
    _, [(_, program)] = joined(lambda x: [*quantized(-x)], random(2, width))
    assert operations(program) == ["neg"]


def test_the_amax_of_the_tensor_is_that_of_its_rows() -> None:
    gm, [(_, program)] = joined(lambda x: [fp4.amax(y := -x), *quantized(y)], random(ROWS, WIDTH))
    assert not program.outputs and not graphs.calls(gm, fp4.amax.default)


def test_what_x_depends_on_by_another_way_is_computed_outside() -> None:
    """Else the kernel would need a product that needs what it computes."""

    def function(x: Tensor, w: Tensor) -> list[Tensor]:
        y = x * 2
        return [*quantized(y + y @ w)]

    _, [(names, program)] = joined(function, random(ROWS, WIDTH), random(WIDTH, WIDTH))
    assert operations(program) == ["add"] and "mul" in names[0]


def test_a_node_that_reads_an_output_early_is_moved_behind() -> None:
    def function(x: Tensor, w: Tensor, bias: Tensor) -> list[Tensor]:
        y = x + 1
        other = torch.cumsum(y, 0) + 1  # stands before the product that x needs
        return [other, *quantized(y + bias @ w)]

    joined(function, random(ROWS, WIDTH), random(WIDTH, WIDTH), random(ROWS, WIDTH, seed=1))


def test_two_operands_of_one_stream() -> None:
    """A residual stream through two norms: the first is an input of the second."""

    def function(x: Tensor, weight: Tensor) -> list[Tensor]:
        first, amaxes = quantized(rms_norm(x, weight))
        y = x + (first.float() @ first.float().t())[:, :1] * amaxes.unsqueeze(1)
        return [y, *quantized(rms_norm(y, weight))]

    _, found = joined(function, random(ROWS, WIDTH), random(WIDTH))
    assert [len(program.outputs) for _, program in found] == [0, 1]


def test_what_only_shows_an_output_stays() -> None:
    """A wider dtype or another shape is not written as well."""

    def function(x: Tensor) -> list[Tensor]:
        y = (x * 2).to(torch.bfloat16)
        z = y.float().view(2, -1, WIDTH)
        return [z, *quantized((z * 3).view(ROWS, WIDTH).to(torch.bfloat16))]

    gm = traced(function, random(ROWS, WIDTH))
    produce(gm.graph, everywhere)
    (node,) = graphs.calls(gm, PRODUCE)
    assert [value.dtype for value in Program.from_json(node.args[1]).outputs] == ["bfloat16"]


def test_one_row_and_a_number() -> None:
    for shape in ((), (1,), (1, 1)):
        _, [(_, program)] = joined(lambda x, s: [*quantized(x * s)], random(1, WIDTH), torch.full(shape, 2.0))
        assert operations(program) == ["mul"]


@pytest.mark.parametrize(("exponent", "steps"), [(2, 1), (2.0, 1), (3.0, 2), (2.5, 0)])
def test_powers(exponent: float, steps: int) -> None:
    _, [(_, program)] = joined(lambda x: [*quantized(x.abs() ** exponent)], random(ROWS, WIDTH))
    assert operations(program) == (["abs"] if steps else []) + ["mul"] * steps


def test_a_sum_in_bfloat16_that_others_read_in_float32_is_computed_outside() -> None:
    def function(x: Tensor) -> list[Tensor]:
        total = x.sum(-1, keepdim=True).float()
        return [total, *quantized((x * total).to(torch.bfloat16))]

    gm = traced(function, random(ROWS, WIDTH, dtype=torch.bfloat16))
    produce(gm.graph, everywhere)
    (node,) = graphs.calls(gm, PRODUCE)
    program = Program.from_json(node.args[1])
    assert operations(program) == ["mul"] and not program.outputs


def test_an_output_has_the_strides_that_it_had() -> None:
    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        z = x.t() * 2
        return [z.t().view(-1), *quantized(y + z)]

    _, [(_, program)] = joined(function, random(WIDTH, ROWS), random(ROWS, WIDTH))
    assert operations(program) == ["add"] and not program.outputs


def test_numbers_of_another_device_are_no_inputs() -> None:
    mode = FakeTensorMode()
    x = mode.from_tensor(torch.empty(ROWS, WIDTH, device="meta"))
    gm = compat.trace(lambda x, s: quantized(s * -x), [x, mode.from_tensor(torch.tensor(2.0))], mode)
    produce(gm.graph, everywhere)
    (node,) = graphs.calls(gm, PRODUCE)
    assert [str(one.target) for one in node.args[0]] == ["aten.mul.Tensor"]


@pytest.mark.parametrize("random_numbers", [False, True])
def test_the_order_of_what_has_effects_is_kept(random_numbers: bool) -> None:
    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        z = x + 1
        other = torch.rand_like(y) if random_numbers else x.copy_(y)
        return [other, *quantized(z * 2)]

    gm = traced(function, random(ROWS, WIDTH), random(ROWS, WIDTH, seed=1))
    produce(gm.graph, everywhere)
    (node,) = graphs.calls(gm, PRODUCE)
    assert not Program.from_json(node.args[1]).steps


LEFT_ALONE: dict[str, Callable[[Tensor], Any]] = {
    "a scale a tensor": lambda x: fp4.quantize_decoded(-x, fp4.amax(-x), None, "nvfp4", [1, 16], "nearest", 0),
    "stochastic": lambda x: fp4.quantize_decoded(
        y := -x, fp4.row_amax(y), torch.tensor(1), "nvfp4", [1, 16], "stochastic", 0
    ),
    "the amaxes of another tensor": lambda x: fp4.quantize_decoded(
        -x, fp4.row_amax(x), None, "nvfp4", [1, 16], "nearest", 0
    ),
    "mxfp4": lambda x: fp4.quantize_decoded(-x, None, None, "mxfp4", [1, 32], "nearest", 0),
    "a part of a block": lambda x: quantized(-x[:, :40])[0],
    "the transpose": lambda x: quantized(x.t())[0],
    "float16": lambda x: quantized(-x.half())[0],
    "rows too wide for a program": lambda x: quantized(torch.cat([x] * 257, 1))[0],
}


@pytest.mark.parametrize("what", LEFT_ALONE)
def test_what_is_left_alone(what: str) -> None:
    _, found = joined(lambda x: [LEFT_ALONE[what](x)], random(ROWS, WIDTH))
    assert not found


NOT_JOINED: dict[str, Callable[[Tensor], Tensor]] = {
    "an operation without a step": lambda x: torch.cumsum(x, 1),
    "a transposition": lambda x: (x.view(WIDTH, ROWS) + 1).t().contiguous(),
    "a number that is not finite": lambda x: x * math.inf,
    "an option": lambda x: torch.add(x, x, alpha=2),
    "a broadcast over rows of blocks": lambda x: x.view(2, -1, WIDTH) * x.view(2, -1, WIDTH)[:, :1],
    "an option in its place": lambda x: aten.sub.Scalar(x, 1, 2),
    "a sum over columns": lambda x: x.sum(0, keepdim=True).expand(ROWS, WIDTH).contiguous(),
    "integers": lambda x: torch.where(x > 0, x, 0.0),
}


@pytest.mark.parametrize("what", NOT_JOINED)
def test_what_is_not_joined_is_an_input(what: str) -> None:
    _, [(_, program)] = joined(lambda x: [*quantized(NOT_JOINED[what](x).reshape(ROWS, WIDTH))], random(ROWS, WIDTH))
    assert not program.steps and len(program.inputs) == 1


def test_more_inputs_than_a_thread_holds() -> None:
    xs = [random(ROWS, WIDTH, seed=seed) for seed in range(MOST_INPUTS + 1)]
    for count in (MOST_INPUTS, MOST_INPUTS + 1):
        _, [(names, _)] = joined(lambda *xs: [*quantized(functools.reduce(torch.add, xs))], *xs[:count])
        assert len(names) == (count if count == MOST_INPUTS else 1)


SHAPES = {"full": (ROWS, WIDTH), "blocks": (2, ROWS // 2, WIDTH), "row": (ROWS, 1), "column": (WIDTH,), "number": ()}
BINARY = (torch.add, torch.sub, torch.mul, torch.div)
UNARY = (torch.neg, torch.abs, torch.relu, torch.exp, torch.rsqrt, torch.tanh, torch.erf, torch.reciprocal)
places = st.integers(0, 30)
operation = st.one_of(
    st.tuples(st.sampled_from(UNARY), places),
    st.tuples(st.sampled_from(BINARY), places, places | st.sampled_from([2.0, -0.5, 1e-40])),
    st.tuples(st.sampled_from(["sum", "mean", "shape", "cumsum"]), places),
)


def result(what: Any, x: Tensor, other: Any) -> Tensor | None:
    """Of one operation; None where shapes do not go together."""
    if what in ("sum", "mean"):
        return getattr(torch, what)(x, -1, keepdim=True) if x.dim() else None
    if what == "shape":
        return x.reshape(SHAPES["blocks" if x.dim() == 2 else "full"]) if x.numel() == ROWS * WIDTH else x.unsqueeze(0)
    if what == "cumsum":
        return torch.cumsum(x, 0)
    if isinstance(other, Tensor):
        pairs = itertools.zip_longest(reversed(x.shape), reversed(other.shape), fillvalue=1)
        return what(x, other) if all(a == b or 1 in (a, b) for a, b in pairs) else None
    return what(x) if other is None else what(x, other)


@settings(max_examples=150)
@given(st.lists(operation, min_size=1, max_size=10), st.sets(places), st.integers(0, 2))
def test_any_graph_gives_the_same_bits(plan: list[tuple[Any, ...]], shown: set[int], start: int) -> None:
    """Of elementwise operations and sums on matrices, rows, columns and numbers, some of which are outputs."""

    def function(*inputs: Tensor) -> list[Tensor]:
        values = [inputs[start], *inputs]
        for what, place, *other in plan:
            right = values[other[0] % len(values)] if other and isinstance(other[0], int) else next(iter(other), None)
            y = result(what, values[place % len(values)], right)
            if y is not None and y.dim() < 4 and y.numel() <= ROWS * WIDTH:
                values.append(y)
        x = [x for x in values if x.numel() == ROWS * WIDTH][-1]
        return [*quantized(x.reshape(ROWS, WIDTH)), *(values[place] for place in sorted(shown) if place < len(values))]

    joined(function, *(random(*shape, seed=seed) for seed, shape in enumerate(SHAPES.values())))


def test_sizes_known_at_run_time_stay_apart() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fake = mode.from_tensor(random(ROWS, WIDTH), static_shapes=False)
    gm = compat.trace(lambda x: quantized(-x), [fake], mode)
    produce(gm.graph, everywhere)
    assert not graphs.calls(gm, PRODUCE)


def test_not_where_inductor_rounds_in_between() -> None:
    gm = traced(lambda x: quantized(-x), random(ROWS, WIDTH))
    with torch._inductor.config.patch(emulate_precision_casts=True):
        produce(gm.graph, everywhere)
    assert not graphs.calls(gm, PRODUCE)


@pytest.mark.parametrize("name", ["block", "checkpointed projections"])
@pytest.mark.parametrize("scale", ["amax", "bound"])
def test_a_model_gives_the_same_numbers(name: str, scale: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, whose operations are not rounded in between; sums of rows are the reference's here."""
    monkeypatch.setattr(passes, "fuse", functools.partial(fuse, eligible=everywhere))
    cases: dict[str, Callable[[], nn.Module]] = {
        "block": models.Block,
        "checkpointed projections": lambda: models.Checkpointed(models.QKV()),
    }
    recipe = Recipe.nvidia(activation_scale="row", rotated_scale=scale)
    options = {"recipe": recipe, "policy": Policy()}
    report = fp4compile.explain(models.seeded(cases[name]), models.tokens(), options=options)
    count = 0
    for part in ("forward", "backward"):
        gm = report.graphs[part]
        inputs = graphs.example_inputs(gm, below=models.N)
        emulate(gm.graph, graphs.calls(gm, fp4.scaled_mm.default))
        gm.recompile()
        expected = graphs.run(gm, inputs, seed=3)
        produce(gm.graph, everywhere)
        gm.graph.lint()
        gm.recompile()
        count += len(graphs.calls(gm, PRODUCE))
        assert not graphs.calls(gm, fp4.row_amax.default)
        assert graphs.same_bits(graphs.run(gm, inputs, seed=3), expected)
    assert count


# --- Inductor's code


def test_inductor_writes_no_kernel_for_what_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm of a residual and three products: the rest is one kernel for the rows of all products."""
    shapes = [((4096, 1024), torch.bfloat16)] * 2 + [((1024,), torch.bfloat16), ((1024, 1024), torch.bfloat16)]
    monkeypatch.setattr(lowering, "target_of", lambda device: target_for("cuda", (9, 0)))

    def function(x: Tensor, y: Tensor, weight: Tensor, w: Tensor) -> list[Tensor]:
        total = x + y
        values, amaxes = quantized(rms_norm(total, weight))
        amax = fp4.amax(w)
        right = fp4.quantize_decoded(w, amax, None, "nvfp4", [16, 16], "nearest", 0)
        product = fp4.decoded_mm(values, None, right, amax, torch.float32)
        return [total, product * amaxes.float().unsqueeze(1)]

    gm = traced(function, *(torch.empty(shape, dtype=dtype) for shape, dtype in shapes))
    produce(gm.graph, everywhere)
    gm.recompile()
    program = fake_gpu.generated(gm, shapes)
    assert program.count("torch.ops.fp4.produce.default(") == 1
    (rest,) = fake_gpu.kernels(program)
    assert "rsqrt" not in rest
