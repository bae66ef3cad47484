"""Scales in the order of tensor cores change no value, and only products that can read them get them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import graphs
import models
import pytest
import torch
from graphs import fp4
from models import K, N, tokens
from torch import fx, nn

import fp4compile
from fp4compile import Policy, Recipe, lowering, passes
from fp4compile.lowering import lower
from fp4compile.lowering.targets import target_for
from fp4compile.passes.fuse import fuse
from fp4compile.passes.tile import tile

CASES: dict[str, Callable[[], nn.Module]] = {
    "linear": functools.partial(nn.Linear, K, N),
    "q, k and v of one input": models.QKV,
    "checkpointed block": lambda: models.Checkpointed(models.QKV()),
}


def explained(name: str, recipe: Recipe | str | None = None) -> dict[str, fx.GraphModule]:
    return fp4compile.explain(models.seeded(CASES[name]), tokens(), options={"recipe": recipe}).graphs


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def patch() -> None:
        monkeypatch.setattr(passes, "fuse", functools.partial(fuse, eligible=lambda device: True))
        monkeypatch.setattr(passes, "tile", functools.partial(tile, eligible=lambda device: True))

    return patch


def tiled(gm: fx.GraphModule) -> list[bool]:
    return [len(node.args) == 10 and node.args[9] is True for node in graphs.calls(gm, fp4.scaled_mm.default)]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("recipe", ["nvidia", "mxfp4"])
def test_results_have_the_same_bits(name: str, recipe: str, everywhere: Callable[[], None]) -> None:
    plain = explained(name, recipe)["joint_after"]
    everywhere()
    changed = explained(name, recipe)["joint_after"]
    assert not any(tiled(plain)) and all(tiled(changed))
    inputs = graphs.example_inputs(plain, below=N)
    assert graphs.same_bits(graphs.run(plain, inputs, seed=3), graphs.run(changed, inputs, seed=3))


def test_a_product_with_a_bf16_operand_is_left_and_so_are_the_operands_it_shares(
    everywhere: Callable[[], None],
) -> None:
    everywhere()
    gm = explained("linear", Recipe.nvidia(dgrad=("bf16", "nvfp4")))["joint_after"]
    by_role = dict(zip(graphs.calls(gm, fp4.scaled_mm.default), tiled(gm), strict=True))
    assert sorted(by_role.values()) == [False, True, True]
    for node, is_tiled in by_role.items():
        shapes = [node.args[i].meta["val"].dim() for i in (1, 5) if node.args[i] is not None]
        assert set(shapes) == ({5} if is_tiled else {2})


@pytest.mark.parametrize("save", ["auto", "packed", "recompute"])
def test_what_is_kept_for_the_backward_is_tiled_too(save: str, everywhere: Callable[[], None]) -> None:
    """The anchor that keeps packed x is no product that reads its scales."""
    everywhere()
    layer = nn.Linear(K, N, dtype=torch.bfloat16)
    report = fp4compile.explain(layer, tokens(dtype=torch.bfloat16), options={"save": save, "policy": Policy()})
    products = graphs.calls(report.graphs["joint_after"], fp4.scaled_mm.default)
    assert len(products) == 3 and all(node.args[9:] == (True,) for node in products)


def test_on_blackwell_every_product_is_the_native_template(
    everywhere: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    everywhere()
    parts = explained("linear")
    monkeypatch.setattr(lowering, "target_of", lambda device: target_for("cuda", (10, 0)))
    monkeypatch.setattr(lowering, "capability_of", lambda device: (10, 0))
    names: list[str] = []
    for part in ("forward", "backward"):
        lower(parts[part].graph)
        names += [str(node.target) for node in parts[part].graph.nodes if str(node.target).startswith("fp4")]
    assert names.count("fp4_native.gemm.default") == 3
    assert not any(name.startswith("fp4.") for name in names)
