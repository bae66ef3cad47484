"""A tensor that has a scale a row is computed and quantized in one kernel, with all that Inductor would join before it.

In a partitioned graph, on devices with kernels, where an operand's values are quantized with the amaxes of their rows:

    x = ... norm, activation, residual ...        values, amaxes, ... = fp4.produce(inputs, program)
    amaxes = fp4.row_amax(x)                  ->
    values = fp4.quantize_decoded(x, amaxes)

So are codes and scales, where they are kept or multiplied as they are. The program has the elementwise operations and
the sums of rows that x is made of; whatever of them others read is an output of the kernel, x included, which is not
written otherwise. An operand that no such operation computes is read once for its amaxes and its values, unless its
rows are very wide. What reads a product of codes stays with it, in its epilogue.

Changes no value but by the order in which a row is summed, which is the compiler's choice with Inductor, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .. import compat
from ..graph import aten, emit, emit_items, prims
from ..ops.produced import DTYPES, MOST, SUM, WIDEST, Argument, Kind, Program, Result, Step, Value, spread
from .fold import is_tiled
from .kernels.produced import SIZE

fp4 = torch.ops.fp4

TILED_CODES = 7
"""Where ``tiled`` stands among the arguments of ``quantize``."""
WIDEST_ALONE = 8192
"""Columns up to which what no step computes is read once: wider rows, of 1024 threads a program, are faster apart
(docs/performance.md)."""
MOST_INPUTS = 6
"""Matrices that a program reads: a thread holds 16 elements of each."""

ELEMENTWISE: dict[Any, str] = {
    aten.add.Tensor: "add",
    aten.add.Scalar: "add",
    aten.sub.Tensor: "sub",
    aten.sub.Scalar: "sub",
    aten.mul.Tensor: "mul",
    aten.mul.Scalar: "mul",
    aten.div.Tensor: "div",
    aten.div.Scalar: "div",
    aten.neg.default: "neg",
    aten.abs.default: "abs",
    aten.relu.default: "relu",
    aten.reciprocal.default: "reciprocal",
    aten.rsqrt.default: "rsqrt",
    aten.exp.default: "exp",
    aten.sigmoid.default: "sigmoid",
    aten.tanh.default: "tanh",
    aten.erf.default: "erf",
}
POW = aten.pow.Tensor_Scalar
REDUCTIONS = (aten.sum.dim_IntList, aten.mean.dim)
CAST = prims.convert_element_type.default
LAYOUTS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unsqueeze.default)
QUANTIZERS = (fp4.quantize_decoded.default, fp4.quantize.default)
NAMES = {dtype: name for name, dtype in DTYPES.items()}

Shape = Kind | str
"""A ``Kind``, or "flat": [R], one number a row that no operation spreads over a matrix."""


def produce(graph: fx.Graph, eligible: Callable[[torch.device], bool]) -> None:
    """In place; ``eligible``: the devices with kernels."""
    if compat.rounds_between_operations():  # then Inductor's numbers are others
        return
    quantizers = [node for node in graph.nodes if node.target in QUANTIZERS]
    for node in quantizers:
        if eligible(node.args[0].meta["val"].device) and is_by_row(node):
            region = _Region(node)
            if region.members or region.columns <= WIDEST_ALONE:
                _replace(graph, node, region)


def is_by_row(quantizer: fx.Node) -> bool:
    """Whether it is what ``fp4::produce`` does last."""
    x, amax, seed, format, block = quantizer.args[:5]
    assert isinstance(x, fx.Node)
    if not isinstance(amax, fx.Node) or (amax.target, amax.args) != (fp4.row_amax.default, (x,)):
        return False
    if (seed, format, list(block)) != (None, "nvfp4", [1, SIZE]):  # type: ignore[arg-type]
        return False
    value = x.meta["val"]
    rows, columns = value.shape
    return (
        all(isinstance(size, int) and size > 0 for size in (rows, columns))
        and columns % SIZE == 0
        and columns <= WIDEST
        and value.dtype in NAMES
        and value.is_contiguous()
    )


def _result(quantizer: fx.Node) -> Result:
    if quantizer.target is fp4.quantize_decoded.default:
        return "values"
    return "tiles" if len(quantizer.args) > TILED_CODES and quantizer.args[TILED_CODES] else "codes"


class _Region:
    """The nodes that one kernel computes, and what it reads: ``members`` and ``inputs``, in the order of the graph."""

    def __init__(self, quantizer: fx.Node) -> None:
        self.quantizer = quantizer
        self.x: fx.Node = quantizer.args[0]  # type: ignore[assignment]
        self.amax: fx.Node = quantizer.args[1]  # type: ignore[assignment]
        self.whole = [user for user in self.x.users if user.target is fp4.amax.default]
        self.rows, self.columns = self.x.meta["val"].shape
        members = self._grown()
        inputs = _inputs_of(members)
        too_many = sum(self.kind(node) == "full" for node in inputs) > MOST_INPUTS
        if not members or too_many or _has_effects(members[0], quantizer):
            members, inputs = [], [self.x]
        self.members, self.inputs = members, inputs

    def _grown(self) -> list[fx.Node]:
        """From x upwards. A node that something else reads on which x depends, too, would be needed before it is
        computed: it stays outside."""
        ancestors, members = _ancestors(self.x), set[fx.Node]()
        inner = {*self.whole, self.amax, self.quantizer}
        for node in sorted(ancestors, reverse=True):
            apart = any(user in ancestors and user not in members for user in node.users)
            joins = node is self.x or any(user in members for user in node.users)
            if joins and not apart and self._is_computable(node, _is_read_outside(node, inner | members)):
                members.add(node)
        return sorted(members)

    def kind(self, node: fx.Node) -> Shape | None:
        """What a node is in a program of [rows, columns]; None: nothing."""
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor) or not all(isinstance(size, int) for size in value.shape):
            return None
        if value.device != self.x.meta["val"].device:  # Inductor takes numbers of a CPU
            return None
        shape, count = tuple(value.shape), math.prod(value.shape)
        if shape and shape[-1] == self.columns and count in (self.rows * self.columns, self.columns):
            return "full" if count == self.rows * self.columns else "column"
        if count == 1 and len(shape) < 2:
            return "scalar"
        if count == self.rows and (len(shape) == 1 or shape[-1] == 1):
            return "flat" if len(shape) == 1 else "row"
        return "scalar" if count == 1 else None

    def _is_computable(self, node: fx.Node, outside: bool) -> bool:
        """Whether a step computes a node. outside: others read it."""
        kind, sources = self.kind(node), node.all_input_nodes
        kinds = [self.kind(source) for source in sources]
        known = all(found and source.meta["val"].dtype in NAMES for found, source in zip(kinds, sources, strict=True))
        if (
            node.op != "call_function"
            or kind is None
            or node.meta["val"].dtype not in NAMES
            or not sources
            or not known
        ):
            return False
        if outside and not self._is_writable(node, kind):
            return False
        if any(map(_is_template, sources)):
            return False
        if node.target in LAYOUTS:
            return {kind, *kinds} in ({"full"}, {"row"}, {"flat"}, {"row", "flat"}, {"column"})
        if node.target in REDUCTIONS:
            return kinds == ["full"] and kind == "row" and _sums_rows(node)
        if node.target is POW:
            return node.args[1] in (2, 3) and kinds == [kind]
        if node.target is CAST:
            return kinds == [kind]
        return node.target in ELEMENTWISE and _is_plain(node) and kind == _spread(kinds)

    def _is_writable(self, node: fx.Node, kind: Shape) -> bool:
        """As an output, whose rows are contiguous. A free node is made again of its source's output."""
        value = node.meta["val"]
        if kind in ("row", "flat"):
            return _is_free(node) or value.dtype == torch.float32
        return kind == "full" and bool(value.is_contiguous())

    def program(self) -> tuple[Program, list[fx.Node]]:
        """The steps of the members, and the nodes that are outputs behind the amaxes."""
        writer = _Writer(self)
        for node in self.members:
            writer.add(node)
        inside = {*self.members, *self.whole, self.amax, self.quantizer}
        read = [node for node in self.members if not _is_free(node) and _is_read_outside(node, inside)]
        outputs = tuple(writer.value(node) for node in read)
        return Program(
            _result(self.quantizer),
            self.columns,
            tuple(writer.inputs),
            tuple(writer.steps),
            writer.value(self.x),
            outputs,
        ), read


def _is_read_outside(node: fx.Node, inside: set[fx.Node]) -> bool:
    """Also if only through nodes that show the same numbers, which are then left where they are."""
    return any(
        _is_read_outside(user, inside) if user in inside and _is_free(user) else user not in inside
        for user in node.users
    )


def _has_effects(first: fx.Node, last: fx.Node) -> bool:
    """Whether a node between the two writes to a tensor or takes random numbers: then the order of nodes counts."""
    node = first
    while node is not last:
        schema, tags = compat.schema_of(node.target), getattr(node.target, "tags", ())
        if (schema is not None and schema.is_mutable) or torch.Tag.nondeterministic_seeded in tags:
            return True
        node = node.next
    return False


def _is_template(node: fx.Node) -> bool:
    """Whether it shows a product whose own kernel computes what follows it."""
    while node.op == "call_function" and _is_free(node):
        node = node.args[0]  # type: ignore[assignment]
    return node.target is fp4.scaled_mm.default and is_tiled(node)


def _is_free(node: fx.Node) -> bool:
    """Whether a node has its input's numbers, in another shape or a wider dtype."""
    if node.target in LAYOUTS:
        return True
    return node.target is CAST and node.meta["val"].dtype.itemsize > node.args[0].meta["val"].dtype.itemsize  # type: ignore[union-attr]


def _inputs_of(members: list[fx.Node]) -> list[fx.Node]:
    inside = set(members)
    return list(dict.fromkeys(source for node in members for source in node.all_input_nodes if source not in inside))


def _ancestors(node: fx.Node) -> set[fx.Node]:
    """With the node itself."""
    found, todo = {node}, [node]
    while todo:
        for source in todo.pop().all_input_nodes:
            if source not in found:
                found.add(source)
                todo.append(source)
    return found


def _sums_rows(node: fx.Node) -> bool:
    dims, keeps = node.args[1], len(node.args) > 2 and bool(node.args[2])
    last = node.args[0].meta["val"].dim() - 1  # type: ignore[union-attr]
    named = isinstance(dims, (list, tuple)) and list(dims) in ([-1], [last])
    return named and keeps and len(node.args) == 3 and not node.kwargs


def _is_plain(node: fx.Node) -> bool:
    """Of tensors and numbers that can be written down, with no option."""
    numbers = [arg for arg in node.args if not isinstance(arg, fx.Node)]
    known = all(isinstance(arg, (int, float)) and abs(arg) <= MOST for arg in numbers)
    return known and len(node.args) <= 2 and not node.kwargs


def _spread(kinds: list[Shape | None]) -> Shape | None:
    """What an elementwise operation of such operands gives."""
    if "flat" in kinds:
        return "flat" if set(kinds) <= {"flat", "scalar"} else None
    return spread(kinds)  # type: ignore[arg-type]


class _Writer:
    """Writes the program of a region."""

    def __init__(self, region: _Region) -> None:
        self._region = region
        self._names: dict[fx.Node, str] = {}
        self.steps: list[Step] = []
        self.inputs: list[Value] = []
        for index, node in enumerate(region.inputs):
            self._names[node] = f"i{index}"
            self.inputs.append(self.value(node))

    def value(self, node: fx.Node) -> Value:
        return Value(self._names[node], self._kind(node), NAMES[node.meta["val"].dtype])

    def _kind(self, node: fx.Node) -> Kind:
        kind = self._region.kind(node)
        return "row" if kind == "flat" else kind  # type: ignore[return-value]

    def add(self, node: fx.Node) -> None:
        if node.target in LAYOUTS or node.target is CAST:  # rounded when it is written
            self._names[node] = self._names[node.args[0]]  # type: ignore[index]
            return
        args = [self._names[arg] if isinstance(arg, fx.Node) else arg for arg in node.args]
        if node.target is POW:
            self._names[node] = self._power(node, args[0], int(args[1]))  # type: ignore[arg-type]
        elif node.target in REDUCTIONS:
            name = self._step(SUM, [args[0]], "row")  # type: ignore[list-item]
            is_mean = node.target is aten.mean.dim
            self._names[node] = self._step("div", [name, float(self._region.columns)], "row") if is_mean else name
        else:
            self._names[node] = self._step(ELEMENTWISE[node.target], args, self._kind(node))  # type: ignore[arg-type]

    def _power(self, node: fx.Node, base: str, exponent: int) -> str:
        result = base
        for _ in range(exponent - 1):
            result = self._step("mul", [result, base], self._kind(node))
        return result

    def _step(self, op: str, args: list[Argument], kind: Kind) -> str:
        name = f"s{len(self.steps)}"
        numbers = tuple(arg if isinstance(arg, str) else float(arg) for arg in args)
        self.steps.append(Step(name, op, numbers, kind))
        return name


def _replace(graph: fx.Graph, quantizer: fx.Node, region: _Region) -> None:
    program, read = region.program()
    with graph.inserting_before(quantizer):
        new = emit(graph, quantizer, fp4.produce.default, region.inputs, program.to_json())
        results = emit_items(graph, quantizer, new, len(new.meta["val"]))
        first, amaxes, outputs = results[: -1 - len(read)], results[-1 - len(read)], results[len(results) - len(read) :]
        for node, output in zip(read, outputs, strict=True):
            shape = list(node.meta["val"].shape)
            shown = emit(graph, node, aten.view.default, output, shape)
            results.append(shown)
            node.replace_all_uses_with(shown)
        for node in region.whole:  # the largest of the rows' is the tensor's
            largest = emit(graph, node, CAST, emit(graph, node, aten.amax.default, amaxes), torch.float32)
            results.append(largest)
            node.replace_all_uses_with(largest)
    region.amax.replace_all_uses_with(amaxes)
    if program.result == "values":
        quantizer.replace_all_uses_with(first[0])
    else:
        _replace_items(graph, quantizer, first)
    for node in (quantizer, region.amax, *region.whole, *reversed(region.members)):
        if not node.users:
            graph.erase_node(node)
    _move_behind(graph, new, results)


def _replace_items(graph: fx.Graph, quantizer: fx.Node, results: list[fx.Node]) -> None:
    """Codes and scales, which are read one by one."""
    for item in list(quantizer.users):
        item.replace_all_uses_with(results[item.args[1]])  # type: ignore[index]
        graph.erase_node(item)


def _move_behind(graph: fx.Graph, new: fx.Node, results: list[fx.Node]) -> None:
    """Nodes that stand before the new one and read its results: none of its inputs depends on them."""
    late, last = set(results), results[-1]
    for node in list(graph.nodes):
        if node is new:
            break
        if any(source in late for source in node.all_input_nodes):
            late.add(node)
            last.append(node)
            last = node
