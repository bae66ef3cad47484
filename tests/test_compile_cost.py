"""What compiling costs, counted and never timed: many equal blocks cost what a few do, in graphs and in kernels."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import compiling
import models
import pytest
import torch
from models import Transformer, ids
from torch import Tensor, fx
from torch._dynamo.utils import counters

from fp4compile import Policy, backend, compat, compile_blocks, lowering, prepare
from fp4compile.lowering import compiled
from fp4compile.lowering.targets import Target
from fp4compile.policy import default_ends

FEW, MANY = 6, 40
CALLS = ("compile_graph", "run_joint_passes", "lower")
"""What the backend does once for a graph that Dynamo captured; the last of them for its forward and its backward."""

ROWS = functools.partial(ids, length=16)  # rows that blocks of 16 divide need no padding, which is code of its own


def _interpret(gm: fx.GraphModule, inputs: Sequence[Any], **facts: Any) -> Callable[..., Any]:
    def run(values: list[Any]) -> Any:
        return gm(*values)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Inside, graphs are lowered and then run node by node; gives how often the backend did what for them."""
    calls: Counter[str] = Counter()

    def count(name: str) -> Callable[..., Any]:
        real = getattr(backend, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return real(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        stack.enter_context(compiling.lowered())
        stack.enter_context(mock.patch.object(compat, "_compile_fx_inner", _interpret))
        for name in CALLS:
            stack.enter_context(mock.patch.object(backend, name, count(name)))
        counters.clear()
        yield calls


def runs_as(output: Tensor) -> str:
    """What made a block's output: "eager" code, or a graph whose backward keeps packed codes ("nvfp4") or none."""
    made_by: Any = output.grad_fn
    if type(made_by).__name__ != "CompiledFunctionBackward":
        return "eager"
    return "nvfp4" if any(tensor.dtype == torch.uint8 for tensor in made_by.saved_tensors) else "bf16"


# --- block by block


def train_and_evaluate(model: Transformer) -> list[str]:
    """Two steps, an evaluation, and block by block what runs it."""
    for _ in range(2):
        model(ROWS()).sum().backward()
    with torch.no_grad():
        model.eval()(ROWS())
    model.train()
    x, found = model.embedding(ROWS()).detach().requires_grad_(), []
    for block in model.layers:
        x = block(x)
        found.append(runs_as(x))
    return found


def cost_of_blocks(
    monkeypatch: pytest.MonkeyPatch, blocks: int, policy: Policy | None = None, **kwargs: Any
) -> tuple[dict[str, int], list[str]]:
    """How often what was done to compile a model of so many blocks, and what runs each of them."""
    monkeypatch.setattr(lowering, "target_of", lambda device: Target(device.type, "reference", None, "fast to test"))
    model = models.seeded(Transformer, blocks, **kwargs)
    with counted() as calls:
        compile_blocks(model, prepare(model, policy=policy), options={"inductor": compiling.NO_CACHE})
        found = train_and_evaluate(model)
        frames = counters["frames"]
        assert frames["ok"] == frames["total"]  # Dynamo gave up on none, as it does at its limit of recompiles
        return {**calls, "frames": frames["total"]}, found


@pytest.mark.parametrize("recompute", [False, True])
def test_forty_equal_blocks_compile_what_six_do(monkeypatch: pytest.MonkeyPatch, recompute: bool) -> None:
    """Two sets of decisions, in training and in evaluation: four graphs, two of them with a backward."""
    expected = {"compile_graph": 4, "run_joint_passes": 4, "lower": 6, "frames": 4}
    for blocks in (FEW, MANY):
        cost, found = cost_of_blocks(monkeypatch, blocks, recompute=recompute)
        first, last = default_ends(blocks)
        assert found == ["bf16"] * first + ["nvfp4"] * (blocks - first - last) + ["bf16"] * last
        assert cost == expected


def test_a_block_of_its_own_decisions_costs_one_more_and_its_neighbours_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the counts above would show, were decisions or options not equal from block to block."""
    plain, _ = cost_of_blocks(monkeypatch, FEW)
    cost, found = cost_of_blocks(monkeypatch, FEW, Policy(overrides={"layers.2.up": "bf16"}))
    assert found == ["nvfp4"] * 5 + ["bf16"]
    more = {name: cost[name] - plain[name] for name in cost}
    assert more == {"compile_graph": 2, "run_joint_passes": 2, "lower": 3, "frames": 2}


# --- the whole model


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """What the operators' formulas are compiled from on a CPU, in order. They run as they are: no C++ is generated."""
    graphs: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    compile_any = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: compile_any(*args, **{"backend": keep, **kwargs}))
    return graphs


@pytest.mark.slow
def test_a_deeper_model_is_one_graph_too_and_needs_no_further_kernel(kernels: list[fx.GraphModule]) -> None:
    """On a CPU the operators are compiled for all sites: what two blocks need serves eight, in every step."""
    needed = []
    with counted() as calls:
        for blocks in (2, 8):
            calls.clear()
            model = compiling.compiled(models.seeded(Transformer, blocks), policy=Policy(first=0, last=0))
            for _ in range(2):
                logits = model(ROWS())
                assert runs_as(logits) == "nvfp4"
                logits.sum().backward()
            assert calls == {"compile_graph": 1, "run_joint_passes": 1, "lower": 2}
            needed.append(len(kernels))
            assert len(kernels) == compiled._variant.cache_info().currsize  # each once, for the first call and the rest
    assert needed[0] > 0
    assert needed[1] == needed[0]
