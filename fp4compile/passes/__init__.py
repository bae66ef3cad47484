"""The passes over a joint graph, in order. Each is a function of a graph with one job and a file of its own."""

from __future__ import annotations

import logging
import warnings

from torch import fx

from .. import compat
from ..errors import Fp4Error, Fp4Warning
from ..plan import GraphPlan, LeftMatmul, Outcome
from .classify import Left, Site, classify
from .normalize import normalize
from .rewrite import rewrite
from .settle import SettledSite, leave_all, settle
from .share import share

log = logging.getLogger(__name__)


def run_joint_passes(graph: fx.Graph, plan: GraphPlan) -> None:
    """Rewrite one joint (or forward-only) graph in place as the plan says; ``plan.outcome`` tells what was done.

    Raises what ``settle`` raises if ``plan.strict``; otherwise such a graph is left as it is, with one warning.
    """
    if _already_done(graph):
        return
    normalize(graph)
    sites, left = classify(graph, plan.params)
    settled = _settled(graph, sites, plan)
    rewrite(graph, settled)
    share(graph)
    graph.lint()
    plan.outcome = Outcome([one.record for one in settled], [_left_record(item, plan) for item in left])
    log.debug("joint graph after the passes:\n%s", graph)


def _settled(graph: fx.Graph, sites: list[Site], plan: GraphPlan) -> list[SettledSite]:
    try:
        return settle(graph, sites, plan)
    except Fp4Error as error:
        if plan.strict:
            raise
        warnings.warn(f"a graph stays as it is, nothing in it is FP4: {error}", Fp4Warning, stacklevel=2)
        return leave_all(sites, plan, f"the graph could not be rewritten: {error}")


def _left_record(item: Left, plan: GraphPlan) -> LeftMatmul:
    call = plan.call_of(item.node)
    return LeftMatmul(call.module, call.kind, item.reason)


def _already_done(graph: fx.Graph) -> bool:
    """Inductor hands the halves of a partitioned nested region to the hook again: rewritten already, or not joint."""
    joint = any(compat.is_tangent(node) for node in graph.nodes if node.op == "placeholder")
    halves = not joint and any(compat.is_tagged_backward(node) for node in graph.nodes)
    return halves or any(str(node.target).startswith("fp4.") for node in graph.nodes)
