"""From operators to code, late: after partitioning, per node, by the target of the node's device."""

from __future__ import annotations

import json

import torch
from torch import fx

from .compiled import COMPILED
from .targets import target_for


def lower(graph: fx.Graph) -> None:
    """Give every fp4 operator of a partitioned graph the implementation of its device, in place."""
    for node in graph.nodes:
        if node.target in COMPILED and target_for(_device(node).type).lowering == "compiled":
            node.target = COMPILED[node.target]
    graph.lint()


def lowering_key() -> str:
    """What of this machine the lowered code depends on."""
    kinds = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    return json.dumps({kind: target_for(kind).lowering for kind in kinds})


def _device(node: fx.Node) -> torch.device:
    value = node.meta["val"]
    return (value[0] if isinstance(value, (tuple, list)) else value).device
