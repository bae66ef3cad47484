"""Bytes that a partitioned forward graph keeps for its backward."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from .. import compat
from ..graph import LAYOUT, aten

_COPIES = frozenset({aten.clone.default})


def saved_bytes(forward: fx.GraphModule, backward: fx.GraphModule) -> tuple[int, int]:
    """(bytes, bytes of packed FP4 among them). Storage is counted once, and not at all if an input holds it anyway."""
    total = packed = 0
    for node in _saved(forward, backward):
        size = _bytes(node.meta["val"])
        total += size
        packed += size if _is_packed(node) else 0
    return total, packed


def _saved(forward: fx.GraphModule, backward: fx.GraphModule) -> Iterator[fx.Node]:
    """The nodes of the forward graph whose storage the backward reads: what its last outputs are, all but gradients."""
    inputs = [node for node in backward.graph.nodes if node.op == "placeholder" and not compat.is_tangent(node)]
    outputs: Any = forward.graph.output_node().args[0]
    kept = outputs[len(outputs) - len(inputs) :]
    storages = dict.fromkeys(_storage(node) for node in kept if isinstance(node, fx.Node))
    return (node for node in storages if node.op != "placeholder" and isinstance(node.meta.get("val"), torch.Tensor))


def _storage(node: fx.Node) -> fx.Node:
    """The node that a view looks into."""
    while node.target in LAYOUT and node.target not in _COPIES:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _is_packed(node: fx.Node) -> bool:
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, fx.Node) and source.target is torch.ops.fp4.quantize.default


def _bytes(value: torch.Tensor) -> int:
    return compat.size_hint(value.numel()) * value.element_size()
