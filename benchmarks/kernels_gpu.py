"""Are the generated kernels' bytes those of the CPU reference, and how near do they come to the copy bandwidth?

--check: codes, scales, amaxes and decoded values of every kernel, byte for byte, into memory filled with 0xFF before;
products against float64 products of the decoded operands. The exit code is 1 if anything differs.
--speed: medians beside the same formulas compiled by ``torch.compile`` and eager, as shares of the copy bandwidth.
--sanitize: every kernel once and nothing else, to be run under ``compute-sanitizer``.

Kernels and formulas are compiled in processes of their own first, so that this one finds them in the caches.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import multiprocessing
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import gpu_cases
import torch
import torch._inductor.config
from common import RESULTS, environment, print_table, write_results
from gpu_cases import Case, Operand, Size, Tensors, Timed
from torch import Tensor

from fp4compile.formats import layout
from fp4compile.formats.rotation import SIGNS
from fp4compile.lowering.kernels import columns, common, gemm, rows, weights
from fp4compile.lowering.kernels.kernel import Kernel, Odd, collecting

NAME = "kernels_gpu"
fp4 = torch.ops.fp4

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CHECKED: list[Size] = [(1, 16), (33, 48), (129, 1000), (2049, 528), (1000, 4104), (4095, 4096), (16384, 8192)]
HEAVY = 2**26
"""Elements from which on the CPU computes a slice, and the same formulas on the GPU the whole."""
SLICE = 128
PRODUCTS = [(8192, 8192, 8192), (1000, 528, 4112)]
SANITIZED: list[tuple[Size, torch.dtype]] = [
    ((129, 272), torch.bfloat16),
    ((512, 512), torch.bfloat16),
    ((129, 272), torch.float32),
]
TIMED: list[Size] = [(65536, 8192), (8192, 4096), (8192, 14336)]
GEMMS = [(8192, 8192, 8192), (16384, 5632, 2048)]
GEMM_MARK = 1.15
ROTATED_BYTES = 2**29
"""Inputs are changed at every call until this much has been read, far beyond a level 2 cache."""


# Compiling in other processes


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Errors that another process can read: one it cannot would end all its processes."""
    try:
        yield
    except Exception as error:
        raise RuntimeError(f"{type(error).__name__}: {error}"[:1000]) from None


def compile_kernel(kernel: Kernel, odd: Odd) -> None:
    """In a process of its own: into Triton's cache."""
    with plain_errors():
        kernel.compile(torch.cuda.get_device_capability(), odd)


def compiled_formulas(timed: Timed) -> Callable[[Operand], Tensors]:
    torch._inductor.config.compile_threads = 1
    torch._inductor.config.autotune_local_cache = False  # what was measured beside other work is not to be kept
    return torch.compile(timed.case.formulas, dynamic=False, fullgraph=True)


def compile_formulas(index: int, size: Size, device: str) -> None:
    """In a process of its own: into Inductor's cache."""
    with plain_errors():
        compiled_formulas(gpu_cases.timed()[index])(gpu_cases.blank(size, torch.device(device)))
    torch.cuda.empty_cache()


def settle(what: str, futures: dict[str, Future[None]]) -> None:
    """Wait; what failed here will be compiled, or fail again, where it is used."""
    began = time.perf_counter()
    errors = {name: error for name, future in futures.items() if (error := future.exception())}
    for name, error in list(errors.items())[:5]:
        print(f"  {name}: {str(error).strip()[:200]}")
    print(
        f"{len(futures)} {what} compiled, {len(errors)} failed, waited {time.perf_counter() - began:.0f} s", flush=True
    )


# The same bytes


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def storage_of(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


def into_poisoned(call: Callable[[], Tensors]) -> tuple[Tensors, bool]:
    """The results of a second call, and whether all of them lie where 0xFF was written after the first one."""
    first = call()
    storages = [storage_of(result) for result in first]
    held = [torch.empty_like(storage) for storage in storages for _ in range(3)]
    for memory in (*storages, *held):
        memory.fill_(0xFF)
    spans = [(memory.data_ptr(), memory.data_ptr() + memory.numel()) for memory in (*storages, *held)]
    del first, storages, held, memory
    results = call()
    return results, all(any(begin <= result.data_ptr() < end for begin, end in spans) for result in results)


def differing(got: Tensor, expected: Tensor) -> int:
    """Bytes."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        raise AssertionError(f"{list(got.shape)} {got.dtype}, expected {list(expected.shape)} {expected.dtype}")
    return int((as_bytes(got) != as_bytes(expected).to(got.device)).sum())


def compare(case: Case, size: Size, on_device: Operand, on_cpu: Operand) -> dict[str, Any]:
    """One kernel at one size: a row of the record."""
    result, poisoned = into_poisoned(lambda: case.kernel(on_device))
    row = {
        "kernel": case.name,
        "size": f"{size[0]}x{size[1]}",
        "dtype": str(on_device.x.dtype).removeprefix("torch."),
        "against": "CPU",
        "bytes": sum(as_bytes(tensor).numel() for tensor in result),
        "poisoned": poisoned,
    }
    if math.prod(size) < HEAVY:
        return row | {"differing": sum(map(differing, result, case.formulas(on_cpu)))}
    wrong = sum(map(differing, result, case.formulas(on_device)))
    slices = {"rows": on_cpu.first_rows(SLICE), "columns": on_cpu.first_columns(SLICE)}
    for axis in set(case.axes) & set(slices):
        expected = case.formulas(slices[axis])
        pairs = zip(case.axes, result, expected, strict=True)
        wrong += sum(differing(got[: len(wanted)], wanted) for along, got, wanted in pairs if along == axis)
    return row | {"against": f"the formulas on the GPU; on the CPU {SLICE} rows or columns", "differing": wrong}


def checked_operands(sizes: Iterable[Size]) -> list[tuple[Size, torch.dtype]]:
    return [(size, dtype) for size in sizes for dtype in (DTYPES if math.prod(size) < HEAVY else DTYPES[:1])]


def check_bytes(sizes: Iterable[Size], device: torch.device) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for size, dtype in checked_operands(sizes):
        began = time.perf_counter()
        if math.prod(size) < HEAVY:  # the amaxes that both sides get are the CPU's
            on_cpu = gpu_cases.operand(size, dtype, torch.device("cpu"))
            on_device = on_cpu.to(device)
        else:
            on_device = gpu_cases.operand(size, dtype, device)
            on_cpu = on_device.to(torch.device("cpu"))
        for case in gpu_cases.checked():
            try:
                found.append(compare(case, size, on_device, on_cpu))
            except Exception as error:
                row = {"kernel": case.name, "size": f"{size[0]}x{size[1]}", "dtype": str(dtype), "error": f"{error!r}"}
                found.append(row)
        wrong = sum(row.get("differing", 1) != 0 for row in found)
        spent = time.perf_counter() - began
        print(f"  {size[0]}x{size[1]} {dtype}: {len(found)} compared, {wrong} differ, {spent:.1f} s", flush=True)
    return found


def check_operators(device: torch.device) -> list[dict[str, Any]]:
    """``fp4_cuda``'s quantize, amax and decode as the operators they stand for."""
    operators = cuda_operators()
    if operators is None or device.type != "cuda":
        return []
    found = []
    for size in ((33, 48), (1000, 528)):
        on_cpu = gpu_cases.operand(size, torch.bfloat16, torch.device("cpu"))
        calls: list[tuple[str, tuple[Any, ...]]] = [("amax", (on_cpu.x,)), ("amax", (on_cpu.x.t(),))]
        for x in (on_cpu.x, on_cpu.x.t()):
            rest: list[Any] = [on_cpu.amax, None, "nvfp4", [1, 16], "nearest", 0]
            calls.append(("quantize", (x, *rest)))
            calls.append(("quantize", (x, *rest[:3], [16, 16], *rest[4:])))
            calls.append(("quantize", (x, on_cpu.amax, on_cpu.seed, "nvfp4", [1, 16], "stochastic", 7)))
            calls.append(("quantize", (x, None, None, "mxfp4", [1, 32], "nearest", 0)))
            for name in ("rotated_amax", "amax_both"):
                calls.append((name, (x, 16, SIGNS)))
            calls.append(("rotate_quantize", (x, on_cpu.amax, None, "nvfp4", "nearest", 0, 16, SIGNS)))
            calls.append(("rotate_quantize", (x, on_cpu.amax, None, "nvfp4", "nearest", 0, 32, SIGNS)))
        for format in gpu_cases.FORMATS:
            calls.append(("decode", (*on_cpu.packed[format], format, torch.bfloat16)))
        for name, arguments in calls:
            if not (hasattr(fp4, name) and hasattr(operators, name)):
                continue
            moved = [argument.to(device) if isinstance(argument, Tensor) else argument for argument in arguments]
            row: dict[str, Any] = {"kernel": f"operator {name}", "size": f"{size[0]}x{size[1]}"}
            row |= {"dtype": "bfloat16", "against": "CPU"}
            try:
                results = [as_tuple(getattr(operators, name)(*moved)), as_tuple(getattr(fp4, name)(*arguments))]
                wrong = sum(map(differing, *results))
                found.append(row | {"bytes": sum(as_bytes(t).numel() for t in results[0]), "differing": wrong})
            except Exception as error:
                found.append(row | {"error": f"{error!r}"})
    return found


def as_tuple(result: Any) -> Tensors:
    return result if isinstance(result, tuple) else (result,)


def cuda_operators() -> Any:
    try:
        import fp4compile.lowering.cuda  # noqa: F401
    except ImportError as error:
        print(f"no fp4_cuda operators: {error}")
        return None
    return torch.ops.fp4_cuda


# Products

Quantized = tuple[Tensor, Tensor, Tensor | None, str]


def quantized(height: int, width: int, format: Any, device: torch.device) -> Quantized:
    x = torch.randn(height, width, device=device, dtype=torch.bfloat16)
    amax = fp4.amax(x) if format == "nvfp4" else None
    return (*rows.quantize(x, amax, None, format, 0), amax, format)


def product_error(got: Tensor, a: Quantized, b: Quantized, sample: int = 256) -> dict[str, Any]:
    """Of evenly spaced rows, against a float64 product: the largest error in units of what k float32 additions may err
    (2^-24 k times the sum of magnitudes, half a unit in the last place of the result added), and the RMS error."""
    chosen = torch.linspace(0, got.shape[0] - 1, min(sample, got.shape[0]), device=got.device).long()
    left = fp4.decode(a[0][chosen], a[1][chosen], a[3], torch.float32).double()
    right = fp4.decode(b[0], b[1], b[3], torch.float32).double()
    k = min(left.shape[1], right.shape[1])
    left, right = left[:, :k], right[:, :k]
    factor = 1.0 if a[2] is None or b[2] is None else a[2].double() * b[2].double() / 2688**2
    exact, magnitude = (left @ right.t()) * factor, (left.abs() @ right.abs().t()) * factor
    error = (got[chosen].double() - exact).abs()
    rounding = torch.finfo(got.dtype).eps / 2
    allowed = magnitude * (k + 3) * 2.0**-24 + exact.abs() * rounding + 1e-45
    largest = float((error / allowed).max())
    rms = float(error.square().mean().sqrt() / exact.square().mean().sqrt())
    relative = float((error / exact.abs().max()).max())
    return {"max error / allowed": largest, "max error / max": relative, "rms error / rms": rms, "ok": largest <= 1}


def check_products(device: torch.device, products: Sequence[tuple[int, int, int]]) -> list[dict[str, Any]]:
    found = []
    operators = cuda_operators() if device.type == "cuda" else None
    for (m, n, k), out_dtype in ((p, d) for p in products for d in (torch.float32, torch.bfloat16)):
        for format in gpu_cases.FORMATS:
            a, b = quantized(m, k, format, device), quantized(n, k, format, device)
            ways: dict[str, Callable[[], Tensor]] = {}
            if operators is not None:
                ways["emulated"] = functools.partial(operators.scaled_mm, *a, *b, out_dtype)
            if format == "mxfp4":  # Triton decodes E8M0 scales where the tensor cores take none
                tiles = [(x[0], layout.to_tiles(x[1]), None) for x in (a, b)]
                ways["native"] = functools.partial(gemm.launch, *tiles[0], *tiles[1], format, out_dtype)
            for how, call in ways.items():
                dtype = str(out_dtype).removeprefix("torch.")
                row = {"product": how, "format": format, "m, n, k": f"{m}, {n}, {k}", "result": dtype}
                try:
                    (got,), poisoned = into_poisoned(lambda call=call: (call(),))  # type: ignore[misc]
                    found.append(row | product_error(got, a, b) | {"poisoned": poisoned})
                except Exception as error:
                    found.append(row | {"ok": False, "error": f"{error!r}"[:500]})
    return found


# Speed


def milliseconds(call: Callable[[], object]) -> float:
    from triton.testing import do_bench

    return float(do_bench(call, warmup=15, rep=60, return_mode="median"))


def milliseconds_in_graph(calls: Sequence[Callable[[], object]], repeats: int = 20) -> float:
    """Of one of the calls, replayed as one CUDA graph: what Python costs is not in it. Results are kept, so that all
    write to other memory."""
    for call in calls:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    times = []
    for _ in range(repeats + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / len(calls))
    del kept
    return statistics.median(times[3:])


def measure(call: Callable[[Operand], object], operands: Sequence[Operand]) -> tuple[float, str]:
    """Milliseconds and how they were measured: in a graph where a call is short."""
    if len(operands) > 1:
        calls = [functools.partial(call, operand) for operand in operands]
        try:
            return milliseconds_in_graph(calls), "graph"
        except Exception as error:
            print(f"  no graph: {str(error).splitlines()[0]}")
            torch.cuda.synchronize()
    return milliseconds(lambda: call(operands[0])), "do_bench"


def measure_or_error(call: Callable[[Operand], object], operands: Sequence[Operand]) -> float | str:
    try:
        return measure(call, operands)[0]
    except Exception as error:
        torch.cuda.empty_cache()
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"


def buffers(size: Size, device: torch.device) -> list[Operand]:
    count = max(1, ROTATED_BYTES // (2 * math.prod(size)))
    return [gpu_cases.blank(size, device, random=True) for _ in range(count)]


def copy_speed(size: Size, device: torch.device) -> float:
    """Bytes a second, read and written."""
    operands = buffers(size, device)
    return 4 * math.prod(size) / measure(lambda operand: operand.x.clone(), operands)[0] * 1e3


def speed_of_kernels(sizes: Sequence[Size], deadline: float, device: torch.device) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    reference = copy_speed(sizes[0], device)
    for size in sizes:
        operands, elements = buffers(size, device), math.prod(size)
        own = copy_speed(size, device)
        reference = max(reference, own) if size == sizes[0] else reference
        for timed in gpu_cases.timed():
            ms, how = measure(timed.case.kernel, operands)
            found.append(
                {
                    "kernel": timed.case.name,
                    "size": f"{size[0]}x{size[1]}",
                    "ms": ms,
                    "bytes an element": timed.bytes,
                    "TB/s": timed.bytes * elements / ms / 1e9,
                    "copy TB/s": own / 1e12,
                    "mark": timed.mark,
                    "timed by": how,
                    "compiled ms": None,
                    "eager ms": None,
                }
            )
    reference = max(reference, copy_speed(sizes[0], device))
    for row in found:
        row["share"] = row["TB/s"] * 1e12 / reference
        row["met"] = None if row["mark"] is None else row["share"] >= row["mark"]
    by_key = {(row["kernel"], row["size"]): row for row in found}
    for size in sizes:
        operands = buffers(size, device)[:4]
        for timed in gpu_cases.timed():
            row = by_key[(timed.case.name, f"{size[0]}x{size[1]}")]
            if device.type == "cuda":
                row["eager ms"] = measure_or_error(timed.case.formulas, operands[:1])
            if time.perf_counter() < deadline:
                torch._dynamo.reset()
                row["compiled ms"] = measure_or_error(compiled_formulas(timed), operands)
            else:
                row["compiled ms"] = "not measured: the time was over"
    return found


@contextlib.contextmanager
def chosen(module: Any, choice: Any) -> Iterator[None]:
    """Inside, kernels of a module are launched in one configuration."""
    with mock.patch.object(module, "candidates", lambda *_: [choice]):
        yield


def other_candidates(size: Size, device: torch.device) -> Iterator[tuple[str, Case, Any, Any]]:
    """(its name, case, module, configuration): the choices and all others."""
    cases = {timed.case.name: timed.case for timed in gpu_cases.timed()}
    processors = common.processors_of(device)
    height, width = size
    stochastic = rows.candidates(height * width // 16, True, processors)
    for rows_config in stochastic:
        yield f"{rows_config}", cases["rows nvfp4 stochastic"], rows, rows_config
    units = width // columns.COLUMNS[16][2]
    for rounding in gpu_cases.ROUNDINGS:
        for columns_config, shape in columns.candidates(height, units, 16):
            name = f"{columns_config} {shape}"
            yield name, cases[f"rotated columns nvfp4 {rounding}"], columns, (columns_config, shape)
    for weights_config in weights.candidates():
        yield f"{weights_config}", cases["weights both ways"], weights, weights_config


def speed_of_candidates(size: Size, device: torch.device) -> list[dict[str, Any]]:
    operand, found = gpu_cases.blank(size, device, random=True), []
    for name, case, module, choice in other_candidates(size, device):
        with chosen(module, choice):
            found.append({"kernel": case.name, "configuration": name, "ms": measure_or_error(case.kernel, [operand])})
    return found


def decode_all(operators: Any, operands: Sequence[Quantized]) -> list[Tensor]:
    return [operators.decode(codes, scales, format, torch.bfloat16) for codes, scales, _, format in operands]


def speed_of_products(device: torch.device) -> list[dict[str, Any]]:
    """Medians of three turns, so that a GPU slowed by heat or power slows all alike."""
    operators, found = cuda_operators(), []
    if operators is None:
        return []
    for m, n, k in GEMMS:
        a, b = quantized(m, k, "nvfp4", device), quantized(n, k, "nvfp4", device)
        x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
        w = torch.randn(n, k, device=device, dtype=torch.bfloat16)
        decoded = decode_all(operators, (a, b))
        plain = [(decoded[0], None, None, "bf16"), (decoded[1], None, None, "bf16")]
        cases: dict[str, Callable[[], object]] = {
            "bf16": functools.partial(torch.mm, x, w.t()),
            "bf16 of the decoded operands": functools.partial(torch.mm, decoded[0], decoded[1].t()),
            "decoding both": functools.partial(decode_all, operators, (a, b)),
            "emulated, result bf16": functools.partial(operators.scaled_mm, *a, *b, torch.bfloat16),
            "emulated, result float32": functools.partial(operators.scaled_mm, *a, *b, torch.float32),
            "product alone, result bf16": functools.partial(operators.scaled_mm, *plain[0], *plain[1], torch.bfloat16),
        }
        samples = defaultdict(list)
        for _ in range(3):
            for name, call in cases.items():
                samples[name].append(milliseconds(call))
        base = statistics.median(samples["bf16"])
        for name, times in samples.items():
            ms = statistics.median(times)
            marked = name == "emulated, result bf16" and (m, n, k) == GEMMS[0]
            found.append(
                {
                    "product": name,
                    "m, n, k": f"{m}, {n}, {k}",
                    "ms": ms,
                    "of bf16": ms / base,
                    "TFLOP/s": None if name == "decoding both" else 2 * m * n * k / ms / 1e9,
                    "mark": GEMM_MARK if marked else None,
                    "met": ms / base <= GEMM_MARK if marked else None,
                }
            )
    return found


# Everything together


def operand_of_zeros(size: Size, dtype: torch.dtype, device: torch.device) -> Operand:
    """For launches whose results nobody reads."""
    packed = {format: gpu_cases.any_packed(size, format) for format in gpu_cases.FORMATS}
    packed = {format: (codes.to(device), scales.to(device)) for format, (codes, scales) in packed.items()}
    blank = gpu_cases.blank(size, device)
    return dataclasses.replace(blank, x=blank.x.to(dtype), packed=packed)


def sanitize(device: torch.device) -> None:
    """Every kernel once."""
    count = 0
    operators = cuda_operators() if device.type == "cuda" else None
    for size, dtype in SANITIZED:
        operand = operand_of_zeros(size, dtype, device)
        operand = dataclasses.replace(operand, x=gpu_cases.spread(size, dtype).to(device))
        for case in gpu_cases.checked():
            case.kernel(operand)
            count += 1
        a, b = (quantized(height, size[1] // 32 * 32, "mxfp4", device) for height in size)
        tiles = [(one[0], layout.to_tiles(one[1]), None) for one in (a, b)]
        for out_dtype in (torch.float32, torch.bfloat16):
            gemm.launch(*tiles[0], *tiles[1], "mxfp4", out_dtype)
            count += 1
        if operators is not None:
            a, b = (quantized(height, size[1], "nvfp4", device) for height in size)
            operators.scaled_mm(*a, *b, torch.bfloat16)
            count += 1
    if device.type == "cuda":
        torch.cuda.synchronize()
    print(f"{count} launches")


def record_kernels(args: argparse.Namespace, device: torch.device) -> list[tuple[Kernel, Odd]]:
    """What this run will launch, products apart."""
    with collecting() as found:
        for size, dtype in checked_operands(args.sizes) + SANITIZED if args.check else []:
            operand = operand_of_zeros(size, dtype, device)
            for case in gpu_cases.checked():
                case.kernel(operand)
        for size in args.timed if args.speed else []:
            operand = gpu_cases.blank(size, device)
            for timed in gpu_cases.timed():
                timed.case.kernel(operand)
            if size == args.timed[0]:
                for _, case, module, choice in other_candidates(size, device):
                    with chosen(module, choice):
                        case.kernel(operand)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    # A copy has no binaries, which cannot be handed to another process.
    distinct = {(id(kernel), odd): kernel for kernel, odd in found}
    return [(dataclasses.replace(kernel), odd) for (_, odd), kernel in distinct.items()]


def summary(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of all comparisons, by kernel."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in found:
        groups[row["kernel"]].append(row)
    return [
        {
            "kernel": kernel,
            "comparisons": len(group),
            "MB": sum(row.get("bytes", 0) for row in group) / 1e6,
            "in poisoned memory": sum(row.get("poisoned", False) for row in group),
            "differing bytes": sum(row.get("differing", 0) for row in group),
            "errors": sum("error" in row for row in group),
        }
        for kernel, group in groups.items()
    ]


def earlier(section: str) -> Any:
    """What a run of the other phase has written."""
    path = RESULTS / f"{NAME}.json"
    return json.loads(path.read_text()).get(section) if path.exists() else None


def run_check(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    found = check_bytes(args.sizes, device) + check_operators(device)
    products = check_products(device, PRODUCTS if device.type == "cuda" else [(100, 48, 96)])
    kernels = summary(found)
    print_table("the same bytes as the CPU reference", kernels)
    for row in [row for row in found if row.get("differing", 1)][:20]:
        print("  differs:", row)
    for row in products:
        print("  " + ", ".join(f"{key} {_short(value)}" for key, value in row.items()))
    wrong = sum(row.get("differing", 1) != 0 for row in found) + sum(not row["ok"] for row in products)
    print(f"{len(found)} kernels and {len(products)} products compared, {wrong} differ")
    return {
        "environment": environment(),
        "kernels": kernels,
        "comparisons": found,
        "products": products,
        "wrong": wrong,
    }


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def run_speed(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    found = speed_of_kernels(args.timed, args.deadline, device)
    shown = ("kernel", "size", "ms", "share", "mark", "met", "compiled ms", "eager ms")
    table = [{key: _shorter(row[key]) for key in shown} for row in found]
    print_table(f"shares of {found[0]['TB/s'] / found[0]['share']:.3f} TB/s, the copy bandwidth", table)
    products = speed_of_products(device)
    if products:
        print_table("products", products)
    candidates = speed_of_candidates(args.timed[0], device)
    print_table("candidates", candidates)
    return {"environment": environment(), "rows": found, "products": products, "candidates": candidates}


def _shorter(value: Any) -> Any:
    return "-" if value is None else value[:20] if isinstance(value, str) and ":" in value else value


def sizes(text: str) -> list[Size]:
    pairs = [part.split("x") for part in text.split(",")]
    return [(int(height), int(width)) for height, width in pairs]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Generated kernels on a GPU: the same bytes, and how fast.")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--sanitize", action="store_true", help="launch every kernel once and leave")
    parser.add_argument("--sizes", type=sizes, default=CHECKED, help="of --check, such as 33x48,1x16")
    parser.add_argument("--timed", type=sizes, default=TIMED, help="of --speed")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--processes", type=int, default=min(16, os.cpu_count() or 1), help="0: compile here")
    parser.add_argument("--budget", type=float, default=170, help="seconds after which formulas are not timed any more")
    parser.add_argument("--out", type=Path, help="write the JSON there, too")
    args = parser.parse_args()
    if not (args.check or args.speed or args.sanitize):
        args.check = args.speed = True
    return args


def main() -> None:
    args = arguments()
    if args.device.type == "cuda" and not torch.cuda.is_available():
        print("needs a CUDA device")
        return
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    if args.sanitize:
        sanitize(args.device)
        return
    began = time.perf_counter()
    args.deadline = began + args.budget
    check, speed = earlier("check"), earlier("speed")
    context = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as stack:
        formulas: dict[str, Future[None]] = {}
        if args.processes and args.speed:
            pool = stack.enter_context(ProcessPoolExecutor(args.processes // 2, mp_context=context))
            for size, (index, timed) in itertools.product(args.timed, enumerate(gpu_cases.timed())):
                formulas[f"{timed.case.name} {size}"] = pool.submit(compile_formulas, index, size, str(args.device))
        if args.processes:
            pool = stack.enter_context(ProcessPoolExecutor(args.processes, mp_context=context))
            kernels = record_kernels(args, args.device)
            settle(
                "kernels", {f"{one[0].name} {i}": pool.submit(compile_kernel, *one) for i, one in enumerate(kernels)}
            )
        if args.check:
            check = run_check(args, args.device)
        settle("formulas", formulas)
    if args.check:
        write(check, speed, args.out)
    if args.speed:
        speed = run_speed(args, args.device)
        write(check, speed, args.out)
    print(f"{time.perf_counter() - began:.0f} s")
    if args.check and check["wrong"]:
        raise SystemExit(1)


def write(check: Any, speed: Any, out: Path | None) -> None:
    write_results(
        NAME, speed["rows"] if speed else check["kernels"], more={"check": check, "speed": speed}, copy_to=out
    )


if __name__ == "__main__":
    main()
