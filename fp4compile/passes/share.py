"""Quantize once: equal operands of different GEMMs (q, k and v of one input, for instance) become one node.

Changes no value: only operators that always give the same result for the same arguments are merged. Stochastic rounding
of two sites never merges, because its site number is an argument. The amax of a tensor is that of its transpose.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from .. import compat
from ..graph import CASTS, LAYOUT, aten, laid_out

fp4 = torch.ops.fp4

SHARED = (
    LAYOUT
    | CASTS
    | {
        fp4.anchor.default,
        fp4.amax.default,
        fp4.row_amax.default,
        fp4.rotate.default,
        fp4.quantize.default,
        operator.getitem,
    }
)


def share(graph: fx.Graph) -> None:
    """Merge equal layout, cast and quantization nodes of one phase (forward or backward) and one checkpointed
    region."""
    first: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or not _is_shared(node):
            continue
        key = _key(node)
        if key in first:
            node.replace_all_uses_with(first[key])
            graph.erase_node(node)
        else:
            first[key] = node


def _is_shared(node: fx.Node) -> bool:
    """The multiple of an amax, too, but no other product of the model."""
    if node.target is not aten.mul.Tensor:
        return node.target in SHARED
    factor = node.args[0]
    while isinstance(factor, fx.Node) and factor.target is aten.mul.Tensor:
        factor = factor.args[0]
    return isinstance(factor, fx.Node) and factor.target is fp4.amax.default


def _key(node: fx.Node) -> Any:
    region = (node.meta.get("ac_graph_id"), node.meta.get("recompute"), compat.is_tagged_backward(node))
    args = tuple(map(laid_out, node.all_input_nodes)) if node.target is fp4.amax.default else node.args
    return node.target, _hashable(args), _hashable(node.kwargs), region


def _hashable(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_hashable(item) for item in value)
    if isinstance(value, dict):
        return tuple(sorted((key, _hashable(item)) for key, item in value.items()))
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return str(value)
    return type(value).__name__, value
