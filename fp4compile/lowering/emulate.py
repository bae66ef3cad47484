"""Products where no tensor core multiplies FP4: operands are decoded to bfloat16 once each, whoever reads them.

Changes no value. In a partitioned graph it is known which codes are kept for the backward. All others only exist to be
decoded, so their quantizer writes the values at once: the bytes of the codes are never written nor read.

A product whose left operand has a scale a row is one without, in float32, and a multiplication of its rows in plain
operators, which Inductor joins with what follows: the same operations in the same order as the operator's.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ..formats import nvfp4
from ..graph import aten, emit, has_row_scales, prims

fp4 = torch.ops.fp4

_VALUES: dict[Any, Any] = {
    fp4.quantize.default: fp4.quantize_decoded.default,
    fp4.rotate_quantize.default: fp4.rotate_quantize_decoded.default,
}
"""Quantizer -> what gives the decoded values of its codes."""


def emulate(graph: fx.Graph, products: list[fx.Node]) -> None:
    """Rewrite these ``scaled_mm`` nodes in place, but for operands whose dtype is not one of products in bfloat16."""
    emulator = _Emulator(graph, [node for node in products if all(map(_is_bfloat16, _operands(node)))])
    emulator.run()


def _operands(product: fx.Node) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """(tensor, scales, amax, format) of both."""
    return product.args[:4], product.args[4:8]


def _is_bfloat16(operand: tuple[Any, ...]) -> bool:
    return operand[1] is not None or operand[0].meta["val"].dtype == torch.bfloat16


def _is_transpose(node: fx.Node) -> bool:
    return node.target is aten.permute.default and list(node.args[1]) == [1, 0]  # type: ignore[arg-type]


def times_rows(graph: fx.Graph, like: fx.Node, product: fx.Node, amaxes: fx.Node, dtype: torch.dtype) -> fx.Node:
    """A float32 product [M, N] times what the amaxes of its left operand's rows say, in ``dtype``: formats/nvfp4.py,
    ``row_factors``."""

    def call(target: Any, *arguments: Any) -> fx.Node:
        return emit(graph, like, target, *arguments)

    if amaxes.meta["val"].dtype != torch.float32:
        amaxes = call(prims.convert_element_type.default, amaxes, torch.float32)
    factors = call(aten.unsqueeze.default, call(aten.mul.Tensor, amaxes, nvfp4.ROW_FACTOR), 1)
    result = call(aten.mul.Tensor, product, factors)
    return result if dtype == torch.float32 else call(prims.convert_element_type.default, result, dtype)


class _Emulator:
    def __init__(self, graph: fx.Graph, products: list[fx.Node]) -> None:
        self._graph = graph
        self._products = products
        self._decoded: dict[fx.Node, fx.Node] = {}

    def run(self) -> None:
        for product in self._products:
            (a, b), out_dtype = _operands(product), product.args[8]
            with self._graph.inserting_before(product):
                values = [self._values(product, *operand) for operand in (a, b)]
                if has_row_scales(product):
                    plain = (values[0], None, values[1], b[2], torch.float32)
                    new = emit(self._graph, product, fp4.decoded_mm.default, *plain)
                    new = times_rows(self._graph, product, new, a[2], out_dtype)  # type: ignore[arg-type]
                else:
                    arguments = (values[0], a[2], values[1], b[2], out_dtype)
                    new = emit(self._graph, product, fp4.decoded_mm.default, *arguments)
            product.replace_all_uses_with(new)
        for product in reversed(self._products):
            self._graph.erase_node(product)
        self._graph.eliminate_dead_code()

    def _values(self, product: fx.Node, codes: fx.Node, scales: fx.Node | None, amax: Any, format: str) -> fx.Node:
        if scales is None:
            return codes
        if codes not in self._decoded:
            self._decoded[codes] = self._decode(product, codes, scales, format)
        return self._decoded[codes]

    def _decode(self, product: fx.Node, codes: fx.Node, scales: fx.Node, format: str) -> fx.Node:
        quantizer = codes.args[0] if codes.target is operator.getitem else None
        if isinstance(quantizer, fx.Node) and quantizer.target in _VALUES and self._only_products_read(quantizer):
            with self._graph.inserting_before(quantizer):
                return self._quantize(quantizer, codes)
        return emit(self._graph, product, fp4.decode.default, codes, scales, format, torch.bfloat16)

    def _only_products_read(self, quantizer: fx.Node) -> bool:
        return all(reader in self._products for result in quantizer.users for reader in result.users)

    def _quantize(self, quantizer: fx.Node, codes: fx.Node) -> fx.Node:
        x, *rest = quantizer.args
        assert isinstance(x, fx.Node)
        square = quantizer.target is fp4.quantize.default and rest[3][0] != 1  # type: ignore[index]
        # The same both ways, and cuBLAS reads both; but noise follows the place of an element.
        if square and rest[1] is None and _is_transpose(x):
            values = emit(self._graph, codes, _VALUES[quantizer.target], x.args[0], *rest)
            rows = x.meta["val"].shape[0]
            if isinstance(rows, torch.SymInt) or values.meta["val"].shape[1] != rows:  # what only fills up a block
                values = emit(self._graph, codes, aten.slice.Tensor, values, 1, 0, rows)
            return emit(self._graph, codes, aten.permute.default, values, [1, 0])
        return emit(self._graph, codes, _VALUES[quantizer.target], x, *rest)
