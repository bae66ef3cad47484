"""What the passes share: putting a node in another's place with its metadata, and walking through layout operators."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from . import compat

aten = torch.ops.aten
prims = torch.ops.prims

LAYOUT = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten._reshape_alias.default,
        aten.permute.default,
        aten.t.default,
        aten.transpose.int,
        aten.expand.default,
        aten.alias.default,
        aten.detach.default,
        aten.clone.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
    }
)
"""Operators that hand on the values of their first argument in another shape or order."""

CASTS = frozenset({prims.convert_element_type.default, aten._to_copy.default})

PIECES = frozenset({aten.slice.Tensor, aten.select.int, aten.narrow.default})
SPLITS = frozenset({aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int})


def _collectives() -> frozenset[Any]:
    names = ("wait_tensor", "all_gather_into_tensor", "all_gather_into_tensor_out")
    functional = getattr(torch.ops, "_c10d_functional", None)
    return frozenset(getattr(functional, name).default for name in names if hasattr(functional, name))


COLLECTIVES = _collectives()


def emit(graph: fx.Graph, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Call ``target`` at the graph's insertion point, with the metadata of ``like`` and a computed fake value."""
    node = graph.call_function(target, args, kwargs)
    node.meta.update({key: like.meta[key] for key in compat.INHERITED_META if key in like.meta})
    node.meta["val"] = fake_value(node, compat.fake_mode(like.meta["val"]))
    return node


def fake_value(node: fx.Node, mode: Any) -> Any:
    """What a node gives, computed on the fake values of its inputs under their fake-tensor mode."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])
    with mode:
        return node.target(*args, **kwargs)  # type: ignore[operator]


def emit_items(graph: fx.Graph, like: fx.Node, node: fx.Node, count: int) -> list[fx.Node]:
    """The ``count`` results of a node with several."""
    return [emit(graph, like, operator.getitem, node, index) for index in range(count)]


def source(node: fx.Node) -> tuple[fx.Node, str] | None:
    """One step towards where a value comes from: (input, "layout" | "cast" | "piece" | "collective"), or None."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    first = node.args[0]
    if node.target in LAYOUT:
        return first, "layout"
    if node.target in CASTS:
        return first, "cast"
    if node.target in PIECES:
        return first, "piece"
    if node.target in COLLECTIVES:
        return first, "collective"
    if node.target is operator.getitem and first.target in SPLITS:
        return first.all_input_nodes[0], "piece"
    return None


def origins(node: fx.Node) -> Iterator[tuple[fx.Node, str]]:
    """The steps from a node back to its root, nearest first."""
    step = source(node)
    while step is not None:
        yield step
        step = source(step[0])


def root(node: fx.Node) -> fx.Node:
    """Where a value comes from, through layout, casts, pieces and collectives."""
    for origin, _ in origins(node):
        node = origin
    return node


def canonical(node: fx.Node) -> fx.Node:
    """The node that holds the same values, through layout and casts only: equal for two uses of one operand."""
    for origin, step in origins(node):
        if step not in ("layout", "cast"):
            break
        node = origin
    return node


def has_row_scales(product: fx.Node) -> bool:
    """Whether the left operand of a ``scaled_mm`` has a scale a row."""
    amax = product.args[2]
    return isinstance(amax, fx.Node) and amax.meta["val"].dim() == 1


def laid_out(node: fx.Node, copies: bool = True) -> fx.Node:
    """The node whose elements a node has, each once, in another shape or order. ``copies``: also behind a copy that
    orders memory anew."""
    while node.target in LAYOUT and node.target is not aten.expand.default:
        source: fx.Node = node.args[0]  # type: ignore[assignment]
        if node.target is aten.clone.default and not copies and _is_reordered(node, source):
            break
        node = source
    return node


def _is_reordered(copy: fx.Node, source: fx.Node) -> bool:
    return bool(copy.meta["val"].stride() != source.meta["val"].stride())


def transposed(graph: fx.Graph, like: fx.Node, node: fx.Node) -> fx.Node:
    """The transpose of a 2-D node; a transpose that is already there is undone, so that equal operands meet."""
    if node.target is aten.permute.default and node.args[1] in ([1, 0], (1, 0)):
        return node.args[0]  # type: ignore[return-value]
    return emit(graph, like, aten.permute.default, node, [1, 0])


def hoisted(graph: fx.Graph, at: fx.Node, node: fx.Node) -> fx.Node:
    """The values of ``node`` at the insertion point, which is before ``at``: steps that stand later are made again."""
    if node < at:
        return node
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda one: hoisted(graph, at, one))
    return emit(graph, at, node.target, *args, **kwargs)


def without_casts(graph: fx.Graph, like: fx.Node, node: fx.Node) -> fx.Node:
    """The same operand made from its uncast root: autocast's rounding of a weight is not needed before quantization."""
    steps = []
    while (step := source(node)) is not None and step[1] in ("layout", "cast"):
        if step[1] == "layout":
            steps.append(node)
        node = step[0]
    for step_node in reversed(steps):
        node = emit(graph, like, step_node.target, node, *step_node.args[1:], **step_node.kwargs)
    return node


def has_cast(node: fx.Node) -> bool:
    """Whether a cast lies between a node and the values it is a layout of."""
    while (step := source(node)) is not None and step[1] in ("layout", "cast"):
        if step[1] == "cast":
            return True
        node = step[0]
    return False
