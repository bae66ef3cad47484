"""Three ways to run what the backend makes of a model, from fastest to compile to most complete.

"interpreted": the partitioned graphs node by node, no code generated. "inductor": Inductor's code, calling the
operators' reference. "lowered": what a user gets. All three give the same bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn

from fp4compile import backend
from fp4compile.lowering.compiled import forget
from fp4compile.options import Options
from fp4compile.plan import GraphPlan

NO_CACHE = {"force_disable_caches": True}


def _interpret(gm: fx.GraphModule, example_inputs: Sequence[Any], **facts: Any) -> Callable[..., Any]:
    def run(values: list[Any]) -> Any:
        return gm(*values)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


@contextlib.contextmanager
def interpreted() -> Iterator[list[GraphPlan]]:
    """Inside, "nvfp4" generates no code; gives the plans of the graphs that it was called for, in order."""
    plans: list[GraphPlan] = []
    real = backend.compile_graph

    def compile_graph(
        gm: fx.GraphModule, inputs: Sequence[Any], options: Options, on_plan: Callable[[GraphPlan], Any]
    ) -> Callable[..., Any]:
        def keep(plan: GraphPlan) -> None:
            plans.append(plan)
            on_plan(plan)

        return real(gm, inputs, options, inner_compile=_interpret, extra_patches=NO_CACHE, on_plan=keep)

    with _fresh(), mock.patch.object(backend, "compile_graph", compile_graph):
        yield plans


@contextlib.contextmanager
def inductor() -> Iterator[None]:
    """Inside, Inductor's code calls the operators' reference. Compile with ``NO_CACHE`` under "inductor" in options:
    the caches take no notice of this patch."""
    with _fresh(), mock.patch.object(backend, "lower", lambda graph, product: None):
        yield


@contextlib.contextmanager
def lowered() -> Iterator[None]:
    with _fresh():
        yield


@contextlib.contextmanager
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    forget()
    try:
        yield
    finally:
        torch.compiler.reset()
        forget()


def compiled(model: nn.Module, **options: Any) -> Callable[..., Any]:
    """``model`` with the backend and these options, without Inductor's caches."""
    options = {**options, "inductor": {**options.get("inductor", {}), **NO_CACHE}}
    return torch.compile(model, backend="nvfp4", options=options)


def step(model: Callable[..., Any], x: Tensor, dy: Tensor | None = None) -> Tensor:
    """One forward and backward; the result. ``dy`` defaults to a fixed random gradient."""
    y = model(x)
    if dy is None:
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype)
    y.backward(dy)
    return y.detach()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The parameters' gradients, taken off the model."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found
