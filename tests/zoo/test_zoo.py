"""Real architectures: no weight matmul is lost, each has its module's name, head and last blocks stay bf16."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from architectures import ZOO, Architecture
from compiling import interpreted
from eager import weight_matmuls
from torch import nn

import fp4compile
from fp4compile.plan import SiteRecord

QUICK = ("Qwen3", "Qwen3-MoE", "GPT-2", "Whisper")
"""Run by ``make test`` too: one whose forward is wrapped in a function, experts and a router, a graph break and weights
[in, out], an encoder with a decoder."""

ENDS = {4: (0, 1), 16: (1, 2)}
"""First and last blocks that stay bf16, by the number of blocks: 2 and 8 of 62, rounded."""

EXPERTS = "batched weights (experts) are not rewritten yet"


EAGER = "in no captured graph"


def stays_bf16(architecture: Architecture, name: str, weight: nn.Parameter) -> bool:
    """By the rules as the documentation has them."""
    first, last = ENDS[architecture.count]
    parts = name.removeprefix(f"{architecture.blocks}.").split(".")
    in_blocks = name.startswith(f"{architecture.blocks}.")
    at_an_end = in_blocks and not first <= int(parts[0]) < architecture.count - last
    return name == architecture.head or at_an_end or min(weight.shape) < 16


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.zoo) for name in ZOO])
def test_sites_and_their_decisions(name: str, record_property: Callable[[str, object], None]) -> None:
    architecture = ZOO[name]
    eager = weight_matmuls(architecture.build(), architecture.inputs())
    start = time.process_time()
    model = architecture.build()
    report = fp4compile.explain(model, **architecture.inputs())
    record_property("zoo", row(name, architecture, report.sites, time.process_time() - start))
    modules = dict(model.named_modules())

    # What torch leaves to Python after a graph break is no site, but it is listed.
    left_to_python = [one.fqn for one in report.matmuls_left if one.reason.startswith(EAGER) and one.fqn in eager.plain]
    sites = [site.fqn for site in report.sites]
    assert Counter(sites + left_to_python) == Counter(eager.plain)
    batched = [one.fqn for one in report.matmuls_left if one.reason == EXPERTS]
    assert Counter(batched) == Counter(weight.rpartition(".")[0] for weight in eager.batched)
    assert {one.fqn for one in report.matmuls_left if not one.reason.startswith(EAGER)} <= modules.keys() - {""}

    assert architecture.head in sites + left_to_python
    for site in report.sites:
        expected = "bf16" if stays_bf16(architecture, site.fqn, modules[site.fqn].weight) else "nvfp4"
        assert {site.forward.precision, site.dgrad.precision, site.wgrad.precision} == {expected}, site


@pytest.mark.zoo
@pytest.mark.parametrize("name", ZOO)
def test_compiling_decides_as_explain_shows(name: str) -> None:
    """Sites of blocks that share a graph show once."""
    architecture = ZOO[name]
    report = fp4compile.explain(architecture.build(), **architecture.inputs())
    model = architecture.build()
    with interpreted() as plans:
        torch.compile(model, backend="nvfp4")(**architecture.inputs())
    found = {decided(site) for plan in plans if plan.outcome for site in plan.outcome.sites}
    expected = set(map(decided, report.sites))
    assert found == expected or (found < expected and len(plans) > 1)


def decided(site: SiteRecord) -> tuple[object, ...]:
    return site.fqn, site.forward, site.dgrad, site.wgrad


def row(name: str, architecture: Architecture, sites: Sequence[SiteRecord], seconds: float) -> str:
    """What the table at the end of ``make zoo`` has of a model."""
    heads = [site.forward.reason for site in sites if site.fqn == architecture.head]
    ends = sorted({site.forward.reason for site in sites if "blocks" in site.forward.reason})
    done = sum(site.rewritten for site in sites)
    cells = (name, len(sites), done, ", ".join(heads), ", ".join(ends), f"{seconds:.1f}")
    return f"| {' | '.join(map(str, cells))} |"
