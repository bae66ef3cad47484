"""``activation_scale="row"``: what changes in the graph, that nothing else does, that all ways to run it agree."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import compiling
import graphs
import models
import pytest
import torch
from graphs import Gemm, fp4
from models import K, N, T, tokens
from torch import Tensor, fx, nn

import fp4compile
from fp4compile import Policy, Recipe, Report, lowering, passes
from fp4compile.formats import nvfp4
from fp4compile.lowering import lower
from fp4compile.lowering.emulate import emulate
from fp4compile.lowering.fold import fold_rows
from fp4compile.lowering.targets import target_for
from fp4compile.passes.fuse import fuse
from fp4compile.passes.tile import tile

aten = torch.ops.aten
ROW, TENSOR = Recipe.nvidia(activation_scale="row"), Recipe.nvidia()
CASES: dict[str, Callable[[], nn.Module]] = {
    "linear": functools.partial(nn.Linear, K, N),
    "q, k and v of one input": models.QKV,
    "block": models.Block,
    "checkpointed block": lambda: models.Checkpointed(models.QKV()),
}
of_cases = pytest.mark.parametrize("name", CASES)


def explained(name: str, recipe: Recipe = ROW, dtype: torch.dtype = torch.float32, **options: Any) -> Report:
    model = models.seeded(CASES[name]).to(dtype)
    return fp4compile.explain(model, tokens(dtype=dtype), options={"recipe": recipe, **options})


def joint(name: str, recipe: Recipe = ROW) -> fx.GraphModule:
    return explained(name, recipe).graphs["joint_after"]


def roles(gm: fx.GraphModule) -> dict[str, Gemm]:
    names = {(T, N, K): "forward", (T, K, N): "dgrad", (N, K, T): "wgrad"}
    return {names[gemm.shape]: gemm for gemm in graphs.gemms(gm)}


def row_amaxes(gm: fx.GraphModule) -> list[fx.Node]:
    quantized = graphs.calls(gm, fp4.quantize.default)
    return [node.args[1] for node in quantized if node.args[1] is not None and node.args[1].meta["val"].dim() == 1]


# --- the graph


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_activation_of_the_forward_alone_has_a_scale_a_row(dtype: torch.dtype) -> None:
    """Its amaxes are in its own dtype."""
    gm = explained("linear", dtype=dtype).graphs["joint_after"]
    found = roles(gm)
    by_row = {role: (gemm.left.by_row, gemm.right.by_row) for role, gemm in found.items()}
    assert by_row == {"forward": (True, False), "dgrad": (False, False), "wgrad": (False, False)}
    assert found["forward"].left.block == (1, 16)
    (amax,) = row_amaxes(gm)
    assert amax.meta["val"].shape == (T,) and amax.meta["val"].dtype == dtype
    assert found["forward"].node.args[2] is amax


@of_cases
def test_no_amax_of_a_whole_activation_is_left_in_the_forward(name: str) -> None:
    """But for wgrad's rotated operand. Weights have one in each phase."""
    plain, by_row = joint(name, TENSOR), joint(name)
    of_x = {gemm.left.quantize for gemm in graphs.gemms(plain) if gemm.left.rounding == "nearest"}
    assert len(graphs.calls(plain, fp4.amax.default)) - len(graphs.calls(by_row, fp4.amax.default)) == len(of_x)
    assert len(row_amaxes(by_row)) == len(of_x)
    without_wgrad = joint(name, Recipe.nvidia(activation_scale="row", wgrad="bf16"))
    forwards = [gemm for gemm in graphs.gemms(without_wgrad) if gemm.left.rounding == "nearest"]
    assert forwards and all(gemm.left.by_row for gemm in forwards)
    sources = {graphs.elements(node.args[0]) for node in graphs.calls(without_wgrad, fp4.amax.default)}
    assert not sources & {graphs.elements(gemm.left.source) for gemm in forwards}


def test_q_k_and_v_share_their_inputs_amaxes(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = joint("q, k and v of one input")
    assert len(row_amaxes(shared)) == len(graphs.calls(shared, fp4.row_amax.default)) == 1
    monkeypatch.setattr(passes, "share", lambda graph: None)
    apart = joint("q, k and v of one input")
    assert len(row_amaxes(apart)) == 3
    inputs = graphs.example_inputs(shared, below=N)
    assert graphs.same_bits(graphs.run(shared, inputs, seed=3), graphs.run(apart, inputs, seed=3))


@pytest.mark.parametrize("forward", ["mxfp4", "bf16", ("mxfp4", "nvfp4"), ("bf16", "nvfp4")], ids=str)
def test_without_an_nvfp4_activation_nothing_changes(forward: Any) -> None:
    codes = [
        joint("linear", Recipe.nvidia(forward=forward, activation_scale=scale)).code for scale in ("row", "tensor")
    ]
    assert codes[0] == codes[1]


def test_an_activation_on_the_right_has_a_scale_a_column_by_the_turned_product() -> None:
    """w @ x: its tokens are columns."""

    class Left(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return self.weight @ x

    model, found = models.seeded(functools.partial(Left, K, N, bias=False)), []
    for recipe in (ROW, TENSOR):
        gm = fp4compile.explain(model, tokens(K, T), options={"recipe": recipe}).graphs["joint_after"]
        assert [amax.meta["val"].shape for amax in row_amaxes(gm)] == [(T,)] * (recipe is ROW)
        inputs = graphs.example_inputs(gm, below=N)
        found.append(graphs.run(gm, inputs)[0])
        (fake,) = (
            node.meta["val"] for node in gm.graph.output_node().all_input_nodes if node.meta["val"].shape == (N, T)
        )
        assert fake.stride() == found[-1].stride() == (T, 1)
    x, w = (next(one for one in inputs if one.shape == shape) for shape in ((K, T), (N, K)))
    rows, amax = x.abs().amax(0), fp4.amax(w)
    left = fp4.quantize(x.t(), rows, None, "nvfp4", [1, 16], "nearest", 0)
    right = fp4.quantize(w, amax, None, "nvfp4", [16, 16], "nearest", 0)
    assert torch.equal(found[0], fp4.scaled_mm(*left, rows, "nvfp4", *right, amax, "nvfp4", torch.float32).t())
    assert graphs.relative_error(found[0], found[1]) < 0.2


def test_stochastic_rounding_goes_with_it() -> None:
    gm = joint("linear", Recipe.nvidia(activation_scale="row", stochastic=("forward.x",)))
    left = roles(gm)["forward"].left
    assert left.by_row and left.rounding == "stochastic"


@pytest.mark.parametrize("shape", [(0, K), (T, 0)], ids=["no token", "no feature"])
def test_nothing_to_reduce_is_no_error(shape: tuple[int, int]) -> None:
    layer = nn.Linear(shape[1], N, bias=False)
    options = {"recipe": ROW, "policy": Policy(overrides={"*": "nvfp4"})}
    gm = fp4compile.explain(layer, tokens(*shape), options=options).graphs["joint_after"]
    assert graphs.gemms(gm) if shape[1] else row_amaxes(gm)
    results = graphs.run(gm, graphs.example_inputs(gm, below=N))
    assert results[0].shape == (shape[0], N) and not results[0].any()
    fold_rows(gm.graph)
    gm.recompile()
    assert graphs.same_bits(graphs.run(gm, graphs.example_inputs(gm, below=N)), results)


def test_a_number_of_tokens_that_changes() -> None:
    x = tokens(T, K)
    torch._dynamo.mark_dynamic(x, 0)
    gm = fp4compile.explain(nn.Linear(K, N), x, options={"recipe": ROW}).graphs["joint_after"]
    (amax,) = row_amaxes(gm)
    assert isinstance(amax.meta["val"].shape[0], torch.SymInt)


# --- the numbers


def outputs(recipe: Recipe, x: Tensor) -> list[Tensor]:
    """y, dx and dw of a linear layer, by the graph's operators."""
    gm = explained("linear", recipe, policy=Policy()).graphs["joint_after"]
    inputs = graphs.example_inputs(gm, below=N)
    for value in inputs:
        if value.shape == x.shape:
            value.copy_(x)
    return [one for one in graphs.run(gm, inputs) if isinstance(one, Tensor)]


def test_the_forward_changes_and_no_gradient_of_the_layer() -> None:
    """A row's scale only moves the exponents of its block scales and rounds them elsewhere: the same error."""
    x = tokens(grad=False)
    exact, tensor, row = (
        outputs(Recipe.nvidia(forward=("bf16" if i == 0 else "nvfp4", "nvfp4"), activation_scale=scale), x)
        for i, scale in enumerate(("tensor", "tensor", "row"))
    )
    y = next(i for i, one in enumerate(row) if one.shape == (2, 12, N))
    assert graphs.same_bits([*tensor[:y], *tensor[y + 1 :]], [*row[:y], *row[y + 1 :]])
    assert not torch.equal(tensor[y], row[y])
    errors = [graphs.relative_error(one[y], exact[y]) for one in (tensor, row)]
    assert 0.02 < errors[0] < 0.2 and errors[1] == pytest.approx(errors[0], rel=0.15)


def test_a_row_of_large_values_leaves_the_others_alone() -> None:
    x = tokens(grad=False)
    changed = x.clone()
    changed[0, 0] *= 2.0**20
    tensor, row = ([outputs(recipe, one) for one in (x, changed)] for recipe in (TENSOR, ROW))
    y = next(i for i, one in enumerate(row[0]) if one.shape == (2, 12, N))
    rest = [[one[y].flatten(0, 1)[1:] for one in pair] for pair in (tensor, row)]
    assert torch.equal(*rest[1])
    assert graphs.relative_error(rest[0][1], rest[0][0]) > 0.3, "with one scale they are lost beside it"


def test_nan_stays_in_its_row() -> None:
    x = tokens(grad=False)
    x[1, 3, 5] = torch.nan
    y = next(one for one in outputs(ROW, x) if one.shape == (2, 12, N))
    assert y[1, 3].isnan().all() and y.isfinite().sum() == (T - 1) * N


@pytest.mark.slow
def test_gradients_of_a_model_are_as_close_to_bf16s() -> None:
    found = {}
    for name, recipe in (("bf16", Recipe.bf16()), ("tensor", TENSOR), ("row", ROW)):
        torch.manual_seed(0)
        model = models.seeded(models.Block)
        with compiling.interpreted():
            compiling.step(
                torch.compile(model, backend="nvfp4", options={"recipe": recipe, "policy": Policy()}), tokens()
            )
        found[name] = compiling.gradients(model)
    assert any(not torch.equal(one, found["tensor"][name]) for name, one in found["row"].items())
    for name, exact in found["bf16"].items():
        tensor, row = (graphs.relative_error(found[which][name], exact) for which in ("tensor", "row"))
        assert row < 1.3 * tensor + 0.02, name


# --- every way to run it


def everywhere(device: torch.device) -> bool:
    return True


@of_cases
@pytest.mark.parametrize("fused", [False, True], ids=["apart", "fused"])
def test_emulated_and_fused_graphs_give_the_same_bits(name: str, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if fused:
        monkeypatch.setattr(passes, "fuse", functools.partial(fuse, eligible=everywhere))
    report = explained(name)
    for part in ("forward", "backward"):
        gm = report.graphs[part]
        inputs = graphs.example_inputs(gm, below=N)
        expected = graphs.run(gm, inputs, seed=3)
        products = graphs.calls(gm, fp4.scaled_mm.default)
        by_row = [product for product in products if product.args[2].meta["val"].dim()]
        if name != "checkpointed block":  # whose forward is in the backward again
            assert len(by_row) == (len(products) if part == "forward" else 0)
        fold_rows(gm.graph)
        emulate(gm.graph, products)
        gm.graph.lint()
        assert not graphs.calls(gm, fp4.row_amax.default)
        gm.recompile()
        decoded = [node for node in graphs.calls(gm, fp4.decoded_mm.default) if node.args[1] is None]
        assert len(decoded) == len(by_row) and not graphs.calls(gm, fp4.scaled_mm.default)
        assert graphs.same_bits(graphs.run(gm, inputs, seed=3), expected)


def test_a_product_with_scales_of_rows_is_multiplied_behind_it() -> None:
    gm = explained("linear", dtype=torch.bfloat16).graphs["forward"]
    fold_rows(gm.graph)
    emulate(gm.graph, graphs.calls(gm, fp4.scaled_mm.default))
    gm.recompile()
    (node,) = graphs.calls(gm, fp4.decoded_mm.default)
    assert node.args[1] is None and node.args[4] == torch.float32
    (multiplied,) = node.users
    factors = multiplied.args[1].args[0]
    assert multiplied.target is factors.target is aten.mul.Tensor and factors.args[1] == nvfp4.ROW_FACTOR
    assert factors.args[0].args[0].target is aten.amax.default


def test_tensor_cores_are_given_scales_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows are multiplied behind the product, in its epilogue."""
    monkeypatch.setattr(passes, "fuse", functools.partial(fuse, eligible=everywhere))
    plain = joint("linear")
    monkeypatch.setattr(passes, "tile", functools.partial(tile, eligible=everywhere))
    report = explained("linear")
    tiled = report.graphs["joint_after"]
    assert all(node.args[9:] == (True,) for node in graphs.calls(tiled, fp4.scaled_mm.default))
    inputs = graphs.example_inputs(plain, below=N)
    assert graphs.same_bits(graphs.run(plain, inputs, seed=3), graphs.run(tiled, inputs, seed=3))
    monkeypatch.setattr(lowering, "target_of", lambda device: target_for("cuda", (10, 0)))
    monkeypatch.setattr(lowering, "capability_of", lambda device: (10, 0))
    nodes: list[fx.Node] = []
    for part in ("forward", "backward"):
        lower(report.graphs[part].graph)
        nodes += [node for node in report.graphs[part].graph.nodes if str(node.target).startswith("fp4")]
    names = [str(node.target) for node in nodes]
    assert names.count("fp4_native.gemm.default") == 3 and names.count("fp4_cuda.produce.default") == 1
    (product,) = (node for node in nodes if "gemm" in str(node.target) and node.args[2] is None)
    (multiplied,) = product.users
    assert multiplied.target is aten.mul.Tensor and product.args[7] == torch.float32


@pytest.mark.slow
def test_generated_code_gives_the_same_bits() -> None:
    """Inductor's row maxima against node by node."""
    results = []
    for way in (compiling.interpreted, compiling.inductor):
        model, x = models.seeded(models.QKV), tokens()
        with way():
            torch.manual_seed(1)
            recipe = Recipe.nvidia(activation_scale="row", stochastic=())
            y = compiling.step(compiling.compiled(model, recipe=recipe), x)
        results.append([y, x.grad, *compiling.gradients(model).values()])
    assert graphs.same_bits(*results)


# --- what is saved


@of_cases
@pytest.mark.parametrize("mode", ["auto", "packed", "recompute"])
def test_nothing_more_is_saved(name: str, mode: str) -> None:
    """Amaxes of rows are of use in the forward only."""
    tensor, row = (explained(name, recipe, torch.bfloat16, save=mode).saved_for_backward for recipe in (TENSOR, ROW))
    assert (row.bytes, row.packed_bytes) == (tensor.bytes, tensor.packed_bytes)
