"""``torch.compile(model, backend="nvfp4")``: options, plan, Inductor with passes before and after its partitioner."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from . import compat, ops  # noqa: F401  (ops registers the operators)
from .errors import Fp4Warning
from .lowering import lower, lowering_key, refuse_product
from .options import Options, parse_options
from .passes import run_joint_passes
from .plan import GraphPlan, make_plan
from .policy import NAMELESS, Policy


def nvfp4(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The backend ``torch.compile`` calls for each captured graph.

    Options, all optional:
        recipe: a ``Recipe`` or its name. policy: a ``Policy``, a dict of its fields, or a plan's decisions
        (``plan.options`` of ``prepare``). mode: as ``torch.compile``'s. inductor: a dict of Inductor's settings.
        save: what wgrad's input is kept as: "auto" (the partitioner weighs bytes), "packed" (in 4 bits wherever nothing
        else keeps it in bf16: nothing is quantized again) or "recompute" (what bf16 would keep: it is quantized in the
        backward). strict: True: a graph that cannot be rewritten is an error; False: it stays as it is, with one
        warning. product: what multiplies packed operands where tensor cores do (Blackwell): "auto" (cuBLAS what it
        can take, the Triton template the rest; ``mode="max-autotune"`` measures both), "cublas" (without measuring; a
        warning names what it cannot take) or "triton". The log "fp4compile.lowering" has the reason of each choice, at
        level DEBUG.

    Raises:
        ConfigError: an option is unknown, has a value of the wrong kind or cannot be honoured on this device.
        RewriteError, UnsupportedDtypeError: the graph cannot be rewritten and ``strict`` is True.
    """
    parsed = parse_options(options, mode)
    _warn_if_last(compat.variant(), compat.recompile_limit())
    plans: list[GraphPlan] = []
    compiled = compile_graph(gm, example_inputs, parsed, on_plan=plans.append)
    _warn_if_nothing(plans[0], parsed)
    return _refuse_double_backward(compiled)


def compile_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    inner_compile: Callable[..., Any] | None = None,
    extra_patches: Mapping[str, Any] | None = None,
    on_joint: Callable[[str, fx.Graph], None] | None = None,
    on_plan: Callable[[GraphPlan], Any] | None = None,
    shared: bool = True,
) -> Callable[..., Any]:
    """Plan one graph and compile it. The last five arguments let ``explain`` look on, at every block, without
    generating code; ``shared``: see ``make_plan``."""
    devices = [value.device for value in example_inputs if isinstance(value, torch.Tensor)]
    key = options.key() + lowering_key(devices)
    plan = make_plan(gm, options.recipe, options.policy, options.strict, key, options.save, shared)
    if on_plan is not None:
        on_plan(plan)
    joint = functools.partial(_joint, plan=plan, product=options.product, look=on_joint)
    patches = {
        **options.inductor,
        compat.JOINT_PASS: compat.GraphPass(compat.JOINT_PASS, joint, f"{plan.digest} joint"),
        **(extra_patches or {}),
    }
    lowering = functools.partial(lower, product=options.product)
    return compat.compile_fx(gm, example_inputs, patches, inner_compile or compat.inner_compile_after(lowering))


def _joint(graph: fx.Graph, plan: GraphPlan, product: str, look: Callable[[str, fx.Graph], None] | None) -> None:
    if look is not None:
        look("joint_before", graph)
    run_joint_passes(graph, plan)
    refuse_product(graph, product)
    if look is not None:
        look("joint_after", graph)


def _warn_if_last(variant: int, limit: int) -> None:
    """What torch does not compile any more runs without FP4, of which torch only logs a line."""
    if variant >= limit:
        warnings.warn(
            f"backend 'nvfp4' compiles variant {variant} of one function, and torch's limit is {limit}: calls that "
            "need another one run eagerly and without FP4, or fail with fullgraph=True. TORCH_LOGS=recompiles says in "
            "what they differ; where it is an integer attribute of a module, "
            "torch._dynamo.config.allow_unspec_int_on_nn_module = True makes one variant of all; where so many are "
            "meant, raise torch._dynamo.config.recompile_limit.",
            Fp4Warning,
            stacklevel=2,
        )


def _warn_if_nothing(plan: GraphPlan, options: Options) -> None:
    """A user who asked for NVFP4 and gets none of it must hear so. Decisions made by ``prepare`` were shown there."""
    if plan.outcome is None or not isinstance(options.policy, Policy) or not (plan.outcome.sites or plan.outcome.left):
        return
    if plan.outcome.refused or plan.elsewhere or any(site.rewritten for site in plan.outcome.sites):
        return
    reasons = sorted({site.forward.reason for site in plan.outcome.sites} | {item.reason for item in plan.outcome.left})
    if reasons == [NAMELESS]:
        return  # it has been said, with what to write
    warnings.warn(
        f"backend 'nvfp4' rewrote nothing: all of {len(plan.outcome.sites)} weight matmuls of this graph stay as they "
        f"are ({'; '.join(reasons)}). fp4compile.explain(model, *args) shows every matmul.",
        Fp4Warning,
        stacklevel=2,
    )


def _refuse_double_backward(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """AOTAutograd cannot differentiate its backward; say so where the gradient enters, with the way out."""

    @functools.wraps(compiled)
    def run(*args: Any) -> Any:
        results = compiled(*args)
        for value in results if isinstance(results, (list, tuple)) else (results,):
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                value.register_hook(_no_create_graph)
        return results

    return run


def _no_create_graph(gradient: torch.Tensor) -> None:
    if torch.is_grad_enabled():  # only while create_graph=True
        raise RuntimeError(
            "double backward through a model compiled with backend 'nvfp4' is not supported: its backward is compiled "
            "once. Compute that loss (gradient penalty, Hessian product) with the uncompiled model, or call backward "
            "without create_graph=True."
        )
