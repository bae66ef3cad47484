"""What each GEMM of each site gets, before anything is changed: by decision, recipe, shape and dtype."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from .. import compat
from ..decisions import Choice, Decision
from ..errors import UnsupportedDtypeError
from ..plan import GraphPlan, RoleRecord, SiteRecord
from ..recipe import ROLES, GemmSpec, Role
from .classify import Site, operands

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclasses.dataclass(frozen=True)
class SettledSite:
    """A site, its line in the report, and how its GEMMs are done. ``specs`` has no entry for a GEMM left alone."""

    site: Site
    record: SiteRecord
    specs: Mapping[Role, GemmSpec]


def settle(graph: fx.Graph, sites: list[Site], plan: GraphPlan) -> list[SettledSite]:
    """The sites with what they get.

    Raises:
        RewriteError: the plan does not know a site's module or parameter.
        UnsupportedDtypeError: a site that is to be rewritten has a dtype that cannot be quantized.
    """
    has_backward = any(compat.is_tangent(node) for node in graph.nodes if node.op == "placeholder")
    return [_settle(number, site, plan, has_backward) for number, site in enumerate(sites)]


def leave_all(sites: list[Site], plan: GraphPlan, reason: str) -> list[SettledSite]:
    """The sites of a graph that could not be rewritten: every GEMM as it is, for one reason."""
    records: dict[str, RoleRecord] = dict.fromkeys(ROLES, RoleRecord("bf16", reason))
    return [
        SettledSite(site, _record(number, site.param[1], site, plan, records), {}) for number, site in enumerate(sites)
    ]


def _settle(number: int, site: Site, plan: GraphPlan, has_backward: bool) -> SettledSite:
    fqn, decision, min_size = plan.decide(site.forward, site.param)
    decision = _by_shape(decision, site, min_size)
    specs: dict[Role, GemmSpec] = {}
    records: dict[str, RoleRecord] = {}
    for role in ROLES:
        choice = decision.choice(role)
        spec = plan.recipe.gemm(role, choice.precision)
        if getattr(site, role) is None:
            records[role] = RoleRecord("absent", _absence(site, role, has_backward))
        elif spec is None:
            recipe_says = choice.precision == "recipe"
            records[role] = RoleRecord("bf16", "the recipe keeps this GEMM in bf16" if recipe_says else choice.reason)
        else:
            specs[role] = spec
            records[role] = RoleRecord(spec.precision, choice.reason)
    if specs:
        _check_dtype(fqn, site)
    return SettledSite(site, _record(number, fqn, site, plan, records), specs)


def _absence(site: Site, role: Role, has_backward: bool) -> str:
    if site.unclear:
        return "not told apart from the other gradient"
    if not has_backward:
        return "the graph has no backward"
    return "the input needs no gradient" if role == "dgrad" else "the weight needs no gradient"


def _check_dtype(fqn: str, site: Site) -> None:
    dtypes = {operand.meta["val"].dtype for operand in operands(site.forward)}
    bad = sorted(str(dtype) for dtype in dtypes if dtype not in DTYPES)
    if bad:
        raise UnsupportedDtypeError(
            f"site {fqn!r}: dtype {', '.join(bad)} cannot be quantized to FP4. Convert the model to bfloat16, float16 "
            f"or float32, keep the site out with Policy(skip=[{fqn!r}]), or pass options={{'strict': False}} to leave "
            "the graph as it is."
        )


def _by_shape(decision: Decision, site: Site, min_size: int) -> Decision:
    """The decision with small sites kept in bf16, except where an override names a format."""
    shape = site_shape(site)
    small = [
        f"{name} = {shape[name]}" for name in ("K", "N") if isinstance(shape[name], int) and shape[name] < min_size
    ]
    if not small:
        return decision
    kept = Choice("bf16", f"{' and '.join(small)} is below the policy's min_size {min_size}")
    return Decision(*(kept if choice.precision == "recipe" else choice for choice in map(decision.choice, ROLES)))


def site_shape(site: Site) -> dict[str, Any]:
    """T tokens, K input features, N output features of a site, as the graph has them (possibly symbolic)."""
    left, right = (operand.meta["val"].shape for operand in operands(site.forward))
    if site.weight == 1:
        return {"T": left[0], "K": left[1], "N": right[1]}
    return {"T": right[1], "K": left[1], "N": left[0]}


def _record(number: int, fqn: str, site: Site, plan: GraphPlan, roles: Mapping[str, RoleRecord]) -> SiteRecord:
    shape = {name: size if isinstance(size, int) else str(size) for name, size in site_shape(site).items()}
    return SiteRecord(number, fqn, plan.call_of(site.forward).kind, shape, **roles)
