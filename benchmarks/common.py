"""What every benchmark script shares: timing side by side, a record of the environment, a table, a JSON file.

One script answers one question. It prints a table and writes benchmarks/results/<script>.json, so that every
number quoted elsewhere has a file behind it. A folder named by BENCHMARK_RESULTS is written to instead.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(os.environ.get("BENCHMARK_RESULTS") or Path(__file__).parent / "results")


@dataclass(frozen=True)
class Timing:
    """Wall-clock milliseconds of one call: the median of the repeats, the fastest and the slowest of them."""

    median_ms: float
    min_ms: float
    max_ms: float
    repeats: int


def time_side_by_side(
    cases: Mapping[str, Callable[[], object]], *, repeats: int = 20, warmup: int = 3
) -> dict[str, Timing]:
    """Time the cases in turns: A, B, A, B, ..., so that a slow spell of the machine hits all of them alike.

    The warm-up calls, which also compile, are not counted. On CUDA each call is waited for.
    """
    for call in cases.values():
        for _ in range(warmup):
            call()
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, call in cases.items():
            samples[name].append(_milliseconds(call))
    return {name: Timing(statistics.median(times), min(times), max(times), repeats) for name, times in samples.items()}


def _milliseconds(call: Callable[[], object]) -> float:
    _wait()
    began = time.perf_counter()
    call()
    _wait()
    return (time.perf_counter() - began) * 1e3


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def environment() -> dict[str, Any]:
    """What a reader needs to run the script again and to judge its numbers."""
    versions = {name: _version(name) for name in ("torch", "triton", "fp4compile")}
    cuda = torch.cuda.is_available()
    return {
        "command": _command(sys.argv),
        "python": platform.python_version(),
        "versions": versions,
        "cpu": _cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "cuda": torch.version.cuda if cuda else None,
    }


def _command(argv: Sequence[str]) -> str:
    """Without where a copy of the results went."""
    words = ["python", f"benchmarks/{Path(argv[0]).name}"]
    for before, word in itertools.pairwise(argv):
        if word != "--out" and before != "--out":
            words.append(word)
    return shlex.join(words)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def print_table(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """One line a row, columns named by the first row's keys; floats with three digits after the point."""
    header = list(rows[0])
    lines = [header, *([_cell(row[column]) for column in header] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(title)
    for first, *others in lines:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        print("  ".join([first.ljust(widths[0]), *cells]))


def _cell(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def write_results(
    name: str,
    rows: Sequence[Mapping[str, Any]],
    timings: Mapping[str, Timing] | None = None,
    *,
    more: Mapping[str, Any] | None = None,
    copy_to: Path | None = None,
) -> Path:
    """Write <name>.json into the folder of results: the environment, the table's rows, the raw timings and ``more``."""
    record = {
        "benchmark": name,
        "environment": environment(),
        "rows": list(rows),
        "timings": {case: asdict(timing) for case, timing in (timings or {}).items()},
        **(more or {}),
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    text = json.dumps(record, indent=2) + "\n"
    path.write_text(text)
    if copy_to is not None:
        copy_to.parent.mkdir(parents=True, exist_ok=True)
        copy_to.write_text(text)
    print(f"wrote {os.path.relpath(path)}")
    return path
