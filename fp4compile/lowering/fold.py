"""The amax of a tensor that Inductor computes itself, as plain operators that join the kernel which computes it.

    amax(x) -> float32(amax(amax(|x|, -1)))

The maxima of the rows are one more output of the kernel that writes x, so x is not read for them; a second, small
kernel finds the largest of them. Only on devices with kernels, in a partitioned graph, and only where there is such a
kernel: not for graph inputs nor for what a library, a kernel of this package or a collective gives. ``fp4.amax_both``
stays: it needs the rotation, and reads x once for both.

The bits stay the same although Inductor keeps x in float32 inside that kernel and rounds it to bfloat16 (float16) when
it is stored: rounding is monotone, so the maximum of rounded values is the rounded maximum of the values, and the row
maxima are stored in x's dtype before another kernel reads them. That is why there must be two rows at least, or the
last step would join the first kernel and read the maximum unrounded, and rows of some length, which Inductor does not
unroll into their reader. NaN propagates in every step.

The result of a reduction stays, too: Inductor never joins one reduction with the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import fx

from .. import compat
from ..graph import LAYOUT, aten, emit, laid_out, prims

fp4 = torch.ops.fp4

SHORTEST = 16
"""Elements of the shortest row that is worth it. Inductor unrolls reductions of fewer than 8."""
TILED = 9
"""Where ``tiled`` stands among the arguments of ``scaled_mm``."""


def is_tiled(product: fx.Node) -> bool:
    """Whether a ``scaled_mm`` is of operands for the tensor cores: once cuBLAS's are replaced, a template, whose kernel
    computes what follows it."""
    return len(product.args) > TILED and bool(product.args[TILED])


def fold(graph: fx.Graph, eligible: Callable[[torch.device], bool]) -> None:
    """In place; ``eligible``: the devices with kernels."""
    for node in list(foldable(graph, eligible)):
        producer = _producer(node)
        with graph.inserting_before(node):
            magnitudes = emit(graph, node, aten.abs.default, producer)
            rows = emit(graph, node, aten.amax.default, magnitudes, [-1])
            result = emit(graph, node, aten.amax.default, rows)
            if result.meta["val"].dtype != torch.float32:
                result = emit(graph, node, prims.convert_element_type.default, result, torch.float32)
        node.replace_all_uses_with(result)
        graph.erase_node(node)


def fold_rows(graph: fx.Graph) -> None:
    """The amax of each row in plain operators, in place: on all devices, for there is no kernel of this package.

    They are in the dtype of the rows, not in float32: what rounds them is that they are stored, see above. A cast to
    float32 would be done in the same kernel, before anything is rounded.
    """
    for node in graph.find_nodes(op="call_function", target=fp4.row_amax.default):
        x = node.args[0]
        with graph.inserting_before(node):
            columns = x.meta["val"].shape[1]
            if isinstance(columns, int) and columns == 0:  # there is no maximum of nothing
                result = emit(graph, node, aten.sum.dim_IntList, x, [-1])
            else:
                result = emit(graph, node, aten.amax.default, emit(graph, node, aten.abs.default, x), [-1])
        node.replace_all_uses_with(result)
        graph.erase_node(node)


def foldable(
    graph: fx.Graph, eligible: Callable[[torch.device], bool], is_template: Callable[[fx.Node], bool] = is_tiled
) -> Iterator[fx.Node]:
    """The ``fp4.amax`` nodes that ``fold`` replaces. ``is_template``: which products have an epilogue of their own."""
    for node in graph.find_nodes(op="call_function", target=fp4.amax.default):
        if eligible(node.meta["val"].device) and finds_row_maxima(_producer(node), is_template):
            yield node


def finds_row_maxima(producer: fx.Node, is_template: Callable[[fx.Node], bool] = is_tiled) -> bool:
    """Whether a kernel of Inductor's computes a node and can find the maxima of its rows, too."""
    return _is_generated(producer) and _has_rows(producer.meta["val"]) and not _is_epilogue(producer, is_template)


def _producer(amax: fx.Node) -> fx.Node:
    """What computes the elements of amax's tensor, or copies them."""
    (x,) = amax.args
    assert isinstance(x, fx.Node)
    return laid_out(x, copies=False)


def _is_generated(node: fx.Node) -> bool:
    """Whether Inductor writes a loop over the elements for it."""
    return node.op == "call_function" and torch.Tag.pointwise in getattr(node.target, "tags", ())


def _has_rows(value: torch.Tensor) -> bool:
    """Several contiguous rows of some length: see above. Sizes known at run time alone may be 0."""
    if value.dim() < 2:
        return False
    *others, last = value.shape
    return (
        all(map(compat.has_hint, value.shape))
        and compat.size_hint(last) >= SHORTEST
        and compat.statically_one(value.stride()[-1])
        and all(compat.size_hint(size) > 0 for size in others)
        and any(not compat.statically_one(size) for size in others)
    )


def _is_epilogue(node: fx.Node, is_template: Callable[[fx.Node], bool]) -> bool:
    """Whether a template's kernel computes a node. It would not if that had to find row maxima, too, and the product
    would be written and read again, which is more than a read of the node. What needs a reduction is no epilogue."""
    seen, todo, joins = {node}, [node], False
    while todo:
        for source in todo.pop().all_input_nodes:
            if source in seen:
                continue
            seen.add(source)
            tags = getattr(source.target, "tags", ())
            if torch.Tag.reduction in tags:
                return False
            if source.target is fp4.scaled_mm.default:
                joins = joins or is_template(source)
            elif _is_generated(source) or source.target in LAYOUT:
                todo.append(source)
    return joins
