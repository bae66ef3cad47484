"""What a partitioned forward graph keeps for its backward: each tensor, its bytes, and what reads it there."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from .. import compat
from ..graph import CASTS, COLLECTIVES, LAYOUT, PIECES, SPLITS, aten, root
from ..passes.classify import MATMULS

fp4 = torch.ops.fp4

_COPIES = frozenset({aten.clone.default})

_HAND_ON = LAYOUT | CASTS | PIECES | SPLITS | COLLECTIVES | {operator.getitem, fp4.anchor.default}
"""What gives its first argument's values, or some of them: what reads these is behind it."""

NameOf = Callable[[fx.Node], str]


@dataclasses.dataclass(frozen=True)
class SavedTensor:
    """A tensor that the forward keeps for the backward.

    ``what`` it is: the user's call and the operator in it that computed the tensor ("rms_norm rsqrt"), or which of the
    operator's results it is ("scaled_dot_product_attention output"). One name where both are equal; the call alone for
    a matmul ("linear"), the operator alone for this package's others ("fp4.quantize codes"). ``module``: where it was
    computed, named as sites are, "" outside any. ``dtype`` without "torch."; ``shape`` with names for sizes that
    change; ``bytes`` for the sizes of the capture. ``packed``: codes or scales of FP4.

    ``needed_by``: (operation, module) of each operation of the backward that reads the tensor, found through layout
    and casts. Matmuls and this package's operators have their own names: "mm" is a product left in high precision,
    "fp4.rotate" or "fp4.quantize" means that the tensor is quantized in the backward. Other operations have the name of
    the user's call: "silu backward" is its gradient, "silu recomputed" what it gave, computed again in the backward.
    """

    what: str
    module: str
    dtype: str
    shape: tuple[int | str, ...]
    bytes: int
    packed: bool
    needed_by: tuple[tuple[str, str], ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        needed_by = [{"operation": operation, "module": module} for operation, module in self.needed_by]
        return {**dataclasses.asdict(self), "shape": list(self.shape), "needed_by": needed_by}


def saved_tensors(
    forward: fx.GraphModule, backward: fx.GraphModule, kind_of: NameOf, module_of: NameOf
) -> Iterator[SavedTensor]:
    """The tensors kept. Storage is counted once, and not at all if an input holds it anyway.

    ``kind_of``, ``module_of``: the user's call that a node belongs to and the module it runs in, "" for none.
    """
    copies: dict[fx.Node, list[fx.Node]] = {}
    for kept, copy in _handed_over(forward, backward):
        copies.setdefault(_storage(kept), []).append(copy)
    for node, inputs in copies.items():
        if node.op != "placeholder":
            value, source = node.meta["val"], _source(node)
            readers = dict.fromkeys(reader for one in inputs for reader in _readers(one))
            yield SavedTensor(
                what=_what(source, kind_of(source)),
                module=module_of(source),
                dtype=str(value.dtype).removeprefix("torch."),
                shape=tuple(size if isinstance(size, int) else str(size) for size in value.shape),
                bytes=compat.size_hint(value.numel()) * value.element_size(),
                packed=_is_packed(node),
                needed_by=tuple(
                    dict.fromkeys((_operation(reader, kind_of(reader)), module_of(reader)) for reader in readers)
                ),
            )


def _handed_over(forward: fx.GraphModule, backward: fx.GraphModule) -> Iterator[tuple[fx.Node, fx.Node]]:
    """(node of the forward graph, input of the backward) for each tensor between them: the forward's last outputs are
    the backward's inputs but gradients. Names may differ, and sizes are last there and first here."""
    inputs = [node for node in backward.graph.nodes if node.op == "placeholder" and not compat.is_tangent(node)]
    outputs: Any = forward.graph.output_node().args[0]
    kept = outputs[len(outputs) - len(inputs) :]
    return zip(filter(_is_tensor, kept), filter(_is_tensor, inputs), strict=True)


def _is_tensor(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def _storage(node: fx.Node) -> fx.Node:
    """The node that a view looks into."""
    while node.target in LAYOUT and node.target not in _COPIES:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _is_packed(node: fx.Node) -> bool:
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, fx.Node) and source.target in (fp4.quantize.default, fp4.rotate_quantize.default)


# --- names -----------------------------------------------------------------------------------------------------------


def _source(node: fx.Node) -> fx.Node:
    """What computed a node's values; the node itself if it only converts an input."""
    source = root(node)
    while source.target is fp4.anchor.default:  # nothing but a mark
        source = root(source.args[0])  # type: ignore[arg-type]
    return node if source.op == "placeholder" else source


def _what(node: fx.Node, call: str) -> str:
    if node.target is operator.getitem:
        source, index = node.args
        name = _operator(source)  # type: ignore[arg-type]
        of = name if name.startswith("fp4.") else call or name
        return f"{of} {compat.result_name(source.target, index)}"  # type: ignore[union-attr,arg-type]
    name = _operator(node)
    if node.target in MATMULS or node.target is fp4.scaled_mm.default:
        return call or name
    return name if name.startswith("fp4.") or call in ("", name) else f"{call} {name}"


def _operation(node: fx.Node, call: str) -> str:
    name = _operator(node)
    if name.startswith("fp4.") or node.target in MATMULS or not call:
        return name
    return f"{call} {'recomputed' if compat.is_recomputed(node) else 'backward'}"


def _operator(node: fx.Node) -> str:
    """ "mul" for aten.mul.Tensor, "fp4.rotate" for fp4.rotate.default: PyTorch's own operators need no namespace."""
    if node.target in CASTS:
        return "cast"
    namespace, *rest = str(node.target).split(".")
    if not rest:
        return namespace
    return rest[0] if namespace in ("aten", "prims") else f"{namespace}.{rest[0]}"


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """The operations that compute with a node's values."""
    for user in node.users:
        if user.target in _HAND_ON:
            yield from _readers(user)
        elif user.op != "output":
            yield user
