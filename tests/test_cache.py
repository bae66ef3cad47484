"""Compiled graphs are shared where decisions are equal and never where they are not, also through caches on disk."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import fp4compile.backend
from fp4compile import Policy, Recipe, compile_blocks, plan, prepare
from fp4compile.options import parse_options
from fp4compile.plan import make_plan


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(32, 64, bias=False)
        self.down = nn.Linear(64, 32, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x):
        for block in self.layers:
            x = block(x)
        return x


def saves_fp4(output):
    """Whether the graph that made an output keeps packed codes for its backward."""
    return any(tensor.dtype == torch.uint8 for tensor in output.grad_fn.saved_tensors)


def run_blocks(model):
    """Which blocks, one by one, run an NVFP4 graph. With their backward: a graph is cached when that is compiled."""
    outputs = [block(torch.ones(4, 32, requires_grad=True)) for block in model.layers]
    kinds = [saves_fp4(output) for output in outputs]
    for output in outputs:
        output.sum().backward()
    return kinds


@pytest.fixture
def plans(monkeypatch):
    """The plans of all graphs compiled during a test. Operators stay as they are: only graphs are looked at here."""
    made = []

    def remember(*args):
        made.append(make_plan(*args))
        return made[-1]

    torch.compiler.reset()
    monkeypatch.setattr(fp4compile.backend, "make_plan", remember)
    monkeypatch.setattr(fp4compile.backend, "lower", lambda graph, product: None)
    return made


def test_blocks_of_equal_decisions_share_one_graph_and_others_do_not(plans):
    model = Model(12)
    plan = prepare(model, policy=Policy(first=2, last=3))
    compile_blocks(model, plan)
    assert run_blocks(model) == [False] * 2 + [True] * 7 + [False] * 3
    assert len(plans) == 2
    assert len({plan.digest for plan in plans}) == 2


def test_two_equal_blocks_with_different_options_do_not_share_a_graph(plans):
    blocks = [Block(), Block()]
    blocks[0].compile(backend="nvfp4", options={"policy": Policy(skip=["*"], overrides={"up": "nvfp4"})})
    blocks[1].compile(backend="nvfp4", options={"recipe": Recipe.nvidia(rotation=0)})
    for block in blocks:
        block(torch.ones(4, 32, requires_grad=True))
    assert len({plan.digest for plan in plans}) == 2
    assert [[site.rewritten for site in plan.outcome.sites] for plan in plans] == [[True, False], [True, True]]


def digest_of(options, model=None):
    found = []

    def backend(gm, inputs):
        parsed = parse_options(options)
        found.append(make_plan(gm, parsed.recipe, parsed.policy, parsed.strict, parsed.key()).digest)
        return gm.forward

    torch.compiler.reset()
    torch.compile(model or Block(), backend=backend)(torch.ones(4, 32))
    return found[0]


def test_the_digest_is_the_same_for_the_same_graph_and_options():
    assert digest_of(None) == digest_of({"recipe": "nvidia", "policy": {}})


@pytest.mark.parametrize(
    "options",
    [
        {"recipe": Recipe.nvidia(rotation=0)},
        {"recipe": Recipe.nvidia(stochastic=())},
        {"recipe": Recipe.nvidia(rotated_scale="bound")},
        {"recipe": Recipe.nvidia(activation_scale="row")},
        {"policy": {"skip": ["up"]}},
        {"policy": {"overrides": {"up": {"dgrad": "bf16"}}}},
        {"policy": {"min_size": 64}},
        {"strict": False},
        {"inductor": {"cpp.threads": 1}},
    ],
)
def test_the_digest_differs_for_whatever_changes_the_graph(options):
    assert digest_of(options) != digest_of(None)


def test_the_digest_covers_the_sources_of_the_package(monkeypatch):
    before = digest_of(None)
    monkeypatch.setattr("fp4compile.plan.package_digest", lambda: "other sources")
    assert digest_of(None) != before


TRAP = """
import torch, sys
sys.path.insert(0, {tests!r})
from test_cache import Model, run_blocks
from fp4compile import Policy, compile_blocks, prepare
from torch._dynamo.utils import counters
import fp4compile.backend
fp4compile.backend.lower = lambda graph, product: None
model = Model(4)
compile_blocks(model, prepare(model, policy=Policy(first={first}, last={last})))
print(run_blocks(model), counters["aot_autograd"]["autograd_cache_hit"])
"""


@pytest.mark.slow
def test_a_warm_cache_never_hands_out_a_graph_of_other_decisions(tmp_path):
    """The trap: block code is equal and the caches do not see decisions unless the pass tells them."""

    def run(first, last):
        script = TRAP.format(tests=os.path.dirname(__file__), first=first, last=last)
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout.strip().splitlines()[-1]

    assert run(1, 1) == "[False, True, True, False] 0"
    assert run(1, 1) == "[False, True, True, False] 2"
    assert run(0, 2) == "[True, True, False, False] 2"
    assert run(0, 0) == "[True, True, True, True] 1"


def test_every_file_of_the_package_is_in_the_key() -> None:
    """A template's text becomes part of cached graphs as code does."""
    root = Path(fp4compile.__file__).parent
    files = {path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert {path.name for path in files - set(plan.package_sources())} <= {"py.typed"}
