"""From operators to code, late: after partitioning, per node, by the target of the node's device."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from .. import compat
from ..errors import ConfigError, Fp4Warning
from ..graph import emit, has_row_scales
from . import template
from .ahead import compile_ahead
from .compiled import COMPILED
from .cuda import CUDA, IMPLEMENTATIONS, TUNED
from .emulate import emulate, times_rows
from .fold import fold, fold_rows, is_tiled
from .produce import produce
from .product import Choice, Product, choose_product, product_of
from .targets import capability_of, has_kernels, multiplies_fp4, target_of

log = logging.getLogger(__name__)

SCALED_MM = torch.ops.fp4.scaled_mm.default
PRODUCTS = (SCALED_MM, torch.ops.fp4.decoded_mm.default)
"""Operators that do not only launch kernels: cuBLAS does not run on fake tensors."""


def refuse_product(graph: fx.Graph, product: str) -> None:
    """Raise where an option ``product`` other than "auto" means nothing: no tensor core multiplies FP4."""
    devices = {_device(node) for node in graph.find_nodes(op="call_function", target=SCALED_MM)}
    for device in sorted(devices, key=str):
        if product != "auto" and not multiplies_fp4(device):
            raise ConfigError(
                f"option 'product' is {product!r}, but no tensor core of {device} multiplies FP4 "
                f"({target_of(device).reason}); leave it 'auto', or use a GPU that does, such as B200"
            )


def lower(graph: fx.Graph, product: str = "auto") -> None:
    """Give every fp4 operator of a partitioned graph the implementation of its device, in place.

    product: what multiplies packed operands where tensor cores do, the option of that name.
    """
    emulate(graph, [node for node in graph.find_nodes(op="call_function", target=SCALED_MM) if _is_emulated(node)])
    templates = _multiply(graph, product)
    produce(graph, _runs_kernels)
    fold(graph, _runs_kernels)
    fold_rows(graph)
    for node in list(graph.nodes):
        if node.op == "call_function" and str(node.target).startswith("fp4."):
            if node.target is torch.ops.fp4.anchor.default:  # it has held what it had to in the partition
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)
            elif node in templates:
                _to_native(graph, node, templates[node])
            else:
                _to_twin(node)
    graph.lint()


def _multiply(graph: fx.Graph, asked: str) -> dict[fx.Node, str]:
    """Choose what multiplies tiled operands. cuBLAS is put in place: what follows it is a kernel like any other. The
    rest is given back, with what each gets: a template has an epilogue, which nothing may be taken from before."""
    templates: dict[fx.Node, str] = {}
    unfit: dict[str, None] = {}
    for node in filter(is_tiled, graph.find_nodes(op="call_function", target=SCALED_MM)):
        product, choice = _choose(node, asked)
        if choice.unfit and asked == "cublas":
            unfit[f"{product} ({choice.reason})"] = None
        if choice.kernel == "cublas":
            _to_native(graph, node, choice.kernel)
        else:
            templates[node] = choice.kernel
    if unfit:
        warnings.warn(
            f"option 'product' is 'cublas', but the Triton template multiplies what cuBLAS cannot: {'; '.join(unfit)}",
            Fp4Warning,
            stacklevel=2,
        )
    return templates


def _choose(node: fx.Node, asked: str) -> tuple[Product, Choice]:
    """A product of tiled operands, and what multiplies it."""
    product, capability = product_of(node), capability_of(_device(node))
    assert capability is not None
    major, minor = map(int, (torch.version.cuda or "0.0").split(".")[:2])
    choice = choose_product(asked, product, capability, (major, minor), compat.autotunes_products())
    log.debug("product %s: %s (%s)", product, choice.kernel, choice.reason)
    return product, choice


def _is_emulated(product: fx.Node) -> bool:
    return not is_tiled(product) and _runs_kernels(_device(product))


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


def _to_native(graph: fx.Graph, node: fx.Node, kernel: str) -> None:
    """A product of tiled operands becomes one operator for the template, which Inductor writes together with what
    follows (with the scales of rows, too), and for cuBLAS."""
    template.register()
    a, a_scales, a_amax, format, b, b_scales, b_amax, _, out_dtype, _ = node.args
    if not has_row_scales(node):
        arguments = (a, a_scales, a_amax, b, b_scales, b_amax, format, out_dtype, kernel)
        node.target, node.args = template.OPERATOR, arguments
        return
    with graph.inserting_before(node):
        arguments = (a, a_scales, None, b, b_scales, b_amax, format, torch.float32, kernel)
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
