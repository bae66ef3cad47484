"""Fusing what one kernel reads changes no value: the same bits with and without it, from fewer reads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import graphs
import models
import pytest
import torch
from graphs import fp4
from models import K, N, tokens
from torch import fx, nn

import fp4compile
from fp4compile import Recipe, passes
from fp4compile.graph import canonical
from fp4compile.passes.fuse import fuse

CASES: dict[str, Callable[[], nn.Module]] = {
    "linear": functools.partial(nn.Linear, K, N),
    "q, k and v of one input": models.QKV,
    "module called twice": models.Twice,
    "checkpointed block": lambda: models.Checkpointed(models.QKV()),
}


def joint(name: str, recipe: Recipe | str | None = None) -> fx.GraphModule:
    return fp4compile.explain(models.seeded(CASES[name]), tokens(), options={"recipe": recipe}).graphs["joint_after"]


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    fuse_all = functools.partial(fuse, eligible=lambda device: True)
    return lambda: monkeypatch.setattr(passes, "fuse", fuse_all)


def count(gm: fx.GraphModule, *operators: Any) -> int:
    return sum(len(graphs.calls(gm, operator)) for operator in operators)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("recipe", ["nvidia", "mxfp4"])
def test_results_have_the_same_bits(name: str, recipe: str, everywhere: Callable[[], None]) -> None:
    apart = joint(name, recipe)
    everywhere()
    fused = joint(name, recipe)
    assert count(apart, fp4.rotate.default) > 0
    assert count(fused, fp4.rotate.default) == 0
    inputs = graphs.example_inputs(apart, below=N)
    assert graphs.same_bits(graphs.run(apart, inputs, seed=3), graphs.run(fused, inputs, seed=3))


def test_every_activation_and_gradient_is_read_once_for_its_amaxes(everywhere: Callable[[], None]) -> None:
    """x and dy of a linear layer have one amax_both each; the weight, never rotated, has a plain one a phase."""
    everywhere()
    gm = joint("linear")
    assert count(gm, fp4.amax_both.default) == 2
    assert count(gm, fp4.rotated_amax.default) == 0
    assert {canonical(node.args[0]).name for node in graphs.calls(gm, fp4.amax.default)} == {"primals_1"}
    assert count(gm, fp4.amax.default) == 2


@pytest.mark.parametrize("name", CASES)
def test_a_bound_leaves_no_amax_of_a_rotation(name: str, everywhere: Callable[[], None]) -> None:
    bound = Recipe.nvidia(rotated_scale="bound")
    apart = joint(name, bound)
    everywhere()
    fused = joint(name, bound)
    assert count(fused, fp4.amax_both.default, fp4.rotated_amax.default, fp4.rotate.default) == 0
    assert count(fused, fp4.rotate_quantize.default) > 0
    inputs = graphs.example_inputs(apart, below=N)
    assert graphs.same_bits(graphs.run(apart, inputs, seed=3), graphs.run(fused, inputs, seed=3))


def test_with_a_bound_every_activation_and_gradient_is_reduced_once_a_phase(everywhere: Callable[[], None]) -> None:
    everywhere()
    gm = joint("q, k and v of one input", Recipe.nvidia(rotated_scale="bound"))
    reduced = [graphs.elements(node.args[0]).name for node in graphs.calls(gm, fp4.amax.default)]
    weights = [name for name in reduced if reduced.count(name) > 1]
    assert len(reduced) == 1 + 3 + 6 and len(weights) == 6 and "primals_2" not in weights


def test_every_activation_and_gradient_is_quantized_once_a_layout(everywhere: Callable[[], None]) -> None:
    everywhere()
    gm = joint("q, k and v of one input")
    quantized = [node.args[0].name for node in graphs.calls(gm, fp4.quantize.default)]
    rotated = [node.args[0].name for node in graphs.calls(gm, fp4.rotate_quantize.default)]
    assert len(rotated) == len(set(rotated)) == 4  # x, shared by three layers, and their three dy
    assert quantized.count("view") + quantized.count("primals_2") <= 1


def test_where_a_device_has_no_kernels_nothing_changes() -> None:
    gm = joint("linear")
    assert count(gm, fp4.amax_both.default, fp4.rotated_amax.default, fp4.rotate_quantize.default) == 0
    fuse(gm.graph)
    assert count(gm, fp4.rotate.default) > 0


def test_a_rotated_operand_in_bf16_keeps_its_rotation(everywhere: Callable[[], None]) -> None:
    everywhere()
    gm = joint("linear", Recipe.nvidia(wgrad=("bf16", "nvfp4")))
    assert count(gm, fp4.rotate.default) == 1
    assert torch.bfloat16 in {node.meta["val"].dtype for node in graphs.calls(gm, fp4.rotate.default)}


def test_a_rotation_without_a_kernel_is_made_once(everywhere: Callable[[], None]) -> None:
    everywhere()
    gm = joint("linear", Recipe.nvidia(rotation=32))
    assert count(gm, fp4.rotate.default) == 2
    assert count(gm, fp4.rotated_amax.default, fp4.rotate_quantize.default) == 0
