"""One seed a graph: where it is drawn, what follows from torch.manual_seed, what is saved for it."""

from __future__ import annotations

import functools

import graphs
import models
import torch
from graphs import fp4
from models import K, N, tokens
from torch import Tensor, fx, nn

import fp4compile
from fp4compile import Recipe, Report

prims = torch.ops.prims


@functools.cache
def linear(*stochastic: str) -> Report:
    options = {"recipe": Recipe.nvidia(stochastic=stochastic)}
    return fp4compile.explain(models.seeded(nn.Linear, K, N, bias=False), tokens(), options=options)


def draws(gm: fx.GraphModule) -> int:
    return len(graphs.calls(gm, prims.inductor_seeds.default))


def results(report: Report, seed: int) -> list[Tensor]:
    gm = report.graphs["joint_after"]
    return graphs.run(gm, graphs.example_inputs(gm, below=N), seed)


def test_the_seed_of_the_gradients_is_drawn_in_the_backward_and_not_saved() -> None:
    report = linear("dgrad.dy", "wgrad.dy")
    assert draws(report.graphs["forward"]) == 0
    assert draws(report.graphs["backward"]) == 1
    assert torch.int64 not in {node.meta["val"].dtype for node in saved(report)}


def test_one_scalar_is_saved_if_forward_and_backward_round_stochastically() -> None:
    report = linear("forward.x", "dgrad.dy", "wgrad.dy")
    assert draws(report.graphs["forward"]) == 1
    assert draws(report.graphs["backward"]) == 0
    (seed,) = (node for node in saved(report) if node.meta["val"].dtype is torch.int64)
    assert seed.meta["val"].numel() == 1


def saved(report: Report) -> list[fx.Node]:
    return [node for node in report.graphs["forward"].graph.output_node().all_input_nodes]


def test_rounding_follows_manual_seed() -> None:
    report = linear("dgrad.dy", "wgrad.dy")
    first, again, other = (results(report, seed) for seed in (1, 1, 2))
    assert graphs.same_bits(first, again)
    assert torch.equal(first[0], other[0])  # the forward
    assert not torch.equal(first[1], other[1])
    assert not torch.equal(first[2], other[2])


def test_the_next_step_rounds_differently() -> None:
    gm = linear("dgrad.dy", "wgrad.dy").graphs["joint_after"]
    inputs = graphs.example_inputs(gm, below=N)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        first, second = gm(*inputs), gm(*inputs)
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[1], second[1])


def test_sites_with_the_same_numbers_are_rounded_independently() -> None:
    """Two gradients of one tensor: with one noise for both, their codes would be the same."""
    gm = linear("dgrad.dy", "wgrad.dy").graphs["joint_after"]
    dgrad, wgrad = (node for node in graphs.calls(gm, fp4.quantize.default) if node.args[5] == "stochastic")
    x = torch.rand(32, 32)
    amax, seed = x.amax(), torch.tensor(7)
    codes = [fp4.quantize(x, amax, seed, "nvfp4", [1, 16], "stochastic", node.args[6])[0] for node in (dgrad, wgrad)]
    assert not torch.equal(*codes)


def test_a_seed_is_never_recomputed_by_checkpointing() -> None:
    """Drawn again, it would be another seed."""
    options = {"recipe": Recipe.nvidia(stochastic={"forward.x", "dgrad.dy"})}
    report = fp4compile.explain(models.Checkpointed(models.seeded(models.QKV)), tokens(), options=options)
    assert draws(report.graphs["forward"]) == 1
    assert draws(report.graphs["backward"]) == 0
