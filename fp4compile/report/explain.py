"""``explain``: capture what the backend does to a model, without generating code.

The model runs forward once on the given inputs, by interpreting the captured graphs with the operators' reference.
Random state and buffers are put back afterwards. A second capture without rewriting gives the baseline.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from .. import compat
from ..backend import compile_graph
from ..lowering.compiled import forget
from ..modules import ModuleTree
from ..options import Options, parse_options
from ..plan import GraphPlan, LeftMatmul, SiteRecord
from .report import Report, SavedBytes
from .roofline import Model, Roofline, gpu_named, predict
from .saved import SavedTensor, saved_tensors


def explain(
    model: nn.Module,
    *args: Any,
    options: Mapping[str, Any] | None = None,
    target: str | None = None,
    **kwargs: Any,
) -> Report:
    """What ``torch.compile(model, backend="nvfp4", options=options)`` does when called with these arguments.

    Compiles nothing, but resets Dynamo (``torch.compiler.reset``): models compiled before are compiled again at
    their next call. Use small inputs: the forward runs in the eager reference.

    target: a GPU, "H200", "B200", "GB200", "B300" or "GB300". The report then has a ``roofline``, which PREDICTS the
    times of products and quantizers there for inputs of exactly these sizes. They may be those of training: with a
    target the captured graphs are not run, and what comes out of them is uninitialized.

    Raises:
        ConfigError: an option or the target is unknown.
        ConfigError, RewriteError, UnsupportedDtypeError: as the backend does (inside Dynamo's BackendCompilerFailed).
    """
    parsed = parse_options(options)
    gpu = None if target is None else gpu_named(target)
    captures = _capture(model, args, kwargs, parsed, run=gpu is None)
    baseline = _capture(model, args, kwargs, parsed.without_rewriting(), run=gpu is None)
    return Report(
        sites=tuple(_sites(captures)),
        matmuls_left=(*_left(captures), *_uncaptured(model, captures)),
        saved_for_backward=SavedBytes(
            tensors=tuple(_saved(captures)), baseline_bytes=sum(one.bytes for one in _saved(baseline))
        ),
        graphs=_graphs(captures),
        roofline=None if gpu is None else _roofline(captures, Model(gpu)),
    )


class _Capture:
    """One Dynamo graph on its way through the backend. ``run``: compute what it gives, not only its shapes."""

    def __init__(self, run: bool) -> None:
        self._run = run
        self.plan: GraphPlan | None = None
        self.graphs: dict[str, fx.GraphModule] = {}

    def keep_plan(self, plan: GraphPlan) -> None:
        self.plan = plan

    def keep_joint(self, name: str, graph: fx.Graph) -> None:
        if name not in self.graphs:
            copy = fx.Graph()
            copy.output(copy.graph_copy(graph, {}))
            self.graphs[name] = fx.GraphModule(graph.owning_module or nn.Module(), copy)

    def inner_compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **facts: Any) -> Callable[..., Any]:
        """Stands in for Inductor's code generation: keep the graph, run it as it is or not at all."""
        self.graphs["backward" if facts.get("is_backward") else "forward"] = gm

        def run(values: list[Any]) -> Any:
            return gm(*values) if self._run else fx.node.map_arg(gm.graph.output_node().args[0], _uninitialized)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def name_of(self, node: fx.Node) -> str:
        """The module that a node comes from, "" for none, called as the report calls sites."""
        if self.plan is None or compat.mark_of(node) is None:
            return ""
        call = self.plan.call_of(node)
        return f"{call.root}.{call.module}" if len(self.plan.decisions) > 1 and call.root else call.module

    def kind_of(self, node: fx.Node) -> str:
        """What the user called where a node comes from (linear, silu ...), "" for nodes of no call."""
        return "" if self.plan is None or compat.mark_of(node) is None else self.plan.call_of(node).kind

    def saved(self) -> Iterator[SavedTensor]:
        if "backward" in self.graphs:
            yield from saved_tensors(self.graphs["forward"], self.graphs["backward"], self.kind_of, self.name_of)


def _uninitialized(node: fx.Node) -> Any:
    """What a node gives in shape, type and strides. Memory that nobody writes costs nothing; indices are 0."""
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        return compat.size_hint(value)
    size, stride = ([compat.size_hint(one) for one in sizes] for sizes in (value.shape, value.stride()))
    blank = torch.empty_strided(size, stride, dtype=value.dtype, device=value.device)
    return blank.zero_() if value.dtype in (torch.bool, torch.int32, torch.int64) else blank


def _capture(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], options: Options, run: bool
) -> list[_Capture]:
    captures: list[_Capture] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        capture = _Capture(run)
        captures.append(capture)
        return compile_graph(
            gm,
            example_inputs,
            options,
            inner_compile=capture.inner_compile,
            extra_patches=compat.CAPTURE_PATCHES,
            on_joint=capture.keep_joint,
            on_plan=capture.keep_plan,
            shared=False,
        )

    torch.compiler.reset()
    try:
        with compat.capture_context(), _state_kept(model):
            torch.compile(model, backend=backend)(*args, **kwargs)
    finally:
        torch.compiler.reset()
        forget()
    return [capture for capture in captures if capture.graphs]


@contextlib.contextmanager
def _state_kept(model: nn.Module) -> Iterator[None]:
    """Random numbers and buffers are afterwards as they were."""
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    try:
        with torch.random.fork_rng():
            yield
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in buffers:
                    buffer.copy_(buffers[name])


def _sites(captures: list[_Capture]) -> Iterator[SiteRecord]:
    number = 0
    for capture in captures:
        for site in capture.plan.outcome.sites if capture.plan and capture.plan.outcome else ():
            yield SiteRecord(**{**vars(site), "site": number})
            number += 1


def _left(captures: list[_Capture]) -> Iterator[LeftMatmul]:
    for capture in captures:
        if capture.plan and capture.plan.outcome:
            yield from capture.plan.outcome.left


def _uncaptured(model: nn.Module, captures: list[_Capture]) -> Iterator[LeftMatmul]:
    """Weights that a matmul may read and no graph does."""
    tree = ModuleTree(model)
    read = {name for capture in captures if capture.plan for _, name in capture.plan.params.values()}
    owners = {id(named.value) for named in tree.parameters if named.name in read}
    reason = "in no captured graph: not called, or run eagerly by torch after a graph break"
    for named in tree.parameters:
        if named.is_weight and id(named.value) not in owners:
            yield LeftMatmul(named.site, "weight", reason)


def _saved(captures: list[_Capture]) -> Iterator[SavedTensor]:
    for capture in captures:
        yield from capture.saved()


def _roofline(captures: list[_Capture], model: Model) -> Roofline:
    """The prediction for what all captured graphs become."""
    return predict(
        (
            (capture.graphs[name].graph, capture.name_of)
            for capture in captures
            for name in ("forward", "backward")
            if name in capture.graphs
        ),
        model,
    )


def _graphs(captures: list[_Capture]) -> dict[str, fx.GraphModule]:
    return {
        name if index == 0 else f"{name}.{index}": graph
        for index, capture in enumerate(captures)
        for name, graph in capture.graphs.items()
    }
