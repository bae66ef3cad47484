"""What is kept for wgrad: the same numbers in every mode, never more bytes than without rewriting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import graphs
import models
import pytest
import torch
from graphs import fp4
from models import K, N, T, tokens
from torch import Tensor, nn

import fp4compile
from fp4compile import Recipe
from fp4compile.errors import ConfigError
from fp4compile.lowering import lower
from fp4compile.report import Report

MODES = ("auto", "packed", "recompute")


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(K, N, bias=False), nn.GELU(), nn.Linear(N, K, bias=False)).bfloat16()


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "mlp": (mlp, lambda: tokens(dtype=torch.bfloat16)),
    "transformer": (lambda: models.Transformer().bfloat16(), lambda: models.ids(4, 64)),
    "checkpointed": (lambda: models.Transformer(recompute=True).bfloat16(), lambda: models.ids(4, 64)),
}


def explained(case: str, mode: str, recipe: Recipe | None = None) -> Report:
    make, inputs = CASES[case]
    return fp4compile.explain(models.seeded(make), inputs(), options={"save": mode, "recipe": recipe})


@pytest.mark.parametrize("recipe", [None, Recipe.nvidia(activation_scale="row")], ids=["nvidia", "a scale a row"])
@pytest.mark.parametrize("case", CASES)
def test_no_mode_saves_more_than_without_rewriting(case: str, recipe: Recipe | None) -> None:
    for mode in MODES:
        saved = explained(case, mode, recipe).saved_for_backward
        assert saved.bytes <= saved.baseline_bytes, mode


@pytest.mark.parametrize("case", CASES)
def test_to_recompute_is_to_save_what_bf16_saves(case: str) -> None:
    saved = explained(case, "recompute").saved_for_backward
    assert saved.packed_bytes == 0
    assert saved.bytes == saved.baseline_bytes


def test_packed_keeps_the_input_of_every_layer_in_four_bits() -> None:
    padded = -(-T // 16) * 16
    assert explained("mlp", "packed").saved_for_backward.packed_bytes == (K + N) * padded * (0.5 + 1 / 16)


@pytest.mark.parametrize("case", ["mlp", "transformer"])
def test_every_mode_has_the_same_results(case: str) -> None:
    expected: list[Tensor] | None = None
    for mode in MODES:
        gm = explained(case, mode).graphs["joint_after"]
        results = graphs.run(gm, graphs.example_inputs(gm, below=8), seed=3)
        assert expected is None or graphs.same_bits(results, expected), mode
        expected = results


@pytest.mark.parametrize("mode", ["packed", "recompute"])
def test_generated_code_does_not_know_of_the_anchor(mode: str) -> None:
    report = explained("mlp", mode)
    anchors = 0
    for part in ("forward", "backward"):
        gm = report.graphs[part]
        anchors += len(graphs.calls(gm, fp4.anchor.default))
        lower(gm.graph)
        assert not graphs.calls(gm, fp4.anchor.default)
    assert anchors


@pytest.mark.slow
def test_training_is_the_same_in_every_mode() -> None:
    def train(mode: str) -> list[Tensor]:
        torch.manual_seed(0)
        torch.compiler.reset()
        model = models.seeded(mlp)
        x = tokens(dtype=torch.bfloat16)
        torch.manual_seed(1)
        torch.compile(model, backend="nvfp4", options={"save": mode})(x).float().square().mean().backward()
        return [x.grad, *(parameter.grad for parameter in model.parameters())]

    first, *others = (train(mode) for mode in MODES)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_another_word_is_refused() -> None:
    with pytest.raises(ConfigError, match="'auto', 'packed', 'recompute'"):
        fp4compile.explain(mlp(), tokens(dtype=torch.bfloat16), options={"save": "none"})
