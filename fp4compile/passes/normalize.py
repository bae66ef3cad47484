"""Batched products of one batch become plain ones: what einsum makes of a linear layer, forward and backward."""

from __future__ import annotations

from torch import fx

from .. import compat
from ..graph import aten, emit


def normalize(graph: fx.Graph) -> None:
    """Replace ``bmm`` of [1, M, K] and [1, K, N] by ``mm`` between a squeeze and an unsqueeze. Changes no value."""
    for node in list(graph.nodes):
        if node.target is not aten.bmm.default or not compat.statically_one(node.meta["val"].shape[0]):
            continue
        with graph.inserting_before(node):
            left, right = (emit(graph, node, aten.squeeze.dim, operand, 0) for operand in node.args)
            product = emit(graph, node, aten.mm.default, left, right)
            batched = emit(graph, node, aten.unsqueeze.default, product, 0)
        node.replace_all_uses_with(batched)
        graph.erase_node(node)
