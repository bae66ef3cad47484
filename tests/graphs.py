"""Reading and running captured graphs in tests."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from torch import Tensor, fx

from fp4compile import compat

fp4 = torch.ops.fp4


@dataclasses.dataclass(frozen=True)
class Operand:
    """One side of a ``scaled_mm``: how it was quantized and the [rows, contraction] node it was made from. ``growth``:
    what the amax before the rotation is multiplied by; None if the amax is that of the quantized tensor. ``by_row``: it
    has an amax a row."""

    format: str
    block: tuple[int, ...] | None
    rounding: str | None
    rotation: tuple[int, int] | None
    site: int
    growth: float | None
    by_row: bool
    quantize: fx.Node | None
    source: fx.Node


@dataclasses.dataclass(frozen=True)
class Gemm:
    node: fx.Node
    left: Operand
    right: Operand

    @property
    def shape(self) -> tuple[int, ...]:
        """Result and contraction: (M, N, K)."""
        return (*self.node.meta["val"].shape, self.left.source.meta["val"].shape[1])

    @property
    def dtype(self) -> torch.dtype:
        return self.node.meta["val"].dtype


def calls(gm: fx.GraphModule, target: Any) -> list[fx.Node]:
    """Nodes that call one operator, in order."""
    return gm.graph.find_nodes(op="call_function", target=target)


def matmuls(gm: fx.GraphModule) -> int:
    """Plain matmuls that are left."""
    aten = torch.ops.aten
    return sum(len(calls(gm, op)) for op in (aten.mm.default, aten.addmm.default, aten.bmm.default))


def gemms(gm: fx.GraphModule) -> list[Gemm]:
    return [
        Gemm(node, _operand(*node.args[:4]), _operand(*node.args[4:8])) for node in calls(gm, fp4.scaled_mm.default)
    ]


def _operand(values: fx.Node, scales: fx.Node | None, amax: fx.Node | None, format: str) -> Operand:
    quantize = None if scales is None else values.args[0]
    rows = values if quantize is None else quantize.args[0]
    rotated = rows.target is fp4.rotate.default
    growth, by_row = None, False
    if quantize is not None:
        assert values.target is operator.getitem and scales.args == (quantize, 1)
        assert amax is quantize.args[1], "the GEMM must use the amax that the codes were made with"
        if rotated and amax is not None and amax.target is torch.ops.aten.mul.Tensor:
            rows_of_amax, growth = rows.args[0], 1.0
            while amax.target is torch.ops.aten.mul.Tensor:
                growth *= amax.args[1]
                amax = amax.args[0]
        elif amax is not None and amax.target is fp4.row_amax.default:
            by_row = True
            assert amax.args == (rows,), "the amaxes must be those of the rows that are quantized"
        else:
            rows_of_amax = rows
        assert (
            amax is None
            or by_row
            or (amax.target is fp4.amax.default and elements(amax.args[0]) is elements(rows_of_amax))
        )
    return Operand(
        format=format,
        block=None if quantize is None else tuple(quantize.args[4]),
        rounding=None if quantize is None else quantize.args[5],
        rotation=tuple(rows.args[1:]) if rotated else None,
        site=0 if quantize is None else quantize.args[6],
        growth=growth,
        by_row=by_row,
        quantize=quantize,
        source=rows.args[0] if rotated else rows,
    )


def elements(node: fx.Node) -> fx.Node:
    """What a node is a view of."""
    while node.target in (torch.ops.aten.permute.default, torch.ops.aten.view.default, fp4.anchor.default):
        node = node.args[0]
    return node


def example_inputs(gm: fx.GraphModule, below: int) -> list[Any]:
    """Random values with a graph's inputs' strides, the same for equal inputs; integers are 0 to ``below`` - 1."""
    generator = torch.Generator().manual_seed(5)

    def value(fake: Any) -> Any:
        if not isinstance(fake, Tensor):
            return compat.size_hint(fake)
        shape = [compat.size_hint(size) for size in fake.shape]
        if not fake.dtype.is_floating_point:
            return torch.randint(below, shape, generator=generator, dtype=fake.dtype)
        strides = [compat.size_hint(stride) for stride in fake.stride()]
        return torch.empty_strided(shape, strides, dtype=fake.dtype).copy_(
            0.3 * torch.randn(shape, generator=generator)
        )

    return [value(node.meta["val"]) for node in gm.graph.nodes if node.op == "placeholder"]


def run(gm: fx.GraphModule, inputs: list[Any], seed: int = 0) -> list[Any]:
    """What a graph gives, by its operators' reference; the caller's random state stays as it is."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        result = gm(*inputs)
    return list(result) if isinstance(result, (list, tuple)) else [result]


def relative_error(value: Tensor, expected: Tensor) -> float:
    """|value - expected| / |expected|, Frobenius; 0 for two zeros."""
    difference = (value.double() - expected.double()).norm()
    return 0.0 if difference == 0 else float(difference / expected.double().norm())


def same_bits(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(left, right, strict=True)
    )
