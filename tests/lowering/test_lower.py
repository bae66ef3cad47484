"""Lowering chooses how an operator runs on a device and never what it gives."""

from __future__ import annotations

import functools
import json
from typing import Any

import compiling
import graphs
import pytest
import torch
from graphs import fp4
from models import K, N, tokens
from torch import Tensor, fx, nn

import fp4compile
from fp4compile import Recipe, lowering
from fp4compile.lowering import lower, lowering_key
from fp4compile.lowering.targets import Target, target_for


def operators(gm: fx.GraphModule) -> list[str]:
    return [str(n.target) for n in gm.graph.nodes if str(n.target).startswith("fp4")]


def forward_and_backward() -> list[fx.GraphModule]:
    report = fp4compile.explain(nn.Linear(K, N), tokens())
    return [report.graphs["forward"], report.graphs["backward"]]


def test_on_a_cpu_every_operator_becomes_its_compiled_twin() -> None:
    for gm in forward_and_backward():
        before = operators(gm)
        lower(gm.graph)
        assert before
        assert operators(gm) == [name.replace("fp4.", "fp4_compiled.") for name in before]


def test_where_a_device_has_no_kernels_the_reference_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowering, "target_of", lambda device: Target(device.type, "reference", None, "none yet"))
    for gm in forward_and_backward():
        before = gm.code
        lower(gm.graph)
        gm.recompile()
        assert gm.code == before


RECIPES: dict[str, str | Recipe] = {
    "nvidia": "nvidia",
    "mxfp4": "mxfp4",
    "a pair": Recipe(forward=("bf16", "nvfp4"), dgrad="mxfp4"),
    "rows": Recipe.nvidia(activation_scale="row"),
    "bound": Recipe.nvidia(activation_scale="row", rotated_scale="bound"),
}


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_is_lowered_for_every_gpu(
    recipe: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No operator of the reference is left but ``rotate``, which has no kernel of its own."""
    options = {"recipe": RECIPES[recipe]}
    report = fp4compile.explain(nn.Linear(K, N, dtype=torch.bfloat16), tokens(dtype=torch.bfloat16), options=options)
    monkeypatch.setattr(lowering, "target_of", lambda device: target_for("cuda", capability))
    for part in ("forward", "backward"):
        gm = report.graphs[part]
        lower(gm.graph)
        assert {name for name in operators(gm) if name.startswith("fp4.")} <= {"fp4.rotate.default"}


NAMES = (
    "amax",
    "rotated_amax",
    "amax_both",
    "rotate",
    "quantize",
    "rotate_quantize",
    "decode",
    "scaled_mm",
    "quantize_decoded",
    "rotate_quantize_decoded",
    "decoded_mm",
)


@pytest.mark.parametrize(("library", "without"), [("fp4_compiled", ()), ("fp4_cuda", ("rotate",))])
def test_every_operator_has_a_twin_of_the_same_schema(library: str, without: tuple[str, ...]) -> None:
    for name in NAMES:
        if name not in without:
            operator, twin = (getattr(getattr(torch.ops, one), name).default for one in ("fp4", library))
            assert str(twin._schema) == str(operator._schema).replace("fp4::", f"{library}::")


def test_where_a_device_has_kernels_every_operator_becomes_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowering, "target_of", lambda device: target_for("cuda", (9, 0)))
    for gm in forward_and_backward():
        lower(gm.graph)
        assert operators(gm)
        assert all(name.startswith("fp4_cuda.") for name in operators(gm) if "rotate." not in name)


def test_the_lowering_is_part_of_the_cache_key(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [torch.device("cpu")]
    before = lowering_key(devices)
    assert json.loads(before)["cpu"]
    monkeypatch.setattr(lowering, "target_of", lambda device: Target(device.type, "reference", None, "none yet"))
    assert lowering_key(devices) != before


@pytest.mark.slow
@pytest.mark.parametrize("rows", [33, 17])
def test_compiled_operators_give_the_references_bits(rows: int) -> None:
    """All that one linear layer needs, at ragged sizes."""
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(rows, K, generator=generator), torch.randn(N, K, generator=generator)
    expected, found = ([*_chain(ops, x, w)] for ops in (torch.ops.fp4, torch.ops.fp4_compiled))
    for (name, value), (_, wanted) in zip(found, expected, strict=True):
        assert value.shape == wanted.shape and value.dtype == wanted.dtype, name
        assert torch.equal(_bits(value), _bits(wanted)), name


@pytest.mark.slow
@pytest.mark.parametrize("rows", [0, 1])
def test_compiled_operators_take_no_row_and_one_row(rows: int) -> None:
    """Sizes that Dynamo compiles anew for."""
    x = tokens(rows, K, grad=False)
    amax = torch.ops.fp4_compiled.amax(x)
    assert torch.equal(amax, fp4.amax(x))
    how = (x, amax, None, "nvfp4", [1, 16], "nearest", 0)
    for value, wanted in zip(torch.ops.fp4_compiled.quantize(*how), fp4.quantize(*how), strict=True):
        assert value.shape == wanted.shape
        assert torch.equal(_bits(value), _bits(wanted))


@pytest.mark.slow
def test_sites_share_one_kernel() -> None:
    x, amax, seed = tokens(33, K, grad=False), torch.tensor(4.0), torch.tensor(9)
    variants = lowering.compiled._variant
    codes, sizes = [], []
    for site in (4, 12):
        codes.append(torch.ops.fp4_compiled.quantize(x, amax, seed, "nvfp4", [1, 16], "stochastic", site)[0])
        sizes.append(variants.cache_info().currsize)
        assert torch.equal(codes[-1], fp4.quantize(x, amax, seed, "nvfp4", [1, 16], "stochastic", site)[0])
    assert sizes[0] == sizes[1]
    assert not torch.equal(*codes)


def _chain(ops: Any, x: Tensor, w: Tensor) -> Any:
    """(name, result) of the operators that one linear layer needs."""
    rotated = ops.rotate(x.t(), 16, 0xD7E8)
    x_max, w_max, r_max = ops.amax(x), ops.amax(w), ops.amax(rotated)
    rows = ops.quantize(x, x_max, None, "nvfp4", [1, 16], "nearest", 0)
    tiles = ops.quantize(w, w_max, None, "nvfp4", [16, 16], "nearest", 0)
    noisy = ops.quantize(rotated, r_max, torch.tensor(7), "nvfp4", [1, 16], "stochastic", 4)
    product = ops.scaled_mm(*rows, x_max, "nvfp4", *tiles, w_max, "nvfp4", torch.float32)
    yield "rotate", rotated
    yield from (("amax", one) for one in (x_max, w_max, r_max))
    yield from ((name, one) for name, pair in (("1x16", rows), ("16x16", tiles), ("noisy", noisy)) for one in pair)
    yield "scaled_mm", product


def _bits(value: Tensor) -> Tensor:
    return value.view(torch.uint8) if value.dtype.itemsize == 1 else value


def test_the_way_called_inductor_calls_no_compiled_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the comparison of ways in test_backend compares one with itself."""

    @functools.cache
    def refuse(*args: Any) -> None:
        raise AssertionError("a compiled operator was called")

    monkeypatch.setattr(lowering.compiled, "_variant", refuse)
    model = nn.Linear(K, N, bias=False)
    with compiling.inductor(), torch.no_grad():
        compiling.compiled(model)(tokens())
    with compiling.lowered(), torch.no_grad(), pytest.raises(AssertionError, match="compiled operator"):
        compiling.compiled(model)(tokens())


def test_graphs_of_another_library_are_left_alone() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.ops.aten.relu.default, (x,))
    graph.output(y)
    for node in (x, y):
        node.meta["val"] = torch.empty(2)
    lower(graph)
    assert graphs.calls(fx.GraphModule({}, graph), torch.ops.aten.relu.default)
