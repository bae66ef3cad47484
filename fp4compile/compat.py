"""Every private name of torch that the package touches, in one place, with a self test.

Nothing else in the package imports a name from ``torch._*``. When a torch release moves one of them, this file
changes and ``self_test`` says so before a user's model does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import fx
from torch._dynamo import eval_frame
from torch._dynamo.guards import _get_closure_vars, install_guard
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._guards import CompileContext, detect_fake_mode
from torch._inductor import inductor_prims, list_mode_options
from torch._inductor.compile_fx import compile_fx as _compile_fx
from torch._inductor.compile_fx import compile_fx_inner as _compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

SUPPORTED = ((2, 11), (2, 16))
"""Torch versions the package is made for: at least the first, below the second."""

JOINT_PASS = "joint_custom_pre_pass"

MARK = "fp4_site"
"""Key in ``node.meta["custom"]``: Dynamo nodes carry it, AOTAutograd copies it to forward and backward nodes."""

INHERITED_META = (
    "nn_module_stack",
    "fwd_nn_module_stack",
    "source_fn_stack",
    "fwd_source_fn_stack",
    "stack_trace",
    "seq_nr",
    "partitioner_tag",
    "autograd_backward",
    "recompute",
    "ac_graph_id",
    "custom",
)
"""Metadata that a node put in another's place takes over: names for readers, phase and checkpointing for the
partitioner."""


# --- compiling -------------------------------------------------------------------------------------------------------


class GraphPass(CustomGraphPass):
    """A pass for Inductor's hooks: calls ``run(graph)``, then whatever pass the user had put in the same hook."""

    def __init__(self, hook: str, run: Callable[[fx.Graph], None], digest: str) -> None:
        self._run = run
        self._digest = digest
        present = getattr(inductor_config, hook)
        self._users = list(present) if isinstance(present, (list, tuple)) else [present] * (present is not None)

    def __call__(self, graph: fx.Graph) -> None:
        self._run(graph)
        for user_pass in self._users:
            user_pass(graph)

    def uuid(self) -> Any:
        """Cache key: ours and the users'. A user's pass without one turns the cache off, as it does in Inductor."""
        users = [user_pass.uuid() for user_pass in self._users]
        return None if any(key is None for key in users) else (self._digest, *map(repr, users))


def compile_fx(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    patches: Mapping[str, Any],
    inner_compile: Callable[..., Any],
) -> Callable[..., Any]:
    """Inductor's ``compile_fx`` with configuration patches that also hold for the backward compiled later."""
    return _compile_fx(gm, example_inputs, inner_compile=inner_compile, config_patches=dict(patches))  # type: ignore[return-value]


def inner_compile_after(change: Callable[[fx.Graph], None]) -> Callable[..., Any]:
    """Inductor's compilation of one graph, forward or backward, after a change to it and to the graphs nested in it.

    Its own hook for passes comes later: it computes the fake values of all that was changed there anew, and often of
    what follows, which takes longer than the change.
    """

    @functools.wraps(_compile_fx_inner)
    def compile_graph(gm: fx.GraphModule, example_inputs: Sequence[Any], **facts: Any) -> Any:
        for module in gm.modules():
            if isinstance(module, fx.GraphModule):
                change(module.graph)
                module.recompile()
        return _compile_fx_inner(gm, example_inputs, **facts)

    return compile_graph


def mode_options(mode: str) -> dict[str, Any]:
    """Inductor settings behind ``torch.compile``'s ``mode``; KeyError-free: unknown modes raise RuntimeError."""
    return {} if mode == "default" else dict(list_mode_options(mode))


def inductor_setting_exists(name: str) -> bool:
    """Whether ``name`` (dots or dashes as in ``options=``) is a setting of Inductor."""
    try:
        operator.attrgetter(name.replace("-", "_"))(inductor_config)
    except AttributeError:
        return False
    return True


@contextlib.contextmanager
def capture_context() -> Iterator[None]:
    """Inside: backward graphs are lowered with their forward, no cache is used, recompiles are not limited."""
    with (
        functorch_config.patch(force_non_lazy_backward_lowering=True),
        dynamo_config.patch(recompile_limit=10_000, accumulated_recompile_limit=10_000),
    ):
        yield


CAPTURE_PATCHES = {"force_disable_caches": True}


def recompile_limit() -> int:
    """How many variants of one code object Dynamo compiles before it falls back to eager."""
    return int(dynamo_config.recompile_limit)


def variant() -> int:
    """How many variants of the code object in compilation there are, with this one; 0 where nothing is compiled."""
    isolated = getattr(eval_frame, "get_eval_frame_isolate_recompiles_id", lambda: -1)  # torch 2.13
    if isolated() != -1:  # what is compiled on its own has variants of its own, which nothing counts
        return 0
    current = CompileContext.current_compile_id()
    return 0 if current is None or current.frame_compile_id is None else int(current.frame_compile_id) + 1


@contextlib.contextmanager
def below_autograd() -> Iterator[None]:
    """Inside, calls pass autograd by, as they do in torch's own operators. For tensors that need no gradient.

    A compiled graph checks in its first call that no operator returns its inputs, and the operators of Python that it
    calls then run like this; in every later call they do not. Dynamo guards on the difference: what they compile
    themselves would be compiled for both.
    """
    with torch._C._AutoDispatchBelowADInplaceOrView():
        yield


# --- the Dynamo graph ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Step:
    """An object on the way from a frame to an input of its graph. ``source`` is Dynamo's expression for it, which a
    guard can be put on."""

    value: Any
    source: Any
    word: str
    """What it adds to a readable name: a variable, an attribute, an index or a key; "" for a step inside of one."""


def _word(source: Any) -> str:
    words = (getattr(source, field, None) for field in ("local_name", "global_name", "member", "index"))
    word = next((word for word in words if isinstance(word, (str, int))), "")
    return "" if word in _STORAGE else str(word)


_STORAGE = ("_modules", "_parameters", "_buffers", "__dict__", "__closure__", "cell_contents")
"""Where objects keep what is read from them by a name of its own."""


def way_to(placeholder: fx.Node) -> list[Step]:
    """From the frame under compilation to the value of an input of its graph, which is last. Empty without a source.

    A step that Dynamo has no expression for is None.
    """
    source, frame = getattr(placeholder, "_dynamo_source", None), _frame_under_compilation()
    if source is None or frame is None:
        return []
    chain = [source]
    while (base := getattr(chain[-1], "base", None)) is not None:
        chain.append(base)
    names = {**_get_closure_vars(), "L": frame.f_locals, "G": frame.f_globals}
    known: dict[Any, Any] = {}
    return [Step(_value_at(each, names, known), each, _word(each)) for each in reversed(chain)]


def _value_at(source: Any, names: dict[str, Any], known: dict[Any, Any]) -> Any:
    try:
        return source.get_value(names, {}, known)
    except Exception:  # any that the user's objects raise; a parameter that is not found is reported as nameless
        return None


def _frame_under_compilation() -> Any:
    """Dynamo's translator of the outermost frame that the graph was captured from; None outside Dynamo."""
    try:
        translator = InstructionTranslator.current_tx()
    except AttributeError:
        return None
    return None if translator is None else translator.output.root_tx


def local_values() -> list[Any]:
    """What the frame under compilation names: its variables, and the globals that its code reads."""
    frame = _frame_under_compilation()
    return [] if frame is None else _named_by(frame.f_code, frame.f_locals, frame.f_globals)


def _named_by(code: types.CodeType, variables: Mapping[str, Any], globals_: Mapping[str, Any]) -> list[Any]:
    return [*variables.values(), *(globals_[name] for name in code.co_names if name in globals_)]


def calls_around(inside: bool) -> Iterator[tuple[Any, list[Any]]]:
    """(object, values) of the Python calls in progress around the frame under compilation, from the inside out: the
    module or the first argument of what is called, None if there is none; and what the frame names.

    inside: those that torch.compile was called for and what they call; else what is around torch.compile's own call.
    torch's frames count as calls of modules only.
    """
    frame: Any = sys._getframe(1)
    within = True
    while frame is not None:
        code, variables = frame.f_code, frame.f_locals
        if code.co_filename == _EVAL_FRAME and code.co_name == "compile_wrapper" and within:
            compiled = getattr(variables.get("fn"), "__self__", None)
            if inside:
                yield compiled if isinstance(compiled, torch.nn.Module) else None, []
            within = False
        elif code.co_filename == _MODULE and within == inside:
            yield variables.get("self"), []
        elif not code.co_filename.startswith((_TORCH, _HERE)) and within == inside:
            first = variables.get(code.co_varnames[0]) if code.co_argcount else None
            yield first, _named_by(code, variables, frame.f_globals)
        if not within and inside:
            return
        frame = frame.f_back


_EVAL_FRAME = eval_frame.__file__
_MODULE = str(torch.nn.modules.module.__file__)
_TORCH = os.path.dirname(str(torch.__file__)) + os.sep
_HERE = os.path.dirname(__file__) + os.sep


def guard_on(step: Step, holds: Callable[[Any], bool], text: str) -> None:
    """Have the graph under compilation used only while ``holds`` of the object at a step, checked at every call."""

    def fp4_guard(builder: Any, guard: Any) -> None:
        builder.get_guard_manager(guard).add_lambda_guard(holds, [text], None)

    install_guard(step.source.make_guard(fp4_guard))


def module_id(node: fx.Node) -> int | None:
    """``id`` of the innermost module that a call of the graph runs in, as Dynamo noted it."""
    stack = node.meta.get("nn_module_stack")
    key = next(reversed(stack)).partition("@")[0] if stack else ""
    return int(key) if key.isdecimal() else None


def mark(node: fx.Node, value: int) -> None:
    """Write a site's number on a Dynamo node. AOTAutograd hands it to every node that the call becomes."""
    node.meta["custom"] = {**(node.meta.get("custom") or {}), MARK: value}


def mark_of(node: fx.Node) -> int | None:
    """The number ``mark`` wrote, on a Dynamo or an AOT node."""
    return (node.meta.get("custom") or {}).get(MARK)


# --- the joint graph -------------------------------------------------------------------------------------------------


def _base_descriptor(descriptor: Any) -> Any:
    while descriptor is not None and hasattr(descriptor, "base"):  # pieces of a tensor subclass (DTensor), views
        descriptor = descriptor.base
    return descriptor


def _input_key(descriptor: Any) -> int | str | None:
    descriptor = _base_descriptor(descriptor)
    target = getattr(descriptor, "target", None)  # ParamAOTInput, BufferAOTInput
    return target if target is not None else getattr(descriptor, "idx", None)


def input_key(placeholder: fx.Node) -> int | str | None:
    """Which input of the Dynamo graph an AOT placeholder is: its index, or the name of a lifted attribute."""
    kind = type(_base_descriptor(placeholder.meta.get("desc"))).__name__
    return _input_key(placeholder.meta.get("desc")) if kind.endswith("Input") and kind != "TangentAOTInput" else None


def is_tangent(placeholder: fx.Node) -> bool:
    """Whether a placeholder is an incoming gradient."""
    kind = type(_base_descriptor(placeholder.meta.get("desc"))).__name__
    return kind == "TangentAOTInput" or placeholder.name.startswith("tangents")


def has_descriptors(graph: fx.Graph) -> bool:
    """False for the bodies of nested compile regions, whose inputs cannot be traced to parameters."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    return not placeholders or any(node.meta.get("desc") is not None for node in placeholders)


def gradient_keys(graph: fx.Graph) -> list[tuple[fx.Node, int | str]]:
    """(output node, key of the input whose gradient it is) of a joint graph."""
    output = graph.output_node()
    values = torch.utils._pytree.tree_leaves(output.args[0])
    pairs = []
    for value, descriptor in zip(values, output.meta.get("desc") or (), strict=False):
        descriptor = _base_descriptor(descriptor)
        if isinstance(value, fx.Node) and type(descriptor).__name__ == "GradAOTOutput":
            key = _input_key(descriptor.grad_of)
            if key is not None:
                pairs.append((value, key))
    return pairs


def is_tagged_backward(node: fx.Node) -> bool:
    """Autograd's own word that a node belongs to the backward (absent inside a user's autograd.Function)."""
    if "autograd_backward" in node.meta:
        return bool(node.meta["autograd_backward"])
    return node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")


def is_recomputed(node: fx.Node) -> bool:
    """Whether a node of a partitioned backward graph belongs to the forward and is computed there once more."""
    return node.meta.get("partitioner_tag") == "is_forward"


def schema_of(operator: Any) -> Any:
    """The ``torch.FunctionSchema`` of an operator; None of what has none, such as a higher-order operator."""
    return getattr(operator, "_schema", None)


def result_name(operator: Any, index: int) -> str:
    """What an operator's schema calls its result ``index``; the index where it has no name."""
    schema = schema_of(operator)
    return (schema.returns[index].name if schema else "") or str(index)


def fake_mode(value: Any) -> Any:
    """The fake-tensor mode of a node's ``meta["val"]`` (a tensor or a tuple of them)."""
    return detect_fake_mode(value)


def size_hint(size: int | torch.SymInt) -> int:
    """The value a size had when the graph was captured; adds no guard."""
    return size if isinstance(size, int) else int(size.node.hint)


def has_hint(size: int | torch.SymInt) -> bool:
    """False for a size that is only known when the graph runs, such as the count of a mask's elements."""
    return isinstance(size, int) or bool(size.node.has_hint())


def statically_one(size: int | torch.SymInt) -> bool:
    """True for a size known to be 1 without adding a guard."""
    return isinstance(size, int) and size == 1


# --- tracing and random numbers --------------------------------------------------------------------------------------


def trace(function: Callable[..., Any], fake_args: Sequence[Any], mode: Any) -> fx.GraphModule:
    """``function`` as a graph of the operators Inductor lowers, traced with fake tensors."""
    with mode, torch._guards.tracing(None):
        traced = make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="real")(*fake_args)
    traced.graph.eliminate_dead_code()
    return traced


SEEDS = inductor_prims.seeds
LOOKUP_SEED = inductor_prims.lookup_seed


# --- Inductor's templates --------------------------------------------------------------------------------------------
# Imported when used: they bring much of Inductor with them.


def triton_template(name: str, source: str, grid: Callable[..., Any]) -> Any:
    """A kernel in Inductor's template language; grid(m, n, meta, *, cdiv, min) is its launch grid."""
    from torch._inductor.select_algorithm import SymbolicGridFn, TritonTemplate

    return TritonTemplate(name=name, grid=SymbolicGridFn(grid), source=source)


def register_lowering(operator: Any, lower: Callable[..., Any]) -> None:
    """Have Inductor call ``lower`` with its own boxes in place of tensors, where a graph calls ``operator``."""
    from torch._inductor.lowering import register_lowering as register

    register(operator, type_promotion_kind=None)(lower)


SCALED_MM_OUT = torch.ops.aten._scaled_mm_v2.out
"""(A, B, A's scales, their recipes and swizzles, the same of B, bias, out_dtype, *, out): lowering/cublas_fp4.py."""


@functools.cache
def _called_by_name(operator: Any) -> Any:
    """A choice of Inductor's that calls an operator with ``out=``, in generated code by its name in ``torch.ops``.

    Inductor's own name for it, in ``extern_kernels``, is not there in a process that takes the code from a cache.
    """
    from torch._inductor.select_algorithm import ExternKernelChoice

    class Called(ExternKernelChoice):
        def call_name(self) -> str:
            return f"torch.ops.{operator}"

    return Called(operator, name=str(operator).replace(".", "_"))


def lower_by_template(
    template: Any,
    name: str,
    inputs: Sequence[Any],
    size: Sequence[Any],
    dtype: torch.dtype,
    choices: Sequence[Any],
    operators: Sequence[Any] = (),
) -> Any:
    """The contiguous result of a template or an operator, by the fastest of ``choices`` (the template's constants) and
    of ``operators``, which take the inputs and ``out``, if there are several.

    Inputs of more than two dimensions, and all of an operator, are made contiguous, the others stay as they are.
    """
    from torch._inductor import ir
    from torch._inductor.select_algorithm import autotune_select_algorithm, realize_inputs

    realized = [
        ir.ExternKernel.require_contiguous(box) if operators or len(box.get_size()) > 2 else realize_inputs(box)
        for box in inputs
    ]
    layout = ir.FixedLayout(inputs[0].get_device(), dtype, list(size))
    callers: list[Any] = [_called_by_name(operator).bind(realized, layout) for operator in operators]
    for constants in choices:
        refused = template.maybe_append_choice(callers, input_nodes=realized, layout=layout, **constants)
        if refused is not None and len(choices) == 1:
            raise RuntimeError(f"Inductor refuses the template {name}: {refused}") from refused
    result = autotune_select_algorithm(name, callers, realized, layout)
    return result[0] if isinstance(result, tuple) else result  # a tuple from torch 2.13 on


def eager_call(operator: Any, *args: Any) -> Any:
    """In a lowering: call the operator itself from the generated code."""
    from torch._inductor.lowering import fallback_handler

    return fallback_handler(operator, add_to_fallback_set=False)(*args)


def rows_known_aligned(box: Any, bytes: int) -> bool:
    """In a lowering: whether a matrix of bytes has contiguous rows, known to be a multiple of ``bytes`` apart."""
    from torch._inductor.virtualized import V

    stride = box.maybe_get_stride()  # None for what is not computed yet: it will be contiguous
    row, column = (box.get_size()[1], 1) if stride is None else stride
    sizes = V.graph.sizevars
    return bool(sizes.statically_known_equals(column, 1) and sizes.statically_known_multiple_of(row, bytes))


def lowered_size_hint(size: Any) -> int:
    """In a lowering: the value a size had when the graph was captured; adds no guard."""
    from torch._inductor.virtualized import V

    return int(V.graph.sizevars.optimization_hint(size, fallback=8192))


def known_multiple(size: int | torch.SymInt, of: int) -> bool:
    """Whether a size of a graph is known to be a multiple; adds no guard."""
    return statically_known_true(size % of == 0)


def known_equal(one: int | torch.SymInt, other: int | torch.SymInt) -> bool:
    """Whether two sizes of a graph are known to be equal; adds no guard."""
    return statically_known_true(one == other)


def autotunes_products() -> bool:
    """Whether Inductor measures its choices of matrix products (max-autotune)."""
    return bool(inductor_config.max_autotune or inductor_config.max_autotune_gemm)


def rounds_between_operations() -> bool:
    """Whether Inductor rounds to bfloat16 inside a kernel wherever the model does."""
    return bool(inductor_config.emulate_precision_casts)


# --- self test -------------------------------------------------------------------------------------------------------


def version() -> tuple[int, int]:
    """(major, minor) of the torch in use."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


class _Probe(torch.nn.Module):
    """A model for the self test."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(16, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


@functools.cache
def _test_template() -> Any:
    """Inductor takes a template's name once a process."""
    return triton_template("fp4_self_test", "{{def_kernel('A')}}", lambda m, n, meta, *, cdiv, min: (1, 1, 1))


def self_test() -> list[str]:
    """What of this file does not hold on the torch in use; empty when all does. Compiles one tiny model."""
    problems = []
    if not SUPPORTED[0] <= version() < SUPPORTED[1]:
        first, below = (".".join(map(str, bound)) for bound in SUPPORTED)
        problems.append(f"torch {torch.__version__} is not supported: the package is made for >={first},<{below}")
    seen: dict[str, bool] = dict.fromkeys(
        (
            "below autograd",
            "variant",
            "local values",
            "ways",
            "calls around",
            "module ids",
            "guards",
            "marks",
            "descriptors",
            "gradients",
            "inner compile",
        ),
        False,
    )

    try:
        _test_template()
        from torch._inductor.lowering import fallback_handler, register_lowering  # noqa: F401
        from torch._inductor.select_algorithm import autotune_select_algorithm, realize_inputs  # noqa: F401
    except (ImportError, TypeError) as error:
        problems.append(f"templates: {error}")

    ones = torch.ones(2, requires_grad=True)
    with contextlib.suppress(AttributeError), below_autograd():
        seen["below autograd"] = not (ones * 2).requires_grad and not ones[:1]._is_view()

    def joint(graph: fx.Graph) -> None:
        mms = [node for node in graph.nodes if node.target is torch.ops.aten.mm.default]
        seen["marks"] = len(mms) == 3 and all(mark_of(node) == 7 for node in mms)
        keys = [input_key(node) for node in graph.nodes if node.op == "placeholder" and not is_tangent(node)]
        seen["descriptors"] = sorted(map(str, keys)) == ["0", "1"]
        seen["gradients"] = len(gradient_keys(graph)) == 2

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        seen["local values"] = any(value is model for value in local_values())
        seen["variant"] = variant() > 0
        ways = [way_to(node) for node in gm.graph.nodes if node.op == "placeholder"]
        to_weight = next((way for way in ways if way and way[-1].value is model.inner.weight), [])
        seen["ways"] = any(step.value is model for step in to_weight) and to_weight[-1].word == "weight"
        seen["calls around"] = any(called is model for called, _ in calls_around(inside=True))
        seen["module ids"] = any(module_id(node) == id(model.inner) for node in gm.graph.nodes)
        guard_on(to_weight[0], lambda value: seen.update({"guards": value is model}) is None, "self test")
        for node in gm.graph.nodes:
            if node.op == "call_function":
                mark(node, 7)
        patches = {JOINT_PASS: GraphPass(JOINT_PASS, joint, "self test"), **CAPTURE_PATCHES}
        return compile_fx(gm, inputs, patches, inner_compile_after(lambda graph: seen.update({"inner compile": True})))

    model = _Probe()
    with capture_context():
        compiled = torch.compile(model, backend=backend)
        compiled(torch.ones(4, 16, requires_grad=True)).sum().backward()
    return problems + [f"{name}: not as expected on torch {torch.__version__}" for name, ok in seen.items() if not ok]
