"""Which matmul is the forward, dgrad and wgrad of which weight, over the ways of writing one.

A row of the table is "site kind TxKxN roles"; roles has a letter for each GEMM in FP4 (f, d, w), "-" where there is
none and "b" where it stays as it was. That the right operands were taken is tested by running the graph before and
after.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import graphs
import models
import pytest
import torch
from models import B, K, N, S, T, Weights, tokens
from torch import nn
from torch.nn import functional as F

import fp4compile
from fp4compile import Policy, Report
from fp4compile.recipe import ROLES

ACTIVATIONS = "both operands are activations"
ATTENTION = "attention's own matmuls stay in high precision"
COMPUTED = "the weight is computed in the graph"
EXPERTS = "batched weights (experts) are not rewritten yet"
PARAMETERS = "both operands are parameters"


@dataclasses.dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    sites: tuple[str, ...]
    left: tuple[str, ...] = ()
    around: Callable[[], Any] = contextlib.nullcontext
    policy: Policy | None = None
    tolerance: float = 0.5  # of the relative error of an output; a wrong operand gives more than 1


def _linear(bias: bool = False) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(K, N, bias=bias)


def _weights(function: Callable[[Any, torch.Tensor], Any], *shapes: tuple[int, ...]) -> Callable[[], nn.Module]:
    return lambda: Weights(function, *shapes)


def _x(*shape: int, **kwargs: Any) -> Callable[[], torch.Tensor]:
    return lambda: tokens(*shape, **kwargs)


def _dynamic() -> torch.Tensor:
    x = tokens()
    torch._dynamo.mark_dynamic(x, 0)
    return x


LINEAR = (f"weight linear {T}x{K}x{N} fdw",)
W0 = (f"w0 linear {T}x{K}x{N} fdw",)
MATMUL = (f"w0 matmul {T}x{K}x{N} fdw",)


def _block(name: str) -> list[str]:
    shapes = {**{f"attn.{one}": f"{K}x{K}" for one in "qkvo"}, "up": f"{K}x{N}", "down": f"{N}x{K}"}
    return [f"{name}.{layer} linear {T}x{shape} fdw" for layer, shape in shapes.items()]


QKVO = tuple(f"{name} linear {T}x{K}x{K} fdw" for name in "qkvo")

CASES = {
    # one linear layer
    "2-D input": Case(_linear(), _x(T, K), LINEAR),
    "3-D input": Case(_linear(), _x(), LINEAR),
    "4-D input": Case(_linear(), _x(2, 3, 4, K), LINEAR),
    "1-D input": Case(_linear(), _x(K), (f"weight linear 1x{K}x{N} fdw",)),
    "1-D input with bias": Case(_linear(bias=True), _x(K), (f"weight linear 1x{K}x{N} fdw",)),
    "bias": Case(_linear(bias=True), _x(), LINEAR),
    "one token": Case(_linear(), _x(1, K), (f"weight linear 1x{K}x{N} fdw",)),
    "non-contiguous input": Case(_weights(lambda m, x: F.linear(x.transpose(0, 1), m.w0), (N, K)), _x(), W0),
    "bfloat16": Case(lambda: nn.Linear(K, N).bfloat16(), _x(dtype=torch.bfloat16), LINEAR),
    "float16": Case(lambda: nn.Linear(K, N).half(), _x(dtype=torch.float16), LINEAR),
    "dynamic batch": Case(_linear(bias=True), _dynamic, (f"weight linear {S}*sx{K}x{N} fdw",)),
    "below min_size": Case(lambda: nn.Linear(8, N), _x(T, 8), (f"weight linear {T}x8x{N} bbb",)),
    # other ways to write it
    "x @ w": Case(_weights(lambda m, x: x @ m.w0, (K, N)), _x(), MATMUL),
    "w @ x": Case(_weights(lambda m, x: m.w0 @ x, (N, K)), _x(K, T), MATMUL),
    "addmm with alpha and beta": Case(
        _weights(lambda m, x: torch.addmm(m.w1, x, m.w0, beta=0.5, alpha=2.0), (K, N), (N,)),
        _x(T, K),
        (f"w0 addmm {T}x{K}x{N} fdw",),
    ),
    "addmm on a flattened input, weight [in, out]": Case(
        _weights(lambda m, x: torch.addmm(m.w1, x.view(-1, K), m.w0).view(B, S, N), (K, N), (N,)),
        _x(),
        (f"w0 addmm {T}x{K}x{N} fdw",),
    ),
    "einsum": Case(
        _weights(lambda m, x: torch.einsum("btd,fd->btf", x, m.w0), (N, K)), _x(), (f"w0 einsum {T}x{K}x{N} fdw",)
    ),
    "einsum with heads": Case(
        _weights(lambda m, x: torch.einsum("btd,dhk->bhtk", x, m.w0), (K, 4, 16)),
        _x(),
        (f"w0 einsum {T}x{K}x{N} fdw",),
    ),
    "user's autograd.Function": Case(models.UserFunction, _x(T, K), (f"weight matmul {T}x{K}x{N} fdw",)),
    "user's autograd.Function with two weights": Case(
        models.UserFunctions, _x(T, K), ("q matmul 24x32x32 fdw", "k matmul 24x32x32 fdw", "q matmul 24x32x32 fdw")
    ),
    # several uses, several weights
    "fused qkv": Case(
        _weights(lambda m, x: torch.cat(F.linear(x, m.w0).chunk(3, -1)[:2], -1), (3 * K, K)),
        _x(),
        (f"w0 linear {T}x{K}x{3 * K} fdw",),
    ),
    "q, k and v from pieces of one weight": Case(
        _weights(lambda m, x: torch.cat([F.linear(x, w) for w in m.w0.chunk(3)]), (3 * K, K)),
        _x(),
        (f"w0 linear {T}x{K}x{K} fdw",) * 3,
    ),
    "experts by index": Case(
        _weights(lambda m, x: F.linear(x[0], m.w0[0]) - F.linear(x[1], m.w0[1]), (2, N, K)),
        _x(),
        (f"w0 linear {S}x{K}x{N} fdw",) * 2,
    ),
    "module called twice": Case(models.Twice, _x(), (f"inner linear {T}x{K}x{K} fdw",) * 2),
    "one weight for up and down": Case(
        _weights(lambda m, x: F.linear(F.linear(x, m.w0), m.w0.t()), (N, K)),
        _x(),
        (f"w0 linear {T}x{K}x{N} fdw", f"w0 linear {T}x{N}x{K} fdw"),
    ),
    "tied head, rewritten": Case(
        models.Tied,
        models.ids,
        (f"mixer linear {T}x{K}x{K} fdw", f"lm_head linear {T}x{K}x{N} fdw"),
        policy=Policy(keep_head=False),
    ),
    "tied head": Case(models.Tied, models.ids, (f"mixer linear {T}x{K}x{K} fdw", f"lm_head linear {T}x{K}x{N} bbb")),
    "q, k and v of one input": Case(models.QKV, _x(), QKVO[:3]),
    # gradients that are not asked for
    "LoRA on a frozen layer": Case(
        models.LoRA,
        _x(),
        (f"base linear {T}x{K}x{N} fd-", f"down linear {T}x{K}x16 fdw", f"up linear {T}x16x{N} fdw"),
    ),
    "frozen weight": Case(lambda: nn.Linear(K, N).requires_grad_(False), _x(), (f"weight linear {T}x{K}x{N} fd-",)),
    "input without gradient": Case(_linear(bias=True), _x(grad=False), (f"weight linear {T}x{K}x{N} f-w",)),
    "no_grad": Case(_linear(bias=True), _x(), (f"weight linear {T}x{K}x{N} f--",), around=torch.no_grad),
    "inference_mode": Case(
        _linear(bias=True), _x(grad=False), (f"weight linear {T}x{K}x{N} f--",), around=torch.inference_mode
    ),
    # regions
    "autocast": Case(_linear(bias=True), _x(), LINEAR, around=functools.partial(torch.autocast, "cpu", torch.bfloat16)),
    "checkpoint": Case(
        lambda: models.Checkpointed(nn.Sequential(nn.Linear(K, N), nn.GELU(), nn.Linear(N, K))),
        _x(),
        (f"inner.0 linear {T}x{K}x{N} fdw", f"inner.2 linear {T}x{N}x{K} fdw"),
    ),
    "graph break": Case(models.Broken, _x(), (f"first linear {T}x{K}x{N} fdw", f"second linear {T}x{N}x{K} fdw")),
    # left alone
    "experts in one bmm": Case(_weights(lambda m, x: torch.bmm(x, m.w0), (B, K, N)), _x(), (), (f"bmm: {EXPERTS}",)),
    "baddbmm": Case(
        _weights(lambda m, x: torch.baddbmm(m.w1, x, m.w0), (B, K, N), (B, 1, N)), _x(), (), (f"baddbmm: {EXPERTS}",)
    ),
    "attention by matmuls": Case(lambda: models.Attention(K, fused=False), _x(), QKVO, (f"matmul: {ACTIVATIONS}",) * 2),
    "scaled_dot_product_attention": Case(
        lambda: models.Attention(K, fused=True), _x(), QKVO, (f"scaled_dot_product_attention: {ATTENTION}",)
    ),
    "weight_norm": Case(
        lambda: torch.nn.utils.parametrizations.weight_norm(nn.Linear(K, N)), _x(), (), (f"linear: {COMPUTED}",)
    ),
    "weight times a gain": Case(
        _weights(lambda m, x: F.linear(x, m.w0 * m.w1), (N, K), (N, 1)), _x(), (), (f"linear: {COMPUTED}",)
    ),
    "product of weights": Case(
        _weights(lambda m, x: x @ (m.w0 @ m.w0.t()), (K, N)),
        _x(),
        (),
        (f"matmul: {PARAMETERS}", f"matmul: {COMPUTED}"),
    ),
    "convolution": Case(lambda: nn.Conv1d(K, N, 1), _x(B, K, S), ()),
    # PyTorch's own composites
    "nn.MultiheadAttention": Case(
        lambda: nn.MultiheadAttention(K, 2, batch_first=True),
        lambda: (tokens(),) * 3,
        (
            f"in_proj_weight multi_head_attention_forward {T}x{K}x{3 * K} fdw",
            f"out_proj multi_head_attention_forward {T}x{K}x{K} fdw",
        ),
        (f"multi_head_attention_forward: {ACTIVATIONS}",) * 2,
    ),
    "nn.TransformerEncoderLayer": Case(
        lambda: nn.TransformerEncoderLayer(K, 2, N, dropout=0.0, batch_first=True),
        _x(),
        (
            f"self_attn.in_proj_weight multi_head_attention_forward {T}x{K}x{3 * K} fdw",
            f"self_attn.out_proj multi_head_attention_forward {T}x{K}x{K} fdw",
            f"linear1 linear {T}x{K}x{N} fdw",
            f"linear2 linear {T}x{N}x{K} fdw",
        ),
        (f"multi_head_attention_forward: {ATTENTION}",),
        tolerance=0.6,
    ),
    "transformer": Case(
        models.Transformer,
        models.ids,
        (*(row for layer in range(2) for row in _block(f"layers.{layer}")), f"lm_head linear {T}x{K}x{N} bbb"),
        (f"scaled_dot_product_attention: {ATTENTION}",) * 2,
        tolerance=0.9,
    ),
}

ABSENCES = {
    "frozen weight": ("wgrad", "the weight needs no gradient"),
    "input without gradient": ("dgrad", "the input needs no gradient"),
    "no_grad": ("dgrad", "the graph has no backward"),
    "inference_mode": ("wgrad", "the graph has no backward"),
}


@functools.cache
def explained(name: str) -> Report:
    case = CASES[name]
    model, inputs = models.seeded(case.make), case.inputs()
    with case.around():
        options = {"policy": case.policy} if case.policy else None
        return fp4compile.explain(model, *(inputs if isinstance(inputs, tuple) else (inputs,)), options=options)


def _row(site: Any) -> str:
    letters = {"nvfp4": None, "bf16": "b", "absent": "-"}
    roles = "".join(letters[getattr(site, role).precision] or role[0] for role in ROLES)
    shape = "x".join(str(site.shape[name]) for name in "TKN")
    return f"{site.fqn} {site.kind} {shape} {roles}"


def _pieces(report: Report) -> list[str]:
    """Name endings of the graphs that Dynamo split a model into."""
    return [name.removeprefix("joint_before") for name in report.graphs if name.startswith("joint_before")]


@pytest.mark.parametrize("name", CASES)
def test_every_weight_matmul_is_found_with_its_roles(name: str) -> None:
    rows = [_row(site) for site in explained(name).sites]
    assert [re.sub(r"s\d+", "s", row) for row in rows] == list(CASES[name].sites)


@pytest.mark.parametrize("name", CASES)
def test_every_other_matmul_is_reported_with_a_reason(name: str) -> None:
    assert [f"{left.kind}: {left.reason}" for left in explained(name).matmuls_left] == list(CASES[name].left)


@pytest.mark.parametrize("name", CASES)
def test_exactly_the_reported_gemms_are_rewritten(name: str) -> None:
    report = explained(name)
    reported = sum(getattr(site, role).precision == "nvfp4" for site in report.sites for role in ROLES)
    found, before, after = 0, 0, 0
    for piece in _pieces(report):
        found += len(graphs.gemms(report.graphs[f"joint_after{piece}"]))
        before += graphs.matmuls(report.graphs[f"joint_before{piece}"])
        after += graphs.matmuls(report.graphs[f"joint_after{piece}"])
    assert found == reported
    assert after == before - reported


@pytest.mark.parametrize("name", CASES)
def test_the_rewritten_graph_computes_the_same_to_the_precision_of_fp4(name: str) -> None:
    report = explained(name)
    for piece in _pieces(report):
        before, after = report.graphs[f"joint_before{piece}"], report.graphs[f"joint_after{piece}"]
        inputs = graphs.example_inputs(before, below=N)
        expected, results = graphs.run(before, inputs), graphs.run(after, inputs)
        assert len(results) == len(expected) > 0
        for value, wanted in zip(results, expected, strict=True):
            if isinstance(wanted, torch.Tensor):
                assert value.dtype == wanted.dtype and value.shape == wanted.shape
                assert graphs.relative_error(value, wanted) < CASES[name].tolerance


@pytest.mark.parametrize("name", ABSENCES)
def test_a_gradient_that_does_not_exist_is_absent_with_its_reason(name: str) -> None:
    role, reason = ABSENCES[name]
    (site,) = explained(name).sites
    assert (getattr(site, role).precision, getattr(site, role).reason) == ("absent", reason)


def test_min_size_is_the_reason_of_a_small_matmul() -> None:
    (site,) = explained("below min_size").sites
    assert site.forward.reason == "K = 8 is below the policy's min_size 16"


def test_a_matmul_left_alone_is_named_by_its_module() -> None:
    assert [left.fqn for left in explained("transformer").matmuls_left] == ["layers.0.attn", "layers.1.attn"]


def test_the_same_product_of_activations_is_not_taken_for_a_gradient() -> None:
    """The attention scores' own gradients have the same operands' shapes as a wgrad."""
    report = explained("attention by matmuls")
    shapes = sorted(gemm.shape for gemm in graphs.gemms(report.graphs["joint_after"]))
    assert shapes == sorted([(T, K, K)] * 8 + [(K, K, T)] * 4)
