"""What is decided about one captured graph before it is compiled, and the digest that keys every cache.

The plan is made on the Dynamo graph, where module names are known, and consulted by the passes on the joint graph,
where matmuls are. AOTAutograd's and Inductor's caches see neither names nor decisions, so the digest carries both.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from . import compat
from .decisions import Decision, Decisions
from .modules import clean_name
from .policy import Policy, resolve
from .recipe import ROLES, Recipe


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
    ``decisions`` maps a root (the expression of the module that names are relative to, "" for parameters outside
    any) to its table.
    """

    recipe: Recipe
    calls: list[Call]
    params: dict[int | str, tuple[str, str]]
    decisions: dict[str, Decisions]
    strict: bool
    save: str = "auto"
    digest: str = ""
    outcome: Outcome | None = None
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
        return (f"{root}.{fqn}" if len(self.decisions) > 1 else fqn), decision, table.min_size


def make_plan(
    gm: fx.GraphModule, recipe: Recipe, policy: Policy | Decisions, strict: bool, extra_key: str, save: str = "auto"
) -> GraphPlan:
    """Mark the calls of a Dynamo graph, name its parameters, resolve the policy on the module tree behind it.

    ``extra_key`` is whatever else the compiled code depends on (Inductor settings, lowering); it goes into the digest.
    """
    scope = _Scope()
    params = {key: scope.parameter(source, value) for key, source, value in _parameters(gm)}
    calls = _mark_calls(gm, scope)
    decisions = {
        root: policy if isinstance(policy, Decisions) else resolve(scope.modules[root], policy)
        for root in sorted({root for root, _ in params.values()})
    }
    plan = GraphPlan(recipe, calls, params, decisions, strict, save)
    plan.digest = _digest(plan, extra_key)
    return plan


# --- names -----------------------------------------------------------------------------------------------------------


class _Scope:
    """Splits Dynamo's source paths into (root, name below it), a root being the first module on the way.

    Parameters that no module of the frame owns (handed to a compiled function by themselves, or kept in a plain
    list) are gathered in a module of their own under the root "".
    """

    def __init__(self) -> None:
        self._locals, self._globals = compat.root_scope()
        self.modules: dict[str, nn.Module] = {}

    def module(self, path: str) -> tuple[str, str]:
        """(root, cleaned module name) of a module's source path; ("", "") if it hangs on nothing we see."""
        root, names, _ = self._split(path)
        return (root, clean_name(names)) if root else ("", "")

    def parameter(self, source: str, value: torch.Tensor) -> tuple[str, str]:
        """(root, cleaned parameter name) of a parameter's source path."""
        root, names, module = self._split(source)
        if module is not None and _has_parameter(module, names):
            return root, clean_name(names)
        name = (names if module is None else f"{root}.{names}").replace(".", "_")
        loose = self.modules.setdefault("", nn.Module())
        loose.register_parameter(name, nn.Parameter(torch.empty(value.dim() * [0], device="meta")))
        return "", name

    def _split(self, source: str) -> tuple[str, str, nn.Module | None]:
        origin, path = compat.split_source(source)
        if origin is None:
            return "", path, None
        value: Any = (self._locals if origin[0] == "L" else self._globals).get(origin[1])
        label, parts = [origin[1]], path.split(".") if path else []
        while not isinstance(value, nn.Module) and parts:
            label.append(parts[0])
            value = getattr(value, parts.pop(0), None)
        if not isinstance(value, nn.Module):
            return "", ".".join(label), None
        root = ".".join(label)
        self.modules[root] = value
        return root, ".".join(parts), value


def _has_parameter(module: nn.Module, name: str) -> bool:
    try:
        module.get_parameter(name)
    except AttributeError:
        return False
    return True


def _parameters(gm: fx.GraphModule) -> Iterator[tuple[int | str, str, torch.Tensor]]:
    """(AOT input key, source path, fake value) of every parameter the graph reads, as an input or as an attribute."""
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    for index, node in enumerate(placeholders):
        value = node.meta.get("example_value")
        if isinstance(value, nn.Parameter) or node.type is nn.Parameter:
            yield index, compat.source_name(node) or node.name, value
    for name, parameter in gm.named_parameters():
        yield name, name, parameter


def _mark_calls(gm: fx.GraphModule, scope: _Scope) -> list[Call]:
    """Mark every call of the graph and of the bodies of its higher-order operators; equal calls share a number."""
    numbers: dict[Call, int] = {}

    def visit(module: fx.GraphModule) -> None:
        for node in module.graph.nodes:
            if node.op in ("call_function", "call_method"):
                path = compat.module_path(node)
                root, name = scope.module(path) if path else ("", "")
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
