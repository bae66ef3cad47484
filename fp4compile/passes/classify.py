"""Which matmuls of a graph are the forward, dgrad and wgrad GEMM of a weight, and which are none.

Dataflow decides: a node is backward if it depends on an incoming gradient; a forward matmul is a site if exactly
one operand comes from a parameter; a backward matmul is dgrad if it reads the site's weight, wgrad if it reads the
site's input. Autograd's sequence numbers only choose between sites with the same operands, because they are absent
or wrong inside a user's autograd.Function.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from torch import fx

from .. import compat
from ..graph import aten, canonical, root

OPERANDS = {aten.mm.default: (0, 1), aten.addmm.default: (1, 2)}
"""Matmuls that can be rewritten, and where their operands stand."""

BATCHED = {aten.bmm.default: (0, 1), aten.baddbmm.default: (1, 2)}
if hasattr(aten, "_grouped_mm"):
    BATCHED[aten._grouped_mm.default] = (0, 1)

MATMULS = OPERANDS | BATCHED

ATTENTION = frozenset(
    getattr(aten, name).default
    for name in (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    )
    if hasattr(aten, name)
)


@dataclasses.dataclass
class Site:
    """A weight matmul found in the graph. ``weight`` and ``activation`` are operand positions (0 left, 1 right)."""

    forward: fx.Node
    weight: int
    param: tuple[str, str]
    dgrad: fx.Node | None = None
    wgrad: fx.Node | None = None
    dgrad_weight: int = 1
    wgrad_activation: int = 1
    unclear: bool = False

    @property
    def activation(self) -> int:
        return 1 - self.weight

    @property
    def weight_source(self) -> fx.Node:
        return canonical(operands(self.forward)[self.weight])

    @property
    def activation_source(self) -> fx.Node:
        return canonical(operands(self.forward)[self.activation])


@dataclasses.dataclass(frozen=True)
class Left:
    """A forward matmul that is no site, and why."""

    node: fx.Node
    reason: str


def operands(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The two matrices of a matmul node."""
    left, right = MATMULS[node.target]  # type: ignore[index]
    return node.args[left], node.args[right]  # type: ignore[return-value]


def classify(graph: fx.Graph, params: Mapping[int | str, tuple[str, str]]) -> tuple[list[Site], list[Left]]:
    """Sites with their roles, and the other matmuls of the forward. ``params``: graph input -> (root, parameter
    name)."""
    owners = {
        node: params[key]
        for node in graph.nodes
        if node.op in ("placeholder", "get_attr") and (key := _key(node)) is not None and key in params
    }
    backward = backward_nodes(graph)
    constants = _closure(graph, owners)
    sites: list[Site] = []
    left: list[Left] = []
    for node in graph.nodes:
        if node in backward:
            continue
        if node.target in ATTENTION:
            left.append(Left(node, "attention's own matmuls stay in high precision"))
        elif node.target in MATMULS:
            found = _forward_site(node, owners, constants)
            if isinstance(found, Site):
                sites.append(found)
            else:
                left.append(found)
    _assign_backward(
        [node for node in graph.nodes if node in backward and node.target in OPERANDS], sites, backward, graph, params
    )
    return sites, left


def backward_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Every node that depends on an incoming gradient."""
    return _closure(graph, {node for node in graph.nodes if node.op == "placeholder" and compat.is_tangent(node)}, any)


def _closure(graph: fx.Graph, seeds: Iterable[fx.Node], rule=all) -> set[fx.Node]:  # type: ignore[no-untyped-def]
    """Seeds and the nodes whose inputs are, all or any of them, in the closure."""
    closure = set(seeds)
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if node not in closure and inputs and rule(one in closure for one in inputs):
            closure.add(node)
    return closure


def _key(node: fx.Node) -> int | str | None:
    return compat.input_key(node) if node.op == "placeholder" else str(node.target)


def _forward_site(node: fx.Node, owners: Mapping[fx.Node, tuple[str, str]], constants: set[fx.Node]) -> Site | Left:
    pair = operands(node)
    weights = [index for index, operand in enumerate(pair) if root(operand) in owners]
    if len(weights) == 2:
        return Left(node, "both operands are parameters")
    if not weights:
        computed = any(operand in constants for operand in pair)
        return Left(node, "the weight is computed in the graph" if computed else "both operands are activations")
    if node.target in BATCHED:
        return Left(node, "batched weights (experts) are not rewritten yet")
    return Site(node, weights[0], owners[root(pair[weights[0]])])


def _assign_backward(
    nodes: list[fx.Node],
    sites: list[Site],
    backward: set[fx.Node],
    graph: fx.Graph,
    params: Mapping[int | str, tuple[str, str]],
) -> None:
    """Give each backward matmul to the site it belongs to."""
    reaches = _reached_parameters(graph, params)
    for node in nodes:
        sources = [canonical(operand) for operand in operands(node)]
        gradient_sides = [operand in backward for operand in operands(node)]
        if all(gradient_sides) or not any(gradient_sides):
            continue
        fixed = gradient_sides.index(False)
        readers = [site for site in sites if sources[fixed] in (site.weight_source, site.activation_source)]
        site = _choose(node, readers, sources[fixed], reaches.get(node, set()))
        if site is None:
            continue
        if site.weight_source is site.activation_source:
            site.unclear = True
        elif sources[fixed] is site.weight_source:
            site.dgrad, site.dgrad_weight = node, fixed
        else:
            site.wgrad, site.wgrad_activation = node, fixed


def _choose(node: fx.Node, readers: list[Site], source: fx.Node, reached: set[tuple[str, str]]) -> Site | None:
    """The site a backward matmul belongs to, among those that read its fixed operand and still lack that role."""

    def open_role(site: Site) -> bool:
        return (site.dgrad if source is site.weight_source else site.wgrad) is None

    readers = [site for site in readers if open_role(site)]
    same_call = [site for site in readers if site.forward.meta.get("seq_nr") == node.meta.get("seq_nr") is not None]
    if len(same_call) == 1:
        return same_call[0]
    reaching = [site for site in readers if source is site.weight_source or site.param in reached]
    return reaching[0] if reaching else None


def _reached_parameters(
    graph: fx.Graph, params: Mapping[int | str, tuple[str, str]]
) -> dict[fx.Node, set[tuple[str, str]]]:
    """For each matmul, the parameters whose gradient it flows into without passing another matmul."""
    reached: dict[fx.Node, set[tuple[str, str]]] = {}
    for output, key in compat.gradient_keys(graph):
        if key not in params:
            continue
        stack, seen = [output], set()
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            if node.target in MATMULS:
                reached.setdefault(node, set()).add(params[key])
            else:
                stack.extend(node.all_input_nodes)
    return reached
