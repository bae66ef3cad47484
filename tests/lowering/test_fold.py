"""The amax of what Inductor computes joins the kernel that computes it, and no other; the bits are the reference's."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import fake_gpu
import graphs
import models
import pytest
import torch
from graphs import fp4
from models import K, N, tokens
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn import functional as F

import fp4compile
from fp4compile import Recipe, compat, lowering
from fp4compile.lowering.fold import fold, foldable
from fp4compile.lowering.targets import target_for

aten = torch.ops.aten
ROWS, WIDTH = 48, 80
Function = Callable[..., Any]


def everywhere(device: torch.device) -> bool:
    return True


def traced(function: Function, inputs: Sequence[Tensor]) -> fx.GraphModule:
    """The operators of a function that Inductor lowers."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    gm = compat.trace(function, [mode.from_tensor(x) for x in inputs], mode)
    gm.recompile()
    return gm


def folded(function: Function, inputs: Sequence[Tensor]) -> fx.GraphModule:
    gm = traced(function, inputs)
    fold(gm.graph, everywhere)
    gm.graph.lint()
    gm.recompile()
    return gm


def stays(function: Function, *inputs: Tensor) -> bool:
    """Whether the one amax of a function is still an operator."""
    gm = folded(function, inputs)
    left, plain = graphs.calls(gm, fp4.amax.default), graphs.calls(gm, aten.abs.default)
    assert len(left) + len(plain) == 1
    return bool(left)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (WIDTH,), weight.reshape(-1, WIDTH)[0])


def residual(x: Tensor, y: Tensor) -> Tensor:
    return x + 0.1 * y


def cast(x: Tensor, y: Tensor) -> Tensor:
    return (x.float() * y.float()).to(torch.bfloat16)


PRODUCERS: dict[str, Function] = {"SwiGLU": swiglu, "norm": norm, "residual": residual, "cast": cast}


def with_amax(producer: Function) -> Function:
    def function(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        y = producer(*inputs)
        return y, fp4.amax(y.reshape(-1, y.shape[-1]).t())

    return function


# --- the bits


@pytest.mark.parametrize("bad", [None, torch.nan, torch.inf, "-0.0"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", PRODUCERS)
def test_the_bits_are_the_references(name: str, dtype: torch.dtype, bad: Any) -> None:
    inputs = [random(2, ROWS, WIDTH, dtype=dtype, seed=seed) for seed in (1, 2)]
    if bad is not None:
        inputs[0][1, 7, 5] = float(bad)
    gm = folded(with_amax(PRODUCERS[name]), inputs)
    assert not graphs.calls(gm, fp4.amax.default)
    y, found = graphs.run(gm, inputs)
    assert found.dtype == torch.float32 and found.shape == ()
    assert torch.equal(found.view(torch.int32), fp4.amax(y).view(torch.int32)) or (found.isnan() and bad is torch.nan)
    assert bool(found.isfinite()) or bad in (torch.nan, torch.inf)


@pytest.mark.slow
def test_generated_code_has_the_bits_of_the_tensor_it_writes() -> None:
    """Inductor keeps the producer in float32 up to the row maximum; the tensor that it writes is bfloat16."""

    def all_of_them(*inputs: Tensor) -> list[Tensor]:
        return [one for producer in PRODUCERS.values() for one in with_amax(producer)(*inputs)]

    def some(seed: int) -> list[Tensor]:
        return [random(ROWS, WIDTH, seed=2 * seed + which) for which in (0, 1)]

    gm = folded(all_of_them, some(0))
    assert not graphs.calls(gm, fp4.amax.default)
    compiled = torch.compile(gm)
    for seed in range(20):
        results = compiled(*some(seed))
        for y, amax in zip(results[::2], results[1::2], strict=True):
            assert torch.equal(amax, fp4.amax(y))


# --- what is folded


def test_an_amax_of_what_is_no_generated_code_stays_an_operator() -> None:
    x, w = random(ROWS, WIDTH), random(WIDTH, WIDTH)
    assert stays(lambda x: fp4.amax(x), x)
    assert stays(lambda x: fp4.amax(x.view(2, -1).t()), x)
    assert stays(lambda x, w: fp4.amax(x @ w), x, w)
    assert stays(lambda x, w: fp4.amax(torch.addmm(x, x, w).t()), x, w)
    assert stays(lambda x, w: fp4.amax(torch.bmm(x[None], w[None])[0].view(-1, 16)), x, w)
    assert stays(lambda x: fp4.amax(fp4.rotate(x, 16, 1)), x)
    assert stays(lambda x: fp4.amax(x.sum(0)), random(3, ROWS, WIDTH))
    assert stays(lambda x, w: fp4.amax(torch.cat([x, w])), x, w)


def test_an_amax_of_what_is_generated_code_is_folded_through_views() -> None:
    x = random(2, ROWS, WIDTH)
    assert not stays(lambda x: fp4.amax(x.relu()), x)
    assert not stays(lambda x: fp4.amax(x.relu().view(-1, WIDTH).t()), x)
    assert not stays(lambda x: fp4.amax(x.transpose(1, 2).contiguous()), x)
    assert not stays(lambda x, w: fp4.amax((x @ w).relu()), x[0], random(WIDTH, WIDTH))


@pytest.mark.parametrize(
    ("shape", "folds"),
    [
        ((2, 16), True),
        ((1, 2, 16), True),
        ((1, 4096), False),
        ((1, 1, 64), False),
        ((4096, 8), False),
        ((64,), False),
        ((), False),
        ((0, 64), False),
        ((64, 0), False),
    ],
)
def test_rows_have_to_be_several_and_not_short(shape: tuple[int, ...], folds: bool) -> None:
    """Else Inductor reads a row's maximum in the kernel that computed it, not rounded, or there is none."""
    assert stays(lambda x: fp4.amax(x.relu()), random(*shape)) == (not folds)


def test_rows_that_do_not_lie_together_stay_an_operator() -> None:
    assert stays(lambda x: fp4.amax(x.relu()), random(WIDTH, ROWS).t())


def test_a_tensor_that_may_be_empty_stays_an_operator() -> None:
    """fp4.amax of nothing is 0; a maximum of nothing is an error."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    count = mode.shape_env.create_unbacked_symint()
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(aten.relu.default, (x,))
    amax = graph.call_function(fp4.amax.default, (y,))
    graph.output(amax)
    with mode:
        x.meta["val"] = y.meta["val"] = torch.empty(count, WIDTH)
        amax.meta["val"] = torch.empty(())
    assert list(foldable(graph, everywhere)) == []


def test_both_amaxes_from_one_read_stay() -> None:
    gm = folded(lambda x: fp4.amax_both(x.relu(), 16, 1), [random(ROWS, WIDTH)])
    assert graphs.calls(gm, fp4.amax_both.default) and not graphs.calls(gm, aten.abs.default)


def test_devices_without_kernels_keep_the_operator() -> None:
    gm = traced(lambda x: fp4.amax(x.relu()), [random(ROWS, WIDTH)])
    assert list(foldable(gm.graph, lambda device: False)) == []
    lowering.lower(gm.graph)
    assert not graphs.calls(gm, aten.abs.default)


# --- beside a product whose kernel computes what follows it


def after_a_product(then: Function, tiled: bool) -> bool:
    """Whether the amax of what follows a product stays an operator."""
    x, w = random(ROWS, 64), random(WIDTH, 64)

    def function(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        operands = []
        for one in (x, w):
            amax = torch.ones(())
            operands += [*fp4.quantize(one, amax, None, "nvfp4", [1, 16], "nearest", 0, tiled), amax, "nvfp4"]
        product = fp4.scaled_mm(*operands, torch.bfloat16, tiled)
        return fp4.amax(then(product.view(2, -1, WIDTH), bias))

    return stays(function, x, w, random(WIDTH))


def test_the_epilogue_of_a_native_product_is_not_taken_from_it() -> None:
    assert after_a_product(lambda y, bias: F.silu(y + bias) * 2, tiled=True)
    assert not after_a_product(lambda y, bias: F.silu(y + bias) * 2, tiled=False)


def test_what_needs_a_reduction_is_no_epilogue() -> None:
    assert not after_a_product(lambda y, bias: F.rms_norm(y + bias, (WIDTH,)), tiled=True)


# --- in a program


WIDE = ((8192, 4096), torch.bfloat16)


def program(build: Function, producer: Function, *inputs: Any) -> tuple[str, list[str]]:
    """Inductor's program and kernels for a quantized tensor; ``build``: traced as it is, or folded."""

    def function(*inputs: Tensor) -> Any:
        y = producer(*inputs)
        return fp4.quantize(y, fp4.amax(y), None, "nvfp4", [1, 16], "nearest", 0)

    gm = build(function, [torch.empty(shape, dtype=dtype) for shape, dtype in inputs])
    text = fake_gpu.generated(gm, inputs)
    return text.partition("def call(")[2], fake_gpu.kernels(text)


def stores(kernel: str) -> list[str]:
    """What a kernel writes: "row" maxima, in the dtype of the pointer, or whole tensors."""
    names = re.findall(r"tl\.store\((\w+) \+", kernel)
    return [re.search(rf"'{name}': '\*(\w+)'", kernel)[1] for name in names]  # type: ignore[index]


def test_the_row_maxima_of_swiglu_come_from_its_kernel() -> None:
    text, (first, second) = program(folded, swiglu, WIDE, WIDE)
    assert "fp4.amax" not in text
    assert "libdevice.exp" in first and "triton_helpers.max2" in first
    assert stores(first) == ["bf16", "bf16"]  # the tensor and its row maxima, both rounded
    assert first.count("tl.load(") == 2  # gate and up: the result is not read
    assert "r0_numel = 8192" in second and second.count("tl.load(") == 1
    text, (only,) = program(traced, swiglu, WIDE, WIDE)
    assert "fp4.amax.default(" in text and stores(only) == ["bf16"]


def test_the_row_maxima_of_a_norm_come_from_its_kernel() -> None:
    def wide_norm(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (4096,), weight)

    _, (first, _) = program(folded, wide_norm, WIDE, ((4096,), torch.bfloat16))
    assert "rsqrt" in first and "triton_helpers.max2" in first and stores(first).count("bf16") == 2


# --- in a model


class GatedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(K, N, bias=False), nn.Linear(K, N, bias=False)
        self.down = nn.Linear(N, K, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def halves(recipe: Recipe) -> list[fx.GraphModule]:
    report = fp4compile.explain(
        models.seeded(GatedMLP).bfloat16(), tokens(dtype=torch.bfloat16), options={"recipe": recipe}
    )
    return [report.graphs["forward"], report.graphs["backward"]]


def test_lowering_folds_on_a_device_with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The input of "down" and the gradients of "gate" and "up"; not x, dy or a weight."""
    monkeypatch.setattr(lowering, "target_of", lambda device: target_for("cuda", (9, 0)))
    for gm, folds in zip(halves(Recipe.nvidia(rotated_scale="bound")), (1, 2), strict=True):
        amaxes = len(graphs.calls(gm, fp4.amax.default))
        lowering.lower(gm.graph)
        assert len(graphs.calls(gm, aten.abs.default)) == folds
        assert len(graphs.calls(gm, torch.ops.fp4_cuda.amax.default)) == amaxes - folds


def test_folding_changes_no_bit_of_a_model() -> None:
    for gm in halves(Recipe.nvidia(rotated_scale="bound")):
        inputs = graphs.example_inputs(gm, below=N)
        expected = graphs.run(gm, inputs, seed=3)
        fold(gm.graph, everywhere)
        gm.recompile()
        assert graphs.calls(gm, aten.abs.default)
        assert graphs.same_bits(graphs.run(gm, inputs, seed=3), expected)
