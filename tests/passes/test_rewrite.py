"""The structure of a rewritten joint graph: what the recipe says of an operand is what stands on its nodes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import graphs
import models
import pytest
import torch
from graphs import Gemm, Operand, fp4
from models import K, N, T, tokens
from torch import fx, nn

import fp4compile
from fp4compile import Policy, Recipe, Report
from fp4compile.errors import Fp4Warning, UnsupportedDtypeError
from fp4compile.formats import rotation

aten, prims = torch.ops.aten, torch.ops.prims
SIGNS = 0xD7E8
ROLES = {(T, N, K): "forward", (T, K, N): "dgrad", (N, K, T): "wgrad"}


@functools.cache
def linear(recipe: Recipe | None = None, bias: bool = False, policy: Policy | None = None) -> Report:
    model = models.seeded(nn.Linear, K, N, bias=bias)
    return fp4compile.explain(model, tokens(), options={"recipe": recipe, "policy": policy})


@functools.cache
def transformer() -> Report:
    return fp4compile.explain(models.seeded(models.Transformer), models.ids())


@functools.cache
def qkv() -> Report:
    return fp4compile.explain(models.seeded(models.QKV), tokens())


@functools.cache
def autocast_linear() -> Report:
    model = models.seeded(nn.Linear, K, N, bias=False)
    with torch.autocast("cpu", torch.bfloat16):
        return fp4compile.explain(model, tokens())


def by_role(report: Report) -> dict[str, Gemm]:
    """The three GEMMs of ``linear``, by the shapes of their results."""
    found = graphs.gemms(report.graphs["joint_after"])
    roles = {ROLES[gemm.shape]: gemm for gemm in found}
    assert len(roles) == len(found)
    return roles


def how(operand: Operand) -> tuple[Any, ...]:
    return operand.format, operand.block, operand.rounding, operand.rotation


def placeholder(gm: fx.GraphModule, shape: tuple[int, ...], gradient: bool = False) -> fx.Node:
    """The one graph input of a shape that is, or is not, an incoming gradient."""
    inputs = (node for node in gm.graph.nodes if node.op == "placeholder" and node.meta["val"].shape == shape)
    (found,) = (node for node in inputs if node.name.startswith("tangents") == gradient)
    return found


def origin(operand: Operand) -> fx.Node:
    """The graph input that an operand is a view of."""
    node = operand.source
    while node.op != "placeholder":
        assert node.target in (aten.permute.default, aten.view.default), node.target
        node = node.args[0]
    return node


# --- NVIDIA's recipe


def test_nvidias_recipe_stands_on_the_operands_of_each_gemm() -> None:
    assert {role: (how(gemm.left), how(gemm.right)) for role, gemm in by_role(linear()).items()} == {
        "forward": (("nvfp4", (1, 16), "nearest", None), ("nvfp4", (16, 16), "nearest", None)),
        "dgrad": (("nvfp4", (1, 16), "stochastic", None), ("nvfp4", (16, 16), "nearest", None)),
        "wgrad": (("nvfp4", (1, 16), "stochastic", (16, SIGNS)), ("nvfp4", (1, 16), "nearest", (16, SIGNS))),
    }


def test_each_gemm_reads_the_right_tensors() -> None:
    gm = linear().graphs["joint_after"]
    x, w, dy = placeholder(gm, (2, 12, K)), placeholder(gm, (N, K)), placeholder(gm, (2, 12, N), gradient=True)
    assert {role: (origin(gemm.left), origin(gemm.right)) for role, gemm in by_role(linear()).items()} == {
        "forward": (x, w),
        "dgrad": (dy, w),
        "wgrad": (dy, x),
    }


def test_no_plain_matmul_remains() -> None:
    assert graphs.matmuls(linear().graphs["joint_before"]) == 3
    assert graphs.matmuls(linear().graphs["joint_after"]) == 0


def test_there_is_one_seed_however_many_sites() -> None:
    gm = qkv().graphs["joint_after"]
    stochastic = [node for node in graphs.calls(gm, fp4.quantize.default) if node.args[5] == "stochastic"]
    (seeds,) = graphs.calls(gm, prims.inductor_seeds.default)
    (seed,) = graphs.calls(gm, prims.inductor_lookup_seed.default)
    assert seeds.args == (1, torch.device("cpu"))
    assert len(stochastic) == 6
    assert {node.args[2] for node in stochastic} == {seed}


def test_every_stochastic_operand_has_a_site_number_of_its_own() -> None:
    gm = transformer().graphs["joint_after"]
    sites = [node.args[6] for node in graphs.calls(gm, fp4.quantize.default) if node.args[5] == "stochastic"]
    assert len(sites) == 24
    assert len(set(sites)) == 24


def test_only_gradients_are_rounded_stochastically() -> None:
    gm = transformer().graphs["joint_after"]
    tangents = {node for node in gm.graph.nodes if node.op == "placeholder" and node.name.startswith("tangents")}
    gradients = set(tangents)
    for node in gm.graph.nodes:
        if gradients & set(node.all_input_nodes):
            gradients.add(node)
    for node in graphs.calls(gm, fp4.quantize.default):
        assert (node.args[5] == "stochastic") == (node.args[0] in gradients)


def test_q_k_and_v_share_the_quantized_input() -> None:
    gm = qkv().graphs["joint_after"]
    x = placeholder(gm, (2, 12, K))
    of_x = [gemm for gemm in graphs.gemms(gm) if any(origin_or_none(side) is x for side in (gemm.left, gemm.right))]
    forward = {gemm.left.quantize for gemm in of_x if origin_or_none(gemm.left) is x}
    wgrad = {gemm.right.quantize for gemm in of_x if origin_or_none(gemm.right) is x}
    assert len(of_x) == 6
    assert len(forward) == len(wgrad) == 1
    assert forward != wgrad


def origin_or_none(operand: Operand) -> fx.Node | None:
    try:
        return origin(operand)
    except AssertionError:
        return None


# --- switches of the recipe


def test_rotation_off() -> None:
    report = linear(Recipe.nvidia(rotation=0))
    assert not graphs.calls(report.graphs["joint_after"], fp4.rotate.default)


@pytest.mark.parametrize(("size", "signs"), [(16, 0), (32, SIGNS), (4, 0xF)])
def test_rotation_size_and_signs(size: int, signs: int) -> None:
    roles = by_role(linear(Recipe.nvidia(rotation=size, signs=signs)))
    assert roles["wgrad"].left.rotation == roles["wgrad"].right.rotation == (size, signs)
    assert roles["forward"].left.rotation is roles["dgrad"].left.rotation is None


BOUND = Recipe.nvidia(rotated_scale="bound")


@pytest.mark.parametrize("size", [4, 16, 32, 128])
def test_a_bound_in_place_of_the_rotated_amax(size: int) -> None:
    roles = by_role(linear(Recipe.nvidia(rotated_scale="bound", rotation=size)))
    sides = {role: (gemm.left.growth, gemm.right.growth) for role, gemm in roles.items()}
    growth = rotation.growth(size)
    assert sides == {"forward": (None, None), "dgrad": (None, None), "wgrad": (growth, growth)}
    assert {how(gemm.left)[3] for gemm in roles.values()} == {None, (size, SIGNS)}


def test_a_bound_needs_no_amax_but_that_of_the_row_quantized_operand() -> None:
    """x and dy are reduced once in their phase, W once in each."""
    gm = linear(BOUND).graphs["joint_after"]
    names = [graphs.elements(node.args[0]).name for node in graphs.calls(gm, fp4.amax.default)]
    assert sorted(names) == ["primals_1", "primals_1", "primals_2", "tangents_1"]
    roles = by_role(linear(BOUND))
    assert roles["wgrad"].right.quantize.args[1].args[0] is roles["forward"].left.quantize.args[1]
    assert roles["wgrad"].left.quantize.args[1].args[0] is roles["dgrad"].left.quantize.args[1]


def test_a_bound_is_shared_by_the_layers_of_one_input() -> None:
    report = fp4compile.explain(models.seeded(models.QKV), tokens(), options={"recipe": BOUND})
    gm = report.graphs["joint_after"]
    assert len({gemm.right.quantize for gemm in graphs.gemms(gm) if gemm.right.growth}) == 1
    assert len(graphs.calls(gm, fp4.amax.default)) == 1 + 3 + 2 * 3  # x, three dy, and each weight in both phases


def test_a_bound_of_an_input_that_stands_on_its_side_is_that_of_the_same_amax() -> None:
    """w @ x: wgrad reads x as it lies, the forward its transpose."""

    class Left(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight @ x

    report = fp4compile.explain(Left(K, N, bias=False), tokens(K, T), options={"recipe": BOUND})
    gm = report.graphs["joint_after"]
    assert len(graphs.gemms(gm)) == 3
    assert len(graphs.calls(gm, fp4.amax.default)) == 4


@pytest.mark.parametrize(
    "changes",
    [{"rotation": 0}, {"wgrad": "mxfp4"}, {"wgrad": ("bf16", "mxfp4")}, {"wgrad": "bf16"}],
    ids=["no rotation", "mxfp4", "bf16 and mxfp4", "bf16"],
)
def test_without_a_rotated_nvfp4_operand_a_bound_changes_nothing(changes: dict[str, Any]) -> None:
    found = [linear(Recipe.nvidia(rotated_scale=scale, **changes)).graphs["joint_after"] for scale in ("amax", "bound")]
    assert found[0].code == found[1].code


def test_a_bf16_operand_beside_a_bounded_one_has_none() -> None:
    wgrad = by_role(linear(Recipe.nvidia(rotated_scale="bound", wgrad=("bf16", "nvfp4"))))["wgrad"]
    assert (wgrad.left.format, wgrad.left.growth, wgrad.right.growth) == ("bf16", None, 4.0)


def test_the_amax_for_an_input_that_is_quantized_in_the_backward_is_still_the_forwards() -> None:
    """One number is kept, and the input is read once less."""
    options = {"recipe": BOUND, "save": "recompute"}
    report = fp4compile.explain(models.seeded(nn.Linear, K, N, bias=False), tokens(), options=options)
    joint, forward = report.graphs["joint_after"], report.graphs["forward"]
    assert len(graphs.calls(joint, fp4.amax.default)) == 4
    assert len(graphs.calls(forward, fp4.amax.default)) == 2
    assert not graphs.calls(forward, fp4.rotate.default)


def run_linear(recipe: Recipe, x: torch.Tensor) -> list[torch.Tensor]:
    """y, dx and dw of a linear layer, dy with a few large values."""
    gm = linear(recipe, policy=Policy()).graphs["joint_after"]
    inputs = graphs.example_inputs(gm, below=N)
    for node, value in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True):
        if value.shape == x.shape:
            value.copy_(x)
        if node.name.startswith("tangents"):
            value.pow_(3)
    return [one for one in graphs.run(gm, inputs) if isinstance(one, torch.Tensor)]


def test_a_bound_changes_the_weights_gradient_alone_and_not_its_error() -> None:
    """Block scales are floating point: a tensor scale that is too large by a power of two only changes their exponents,
    as far as they stay above E4M3's subnormals. By another factor they round differently, with an error of the same
    distribution; over 2048 elements of dw the two errors then differ by a few hundredths of themselves."""
    x = tokens(grad=False)
    results = [
        run_linear(Recipe.nvidia(stochastic=(), rotated_scale=scale, wgrad=wgrad), x)
        for scale, wgrad in (("amax", "nvfp4"), ("bound", "nvfp4"), ("amax", "bf16"))
    ]
    index = next(i for i, one in enumerate(results[0]) if one.shape == (N, K))
    (amax, bound, exact) = (result.pop(index) for result in results)
    assert graphs.same_bits(results[0], results[1])
    assert not torch.equal(amax, bound)
    errors = [graphs.relative_error(one, exact) for one in (amax, bound)]
    assert 0.02 < errors[0] < 0.2
    assert errors[1] == pytest.approx(errors[0], rel=0.15)


def test_a_bound_that_overflows_is_loud() -> None:
    """A magnitude that is finite, but not four times it, or not the sums of a rotation by 8; and one that is not."""
    for size, largest in ((16, 2.0**126), (16, torch.inf), (16, torch.nan), (8, 2.0**125)):
        x = tokens(grad=False)
        x[0, 0, 0] = largest
        recipe = Recipe.nvidia(rotated_scale="bound", rotation=size)
        gradient = next(one for one in run_linear(recipe, x) if one.shape == (N, K))
        assert not gradient.isfinite().any()


def test_nothing_stochastic_needs_no_seed() -> None:
    gm = linear(Recipe.nvidia(stochastic=())).graphs["joint_after"]
    assert not graphs.calls(gm, prims.inductor_seeds.default)
    assert {node.args[5] for node in graphs.calls(gm, fp4.quantize.default)} == {"nearest"}
    assert {node.args[6] for node in graphs.calls(gm, fp4.quantize.default)} == {0}


@pytest.mark.parametrize("operand", ["forward.x", "forward.w", "dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x"])
def test_one_stochastic_operand(operand: str) -> None:
    found = {
        f"{role}.{name}"
        for role, gemm in by_role(linear(Recipe.nvidia(stochastic={operand}))).items()
        for name, side in zip(
            ("dy" if role != "forward" else "x", "x" if role == "wgrad" else "w"), (gemm.left, gemm.right), strict=True
        )
        if side.rounding == "stochastic"
    }
    assert found == {operand}


def test_weights_in_rows_of_16() -> None:
    roles = by_role(linear(Recipe.nvidia(weight_block=(1, 16))))
    assert roles["forward"].right.block == roles["dgrad"].right.block == (1, 16)


@pytest.mark.parametrize("role", ["forward", "dgrad", "wgrad"])
def test_one_gemm_stays_as_it_was(role: str) -> None:
    report = linear(Recipe.nvidia(**{role: "bf16"}))
    assert set(by_role(report)) == {"forward", "dgrad", "wgrad"} - {role}
    assert graphs.matmuls(report.graphs["joint_after"]) == 1
    (site,) = report.sites
    assert getattr(site, role).precision == "bf16"
    assert getattr(site, role).reason == "the recipe keeps this GEMM in bf16"


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("role", ["forward", "dgrad", "wgrad"])
def test_one_operand_stays_as_it_was(role: str, side: int) -> None:
    formats = ("bf16", "nvfp4") if side == 0 else ("nvfp4", "bf16")
    gemm = by_role(linear(Recipe.nvidia(**{role: formats})))[role]
    kept, quantized = (gemm.left, gemm.right) if side == 0 else (gemm.right, gemm.left)
    assert (kept.format, kept.quantize) == ("bf16", None)
    assert quantized.format == "nvfp4"
    # Both operands of a rotated product are rotated, or the transform would not cancel.
    assert kept.rotation == quantized.rotation == ((16, SIGNS) if role == "wgrad" else None)


def test_mxfp4_has_blocks_of_32_and_no_tensor_scale() -> None:
    gm = linear(Recipe.named("mxfp4")).graphs["joint_after"]
    assert {(node.args[3], tuple(node.args[4])) for node in graphs.calls(gm, fp4.quantize.default)} == {
        ("mxfp4", (1, 32))
    }
    assert not graphs.calls(gm, fp4.amax.default)
    assert {site.forward.precision for site in linear(Recipe.named("mxfp4")).sites} == {"mxfp4"}


def test_an_override_changes_one_gemm_of_one_weight() -> None:
    policy = Policy(overrides={"k": {"wgrad": "mxfp4", "dgrad": "bf16"}})
    report = fp4compile.explain(models.seeded(models.QKV), tokens(), options={"policy": policy})
    precisions = {
        site.fqn: (site.forward.precision, site.dgrad.precision, site.wgrad.precision) for site in report.sites
    }
    assert precisions == {"q": ("nvfp4",) * 3, "k": ("nvfp4", "bf16", "mxfp4"), "v": ("nvfp4",) * 3}
    formats = [gemm.left.format for gemm in graphs.gemms(report.graphs["joint_after"])]
    assert sorted(formats) == ["mxfp4"] + ["nvfp4"] * 7


def test_gradients_through_one_weight_belong_to_the_call_that_they_came_through() -> None:
    """Two modules with one weight: only the second's dgrad, which reads the incoming gradient, stays bf16."""
    model = nn.ModuleDict({"a": nn.Linear(K, K, bias=False), "b": nn.Linear(K, K, bias=False)})
    model["b"].weight = model["a"].weight
    sequence = nn.Sequential(model["a"], nn.ReLU(), model["b"])
    report = fp4compile.explain(sequence, tokens(), options={"policy": Policy(overrides={"2": {"dgrad": "bf16"}})})
    assert [(site.fqn, site.dgrad.precision) for site in report.sites] == [("0", "nvfp4"), ("2", "bf16")]
    (kept,) = graphs.calls(report.graphs["joint_after"], aten.mm.default)
    assert kept.args[0].args[0].name.startswith("tangents")


# --- nothing to do, or only a part


@pytest.mark.parametrize(
    "options",
    [{"recipe": "bf16"}, {"policy": {"include": []}}, {"policy": {"overrides": {"*": "bf16"}}}],
    ids=["recipe", "include", "override"],
)
def test_a_graph_in_which_nothing_takes_part_computes_the_same_bits(options: dict[str, Any]) -> None:
    report = fp4compile.explain(models.seeded(models.Twice), tokens(), options=options)
    before, after = report.graphs["joint_before"], report.graphs["joint_after"]
    assert not any(site.rewritten for site in report.sites)
    assert not any(str(node.target).startswith("fp4.") for node in after.graph.nodes)
    assert graphs.matmuls(after) == graphs.matmuls(before) == 6
    inputs = graphs.example_inputs(before, below=N)
    assert graphs.same_bits(graphs.run(before, inputs), graphs.run(after, inputs))


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_a_graph_without_gradients_has_only_the_forward(off: Callable[[], Any]) -> None:
    model = models.seeded(nn.Linear, K, N)
    with off():
        report = fp4compile.explain(model, tokens(grad=False))
    gm = report.graphs["joint_after"]
    assert [ROLES[gemm.shape] for gemm in graphs.gemms(gm)] == ["forward"]
    assert len(graphs.calls(gm, fp4.quantize.default)) == 2
    assert not graphs.calls(gm, fp4.rotate.default)
    assert not graphs.calls(gm, prims.inductor_seeds.default)
    assert set(report.graphs) == {"joint_before", "joint_after", "forward"}


# --- results: dtype, bias


def test_results_have_the_dtypes_of_the_matmuls_that_they_replace() -> None:
    model, x = nn.Linear(K, N, bias=False).bfloat16(), tokens(dtype=torch.bfloat16)
    assert {gemm.dtype for gemm in by_role(fp4compile.explain(model, x)).values()} == {torch.bfloat16}
    assert {gemm.dtype for gemm in by_role(linear()).values()} == {torch.float32}


def test_under_autocast_the_weights_gradient_is_float32_from_the_start() -> None:
    report = autocast_linear()
    dtypes = {role: gemm.dtype for role, gemm in by_role(report).items()}
    assert dtypes == {"forward": torch.bfloat16, "dgrad": torch.bfloat16, "wgrad": torch.float32}
    gm = report.graphs["joint_after"]
    (gradient,) = (v for v in gm.graph.output_node().all_input_nodes if v.meta["val"].shape == (N, K))
    while gradient.target is aten.permute.default:
        gradient = gradient.args[0]
    assert gradient is by_role(report)["wgrad"].node


def test_under_autocast_weights_are_quantized_from_float32() -> None:
    report = autocast_linear()
    roles = by_role(report)
    weight = placeholder(report.graphs["joint_after"], (N, K))
    for role in ("forward", "dgrad"):
        assert origin(roles[role].right) is weight
        assert roles[role].right.source.meta["val"].dtype is torch.float32
    assert roles["forward"].left.source.meta["val"].dtype is torch.bfloat16


def test_a_bias_is_added_in_float32_and_rounded_once() -> None:
    report = fp4compile.explain(models.seeded(nn.Linear, K, N).bfloat16(), tokens(dtype=torch.bfloat16))
    forward = by_role(report)["forward"]
    assert forward.dtype is torch.float32
    (total,) = forward.node.users
    (rounded,) = total.users
    assert total.target is aten.add.Tensor
    assert rounded.args == (total, torch.bfloat16)


def test_every_node_has_the_value_that_it_computes() -> None:
    """Shapes, dtypes and strides in ``meta`` are what running the graph gives: Inductor generates code from them."""
    gm = linear(bias=True).graphs["joint_after"]
    interpreter = _Checked(gm)
    interpreter.run(*graphs.example_inputs(gm, below=N))
    assert interpreter.checked > 20


class _Checked(fx.Interpreter):
    checked = 0

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op == "output":
            return result
        for value, fake in zip(_tensors(result), _tensors(n.meta.get("val")), strict=True):
            assert (value.shape, value.dtype, value.stride()) == (fake.shape, fake.dtype, fake.stride()), (
                n.format_node()
            )
            self.checked += 1
        return result


def _tensors(value: Any) -> list[torch.Tensor]:
    values = value if isinstance(value, (tuple, list)) else [value]
    return [one for one in values if isinstance(one, torch.Tensor)]


# --- dtypes that cannot be quantized


def test_float64_is_an_error_that_names_site_dtype_and_ways_out() -> None:
    model = nn.Sequential(nn.Linear(K, N).double())
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        fp4compile.explain(model, tokens(dtype=torch.float64))
    assert isinstance(caught.value.inner_exception, UnsupportedDtypeError)
    for part in ("'0'", "torch.float64", "bfloat16", "Policy(skip=['0'])", "'strict': False"):
        assert part in str(caught.value)


def test_float64_with_strict_off_stays_and_says_why() -> None:
    options = {"strict": False}
    with pytest.warns(Fp4Warning, match=r"torch\.float64"):
        report = fp4compile.explain(nn.Linear(K, N).double(), tokens(dtype=torch.float64), options=options)
    (site,) = report.sites
    assert not site.rewritten
    assert all("torch.float64" in getattr(site, role).reason for role in ("forward", "dgrad", "wgrad"))
    assert graphs.matmuls(report.graphs["joint_after"]) == 3


def test_a_float64_site_kept_out_by_the_policy_is_no_error() -> None:
    options = {"policy": Policy(skip=["weight"])}
    (site,) = fp4compile.explain(nn.Linear(K, N).double(), tokens(dtype=torch.float64), options=options).sites
    assert site.forward.reason == "skip 'weight'"
