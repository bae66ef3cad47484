"""Sharing changes no value: the same bits with and without it, and fewer nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import graphs
import models
import pytest
from graphs import fp4
from models import K, N, tokens
from torch import fx, nn

import fp4compile
from fp4compile import Recipe, passes

CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "q, k and v of one input": (models.QKV, tokens),
    "module called twice": (models.Twice, tokens),
    "LoRA": (models.LoRA, tokens),
    "attention": (lambda: models.Attention(K, fused=False), tokens),
    "checkpointed block": (lambda: models.Checkpointed(models.QKV()), tokens),
}


def joint(name: str, recipe: Recipe | None = None) -> fx.GraphModule:
    make, inputs = CASES[name]
    return fp4compile.explain(models.seeded(make), inputs(), options={"recipe": recipe}).graphs["joint_after"]


@pytest.fixture
def no_sharing(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setattr(passes, "share", lambda graph: None)


@pytest.mark.parametrize("name", CASES)
def test_results_have_the_same_bits_without_sharing(name: str, no_sharing: Callable[[], None]) -> None:
    shared = joint(name)
    no_sharing()
    separate = joint(name)
    assert len(graphs.calls(shared, fp4.quantize.default)) < len(graphs.calls(separate, fp4.quantize.default))
    inputs = graphs.example_inputs(shared, below=N)
    assert graphs.same_bits(graphs.run(shared, inputs, seed=3), graphs.run(separate, inputs, seed=3))


def test_stochastic_rounding_of_one_tensor_at_two_sites_is_not_shared() -> None:
    """Every linear layer reads x, so x is quantized once a layer if its rounding is stochastic, else once."""
    for rounding, count in ((set(), 1), ({"forward.x"}, 3)):
        gm = joint("q, k and v of one input", Recipe.nvidia(stochastic=rounding))
        quantized = {gemm.left.quantize for gemm in graphs.gemms(gm) if gemm.left.source.args[0].name == "primals_2"}
        assert len(quantized) == count, rounding


def test_forward_and_backward_do_not_share(no_sharing: Callable[[], None]) -> None:
    """The weight is quantized once for the forward and once for dgrad, so that its codes need not be saved."""
    recipe = Recipe.nvidia(dgrad=("bf16", "nvfp4"), wgrad="bf16", weight_block=(16, 16))
    report = fp4compile.explain(models.seeded(nn.Linear, K, N, bias=False), tokens(), options={"recipe": recipe})
    weights = [gemm.right.quantize for gemm in graphs.gemms(report.graphs["joint_after"])]
    assert len(set(weights)) == len(weights) == 2


def test_a_checkpointed_region_does_not_share_with_the_outside() -> None:
    """A node shared across the border would be saved, though checkpointing asks for recomputation."""

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.outside = models.Checkpointed(nn.Linear(K, N)), nn.Linear(K, N)

        def forward(self, x: Any) -> Any:
            return self.inside(x) + self.outside(x)

    gm = fp4compile.explain(models.seeded(Half), tokens()).graphs["joint_after"]
    inputs = [gemm.left.quantize for gemm in graphs.gemms(gm) if gemm.left.rounding == "nearest"]
    assert len(inputs) == len(set(inputs)) == 2
    regions = ["ac_graph_id" in node.meta for node in inputs]
    assert sorted(regions) == [False, True]
