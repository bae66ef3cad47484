"""Kernels are compiled from when a graph is lowered; the first launch waits for what is not ready."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import fx

from fp4compile.errors import ConfigError
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

    def submit(self, function: Any, kernel: Kernel, capability: tuple[int, int], odd: Any) -> Future[Any]:
        assert capability == (9, 0)
        self.kernels.append(kernel.name)
        future: Future[Any] = Future()
        future.set_result(f"the binary of {kernel.name}")
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
    assert [(kernel.name, odd) for kernel, odd in found] == [("quantize_rows_nvfp4_nearest_bfloat16", ())]


def test_a_kernel_is_submitted_once(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool()
    monkeypatch.setattr(ahead, "_pool", lambda: pool)
    node = quantize_node(torch.empty(64, 112, dtype=torch.float16, device="meta"))
    for _ in range(2):
        ahead.compile_ahead(node, cuda.quantize, torch.device("cuda", 5))
    assert pool.kernels == ["quantize_rows_nvfp4_nearest_float16"]


def test_symbolic_shapes_submit_nothing(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    node = quantize_node(torch.empty(64, 128, dtype=torch.bfloat16, device="meta"))
    pool = Pool()
    monkeypatch.setattr(ahead, "_pool", lambda: pool)
    monkeypatch.setattr(ahead, "_is_symbolic", lambda value: True)
    ahead.compile_ahead(node, cuda.quantize, torch.device("cuda", 5))
    assert not pool.kernels


def test_a_launch_takes_what_was_compiled_ahead(hopper: None) -> None:
    kernel = fresh_decode()
    kernel.compile_in(Pool(), 0)  # type: ignore[arg-type]
    assert kernel._binary(0) == kernel._binary(0) == "the binary of decode_nvfp4_bfloat16"
    assert "ptx" in kernel._binary(1).asm


def test_an_error_of_the_compiler_is_raised_at_the_launch(hopper: None) -> None:
    kernel = fresh_decode()
    kernel._pending[0, ()] = Future()
    kernel._pending[0, ()].set_exception(RuntimeError("no such register"))
    with pytest.raises(RuntimeError, match="no such register"):
        kernel._binary(0)


def test_the_numbers_of_a_call_are_part_of_what_is_compiled(hopper: None) -> None:
    x, amax = torch.empty(33, 48, dtype=torch.bfloat16, device="meta"), torch.empty((), device="meta")
    ((kernel, odd),) = ahead.launched(cuda.quantize, x, amax, *QUANTIZE)  # 99 blocks
    assert [list(kernel.signature)[place] for place in odd] == ["blocks"]


def test_symbolic_strides_submit_nothing() -> None:
    strided = type("Strided", (torch.Tensor,), {"stride": lambda self: (torch.SymInt(None), 1)})
    assert ahead._is_symbolic(torch.empty(4, 4).as_subclass(strided))
    assert not ahead._is_symbolic(torch.empty(4, 4))


def test_a_tensor_of_the_cpu_is_no_address_for_a_gpu(hopper: None) -> None:
    kernel = fresh_decode()
    with pytest.raises(ConfigError, match="move it to the same device"):
        kernel.run(1, torch.zeros(4, dtype=torch.uint8), torch.zeros(1), torch.zeros(4), 1)
