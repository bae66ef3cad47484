"""The passes over a joint graph, in order. Each is a function of a graph with one job and a file of its own."""

from __future__ import annotations

import logging

from torch import fx

from .. import compat
from ..plan import GraphPlan
from .classify import classify
from .normalize import normalize
from .rewrite import rewrite
from .share import share

log = logging.getLogger(__name__)


def run_joint_passes(graph: fx.Graph, plan: GraphPlan) -> None:
    """Rewrite one joint (or forward-only) graph in place as the plan says; ``plan.outcome`` tells what was done."""
    if _already_done(graph):
        return
    normalize(graph)
    sites, left = classify(graph, plan.params)
    plan.outcome = rewrite(graph, sites, left, plan)
    share(graph)
    graph.lint()
    log.debug("joint graph after the passes:\n%s", graph)


def _already_done(graph: fx.Graph) -> bool:
    """Inductor hands the halves of a partitioned nested region to the hook again: rewritten already, or not joint."""
    joint = any(compat.is_tangent(node) for node in graph.nodes if node.op == "placeholder")
    halves = not joint and any(compat.is_tagged_backward(node) for node in graph.nodes)
    return halves or any(str(node.target).startswith("fp4.") for node in graph.nodes)
