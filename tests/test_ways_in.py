"""A policy holds however a model reaches torch.compile: equal names, equal decisions, equal bits.

``explain`` of the model itself is the measure. Names show in the sites. That graphs run where they should shows in the
bits: without stochastic rounding a product in FP4 differs from one in high precision, and equal ones do not.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compiling import interpreted
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from ways_in import DIM, HIDDEN, PARTS, VOCABULARY, WAYS, Entry, Model

import fp4compile
from fp4compile import Policy, Recipe
from fp4compile.errors import Fp4Warning
from fp4compile.modules import ModuleTree
from fp4compile.plan import GraphPlan, SiteRecord
from fp4compile.recipe import ROLES

POLICY = Policy(first=1, last=2, skip=["layers.2.mid"], overrides={"layers.3.down": {"dgrad": "bf16"}})
OPTIONS = {"recipe": Recipe.nvidia(stochastic=()), "policy": POLICY}

WAYS_IN = WAYS | PARTS

Table = dict[str, tuple[tuple[str, str], ...]]


@pytest.fixture(autouse=True)
def one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of this process alone, for the wrappers that need one."""
    monkeypatch.setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 1000)  # DDP's buckets are as small as these models
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make(blocks: int = 6) -> Model:
    torch.manual_seed(0)
    return Model(blocks)


def tokens() -> Tensor:
    return torch.arange(2 * 16).reshape(2, 16) * 7 % VOCABULARY


def table(sites: Iterable[SiteRecord]) -> Table:
    """Site -> (precision, reason) of its GEMMs."""
    return {
        site.fqn: tuple((getattr(site, role).precision, getattr(site, role).reason) for role in ROLES) for site in sites
    }


def sites_of(plans: list[GraphPlan]) -> Table:
    return table(site for plan in plans if plan.outcome for site in plan.outcome.sites)


def step(function: Any, model: nn.Module, *arguments: Any) -> dict[str, Tensor]:
    """What one training step computes: the result, and each parameter's gradient by its name."""
    y = function(*arguments, tokens())
    y.backward(torch.linspace(-1, 1, y.numel()).reshape(y.shape))
    found = {"result": y.detach()}
    for parameter in ModuleTree(model).parameters:
        gradient = parameter.value.grad
        if gradient is not None:
            found[parameter.name] = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return found


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@functools.cache
def explained() -> Table:
    return table(fp4compile.explain(make(), tokens(), options=OPTIONS).sites)


@functools.cache
def trained() -> dict[str, Tensor]:
    model = make()
    with interpreted():
        return step(torch.compile(model, backend="nvfp4", options=OPTIONS), model)


def entry(way: str) -> tuple[Model, Entry]:
    model = make()
    return model, WAYS_IN[way](model)


def test_the_measure_has_every_kind_of_decision() -> None:
    found = explained()
    assert set(found) == {f"layers.{i}.{name}" for i in range(6) for name in ("up", "mid", "down")} | {"lm_head"}
    reasons = {reason for roles in found.values() for _, reason in roles}
    assert len(reasons) == 6, reasons
    plain = make()
    assert not torch.equal(trained()["result"], plain(tokens()))


@pytest.mark.parametrize("way", WAYS)
def test_every_way_in_has_the_names_and_the_bits_of_the_model_itself(way: str) -> None:
    model, (function, arguments) = entry(way)
    with interpreted() as plans:
        found = step(torch.compile(function, backend="nvfp4", options=OPTIONS), model, *arguments)
    assert sites_of(plans) == explained()
    if way != "fully_sharded_flat":  # its gradients are flat, too
        assert same_bits(found, trained())
    assert torch.equal(found["result"], trained()["result"])


@pytest.mark.parametrize("way", PARTS)
def test_a_model_compiled_in_parts_has_the_decisions_of_the_whole(way: str) -> None:
    """Blocks share graphs, so not all names show; which graph a block ran is in the bits."""
    model, (function, arguments) = entry(way)
    with interpreted() as plans:
        found = step(torch.compile(function, backend="nvfp4", options=OPTIONS), model, *arguments)
    assert sites_of(plans).items() <= explained().items()
    assert same_bits(found, trained())


@pytest.mark.parametrize("way", ["break_between_blocks", "break_in_blocks", "fully_sharded"])
def test_blocks_of_equal_decisions_share_what_is_compiled(way: str) -> None:
    model, (function, _) = entry(way)
    with interpreted() as plans:
        compiled = torch.compile(function, backend="nvfp4", options={**OPTIONS, "policy": Policy(last=2)})
        step(compiled, model)
        blocks = {plan.digest: plan for plan in plans if any("up" in site for site in sites_of([plan]))}
        count = len(plans)
        step(compiled, model)
    assert len(blocks) == 2, "one for the last two, one for the others"
    assert len(plans) == count, "a second step compiles nothing"


MODULES = [
    "itself",
    "forward_decorated_with_wraps",
    "forward_replaced_by_a_closure",
    "list_in_another_module",
    "compiled_block_inside",
    "checkpointed_blocks",
    "data_parallel",
    "fully_sharded_flat",
    *(name for name in PARTS if "function" not in name and "method" not in name),
]
"""The ways that end in a module."""


@pytest.mark.parametrize("way", MODULES)
def test_explain_shows_what_compiling_decides(way: str) -> None:
    """At every block, also where blocks share graphs; what torch runs eagerly after a graph break is a row, too."""
    _, (model, _) = entry(way)
    report = fp4compile.explain(model, tokens(), options=OPTIONS)
    eager = {left.fqn for left in report.matmuls_left if "in no captured graph" in left.reason}
    assert table(report.sites) == {name: roles for name, roles in explained().items() if name not in eager}
    assert eager <= ({"lm_head"} if way in PARTS else set())


@pytest.mark.parametrize("way", MODULES)
def test_module_compile_decides_as_torch_compile_does(way: str) -> None:
    model, (function, _) = entry(way)
    with interpreted() as plans:
        function.compile(backend="nvfp4", options=OPTIONS)
        found = step(function, model)
    assert sites_of(plans).items() <= explained().items()
    assert way in PARTS or sites_of(plans) == explained()
    assert torch.equal(found["result"], trained()["result"])


@pytest.mark.parametrize("way", ["itself", "checkpointed_blocks", "data_parallel", "fully_sharded", "break_in_blocks"])
@pytest.mark.parametrize("whole", [True, False])
def test_a_plan_made_before_wrapping_decides_as_torch_compile_does(way: str, whole: bool) -> None:
    model = make()
    plan = fp4compile.prepare(model, OPTIONS["recipe"], POLICY)  # type: ignore[arg-type]
    function, _ = WAYS_IN[way](model)
    with interpreted() as plans:
        if whole:
            found = step(torch.compile(function, backend="nvfp4", options=plan.options), model)
            assert sites_of(plans).items() <= explained().items()
        else:
            fp4compile.compile_blocks(function, plan)  # type: ignore[arg-type]
            found = step(function, model)
            assert plans
    assert same_bits(found, trained())


def test_a_traced_model_has_its_names() -> None:
    """It has no list of blocks any more, so the policy names them."""
    policy = dataclasses.replace(POLICY, blocks="layers.*")
    with interpreted() as plans:
        traced = torch.fx.symbolic_trace(make())
        step(torch.compile(traced, backend="nvfp4", options={**OPTIONS, "policy": policy}), traced)
    assert sites_of(plans) == explained()


# --- several roots, and none


def test_first_and_last_go_by_each_of_several_models() -> None:
    one, other = make(6), make(4)

    def function(x: Tensor) -> Tensor:
        return one(x).sum() + other(x).sum()

    with interpreted() as plans:
        torch.compile(function, backend="nvfp4", options={"policy": Policy(last=1)})(tokens()).backward()
    found = sites_of(plans)
    kept = {name for name, roles in found.items() if roles[0][0] == "bf16"}
    names = ("up", "mid", "down")
    assert kept == {
        *(f"one.layers.5.{name}" for name in names),
        *(f"other.layers.3.{name}" for name in names),
        "one.lm_head",
        "other.lm_head",
    }
    assert len(found) == 19 + 13


def test_a_graph_is_not_used_for_a_model_that_decides_otherwise() -> None:
    """The blocks are of one class, and only in the model that they are in do they differ."""
    options = {**OPTIONS, "policy": Policy(last=2)}

    def trained_in(way: str, *models: Model) -> dict[str, Tensor]:
        with interpreted():
            for model in models:
                found = step(torch.compile(WAYS_IN[way](model)[0], backend="nvfp4", options=options), model)
        return found

    assert same_bits(trained_in("break_in_blocks", make(6), make(3)), trained_in("itself", make(3)))


def loose(weights: dict[str, Tensor], x: Tensor) -> Tensor:
    return torch.relu(x @ weights["w1"].t()) @ weights["w2"].t()


def loose_weights() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"w1": nn.Parameter(torch.randn(HIDDEN, DIM)), "w2": nn.Parameter(torch.randn(DIM, HIDDEN))}


def rewritten(policy: Any) -> dict[str, bool]:
    with interpreted() as plans:
        function = torch.compile(loose, backend="nvfp4", options={"policy": policy})
        function(loose_weights(), torch.randn(16, DIM)).sum().backward()
    return {site.fqn: site.rewritten for plan in plans for site in plan.outcome.sites}


def test_a_parameter_that_no_module_owns_stays_as_it_is_and_a_warning_says_what_to_write() -> None:
    with pytest.warns(Fp4Warning) as caught:
        assert rewritten(Policy()) == {"weights.w1": False, "weights.w2": False}
    told = [str(one.message) for one in caught if "no module owns" in str(one.message)]
    assert len(told) == 1
    advice = told[0][told[0].index("Policy(") : told[0].index("; or register")]
    assert advice == "Policy(include=['*', 'weights.w1', 'weights.w2'])"
    with warnings.catch_warnings():
        warnings.simplefilter("error", Fp4Warning)
        assert rewritten(eval(advice)) == {"weights.w1": True, "weights.w2": True}


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (Policy(include="*w1"), set()),
        (Policy(include=["*", "weights.*"]), {"w1", "w2"}),
        (Policy(include=["*", "weights"], skip="*.w2"), {"w1"}),
        (Policy(overrides={"weights.w2": "nvfp4"}), {"w2"}),
        (Policy(overrides={"*": "nvfp4"}), set()),
        (fp4compile.prepare(nn.Linear(DIM, DIM)).options["policy"], set()),
    ],
)
def test_only_a_pattern_that_begins_as_its_name_includes_such_a_parameter(policy: Any, expected: set[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Fp4Warning)
        assert {name for name, done in rewritten(policy).items() if done} == {f"weights.{name}" for name in expected}


def test_the_report_says_why_such_a_parameter_stays() -> None:
    class Function(nn.Module):
        def forward(self, weights: dict[str, Tensor], x: Tensor) -> Tensor:
            return loose(weights, x)

    with pytest.warns(Fp4Warning, match="no module owns"):
        report = fp4compile.explain(Function(), loose_weights(), torch.randn(16, DIM))
    assert {site.forward.reason for site in report.sites} == {
        "no module owns it, so no rule by name can hold; include it by this name"
    }


# --- a part that cannot know what it is a part of


def test_a_block_compiled_by_itself_says_that_first_and_last_are_lost() -> None:
    model = make()
    for block in model.layers:
        block.compile(backend="nvfp4", options={"policy": Policy()})
    with interpreted(), pytest.warns(Fp4Warning, match=r"Block is compiled by itself.*6 blocks.*last 1.*prepare"):
        model(tokens())


def test_a_block_compiled_by_itself_is_fine_where_no_block_is_kept() -> None:
    model = make()
    for block in model.layers:
        block.compile(backend="nvfp4", options={"policy": Policy(first=0, last=0)})
    with interpreted(), warnings.catch_warnings():
        warnings.simplefilter("error", Fp4Warning)
        model(tokens())


def test_a_model_compiled_inside_another_module_is_no_block() -> None:
    class Harness(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = torch.compile(make(), backend="nvfp4", options=OPTIONS)

        def forward(self, x: Tensor) -> Tensor:
            return self.model(x)

    with interpreted() as plans, warnings.catch_warnings():
        warnings.simplefilter("error", Fp4Warning)
        Harness()(tokens())
    assert set(sites_of(plans)) == set(explained())


def test_a_graph_without_parameters_has_no_word_on_patterns() -> None:
    with interpreted(), pytest.warns(Fp4Warning, match="rewrote nothing") as caught:
        function = torch.compile(lambda x: x @ x.t(), backend="nvfp4", options={"policy": Policy()})
        function(torch.randn(32, 32, requires_grad=True))
    assert not [one for one in caught if "pattern" in str(one.message)]
