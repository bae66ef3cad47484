"""``python -m fp4compile kernels``: compile the generated kernels for an architecture and show what they became."""

from __future__ import annotations

import concurrent.futures
import fnmatch
import importlib
import importlib.metadata
import multiprocessing
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from ..errors import ConfigError
from ..lowering import sass
from ..lowering.aot import Compiled, architecture, compile_kernel, require_triton
from ..lowering.kernels.kernel import Kernel
from ..table import table

SIZES = ("warps", "registers", "spilled", "shared", "tensor_memory", "instructions")
"""Facts of a kernel that are columns of the first table."""


def examine(arch: str, family: str = "*", jobs: int = 1, out: Path | None = None) -> dict[str, Any]:
    """Compile the registered kernels whose family fits a glob, write their files to ``out``; JSON values."""
    arch = architecture(arch)
    require_triton()
    kernels = choose(_registered(arch), family)
    rows = []
    for name, kernel, result in zip(_names(kernels), kernels, compile_all(kernels, arch, jobs), strict=True):
        rows.append(_facts(name, kernel, result))
        if out is not None:
            _write(out, name, kernel, result)
    return {
        "arch": arch,
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"),
        "kernels": rows,
        "problems": [f"{row['name']}: {row['error']}" for row in rows if row["error"]],
    }


def to_text(facts: dict[str, Any]) -> str:
    """The facts of ``examine`` for a person: sizes, the counts that are not all zero by family, and the problems."""
    rows = [row for row in facts["kernels"] if not row["error"]]
    title = f"{len(rows)} kernels for {facts['arch']}, torch {facts['torch']}, Triton {facts['triton']}"
    families = dict.fromkeys(row["family"] for row in rows if row["counts"])
    counts = [_counts(family, [row for row in rows if row["family"] == family]) for family in families]
    notes = sorted({row["note"] for row in rows if row["note"]})
    problems = [f"failed: {problem}" for problem in facts["problems"]]
    return "\n\n".join([_sizes(title, rows), *counts, *notes, *problems])


def _sizes(title: str, rows: Sequence[dict[str, Any]]) -> str:
    columns = ["kernel", "configuration", *(name.replace("_", " ") for name in SIZES)]
    return table(title, columns, ([row["name"], _configuration(row), *(_cell(row[n]) for n in SIZES)] for row in rows))


def _counts(family: str, rows: Sequence[dict[str, Any]]) -> str:
    names = [name for name in sass.MATTERS if any(row["counts"][name] for row in rows)]
    short = f"{family}_"  # the title has it, and the columns need the room
    cells = ([row["name"].removeprefix(short), *(str(row["counts"][name] or "") for name in names)] for row in rows)
    return table(f"{family}: instructions in the program", ["kernel", *names], cells)


def choose(kernels: Sequence[Kernel], family: str) -> list[Kernel]:
    """The kernels whose family fits a glob."""
    chosen = [kernel for kernel in kernels if fnmatch.fnmatchcase(kernel.family, family)]
    if not chosen:
        families = ", ".join(sorted({kernel.family for kernel in kernels})) or "none"
        raise ConfigError(f"no kernel family fits {family!r}; there are: {families}")
    return chosen


def compile_all(kernels: Sequence[Kernel], arch: str, jobs: int) -> Iterator[Compiled | str]:
    """Each kernel compiled, or why not, in order; in ``jobs`` processes, with a progress bar on a terminal's stderr."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"compiling for {arch}", total=len(kernels))
        for result in _results(kernels, arch, min(jobs, len(kernels))):
            progress.advance(task)
            yield result


def _results(kernels: Sequence[Kernel], arch: str, jobs: int) -> Iterator[Compiled | str]:
    if jobs <= 1:
        yield from (_try_compile(kernel, arch) for kernel in kernels)
        return
    # Spawned, not forked: torch and Triton have started threads by now, which a fork would leave in an unknown state.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        yield from pool.map(_try_compile, kernels, [arch] * len(kernels))


def _try_compile(kernel: Kernel, arch: str) -> Compiled | str:
    """One refused kernel must not hide the others; Triton's errors hold syntax trees and do not travel well."""
    try:
        return compile_kernel(kernel, arch)
    except Exception as error:
        return f"{type(error).__name__}: {error}".strip()


def _registered(arch: str) -> Sequence[Kernel]:
    # Imported here, because the registry may need Triton, and this module must be able to say that it is missing.
    return importlib.import_module("fp4compile.lowering.kernels").all_kernels(arch)


def _names(kernels: Sequence[Kernel]) -> list[str]:
    """A file name for each kernel: its own, numbered where several configurations share it."""
    total, seen = Counter(kernel.name for kernel in kernels), Counter[str]()
    names = []
    for kernel in kernels:
        seen[kernel.name] += 1
        names.append(f"{kernel.name}.{seen[kernel.name]}" if total[kernel.name] > 1 else kernel.name)
    return names


def _facts(name: str, kernel: Kernel, result: Compiled | str) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "name": name,
        "family": kernel.family,
        "constants": {key: _json(value) for key, value in kernel.constants.items()},
        "num_warps": kernel.num_warps,
        "num_stages": kernel.num_stages,
        "warp_specialize": kernel.warp_specialize,
        "error": result if isinstance(result, str) else None,
    }
    return facts if isinstance(result, str) else {**facts, **_measures(result)}


def _measures(compiled: Compiled) -> dict[str, Any]:
    opcodes, main = compiled.opcodes, compiled.main_opcodes
    known = compiled.sass is not None
    return {
        "warps": compiled.warps,
        "registers": compiled.registers,
        "spilled": compiled.spilled,
        "shared": compiled.shared,
        "tensor_memory": compiled.tensor_memory,
        "instructions": opcodes.total() if known else None,
        "main_instructions": main.total() if known else None,
        "counts": sass.count_what_matters(opcodes) if known else {},
        "main_pipes": sass.instruction_mix(main) if known else {},
        "opcodes": dict(opcodes.most_common()),
        "note": compiled.note,
    }


def _write(out: Path, name: str, kernel: Kernel, result: Compiled | str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.py").write_text(kernel.source)
    if isinstance(result, str):
        return
    (out / f"{name}.ttgir").write_text(result.ttgir)
    (out / f"{name}.ptx").write_text(result.ptx)
    (out / f"{name}.cubin").write_bytes(result.cubin)
    if result.sass is not None:
        (out / f"{name}.sass").write_text(result.sass)


def _configuration(row: dict[str, Any]) -> str:
    constants = " ".join(f"{key}={value}" for key, value in row["constants"].items())
    return f"{constants} stages={row['num_stages']}".strip()


def _cell(value: int | None) -> str:
    return "?" if value is None else str(value)


def _json(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)
