"""Bytes kept for the backward: exact numbers, which change only when torch's partitioner or our graphs do."""

from __future__ import annotations

import functools
from typing import Any

import compiling
import models
import pytest
import torch
from models import K, N, T
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import fp4compile
from fp4compile import Recipe
from fp4compile.report import SavedBytes

PACKED = 0.5 + 1 / 16  # bytes an element


@functools.cache
def transformer(recompute: bool = False, recipe: str = "nvidia", dtype: torch.dtype = torch.bfloat16) -> SavedBytes:
    model = models.seeded(models.Transformer, recompute=recompute).to(dtype)
    return fp4compile.explain(model, models.ids(4, 64), options={"recipe": recipe}).saved_for_backward


def linear(**changes: Any) -> SavedBytes:
    """Two linear layers without bias, so that the input of the second must be saved or quantized."""
    model = nn.Sequential(nn.Linear(K, N, bias=False), nn.GELU(), nn.Linear(N, K, bias=False)).bfloat16()
    options = {"recipe": Recipe.nvidia(**changes)}
    return fp4compile.explain(model, models.tokens(dtype=torch.bfloat16), options=options).saved_for_backward


def test_a_transformer_saves_these_bytes() -> None:
    saved = transformer()
    assert (saved.bytes, saved.packed_bytes, saved.baseline_bytes) == (338_968, 36_864, 433_152)


def test_a_transformer_saves_less_than_without_rewriting() -> None:
    saved = transformer()
    assert 0 < saved.packed_bytes < saved.bytes < saved.baseline_bytes


def test_without_rewriting_nothing_is_packed_and_nothing_saved() -> None:
    saved = transformer(recipe="bf16")
    assert saved.packed_bytes == 0
    assert saved.bytes == saved.baseline_bytes == transformer().baseline_bytes


def test_a_checkpointed_transformer_saves_no_more_than_without_rewriting() -> None:
    saved = transformer(recompute=True)
    assert saved.packed_bytes == 0
    assert saved.bytes <= saved.baseline_bytes < transformer().bytes


def test_a_region_that_saves_its_matmuls_does_not_save_quantized_operands_too() -> None:
    """The results of matmuls are marked to be saved; what is put before them must not take over that mark."""
    saves_matmuls = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])

    class Selective(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(K, N, bias=False), nn.GELU(), nn.Linear(N, K, bias=False))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False, context_fn=saves_matmuls)

    model = models.seeded(Selective).bfloat16()
    saved = fp4compile.explain(model, models.tokens(dtype=torch.bfloat16)).saved_for_backward
    assert saved.packed_bytes == 0
    assert 0 < saved.bytes <= saved.baseline_bytes


def test_what_is_saved_packed_is_the_rotated_activation() -> None:
    """Of the input of each of the two layers, with T padded to the 16 of the rotation."""
    padded = -(-T // 16) * 16
    assert linear().packed_bytes == (K + N) * padded * PACKED


def test_with_wgrad_in_bf16_nothing_packed_is_saved() -> None:
    saved = linear(wgrad="bf16")
    assert saved.packed_bytes == 0
    assert saved.bytes == saved.baseline_bytes


def test_a_graph_without_backward_saves_nothing() -> None:
    with torch.no_grad():
        report = fp4compile.explain(nn.Linear(K, N), models.tokens())
    assert report.saved_for_backward == SavedBytes(tensors=(), baseline_bytes=0)


@pytest.mark.parametrize("recompute", [False, True])
def test_the_report_counts_what_autograd_really_holds(recompute: bool) -> None:
    model, ids = models.seeded(models.Transformer, recompute=recompute).bfloat16(), models.ids(4, 64)
    held: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with compiling.interpreted(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = compiling.compiled(model)(ids)
    for tensor in (ids, *model.parameters()):
        held.pop(tensor.untyped_storage().data_ptr(), None)
    assert result.requires_grad
    assert sum(held.values()) == transformer(recompute).bytes
