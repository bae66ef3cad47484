"""Is everything right on this machine's GPU? `make gpu`.

tests      every test marked gpu
bytes      kernels_gpu.py --check: each kernel's bytes are the CPU's
memcheck   every kernel once under compute-sanitizer
racecheck  the same
step       a training step in NVFP4: losses like the eager recipe's, fewer bytes kept for backward than in bf16

Each part is a process of its own; one that fails keeps none of the others from running. The exit code is 1 if any did.
--out takes summary.json, written after every part, and each part's output and results. Times are told, never judged.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from common import environment, print_table

ROOT = Path(__file__).parent.parent
LIMIT = 600
"""Seconds after which a part is taken to hang."""
LOSSES = 2e-3
"""How far a loss may be from the eager recipe's, of it. Other noise moves one by up to 6e-4 within five steps of this
setup; tensor scales of half their size, or one operand that is not rotated, by 1e-2 to 2.5e-2 (on a CPU)."""
SETUP = "small"
WORKERS = min(12, os.cpu_count() or 1)
KERNELS = ("python", "benchmarks/kernels_gpu.py")
SANITIZER = ("compute-sanitizer", "--error-exitcode", "1", "--tool")


@dataclass(frozen=True)
class Part:
    """says: patterns that the output must have; what they found is the part's result. judge: what is wrong with what
    the part wrote into the folder of results."""

    name: str
    command: Sequence[str]
    says: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    judge: Callable[[Path], Sequence[str]] | None = None


@dataclass(frozen=True)
class Outcome:
    part: str
    ok: bool
    seconds: float
    command: str
    result: str


def disagreements(results: Path) -> list[str]:
    """Of the step's variants."""
    record = json.loads((results / f"train_step_{SETUP}.json").read_text())["setups"][SETUP]
    variants = record["variants"]
    absent = [name for name in ("bf16", "nvfp4", "eager") if name not in variants]
    if absent:
        return [f"{name} did not run: {record['left out'].get(name)}" for name in absent]
    found = []
    for step, (ours, eager) in enumerate(zip(variants["nvfp4"]["losses"], variants["eager"]["losses"], strict=False)):
        if not (math.isfinite(ours) and abs(ours - eager) <= LOSSES * abs(eager)):
            found.append(f"the loss of step {step} is {ours}, of the eager recipe {eager}")
    ours, bf16 = (variants[name]["held bytes"] for name in ("nvfp4", "bf16"))
    if ours >= bf16:
        found.append(f"{ours} bytes are kept for backward, in bf16 {bf16}")
    return found


PARTS = (
    # One thread a worker: most of the time goes into compiling kernels, one after the other in each.
    Part(
        "tests",
        ("python", "-m", "pytest", "-m", "gpu", "-n", str(WORKERS), "--dist", "worksteal", "--durations", "15"),
        (r"\d+ passed.* in [\d.]+s",),
        {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"},
    ),
    Part("bytes", (*KERNELS, "--check"), (r"\d+ kernels and \d+ products compared, 0 differ",)),
    Part("memcheck", (*SANITIZER, "memcheck", *KERNELS, "--sanitize"), (r"\d+ launches", r"ERROR SUMMARY: 0 errors")),
    Part(
        "racecheck",
        (*SANITIZER, "racecheck", *KERNELS, "--sanitize"),
        (r"\d+ launches", r"RACECHECK SUMMARY:.*\b0 errors.*"),
    ),
    Part(
        "step",
        ("python", "benchmarks/train_step_gpu.py", "--config", SETUP, "--variants", "bf16,nvfp4,eager", "--steps", "3"),
        judge=disagreements,
    ),
)


def run(part: Part, folder: Path, shared: Mapping[str, str]) -> Outcome:
    began = time.perf_counter()
    log = folder / f"{part.name}.log"
    log.unlink(missing_ok=True)
    try:
        run_into(log, runnable(part.command), {**os.environ, **shared, **part.environment})
        ok, result = True, read(part, log.read_text(errors="replace"), folder)
    except Exception as error:  # of whatever kind: the other parts are to run
        ok, result = False, str(error) if isinstance(error, Failure) else f"{type(error).__name__}: {error}"
        if log.exists():
            print("\n".join(log.read_text(errors="replace").splitlines()[-60:]))
    return Outcome(part.name, ok, time.perf_counter() - began, " ".join(part.command), result)


class Failure(Exception):
    """Of a part, in words."""


def runnable(command: Sequence[str]) -> list[str]:
    """With this interpreter as "python"."""
    if command[0] != "python" and shutil.which(command[0]) is None:
        raise Failure(f"{command[0]} is not on PATH: it is in the bin folder of a CUDA toolkit")
    return [sys.executable if word == "python" else word for word in command]


def run_into(log: Path, command: Sequence[str], variables: Mapping[str, str]) -> None:
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=variables, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            raise Failure(f"not done within {LIMIT} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with all that it started
    if code:
        raise Failure(f"exit code {code}")


def read(part: Part, output: str, results: Path) -> str:
    found = []
    for pattern in part.says:
        matches = re.findall(pattern, output)
        if not matches:
            raise Failure(f"its output does not say {pattern!r}")
        found.append(matches[-1])
    if part.judge is not None:
        if wrong := part.judge(results):
            raise Failure("; ".join(wrong))
        found.append("agrees")
    return ", ".join(found)


@contextlib.contextmanager
def entry_point() -> Iterator[list[str]]:
    """Folders for PYTHONPATH: this checkout, and what an installation would add, where the interpreter has none."""
    if "nvfp4" in {point.name for point in importlib.metadata.entry_points(group="torch_dynamo_backends")}:
        yield [str(ROOT)]
        return
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    with tempfile.TemporaryDirectory() as folder:
        facts = Path(folder) / f"{project['name']}-{project['version']}.dist-info"
        facts.mkdir()
        (facts / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
        )
        lines = [
            line
            for group, points in project["entry-points"].items()
            for line in (f"[{group}]", *(f"{name} = {where}" for name, where in points.items()))
        ]
        (facts / "entry_points.txt").write_text("\n".join(lines) + "\n")
        sys.path.insert(0, folder)  # for the record of versions here
        yield [str(ROOT), folder]


def check(parts: Sequence[Part], folder: Path) -> list[Outcome]:
    outcomes: list[Outcome] = []
    with entry_point() as paths:
        paths += [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
        shared = {"PYTHONPATH": os.pathsep.join(paths), "BENCHMARK_RESULTS": str(folder)}
        for part in parts:
            print(f"{part.name}: {' '.join(part.command)}", flush=True)
            outcomes.append(run(part, folder, shared))
            print(f"{part.name}: {shown(outcomes[-1])}", flush=True)
            record = {
                "benchmark": "gpu_check",
                "environment": environment(),
                "ok": len(outcomes) == len(parts) and all(outcome.ok for outcome in outcomes),
                "parts": [asdict(outcome) for outcome in outcomes],
            }
            (folder / "summary.json").write_text(json.dumps(record, indent=2) + "\n")
    return outcomes


def shown(outcome: Outcome) -> str:
    return f"{'ok' if outcome.ok else 'FAILED'}, {outcome.seconds:.0f} s: {outcome.result}"


def arguments() -> argparse.Namespace:
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(description="Is everything right on this machine's GPU?")
    parser.add_argument("--parts", default=",".join(names), help=f"of {', '.join(names)}; all by default")
    parser.add_argument("--out", type=Path, help="folder for summary.json and each part's output and results")
    args = parser.parse_args()
    args.parts = args.parts.split(",")
    if unknown := set(args.parts) - set(names):
        parser.error(f"unknown {', '.join(sorted(unknown))}; known: {', '.join(names)}")
    return args


def main() -> None:
    args = arguments()
    if not torch.cuda.is_available():
        raise SystemExit(f"needs a CUDA device: torch {torch.__version__} of {sys.executable} finds none")
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.out or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        outcomes = check([part for part in PARTS if part.name in args.parts], folder)
    rows = [{"part": o.part, "": "ok" if o.ok else "FAILED", "s": f"{o.seconds:.0f}"} for o in outcomes]
    print_table(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", rows)
    for outcome in outcomes:
        if not outcome.ok:
            print(f"{outcome.part}: {outcome.result}")
    if not all(outcome.ok for outcome in outcomes):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
