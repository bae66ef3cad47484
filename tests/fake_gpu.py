"""Inductor's code for a GPU that is not there: the source it writes, which is never run.

Tensors are fake, so nothing touches a device; what Inductor asks of one (name, capability, sizes) is answered here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import linecache
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch._inductor.config as inductor_config
import torch._inductor.runtime.triton_helpers  # now: its functions decide at the import whether they are interpreted
import torch._inductor.utils as inductor_utils
import torch.utils._triton
import triton
from torch import fx
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses import fake_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@dataclasses.dataclass(frozen=True)
class Properties:
    """What torch.cuda.get_device_properties says of a B200."""

    name: str = "NVIDIA B200"
    major: int = 10
    minor: int = 0
    multi_processor_count: int = 148
    total_memory: int = 180 << 30
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    regs_per_multiprocessor: int = 65536
    warp_size: int = 32
    gcnArchName: str = ""
    shared_memory_per_block: int = 48 << 10
    shared_memory_per_block_optin: int = 227 << 10
    shared_memory_per_multiprocessor: int = 228 << 10
    L2_cache_size: int = 126 << 20
    uuid: str = "0"
    clock_rate: int = 1965000
    memory_clock_rate: int = 1
    memory_bus_width: int = 1
    is_integrated: int = 0


B200 = Properties()


class Driver:
    """Triton's driver of a device that runs nothing."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 10 * B200.major + B200.minor, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda:0")

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_interface(self) -> Any:
        return torch.cuda


def _answers(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


@contextlib.contextmanager
def fake_gpu() -> Iterator[None]:
    """Inside, torch, Inductor and Triton believe that there is one B200."""
    torch._C._ensureCUDADeviceGuardSet()
    capability = (B200.major, B200.minor)
    answers: list[tuple[Any, str, Any]] = [
        (torch.cuda, "is_available", True),
        (torch.cuda, "device_count", 1),
        (torch.cuda, "current_device", 0),
        (torch.cuda, "get_device_properties", B200),
        (torch.cuda, "get_device_capability", capability),
        (torch.cuda, "get_device_name", B200.name),
        (torch.cuda, "is_bf16_supported", True),
        (torch.cuda, "_lazy_init", None),
        (torch.cuda, "synchronize", None),
        (torch.cuda, "get_rng_state", torch.zeros(16, dtype=torch.uint8)),
        (fake_tensor, "init_gpu_context", None),
        (CudaInterface, "is_available", True),
        (CudaInterface, "current_device", 0),
        (CudaInterface, "get_device_properties", B200),
        (CudaInterface, "get_compute_capability", 10 * B200.major + B200.minor),
        (CudaInterface, "is_triton_capable", True),
        (CudaInterface, "raise_if_triton_unavailable", None),
        (CudaInterface.Worker, "current_device", 0),
        (CudaInterface.Worker, "get_device_properties", B200),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, value in answers:
            if hasattr(owner, name):
                answer = _answers(value)
                stack.enter_context(
                    mock.patch.object(owner, name, staticmethod(answer) if isinstance(owner, type) else answer)
                )
        stack.enter_context(mock.patch.object(torch.version, "cuda", "13.0"))
        stack.enter_context(mock.patch.object(triton.runtime.driver, "_active", Driver()))
        _forget_answers()
        stack.callback(_forget_answers)
        yield


def _forget_answers() -> None:
    """What torch has remembered of the devices of this machine, for instance that Triton has none."""
    for module in (torch.utils._triton, inductor_utils):
        for value in vars(module).values():
            getattr(value, "cache_clear", lambda: None)()


def generated(
    function: Callable[..., Any],
    inputs: Sequence[tuple[tuple[int, ...], torch.dtype]],
    change: Callable[[fx.Graph], None] | None = None,
    **settings: Any,
) -> str:
    """The program that Inductor writes for a function of contiguous tensors of these shapes and dtypes, after a change
    to its graph."""
    patches = {"fx_graph_cache": False, "pattern_matcher": False, "compile_threads": 1, **settings}
    with fake_gpu(), inductor_config.patch(patches):
        mode = fake_tensor.FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        with mode:
            tensors = [torch.empty(shape, dtype=dtype, device="cuda:0") for shape, dtype in inputs]
            graph = make_fx(function, decomposition_table=select_decomp_table())(*tensors)
            if change is not None:
                change(graph.graph)
                graph.recompile()
        with V.set_fake_mode(mode):
            post_grad_passes(graph, True)
            lowering = GraphLowering(graph, example_inputs=tensors, shape_env=mode.shape_env, is_inference=True)
            with V.set_graph_handler(lowering), V.set_debug_handler(DebugContext()):
                lowering.run(*tensors)
                code = lowering.codegen()[0]
    return code if isinstance(code, str) else code.value


def kernels(program: str) -> list[str]:
    """Sources of the Triton kernels in a program of Inductor's."""
    return re.findall(r"async_compile\.triton\('\w+', '''(.*?)'''", program, re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Generated:
    """A kernel of Inductor's program: its function, and what Inductor says of it."""

    function: Any
    options: dict[str, Any]


def load(source: str) -> Generated:
    """The kernel of a source that ``kernels`` found."""
    found: list[Generated] = []

    def template(**options: Any) -> Callable[[Any], Any]:
        return lambda function: found.append(Generated(function, options))

    with fake_gpu(), mock.patch("torch._inductor.runtime.triton_heuristics.template", template):
        _execute(source)
    (kernel,) = found
    return kernel


def compile_kernel(kernel: Generated, arch: int = 100) -> Any:
    """Its binary, compiled by Triton for an architecture."""
    meta = kernel.options["triton_meta"]
    divisible = {key: value for each in meta["configs"] for key, value in each.items()}
    source = ASTSource(kernel.function, meta["signature"], meta["constants"], divisible)
    options = {name: kernel.options[name] for name in ("num_warps", "num_stages")}
    with fake_gpu():
        return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def _execute(source: str) -> None:
    """Run a source whose functions Triton can read, which it does by ``linecache``."""
    name = f"<generated kernel {hash(source)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), {"__name__": "generated"})
