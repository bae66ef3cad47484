"""Turn the GEMMs of each site into NVFP4 subgraphs: rotate, amax, quantize, scaled_mm, as plain nodes.

The one pass that changes numbers. It emits every operand afresh; sharing equal ones is the next pass's job.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from .. import compat
from ..formats.rotation import bound_factors
from ..graph import (
    CASTS,
    LAYOUT,
    aten,
    canonical,
    emit,
    emit_items,
    fake_value,
    has_cast,
    hoisted,
    prims,
    transposed,
    without_casts,
)
from ..recipe import GemmSpec, OperandSpec
from .classify import Site, backward_nodes, operands
from .randomness import GraphSeeds
from .settle import SettledSite

fp4 = torch.ops.fp4


class Salt(enum.IntEnum):
    """An operand of a site; tells the noise of a site's operands apart."""

    FORWARD_X = 0
    FORWARD_W = 1
    DGRAD_DY = 2
    DGRAD_W = 3
    WGRAD_DY = 4
    WGRAD_X = 5


_SALTS_PER_SITE = 8


def rewrite(graph: fx.Graph, settled: list[SettledSite], save: str = "auto") -> None:
    """Rewrite every GEMM that has a spec, in place. save: see ``fp4compile.backend.nvfp4``."""
    seeds = GraphSeeds(graph)
    packable = _packable(graph, settled) if save == "packed" else set()
    tangents = (node for node in graph.find_nodes(op="placeholder") if compat.is_tangent(node))
    tangent = next(tangents, None) if save == "recompute" else None
    for number, one in enumerate(settled):
        rewriter = _SiteRewriter(graph, number, one.site, seeds, tangent, packs=number in packable)
        # wgrad puts its X operand before the forward, so the forward is replaced last.
        if "wgrad" in one.specs:
            rewriter.wgrad(one.specs["wgrad"])
        if "dgrad" in one.specs:
            rewriter.dgrad(one.specs["dgrad"])
        if "forward" in one.specs:
            rewriter.forward(one.specs["forward"])
    graph.eliminate_dead_code()


@dataclasses.dataclass
class _SiteRewriter:
    graph: fx.Graph
    number: int
    site: Site
    seeds: GraphSeeds
    tangent: fx.Node | None = None
    """If given: what wgrad's input is made to depend on, so that it is quantized in the backward."""
    packs: bool = False
    """Whether its codes and scales must be kept for the backward."""
    kept: list[fx.Node] = dataclasses.field(default_factory=list)

    def forward(self, spec: GemmSpec) -> None:
        node = self.site.forward
        sides = {self.site.activation: (spec.left, Salt.FORWARD_X), self.site.weight: (spec.right, Salt.FORWARD_W)}
        with self.graph.inserting_before(node):
            if node.target is aten.mm.default:
                result = self._gemm(node, node, sides, spec, node.meta["val"].dtype)
            else:
                product = self._gemm(node, node, sides, spec, torch.float32)
                result = self._add_bias(node, product)
            if self.kept:
                result = emit(self.graph, node, fp4.anchor.default, result, self.kept)
        node.replace_all_uses_with(result)
        self.graph.erase_node(node)

    def dgrad(self, spec: GemmSpec) -> None:
        node = self.site.dgrad
        assert node is not None
        sides = {
            1 - self.site.dgrad_weight: (spec.left, Salt.DGRAD_DY),
            self.site.dgrad_weight: (spec.right, Salt.DGRAD_W),
        }
        with self.graph.inserting_before(node):
            result = self._gemm(node, node, sides, spec, node.meta["val"].dtype)
        node.replace_all_uses_with(result)
        self.graph.erase_node(node)

    def wgrad(self, spec: GemmSpec) -> None:
        node = self.site.wgrad
        assert node is not None
        cast = float32_cast(node)
        sides = {
            1 - self.site.wgrad_activation: (spec.left, Salt.WGRAD_DY),
            self.site.wgrad_activation: (spec.right, Salt.WGRAD_X),
        }
        with self.graph.inserting_before(node):
            result = self._gemm(node, self.site.forward, sides, spec, torch.float32 if cast else node.meta["val"].dtype)
        node.replace_all_uses_with(result)
        self.graph.erase_node(node)
        if cast is not None:
            _drop_cast(result, cast)

    def _gemm(
        self,
        node: fx.Node,
        early: fx.Node,
        sides: dict[int, tuple[OperandSpec, Salt]],
        spec: GemmSpec,
        dtype: torch.dtype,
    ) -> fx.Node:
        """``scaled_mm`` of the two operands of ``node``. The operand that is no gradient is made where ``early``
        stands."""
        arguments: list[Any] = []
        for index, operand in enumerate(operands(node)):
            operand_spec, salt = sides[index]
            at = early if salt is Salt.WGRAD_X else node
            with self.graph.inserting_before(at):
                if salt in (Salt.FORWARD_W, Salt.DGRAD_W) and has_cast(operand):
                    operand = without_casts(self.graph, at, operand)
                operand = hoisted(self.graph, at, operand)
                rows = operand if index == 0 else transposed(self.graph, at, operand)
                if salt is Salt.WGRAD_X and self.tangent is not None:
                    rows = emit(self.graph, at, fp4.anchor.default, rows, [self.tangent])
                arguments += self._quantized(at, rows, operand_spec, spec, salt)
        if sides[1][0].scale == "tensor":
            return emit(self.graph, node, fp4.scaled_mm.default, *arguments, dtype)
        # The left operand may have a scale a row: the product is turned.
        result = emit(self.graph, node, fp4.scaled_mm.default, *arguments[4:], *arguments[:4], dtype)
        result = emit(self.graph, node, aten.permute.default, result, [1, 0])
        return emit(self.graph, node, aten.clone.default, result, memory_format=torch.contiguous_format)

    def _quantized(self, like: fx.Node, rows: fx.Node, operand: OperandSpec, spec: GemmSpec, salt: Salt) -> list[Any]:
        """(codes, scales, amax, format) of a [rows, contraction] operand; the tensor itself for a bf16 operand."""
        new: list[fx.Node] = []
        plain = rows
        if spec.rotate:
            rows = emit(self.graph, like, fp4.rotate.default, rows, spec.rotate, spec.signs)
            new.append(rows)
        if operand.format == "bf16":
            result = [rows, None, None, "bf16"]
        else:
            amax = None
            if operand.format == "nvfp4":
                by_row = operand.scale == "row"
                row_amax = fp4.row_amax.default
                new += [emit(self.graph, like, row_amax, rows)] if by_row else self._amax(like, plain, rows, spec)
                amax = new[-1]
            site = self.number * _SALTS_PER_SITE + salt
            seed = self.seeds.on(rows.meta["val"].device, like) if operand.rounding == "stochastic" else None
            how = (operand.format, list(operand.block or ()), operand.rounding, site if seed is not None else 0)
            quantized = emit(self.graph, like, fp4.quantize.default, rows, amax, seed, *how)
            codes, scales = emit_items(self.graph, like, quantized, 2)
            new += [quantized, codes, scales]
            if self.packs and salt is Salt.WGRAD_X:
                self.kept = [codes, scales]
                for node in self.kept:
                    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            result = [codes, scales, amax, operand.format]
        _prefer_recompute(new)
        return result

    def _amax(self, like: fx.Node, plain: fx.Node, rows: fx.Node, spec: GemmSpec) -> list[fx.Node]:
        """What the tensor scale of ``rows`` is made from, 0-d float32, behind what it is computed from. ``plain``: the
        operand before its rotation."""
        if spec.rotated_scale == "amax":
            return [emit(self.graph, like, fp4.amax.default, rows)]
        nodes = [emit(self.graph, like, fp4.amax.default, _unmoved(plain))]
        for factor in bound_factors(spec.rotate):
            nodes.append(emit(self.graph, like, aten.mul.Tensor, nodes[-1], factor))
        return nodes

    def _add_bias(self, node: fx.Node, product: fx.Node) -> fx.Node:
        """addmm's ``beta * bias + alpha * product`` on the float32 product, rounded once to the matmul's dtype."""
        beta, alpha = node.kwargs.get("beta", 1), node.kwargs.get("alpha", 1)
        if alpha != 1:
            product = emit(self.graph, node, aten.mul.Tensor, product, alpha)
        if beta != 0:
            bias = emit(self.graph, node, prims.convert_element_type.default, node.args[0], torch.float32)
            if beta != 1:
                bias = emit(self.graph, node, aten.mul.Tensor, bias, beta)
            product = emit(self.graph, node, aten.add.Tensor, product, bias)
        return emit(self.graph, node, prims.convert_element_type.default, product, node.meta["val"].dtype)


def _unmoved(rows: fx.Node) -> fx.Node:
    """The tensor that an operand is the transpose of, as another GEMM reads it: their amaxes become one. Not behind an
    anchor: the input of wgrad is quantized in the backward then, but its amax is known in the forward."""
    if rows.target is fp4.anchor.default:
        rows = rows.args[0]  # type: ignore[assignment]
    return rows.args[0] if rows.target is aten.permute.default else rows  # type: ignore[return-value]


def _packable(graph: fx.Graph, settled: list[SettledSite]) -> set[int]:
    """Sites whose wgrad input nothing else in the backward reads: kept packed it is not kept in bf16 beside it.

    Checkpointed regions keep what they say, and a forward that is not rewritten has nothing to hold the codes to.
    """
    backward = backward_nodes(graph)
    wgrads = {one.site.wgrad for one in settled if "wgrad" in one.specs}
    found = set()
    for number, one in enumerate(settled):
        forward = one.site.forward
        if {"forward", "wgrad"} <= one.specs.keys() and "ac_graph_id" not in forward.meta:
            x = canonical(operands(forward)[one.site.activation])
            if all(reader in wgrads for reader in _readers(x) if reader in backward):
                found.add(number)
    return found


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Who reads a node, through layout and casts."""
    for user in node.users:
        if user.target in LAYOUT or user.target in CASTS:
            yield from _readers(user)
        else:
            yield user


def float32_cast(node: fx.Node) -> fx.Node | None:
    """The cast to float32 that alone, behind layout operators, reads a matmul: its result can be float32 from the
    start."""
    if node.meta["val"].dtype is torch.float32:
        return None
    while len(node.users) == 1:
        node = next(iter(node.users))
        if node.target in CASTS and node.meta["val"].dtype is torch.float32:
            return node
        if node.target not in LAYOUT:
            return None
    return None


def _drop_cast(start: fx.Node, cast: fx.Node) -> None:
    node = start
    while (node := next(iter(node.users))) is not cast:
        node.meta["val"] = fake_value(node, compat.fake_mode(node.meta["val"]))
    cast.replace_all_uses_with(cast.args[0])  # type: ignore[arg-type]
    cast.graph.erase_node(cast)


def _prefer_recompute(nodes: list[fx.Node]) -> None:
    """Inside a checkpointed region quantized operands are recomputed like the activations they come from."""
    for node in nodes:
        if "ac_graph_id" in node.meta and not compat.is_tagged_backward(node):
            node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
