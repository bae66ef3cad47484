"""Merge what a generated kernel does in one read: rotation with what reads it, the two amaxes of one tensor.

Changes no value. Only on devices with kernels: elsewhere the operators stay apart, each with its own implementation.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from .. import compat
from ..graph import aten, emit, emit_items
from ..lowering.targets import has_kernels
from ..ops.library import BLOCKS

fp4 = torch.ops.fp4


def fuse(graph: fx.Graph, eligible: Callable[[torch.device], bool] = has_kernels) -> None:
    """In place; ``eligible``: the devices to fuse on."""
    for node in graph.find_nodes(op="call_function", target=fp4.rotate.default):
        if eligible(node.meta["val"].device) and _has_kernel(node):
            _fuse_rotation(graph, node)
    for node in graph.find_nodes(op="call_function", target=fp4.rotated_amax.default):
        _pair_amaxes(graph, node)
    graph.eliminate_dead_code()


def _has_kernel(rotation: fx.Node) -> bool:
    """Kernels rotate by groups of a block. Another size is better rotated once than by each reader."""
    formats = {reader.args[3] for reader in rotation.users if reader.target is fp4.quantize.default}
    return all(rotation.args[1] == BLOCKS[format] for format in formats)  # type: ignore[index]


def _fuse_rotation(graph: fx.Graph, rotation: fx.Node) -> None:
    """The readers of a rotation rotate themselves. A reader that needs the rotated tensor keeps it."""
    x, size, signs = rotation.args
    for reader in list(rotation.users):
        with graph.inserting_before(reader):
            if reader.target is fp4.amax.default:
                fused = emit(graph, reader, fp4.rotated_amax.default, x, size, signs)
            elif reader.target is fp4.quantize.default and reader.args[4][0] == 1:  # type: ignore[index]
                _, amax, seed, format, _, rounding, site = reader.args
                arguments = (x, amax, seed, format, rounding, site, size, signs)
                fused = emit(graph, reader, fp4.rotate_quantize.default, *arguments)
            else:
                continue
        reader.replace_all_uses_with(fused)
        graph.erase_node(reader)


def _pair_amaxes(graph: fx.Graph, rotated: fx.Node) -> None:
    """amax(x) and rotated_amax(x^T) of one phase and region: one read of x."""
    x_t, size, signs = rotated.args
    assert isinstance(x_t, fx.Node)
    if x_t.target is not aten.permute.default:
        return
    x = x_t.args[0]
    assert isinstance(x, fx.Node)
    plain = next(
        (user for user in x.users if user.target is fp4.amax.default and _region(user) == _region(rotated)), None
    )
    if plain is None:
        return
    first = min(plain, rotated)
    with graph.inserting_before(first):
        both = emit(graph, first, fp4.amax_both.default, x, size, signs)
        amaxes = emit_items(graph, first, both, 2)
    for node, amax in zip((plain, rotated), amaxes, strict=True):
        node.replace_all_uses_with(amax)
        graph.erase_node(node)


def _region(node: fx.Node) -> tuple[object, ...]:
    return node.meta.get("ac_graph_id"), node.meta.get("recompute"), compat.is_tagged_backward(node)
