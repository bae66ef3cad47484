"""What counts as saved, what it is called and what reads it, on graphs made by hand; the table of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fp4compile.report import SavedBytes, SavedTensor
from fp4compile.report.saved import saved_tensors

fp4 = torch.ops.fp4

Function = Callable[..., tuple[Any, ...]]


def nameless(node: fx.Node) -> str:
    return ""


def partitioned(
    forward: Function, saved: int, backward: Function = lambda *saved: saved
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """A forward of a [4, 8] float32 input whose last outputs are saved, and a backward with other names for them."""
    x = torch.ones(4, 8)
    back = make_fx(backward, tracing_mode="fake")(*forward(x)[-saved:])
    with back.graph.inserting_after(back.graph.find_nodes(op="placeholder")[-1]):
        back.graph.placeholder("tangents_1")
    return make_fx(forward, tracing_mode="fake")(x), back


def saved_bytes(*graphs: fx.GraphModule) -> tuple[int, int]:
    """(bytes, bytes of packed FP4 among them)."""
    saved = SavedBytes(tuple(saved_tensors(*graphs, nameless, nameless)), baseline_bytes=0)
    return saved.bytes, saved.packed_bytes


def only(forward: Function, backward: Function, saved: int = 1, call: str = "") -> SavedTensor:
    """The one saved tensor, all nodes of both graphs being of one call in module "m"."""
    (found,) = saved_tensors(*partitioned(forward, saved, backward), lambda node: call, lambda node: "m")
    return found


def quantized(x: Tensor) -> tuple[Tensor, ...]:
    amax = fp4.amax(x)
    return (x.sum(), amax, *fp4.quantize(x, amax, None, "nvfp4", [1, 16], "nearest", 0))


# --- bytes


def test_a_view_and_its_base_are_one_storage() -> None:
    def forward(x: Tensor) -> tuple[Tensor, ...]:
        y = x.relu()
        return y.sum(), y, y.view(32), y.t()

    assert saved_bytes(*partitioned(forward, saved=3)) == (4 * 8 * 4, 0)


def test_a_view_of_an_input_is_held_anyway() -> None:
    assert saved_bytes(*partitioned(lambda x: (x.sum(), x.view(32), x), saved=2)) == (0, 0)


def test_a_copy_is_a_storage_of_its_own() -> None:
    assert saved_bytes(*partitioned(lambda x: (x.sum(), x.t().clone()), saved=1)) == (4 * 8 * 4, 0)


def test_results_that_are_not_saved_do_not_count() -> None:
    assert saved_bytes(*partitioned(lambda x: (x.exp(), x.relu().double()), saved=1)) == (4 * 8 * 8, 0)


def test_codes_and_scales_are_packed_and_amax_is_not() -> None:
    packed = 4 * 8 + 4  # half a byte an element of 16 columns, one scale a row
    assert saved_bytes(*partitioned(quantized, saved=3)) == (packed + 4, packed)


# --- what it is


def test_packed_tensors_are_named_after_results_of_the_operator() -> None:
    found = saved_tensors(*partitioned(quantized, saved=3), lambda node: "linear", nameless)
    assert [(one.what, one.dtype, one.shape, one.packed) for one in found] == [
        ("fp4.amax", "float32", (), False),
        ("fp4.quantize codes", "uint8", (4, 8), True),
        ("fp4.quantize scales", "float8_e4m3fn", (4, 1), True),
    ]


@pytest.mark.parametrize(
    ("forward", "call", "what"),
    [
        (lambda x: (x.sum(), x.rsqrt()), "rms_norm", "rms_norm rsqrt"),
        (lambda x: (x.sum(), x.exp()), "exp", "exp"),
        (lambda x: (x.sum(), x.exp()), "", "exp"),
        (lambda x: (x.sum(), x @ x.t()), "linear", "linear"),
        (lambda x: (x.sum(), x @ x.t()), "", "mm"),
        (lambda x: (x.sum(), x.sort().values), "sorted", "sorted values"),
        (lambda x: (x.sum(), torch.var_mean(x, 1)[1]), "", "var_mean 1"),
        (lambda x: (x.sum(), x.exp().double().t().clone()), "", "exp"),
        (lambda x: (x.sum(), x.exp().split(4, 1)[1]), "", "exp"),
        (lambda x: (x.sum(), fp4.anchor(x.exp(), [x])), "", "exp"),
        (lambda x: (x.sum(), x.to(torch.bfloat16)), "linear", "linear cast"),
    ],
)
def test_a_tensor_is_named_after_what_computed_it(forward: Function, call: str, what: str) -> None:
    assert only(forward, lambda y: (y,), call=call).what == what


def test_its_module_is_that_of_what_computed_it() -> None:
    graphs = partitioned(lambda x: (x.sum(), x.exp().double().t().clone()), 1)
    (found,) = saved_tensors(*graphs, nameless, lambda node: f"module of {node.name}")
    assert (found.module, found.dtype, found.shape) == ("module of exp", "float64", (8, 4))


# --- what reads it


def test_readers_are_found_through_layout_casts_pieces_and_anchors() -> None:
    def backward(y: Tensor) -> tuple[Tensor, ...]:
        seen = fp4.anchor(y.t().double().reshape(32), [y.sum()])
        return seen.exp(), seen.view(2, 16).split(8, 1)[0].cos(), y

    found = only(lambda x: (x.sum(), x.relu()), backward)
    assert sorted(found.needed_by) == [("cos", "m"), ("exp", "m"), ("sum", "m")]


def test_readers_of_all_views_of_a_storage_count_once_each() -> None:
    def forward(x: Tensor) -> tuple[Tensor, ...]:
        y = x.relu()
        return y.sum(), y, y.t()

    found = only(forward, lambda y, view: (y.exp(), view.exp(), view.sin()), saved=2)
    assert found.needed_by == (("exp", "m"), ("sin", "m"))


def test_what_only_an_operation_behind_the_first_reads_is_not_a_reader() -> None:
    assert only(lambda x: (x.sum(), x.relu()), lambda y: (y.exp().sin(),)).needed_by == (("exp", "m"),)


def test_matmuls_and_our_operators_keep_their_names_and_others_have_the_calls() -> None:
    def backward(y: Tensor) -> tuple[Tensor, ...]:
        return y.t() @ y, fp4.rotate(y, 4, 1), y.sigmoid()

    found = only(lambda x: (x.sum(), x.relu()), backward, call="silu")
    assert found.needed_by == (("mm", "m"), ("fp4.rotate", "m"), ("silu backward", "m"))


def test_an_operation_of_the_forward_that_is_made_again_is_recomputed() -> None:
    forward, backward = partitioned(lambda x: (x.sum(), x.relu()), 1, lambda y: (y.sigmoid(), y.exp()))
    (sigmoid,) = backward.graph.find_nodes(op="call_function", target=torch.ops.aten.sigmoid.default)
    sigmoid.meta["partitioner_tag"] = "is_forward"
    (found,) = saved_tensors(forward, backward, lambda node: "silu", nameless)
    assert found.needed_by == (("silu recomputed", ""), ("silu backward", ""))


# --- the table


def tensor(what: str, module: str, bytes: int, *needed_by: tuple[str, str], dtype: str = "bfloat16") -> SavedTensor:
    return SavedTensor(what, module, dtype, (bytes // 2,), bytes, packed=False, needed_by=needed_by)


def printed(*tensors: SavedTensor) -> list[str]:
    """The rows of the table, one space between words."""
    title, _, _, _, *rows = str(SavedBytes(tensors, baseline_bytes=0)).splitlines()
    assert title == "Saved for backward"
    return [" ".join(row.split()) for row in rows]


def test_equal_tensors_of_all_blocks_are_one_row() -> None:
    gates = [tensor("linear", f"h.{i}.gate", 500, ("silu backward", f"h.{i}.mlp")) for i in range(12)]
    assert printed(*gates) == ["linear h.*.gate bfloat16 silu backward in h.*.mlp 12 6,000 100.0%"]


def test_what_differs_in_kind_dtype_or_operation_is_another_row_and_the_largest_comes_first() -> None:
    rows = printed(
        tensor("linear", "0.up", 100, ("mm", "0.up")),
        tensor("linear", "1.up", 200, ("silu backward", "1")),
        tensor("linear", "2.up", 300, ("mm", "2.up"), dtype="float32"),
        tensor("mul", "3.up", 400, ("mm", "3.up")),
    )
    assert rows == [
        "mul *.up bfloat16 mm in *.up 1 400 40.0%",
        "linear *.up float32 mm in *.up 1 300 30.0%",
        "linear *.up bfloat16 silu backward in * 1 200 20.0%",
        "linear *.up bfloat16 mm in *.up 1 100 10.0%",
    ]


def test_names_with_numbers_in_them_and_no_name_stay_readable() -> None:
    rows = printed(tensor("a", "norm1", 100, ("mm", "")), tensor("a", "norm2", 100, ("mm", "layer4.0")))
    assert rows == ["a norm1, norm2 bfloat16 mm in (model), layer4.* 2 200 100.0%"]


def test_operations_of_the_same_modules_share_a_line() -> None:
    rows = printed(tensor("add", "0", 100, ("norm recomputed", "0.n"), ("mm", "1"), ("norm backward", "0.n")))
    assert rows == [
        "add * bfloat16 norm recomputed, norm backward in *.n 1 100 100.0%",
        "mm in *",
    ]


def test_the_smallest_are_one_row_together() -> None:
    small = [tensor(name, "m", 9) for name in "abc"]
    assert printed(tensor("big", "m", 9_973), *small)[1:] == ["less than 0.1% each 3 27 0.3%"]


def test_empty_tensors_have_a_row() -> None:
    assert printed(tensor("a", "m", 0, ("mm", "m"))) == ["a m bfloat16 mm in m 1 0 0.0%"]


def test_nothing_saved_is_no_table() -> None:
    assert str(SavedBytes((), baseline_bytes=0)) == ""
