"""Kernels are compiled beside Inductor's, and found in Triton's cache when they are launched."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from fp4compile import compat
from fp4compile.lowering import ahead, cuda
from fp4compile.lowering.kernels import decode
from fp4compile.lowering.kernels.kernel import Kernel
from fp4compile.lowering.targets import HOPPER

QUANTIZE = (None, "nvfp4", [1, 16], "nearest", 0)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp4compile.lowering.kernels.common.isa_of", lambda device: HOPPER)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


class Pool:
    """Runs nothing, and remembers."""

    def __init__(self) -> None:
        self.kernels: list[str] = []

    def submit(self, function: Any, cache: str, kernel: Kernel, capability: tuple[int, int]) -> Future[None]:
        assert capability == (9, 0)
        self.kernels.append(kernel.name)
        future: Future[None] = Future()
        future.set_exception(RuntimeError("the process ended"))
        return future


def fresh_decode() -> Kernel:
    """A kernel without binaries that other tests have made."""
    return decode.kernel.__wrapped__(HOPPER, "nvfp4", torch.bfloat16, decode.choose())


def quantize_node(x: torch.Tensor) -> fx.Node:
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in ("x", "amax")]
    for node, value in zip(nodes, (x, torch.empty((), device="meta")), strict=True):
        node.meta["val"] = value
    return graph.call_function(torch.ops.fp4_cuda.quantize.default, (*nodes, *QUANTIZE))


def test_the_kernels_of_a_call_are_known_before_it_is_made(hopper: None) -> None:
    x, amax = torch.empty(64, 128, dtype=torch.bfloat16, device="meta"), torch.empty((), device="meta")
    found = ahead.launched(cuda.quantize, x, amax, *QUANTIZE)
    assert [kernel.name for kernel in found] == ["quantize_rows_nvfp4_nearest_bfloat16"]


def test_a_kernel_is_submitted_once(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool()
    monkeypatch.setattr(compat, "compile_pool", lambda: pool)
    node = quantize_node(torch.empty(64, 112, dtype=torch.float16, device="meta"))
    for _ in range(2):
        ahead.compile_ahead(node, cuda.quantize, torch.device("cuda", 5))
    assert pool.kernels == ["quantize_rows_nvfp4_nearest_float16"]


def test_symbolic_shapes_and_a_lone_process_submit_nothing(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    node = quantize_node(torch.empty(64, 128, dtype=torch.bfloat16, device="meta"))
    monkeypatch.setattr(compat, "compile_pool", lambda: None)
    ahead.compile_ahead(node, cuda.quantize, torch.device("cuda", 5))
    pool = Pool()
    monkeypatch.setattr(compat, "compile_pool", lambda: pool)
    monkeypatch.setattr(ahead, "_is_symbolic", lambda value: True)
    ahead.compile_ahead(node, cuda.quantize, torch.device("cuda", 5))
    assert not pool.kernels


def test_what_a_process_failed_to_compile_is_compiled_at_the_launch(hopper: None) -> None:
    kernel = fresh_decode()
    kernel.compile_in(Pool(), 0)
    assert "ptx" in kernel._binary(0).asm


SCRIPT = """
import torch
from concurrent.futures import wait
from pathlib import Path
from triton import knobs
from fp4compile import compat
from fp4compile.lowering.kernels import decode
from fp4compile.lowering.targets import HOPPER

torch.cuda.get_device_capability = lambda device: (9, 0)
kernel = decode.kernel(HOPPER, "nvfp4", torch.bfloat16, decode.choose())
kernel.compile_in(compat.compile_pool(), 0)
wait(kernel._pending.values())
files = lambda: {path for path in Path(knobs.cache.dir).rglob("*") if path.is_file()}
compiled = files()
assert any(path.suffix == ".cubin" for path in compiled), compiled
assert "cubin" in kernel._binary(0).asm
assert files() == compiled, files() - compiled
"""


@pytest.mark.slow
def test_a_process_compiles_into_the_cache_that_is_read_here(tmp_path: Path) -> None:
    """In a process of its own: once Triton has compiled anything, it stays with the assembler it took then."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_COMPILE_THREADS": "2"}
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, env=environment)
