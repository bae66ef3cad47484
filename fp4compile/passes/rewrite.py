"""Turn the GEMMs of each site into NVFP4 subgraphs: rotate, amax, quantize, scaled_mm, as plain nodes.

The one pass that changes numbers. It emits every operand afresh; sharing equal ones is the next pass's job.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from .. import compat
from ..decisions import Choice, Decision
from ..errors import UnsupportedDtypeError
from ..graph import CASTS, LAYOUT, aten, emit, emit_items, fake_value, has_cast, hoisted, prims, transposed, without_casts
from ..plan import GraphPlan, LeftMatmul, Outcome, RoleRecord, SiteRecord
from ..recipe import ROLES, GemmSpec, OperandSpec
from .classify import Left, Site, operands
from .randomness import GraphSeeds

fp4 = torch.ops.fp4

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_SALTS_PER_SITE = 8


def rewrite(graph: fx.Graph, sites: list[Site], left: list[Left], plan: GraphPlan) -> Outcome:
    """Rewrite every GEMM that the policy and the recipe give to FP4; report every site and every matmul left alone."""
    outcome = Outcome(left=[_left_record(item, plan) for item in left])
    seeds = GraphSeeds(graph)
    for number, site in enumerate(sites):
        fqn, decision, min_size = plan.decide(site.forward, site.param)
        decision = _by_shape(decision, site, min_size)
        outcome.sites.append(_SiteRewriter(graph, number, fqn, site, decision, plan, seeds).run())
    graph.eliminate_dead_code()
    return outcome


@dataclasses.dataclass
class _SiteRewriter:
    graph: fx.Graph
    number: int
    fqn: str
    site: Site
    decision: Decision
    plan: GraphPlan
    seeds: GraphSeeds

    def run(self) -> SiteRecord:
        specs = {role: self._spec(role) for role in ROLES}
        if any(spec for spec, _ in specs.values()):
            problem = self._unsupported()
            if problem:
                specs = {role: (None, RoleRecord("bf16", problem)) for role in specs}
        record = self._record({role: entry for role, (_, entry) in specs.items()})
        for role in (
            "wgrad",
            "dgrad",
            "forward",
        ):  # wgrad places its X operand before the forward, which must still stand
            spec = specs[role][0]
            if spec is not None:
                getattr(self, f"_{role}")(spec)
        return record

    # --- what each GEMM gets

    def _spec(self, role: str) -> tuple[GemmSpec | None, RoleRecord]:
        node: fx.Node | None = getattr(self.site, role)
        if node is None:
            return None, RoleRecord("absent", self._absence(role))
        choice: Choice = getattr(self.decision, role)
        if choice.precision == "bf16":
            return None, RoleRecord("bf16", choice.reason)
        spec = self.plan.recipe.gemm(role, None if choice.precision == "recipe" else choice.precision)  # type: ignore[arg-type]
        if spec is None:
            return None, RoleRecord("bf16", "the recipe keeps this GEMM in bf16")
        return spec, RoleRecord(spec.precision, choice.reason)

    def _absence(self, role: str) -> str:
        if self.site.unclear:
            return "not told apart from the other gradient"
        if not any(compat.is_tangent(node) for node in self.graph.nodes if node.op == "placeholder"):
            return "the graph has no backward"
        return "the input needs no gradient" if role == "dgrad" else "the weight needs no gradient"

    def _unsupported(self) -> str | None:
        """Why the site's dtype cannot be rewritten; raised in strict mode."""
        bad = {
            str(operand.meta["val"].dtype)
            for operand in operands(self.site.forward)
            if operand.meta["val"].dtype not in DTYPES
        }
        if not bad:
            return None
        problem = f"dtype {', '.join(sorted(bad))} cannot be quantized to FP4"
        if self.plan.strict:
            raise UnsupportedDtypeError(
                f"site {self.fqn!r}: {problem}. Convert the model to bfloat16, float16 or float32, keep the site out "
                f"with Policy(skip=[{self.fqn!r}]), or pass options={{'strict': False}} to leave it as it is."
            )
        return problem

    def _record(self, roles: dict[str, RoleRecord]) -> SiteRecord:
        call = self.plan.call_of(self.site.forward)
        return SiteRecord(self.number, self.fqn, call.kind, _readable(site_shape(self.site)), **roles)

    # --- the three GEMMs

    def _forward(self, spec: GemmSpec) -> None:
        node = self.site.forward
        sides = {self.site.activation: (spec.left, 0), self.site.weight: (spec.right, 1)}
        with self.graph.inserting_before(node):
            if node.target is aten.mm.default:
                result = self._gemm(node, node, sides, spec, node.meta["val"].dtype)
            else:
                product = self._gemm(node, node, sides, spec, torch.float32)
                result = self._add_bias(node, product)
        node.replace_all_uses_with(result)
        self.graph.erase_node(node)

    def _dgrad(self, spec: GemmSpec) -> None:
        node = self.site.dgrad
        assert node is not None
        sides = {1 - self.site.dgrad_weight: (spec.left, 2), self.site.dgrad_weight: (spec.right, 3)}
        with self.graph.inserting_before(node):
            result = self._gemm(node, node, sides, spec, node.meta["val"].dtype)
        node.replace_all_uses_with(result)
        self.graph.erase_node(node)

    def _wgrad(self, spec: GemmSpec) -> None:
        node = self.site.wgrad
        assert node is not None
        cast = float32_cast(node)
        sides = {1 - self.site.wgrad_activation: (spec.left, 4), self.site.wgrad_activation: (spec.right, 5)}
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
        sides: dict[int, tuple[OperandSpec, int]],
        spec: GemmSpec,
        dtype: torch.dtype,
    ) -> fx.Node:
        """``scaled_mm`` of the two operands of ``node``. The operand that is no gradient is made where ``early``
        stands."""
        arguments: list[Any] = []
        for index, operand in enumerate(operands(node)):
            operand_spec, salt = sides[index]
            at = early if salt == 5 else node
            with self.graph.inserting_before(at):
                if salt in (1, 3) and has_cast(operand):
                    operand = without_casts(self.graph, at, operand)
                operand = hoisted(self.graph, at, operand)
                rows = operand if index == 0 else transposed(self.graph, at, operand)
                arguments += self._quantized(at, rows, operand_spec, spec, salt)
        return emit(self.graph, node, fp4.scaled_mm.default, *arguments, dtype)

    def _quantized(self, like: fx.Node, rows: fx.Node, operand: OperandSpec, spec: GemmSpec, salt: int) -> list[Any]:
        """(codes, scales, amax, format) of a [rows, contraction] operand; the tensor itself for a bf16 operand."""
        new: list[fx.Node] = []
        if spec.rotate:
            rows = emit(self.graph, like, fp4.rotate.default, rows, spec.rotate, spec.signs)
            new.append(rows)
        if operand.format == "bf16":
            result = [rows, None, None, "bf16"]
        else:
            amax = emit(self.graph, like, fp4.amax.default, rows) if operand.format == "nvfp4" else None
            site = self.number * _SALTS_PER_SITE + salt
            seed = self.seeds.on(rows.meta["val"].device, like) if operand.rounding == "stochastic" else None
            how = (operand.format, list(operand.block or ()), operand.rounding, site if seed is not None else 0)
            quantized = emit(self.graph, like, fp4.quantize.default, rows, amax, seed, *how)
            codes, scales = emit_items(self.graph, like, quantized, 2)
            new += [node for node in (amax, quantized, codes, scales) if node is not None]
            result = [codes, scales, amax, operand.format]
        _prefer_recompute(new)
        return result

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


def site_shape(site: Site) -> dict[str, Any]:
    """T tokens, K input features, N output features of a site, as the graph has them (possibly symbolic)."""
    left, right = (operand.meta["val"].shape for operand in operands(site.forward))
    if site.weight == 1:
        return {"T": left[0], "K": left[1], "N": right[1]}
    return {"T": right[1], "K": left[1], "N": left[0]}


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


def _by_shape(decision: Decision, site: Site, min_size: int) -> Decision:
    """The decision with small sites kept in bf16, except where an override names a format."""
    shape = site_shape(site)
    small = [
        f"{name} = {shape[name]}" for name in ("K", "N") if isinstance(shape[name], int) and shape[name] < min_size
    ]
    if not small:
        return decision
    kept = Choice("bf16", f"{' and '.join(small)} is below the policy's min_size {min_size}")
    return Decision(*(kept if choice.precision == "recipe" else choice for choice in map(decision.choice, ROLES)))


def _readable(shape: dict[str, Any]) -> dict[str, int | str]:
    return {name: size if isinstance(size, int) else str(size) for name, size in shape.items()}


def _left_record(item: Left, plan: GraphPlan) -> LeftMatmul:
    call = plan.call_of(item.node)
    return LeftMatmul(call.module, call.kind, item.reason)
