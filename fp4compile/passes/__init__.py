"""The passes over a joint graph, in order. Each is a function of a graph with one job and a file of its own."""

from __future__ import annotations

import logging
import warnings

from torch import fx

from .. import compat
from ..errors import Fp4Error, Fp4Warning
from ..plan import GraphPlan, LeftMatmul, Outcome
from .classify import MATMULS, Site, backward_nodes, classify
from .fuse import fuse
from .normalize import normalize
from .rewrite import rewrite
from .settle import SettledSite, leave_all, settle
from .share import share
from .tile import tile

log = logging.getLogger(__name__)


def run_joint_passes(graph: fx.Graph, plan: GraphPlan) -> None:
    """Rewrite one joint (or forward-only) graph in place as the plan says; ``plan.outcome`` tells what was done.

    Raises what ``settle`` raises if ``plan.strict``; otherwise such a graph is left as it is, with one warning.
    """
    if _already_done(graph):
        return
    if not compat.has_descriptors(graph):
        plan.nested = list(dict.fromkeys([*plan.nested, *_nested(graph, plan)]))
        return
    normalize(graph)
    sites, left = classify(graph, plan.params)
    settled, refused = _settled(graph, sites, plan)
    rewrite(graph, settled, plan.save)
    share(graph)
    fuse(graph)
    tile(graph)
    graph.lint()
    others = [_left_record(item.node, item.reason, plan) for item in left]
    plan.outcome = Outcome([one.record for one in settled], others + plan.nested, refused)
    log.debug("joint graph after the passes:\n%s", graph)


def _settled(graph: fx.Graph, sites: list[Site], plan: GraphPlan) -> tuple[list[SettledSite], bool]:
    """The settled sites, and whether they are left alone because the graph cannot be rewritten."""
    try:
        return settle(graph, sites, plan), False
    except Fp4Error as error:
        if plan.strict:
            raise
        warnings.warn(f"a graph stays as it is, nothing in it is FP4: {error}", Fp4Warning, stacklevel=2)
        return leave_all(sites, plan, f"the graph could not be rewritten: {error}"), True


def _nested(graph: fx.Graph, plan: GraphPlan) -> list[LeftMatmul]:
    """The forward matmuls in the body of a nested compile region, whose inputs cannot be traced to parameters."""
    backward = backward_nodes(graph)
    matmuls = [node for node in graph.nodes if node.target in MATMULS and node not in backward]
    return [_left_record(node, "inside a nested compile region", plan) for node in matmuls]


def _left_record(node: fx.Node, reason: str, plan: GraphPlan) -> LeftMatmul:
    call = plan.call_of(node)
    return LeftMatmul(call.module, call.kind, reason)


def _already_done(graph: fx.Graph) -> bool:
    """Inductor hands the halves of a partitioned nested region to the hook again: rewritten already, or not joint."""
    joint = any(compat.is_tangent(node) for node in graph.nodes if node.op == "placeholder")
    halves = not joint and any(compat.is_tagged_backward(node) for node in graph.nodes)
    return halves or any(str(node.target).startswith("fp4.") for node in graph.nodes)
