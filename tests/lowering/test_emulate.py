"""Where no tensor core multiplies FP4, operands are decoded once each, and codes are only written if they are kept."""

from __future__ import annotations

import functools
from typing import Any

import graphs
import models
import pytest
import torch
from graphs import fp4
from models import K, N, tokens
from torch import fx, nn

import fp4compile
from fp4compile import Recipe, lowering, passes
from fp4compile.lowering import lower
from fp4compile.lowering.emulate import emulate
from fp4compile.lowering.targets import target_for
from fp4compile.passes.fuse import fuse


class Product(nn.Module):
    """x @ w, whose weight has the columns of the result, no multiple of a block of them."""

    def __init__(self, permuted: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(K, K if permuted else 33))
        self.permuted = permuted

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.permute(0, 1)) if self.permuted else x @ self.weight + 1


MODELS: dict[str, Any] = {
    "odd columns": lambda: Product(permuted=False),
    "a permutation that is none": lambda: Product(permuted=True),
    "linear": lambda: nn.Linear(K, N),
    "q, k and v of one input": models.QKV,
    "checkpointed block": lambda: models.Checkpointed(models.QKV()),
}
RECIPES: dict[str, Any] = {
    "nvidia": "nvidia",
    "mxfp4": "mxfp4",
    "nothing rotated": Recipe.nvidia(rotation=0),
    "bf16 gradients": Recipe.nvidia(dgrad="bf16"),
}


@pytest.fixture(autouse=True, params=["fused", "apart"])
def fusing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The passes of a device with kernels, and of one without."""
    if request.param == "fused":
        monkeypatch.setattr(passes, "fuse", functools.partial(fuse, eligible=lambda device: True))


def halves(name: str, recipe: Any = "nvidia", **options: Any) -> list[fx.GraphModule]:
    report = fp4compile.explain(models.seeded(MODELS[name]), tokens(), options={"recipe": recipe, **options})
    return [report.graphs["forward"], report.graphs["backward"]]


def products(gm: fx.GraphModule) -> list[fx.Node]:
    return graphs.calls(gm, fp4.scaled_mm.default)


def emulated(name: str, **options: Any) -> list[fx.GraphModule]:
    found = halves(name, **options)
    for gm in found:
        emulate(gm.graph, products(gm))
    return found


def count(gm: fx.GraphModule, *names: str) -> list[int]:
    return [len(graphs.calls(gm, getattr(fp4, name).default)) for name in names]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_results_have_the_same_bits(name: str, recipe: str) -> None:
    for gm in halves(name, RECIPES[recipe]):
        inputs = graphs.example_inputs(gm, below=N)
        expected = graphs.run(gm, inputs, seed=3)
        assert products(gm)
        emulate(gm.graph, products(gm))
        gm.graph.lint()
        gm.recompile()
        assert not products(gm)
        assert graphs.same_bits(graphs.run(gm, inputs, seed=3), expected)


def test_an_operand_of_several_products_is_decoded_once() -> None:
    forward, backward = emulated("q, k and v of one input", save="packed")
    assert count(forward, "decoded_mm", "decode", "quantize_decoded") == [3, 0, 1 + 3]  # x and three weights
    # Three dy once for dgrad and once for wgrad, three weights; x comes as codes, which three products read.
    quantized = sum(count(backward, "quantize_decoded", "rotate_quantize_decoded"))
    assert [*count(backward, "decoded_mm", "decode"), quantized] == [6, 1, 6 + 3]


def test_codes_are_written_only_to_be_kept() -> None:
    forward, backward = emulated("linear", save="packed")
    kept = forward.graph.output_node().all_input_nodes
    for node in (*graphs.calls(forward, fp4.quantize.default), *graphs.calls(forward, fp4.rotate_quantize.default)):
        assert all(result in kept for result in node.users)
    assert count(backward, "quantize", "rotate_quantize") == [0, 0]


def test_a_transposed_weight_is_the_transposed_view_of_the_weights_values() -> None:
    _, backward = emulated("linear")
    dgrad = next(node for node in graphs.calls(backward, fp4.decoded_mm.default) if node.args[4] is torch.float32)
    weights = dgrad.args[2]
    assert weights.target is torch.ops.aten.permute.default  # type: ignore[union-attr]
    (values,) = weights.all_input_nodes  # type: ignore[union-attr]
    assert values.target is fp4.quantize_decoded.default and values.args[0].op == "placeholder"  # type: ignore[union-attr]


def test_an_operand_that_is_no_bfloat16_leaves_its_product_alone() -> None:
    model, x = models.seeded(lambda: nn.Linear(K, N)), tokens().float()
    options = {"recipe": Recipe.nvidia(wgrad="bf16", forward="bf16")}
    gm = fp4compile.explain(model, x.requires_grad_(), options=options).graphs["backward"]
    mixed = [node for node in products(gm) if "bf16" in (node.args[3], node.args[7])]
    emulate(gm.graph, products(gm))
    assert products(gm) == mixed


def test_a_device_with_kernels_emulates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowering, "target_of", lambda device: target_for("cuda", (9, 0)))
    for gm in halves("linear"):
        lower(gm.graph)
        names = {str(node.target) for node in gm.graph.nodes}
        assert "fp4_cuda.decoded_mm.default" in names
        assert not any("scaled_mm" in name for name in names)
