"""What is decided about one captured graph before it is compiled, and the digest that keys every cache.

The plan is made on the Dynamo graph, where module names are known, and consulted by the passes on the joint graph,
where matmuls are. AOTAutograd's and Inductor's caches see neither names nor decisions, so the digest carries both.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from . import compat
from .decisions import Decision, Decisions
from .errors import Fp4Warning
from .modules import ModuleTree, ancestors
from .policy import NAMELESS, Policy, decide, decide_nameless, warn_unmatched
from .recipe import ROLES, Recipe
from .scope import Root, SameDecisions, Scope, modules_around, same_object


@dataclasses.dataclass(frozen=True)
class RoleRecord:
    """What became of one GEMM of a site: ``precision`` is "nvfp4", "mxfp4", "bf16" (as the model had it) or
    "absent"."""

    precision: str
    reason: str


@dataclasses.dataclass(frozen=True)
class SiteRecord:
    """One weight matmul ``Y [T, N] = X [T, K] W^T`` of the graph, as the report shows it."""

    site: int
    fqn: str
    kind: str
    shape: Mapping[str, int | str]
    forward: RoleRecord
    dgrad: RoleRecord
    wgrad: RoleRecord

    @property
    def rewritten(self) -> bool:
        return any(getattr(self, role).precision in ("nvfp4", "mxfp4") for role in ROLES)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class LeftMatmul:
    """A matmul that is no site (attention, batched or computed weights) and why it was left alone."""

    fqn: str
    kind: str
    reason: str

    def to_dict(self) -> dict[str, str]:
        return dataclasses.asdict(self)


@dataclasses.dataclass
class Outcome:
    """What the joint passes did to the graph. Absent (None in the plan) when a compiled graph came from a cache."""

    sites: list[SiteRecord] = dataclasses.field(default_factory=list)
    left: list[LeftMatmul] = dataclasses.field(default_factory=list)
    refused: bool = False
    """The graph could not be rewritten and ``strict`` was off; its user has been warned."""


@dataclasses.dataclass(frozen=True)
class Call:
    """A call in the Dynamo graph that may turn into a matmul: the module it runs in and what the user called."""

    root: str
    module: str
    kind: str


@dataclasses.dataclass
class GraphPlan:
    """Names and decisions of one captured graph.

    ``calls[k]`` belongs to the nodes marked k; ``params`` maps an input of the graph to (root, parameter name);
    ``decisions`` maps a root (the label of the module that names are relative to, "" for parameters that no module
    owns) to its table.
    """

    recipe: Recipe
    calls: list[Call]
    params: dict[int | str, tuple[str, str]]
    decisions: dict[str, Decisions]
    strict: bool
    save: str = "auto"
    digest: str = ""
    outcome: Outcome | None = None
    elsewhere: bool = False
    """Whether the modules have weights that are rewritten in another graph: this one is a part of a model."""
    nested: list[LeftMatmul] = dataclasses.field(default_factory=list)
    """Matmuls in bodies of nested compile regions, which come to the passes before the graph around them."""

    def call_of(self, node: fx.Node) -> Call:
        """The user's call behind a joint-graph node; unnamed for nodes that no call was marked for."""
        index = compat.mark_of(node)
        return self.calls[index] if index is not None else Call("", "", str(node.target).split(".")[1])

    def decide(self, node: fx.Node, param: tuple[str, str]) -> tuple[str, Decision, int]:
        """Site name, decision and the policy's ``min_size`` for a matmul node whose weight operand comes from
        ``param``."""
        call = self.call_of(node)
        root, name = param
        table = self.decisions[root]
        fqn, decision = table.lookup(call.module if call.root == root else "", [name])
        return (f"{root}.{fqn}" if root and len(self.decisions) > 1 else fqn), decision, table.min_size


def make_plan(
    gm: fx.GraphModule,
    recipe: Recipe,
    policy: Policy | Decisions,
    strict: bool,
    extra_key: str,
    save: str = "auto",
    shared: bool = True,
) -> GraphPlan:
    """Mark the calls of a Dynamo graph, name its parameters, resolve the policy on the module trees behind it.

    ``extra_key`` is whatever else the compiled code depends on (Inductor settings, lowering); it goes into the digest.
    ``shared``: whether torch may use the graph for other modules for which the same is decided.
    """
    scope = Scope(gm)
    plan = GraphPlan(recipe, _mark_calls(gm, scope), scope.params, _decisions(scope, policy), strict, save)
    plan.digest = _digest(plan, extra_key)
    plan.elsewhere = any(_rewritten_elsewhere(root, plan) for root in scope.roots)
    _guard(scope, policy, shared)
    _warn_of_nameless(scope, plan)
    if isinstance(policy, Policy) and scope.roots:
        warn_unmatched(policy, [root.module for root in scope.roots], scope.nameless)
        _warn_of_parts(scope.roots, policy)
    return plan


# --- calls -----------------------------------------------------------------------------------------------------------


def _mark_calls(gm: fx.GraphModule, scope: Scope) -> list[Call]:
    """Mark every call of the graph and of the bodies of its higher-order operators; equal calls share a number."""
    numbers: dict[Call, int] = {}

    def visit(module: fx.GraphModule) -> None:
        for node in module.graph.nodes:
            if node.op in ("call_function", "call_method"):
                root, name = scope.call(node)
                compat.mark(node, numbers.setdefault(Call(root, name, _kind(node.target)), len(numbers)))
            elif node.op == "get_attr":
                body = getattr(module, str(node.target), None)
                if isinstance(body, fx.GraphModule):
                    visit(body)

    visit(gm)
    return list(numbers)


def _kind(target: Any) -> str:
    """What the user called: linear, matmul, addmm, einsum ..."""
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


# --- decisions -------------------------------------------------------------------------------------------------------


def _decisions(scope: Scope, policy: Policy | Decisions) -> dict[str, Decisions]:
    """Root -> table; what no module owns has one together."""
    tables = {root.label: _decide(policy, root.module) for root in scope.roots}
    if scope.nameless:
        # A plan's decisions are for modules, so nothing in them is meant for these.
        tables[""] = decide_nameless(scope.nameless, policy if isinstance(policy, Policy) else Policy())
    return tables


def _decide(policy: Policy | Decisions, module: nn.Module) -> Decisions:
    return policy if isinstance(policy, Decisions) else decide(module, policy)


def _rewritten_elsewhere(root: Root, plan: GraphPlan) -> bool:
    here, table = set(plan.params.values()), plan.decisions[root.label]
    return any(
        weight.is_weight
        and (root.label, weight.name) not in here
        and set(table.of_parameter(weight.name).precisions()) != {"bf16"}
        for weight in root.tree.parameters
    )


def _guard(scope: Scope, policy: Policy | Decisions, shared: bool) -> None:
    """Keep torch from using the graph where its decisions are not those of the modules in the frame."""
    for borrowed in {id(one.step.value): one for one in scope.borrowed}.values():
        if shared:
            same = SameDecisions(borrowed, functools.partial(_decide, policy))
            compat.guard_on(borrowed.step, same, "same FP4 decisions")
        else:
            compat.guard_on(borrowed.step, same_object(borrowed), "same object")


def _warn_of_nameless(scope: Scope, plan: GraphPlan) -> None:
    left = [
        name
        for name, value in scope.nameless.items()
        if _may_be_weight(value) and plan.decisions[""].of_parameter(name).forward.reason == NAMELESS
    ]
    if left:
        warnings.warn(
            f"no module owns the parameters {', '.join(left)} of this graph: the policy's rules by name (output head, "
            "first and last blocks, patterns) cannot hold for them, so they stay in high precision. To rewrite them, "
            f"name them: Policy(include={['*', *left]!r}); or register them in the module that is compiled.",
            Fp4Warning,
            stacklevel=2,
        )


def _may_be_weight(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or value.dim() >= 2


def _warn_of_parts(roots: list[Root], policy: Policy) -> None:
    """A block that is compiled by itself does not know which it is, so the rule of first and last blocks is lost."""
    for model in modules_around(inside=False)[-1:]:
        tree = ModuleTree(model)
        blocks = tree.find_blocks(policy.blocks)
        first, last = policy.ends(len(blocks))
        names = {root.module: tree.name_of(id(root.module)) for root in roots}
        inside = [one for one, name in names.items() if name and {name, *ancestors(name)} & {*blocks}]
        if inside and first + last:
            warnings.warn(
                f"{type(inside[0]).__name__} is compiled by itself and is in a block of {type(model).__name__}, of "
                f"whose {len(blocks)} blocks the policy keeps the first {first} and the last {last} in bf16; which one "
                "this is cannot be told, so none is kept. Decide for the whole model: plan = "
                "fp4compile.prepare(model), then fp4compile.compile_blocks(model, plan)",
                Fp4Warning,
                stacklevel=2,
            )


# --- cache key -------------------------------------------------------------------------------------------------------


@functools.cache
def package_digest() -> str:
    """Hash of every source file of the package: compiled graphs must not outlive the code that made them."""
    digest = hashlib.sha256()
    for path in package_sources():
        digest.update(str(path.relative_to(_ROOT)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


_ROOT = Path(__file__).parent


def package_sources() -> list[Path]:
    """The files that compiled graphs depend on: code and the templates of kernels."""
    return sorted(path for path in _ROOT.rglob("*") if path.suffix in (".py", ".jinja"))


def _digest(plan: GraphPlan, extra_key: str) -> str:
    facts = [
        package_digest(),
        torch.__version__,
        plan.recipe.to_json(),
        [dataclasses.astuple(call) for call in plan.calls],
        sorted((str(key), *place) for key, place in plan.params.items()),
        {root: table.to_json() for root, table in plan.decisions.items()},
        plan.strict,
        extra_key,
    ]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
