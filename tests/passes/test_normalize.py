"""Batched products of one batch become plain ones and keep their values; others stay."""

from __future__ import annotations

import graphs
import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fp4compile.passes.normalize import normalize

aten = torch.ops.aten


def traced(batch: int) -> tuple[fx.GraphModule, list[Tensor]]:
    # Whole numbers: their products have one sum in every order.
    inputs = [torch.randint(-9, 10, shape).float() for shape in ((batch, 5, 7), (batch, 7, 3))]
    return make_fx(lambda a, b: torch.bmm(a, b).relu(), tracing_mode="fake")(*inputs), inputs


def test_a_bmm_of_one_batch_becomes_mm_with_the_same_result() -> None:
    gm, inputs = traced(batch=1)
    expected = gm(*inputs)
    normalize(gm.graph)
    gm.recompile()
    assert not graphs.calls(gm, aten.bmm.default)
    (mm,) = graphs.calls(gm, aten.mm.default)
    assert mm.meta["val"].shape == (5, 3)
    assert torch.equal(gm(*inputs), expected)


@pytest.mark.parametrize("batch", [0, 2])
def test_other_batches_stay(batch: int) -> None:
    gm, _ = traced(batch)
    code = gm.code
    normalize(gm.graph)
    gm.recompile()
    assert gm.code == code
