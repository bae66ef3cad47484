"""Which storage counts as saved, on graphs made by hand."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fp4compile.report.saved import saved_bytes


def partitioned(forward: Callable[[Tensor], tuple[Tensor, ...]], saved: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    """A forward of a [4, 8] float32 input whose last outputs are saved, and a backward with other names for them."""
    backward = fx.Graph()
    inputs = [backward.placeholder(f"anything_{index}") for index in range(saved)]
    backward.output((*inputs, backward.placeholder("tangents_1")))
    return make_fx(forward, tracing_mode="fake")(torch.ones(4, 8)), fx.GraphModule({}, backward)


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
    def forward(x: Tensor) -> tuple[Tensor, ...]:
        amax = torch.ops.fp4.amax(x)
        return (x.sum(), amax, *torch.ops.fp4.quantize(x, amax, None, "nvfp4", [1, 16], "nearest", 0))

    packed = 4 * 8 + 4  # half a byte an element of 16 columns, one scale a row
    assert saved_bytes(*partitioned(forward, saved=3)) == (packed + 4, packed)
