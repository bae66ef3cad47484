"""Where tensor cores multiply FP4 themselves, operands are quantized with scales in the order tensor cores read.

Changes no value. A product takes part if both operands are quantized in one format and no other product reads their
scales.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .. import compat
from ..graph import fake_value
from ..lowering.targets import multiplies_fp4

fp4 = torch.ops.fp4

_QUANTIZERS: dict[Any, int] = {fp4.quantize.default: 7, fp4.rotate_quantize.default: 8}
"""Operators and how many arguments they have before ``tiled``."""


def tile(graph: fx.Graph, eligible: Callable[[torch.device], bool] = multiplies_fp4) -> None:
    """In place; ``eligible``: the devices whose tensor cores multiply FP4."""
    for node in native_products(graph, eligible):
        node.args = (*node.args, True)
        for scales in _scales(node):
            _tile_operand(scales)


def native_products(graph: fx.Graph, eligible: Callable[[torch.device], bool]) -> set[fx.Node]:
    """The products that tensor cores multiply themselves."""
    products = {
        node
        for node in graph.find_nodes(op="call_function", target=fp4.scaled_mm.default)
        if eligible(node.meta["val"].device) and node.args[3] == node.args[7] != "bf16"
    }
    while True:  # a product that stays as it is keeps its operands, and with them other products, as they are
        mixed = {node for node in products if any(_readers(scales) - products for scales in _scales(node))}
        if not mixed:
            return products
        products -= mixed


def _readers(scales: fx.Node) -> set[fx.Node]:
    """An anchor, and the output of a forward, only keep them for the backward."""
    return {user for user in scales.users if user.target is not fp4.anchor.default and user.op != "output"}


def _scales(product: fx.Node) -> list[fx.Node]:
    return [product.args[1], product.args[5]]  # type: ignore[list-item]


def _tile_operand(scales: fx.Node) -> None:
    assert scales.target is operator.getitem
    quantizer = scales.args[0]
    assert isinstance(quantizer, fx.Node)
    if len(quantizer.args) > _QUANTIZERS[quantizer.target]:
        return  # done for another product
    quantizer.args = (*quantizer.args, True)
    mode = compat.fake_mode(quantizer.meta["val"][0])
    for node in (quantizer, scales):
        node.meta["val"] = fake_value(node, mode)
