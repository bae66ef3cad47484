"""From operators to code, late: after partitioning, per node, by the target of the node's device."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from .. import compat
from ..graph import emit, has_row_scales
from . import template
from .ahead import compile_ahead
from .compiled import COMPILED
from .cuda import CUDA, IMPLEMENTATIONS, TUNED
from .emulate import emulate, times_rows
from .fold import TILED, fold, fold_rows
from .produce import produce
from .targets import has_kernels, target_of

SCALED_MM = torch.ops.fp4.scaled_mm.default
PRODUCTS = (SCALED_MM, torch.ops.fp4.decoded_mm.default)
"""Operators that do not only launch kernels: cuBLAS does not run on fake tensors."""


def lower(graph: fx.Graph) -> None:
    """Give every fp4 operator of a partitioned graph the implementation of its device, in place."""
    emulate(graph, [node for node in graph.find_nodes(op="call_function", target=SCALED_MM) if _is_emulated(node)])
    produce(graph, _runs_kernels)
    fold(graph, _runs_kernels)
    fold_rows(graph)
    for node in list(graph.nodes):
        if node.op == "call_function" and str(node.target).startswith("fp4."):
            if node.target is torch.ops.fp4.anchor.default:  # it has held what it had to in the partition
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)
            elif node.target is SCALED_MM and len(node.args) > TILED and node.args[TILED]:
                _to_native(graph, node)
            else:
                _to_twin(node)
    graph.lint()


def _is_emulated(product: fx.Node) -> bool:
    tiled = len(product.args) > TILED and product.args[TILED]
    return not tiled and _runs_kernels(_device(product))


def _runs_kernels(device: torch.device) -> bool:
    return target_of(device).lowering == "kernels"


def _to_twin(node: fx.Node) -> None:
    device, operator = _device(node), node.target
    node.target = _twins(target_of(device).lowering).get(operator, operator)
    if node.target in IMPLEMENTATIONS and operator not in PRODUCTS and device.type == "cuda":
        compile_ahead(node, IMPLEMENTATIONS[node.target], device)


def _twins(lowering: str) -> dict[Any, Any]:
    """Operator -> implementation, of a way of lowering."""
    if lowering == "kernels":
        return TUNED if compat.autotunes_products() else CUDA
    return COMPILED if lowering == "compiled" else {}


def _to_native(graph: fx.Graph, node: fx.Node) -> None:
    """A product of tiled operands becomes the template, which Inductor writes together with what follows: with the
    scales of rows, too."""
    template.register()
    a, a_scales, a_amax, format, b, b_scales, b_amax, _, out_dtype, _ = node.args
    if not has_row_scales(node):
        node.target, node.args = template.OPERATOR, (a, a_scales, a_amax, b, b_scales, b_amax, format, out_dtype)
        return
    with graph.inserting_before(node):
        arguments = (a, a_scales, None, b, b_scales, b_amax, format, torch.float32)
        product = emit(graph, node, template.OPERATOR, *arguments)
        result = times_rows(graph, node, product, a_amax, out_dtype)  # type: ignore[arg-type]
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def implementation(operator: Any, device: torch.device) -> Any:
    """What runs an operator of ``fp4`` eagerly: kernels where a device has them, else its reference."""
    return CUDA.get(operator, operator) if has_kernels(device) else operator


def lowering_key(devices: Iterable[torch.device]) -> str:
    """What of these devices the lowered code depends on."""
    return json.dumps({str(device): target_of(device).reason for device in sorted(set(devices), key=str)})


def _device(node: fx.Node) -> torch.device:
    value = node.meta["val"]
    return (value[0] if isinstance(value, (tuple, list)) else value).device
