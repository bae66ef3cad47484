"""PREDICTION, nothing here has run on Blackwell: what bounds each generated kernel on a B200, memory or instructions?

For each kernel: the fewest bytes an element, against the memory bandwidth; the instructions an element, counted in the
machine code that Triton's assembler makes for sm_100a, against the issue rate and against each pipe's rate. The
slowest of these bounds is the prediction; latency, caches and the start of a launch are not in it, so it is a bound and
no estimate. Products: the tensor cores' peak against memory, and the bytes that their tiles load.

The same counting for sm_90 stands beside what was measured on an H200 (kernels_gpu.json), which shows how far from its
bound a kernel runs. Needs Triton and no GPU.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections import Counter
from typing import Any

import torch
from common import RESULTS, print_table, write_results

from fp4compile.formats.rotation import SIGNS
from fp4compile.lowering import aot, sass
from fp4compile.lowering.kernels import Kernel, amax, columns, decode, gemm, produced, rows, weights
from fp4compile.lowering.targets import ISAS, Isa
from fp4compile.ops.produced import Program, Value

SIZE = (65536, 8192)
PRODUCT = (8192, 8192, 8192)
FP4_PEAK = 9e15
"""Operations a second of B200's tensor cores on dense FP4: NVIDIA's data sheet of HGX B200, for one GPU."""
ELEMENTS = math.prod(SIZE)
ISSUED = 4
"""Instructions of a warp that a multiprocessor starts in a clock: one for each of its schedulers."""


@dataclasses.dataclass(frozen=True)
class Device:
    """bandwidth: bytes a second. clock: Hz."""

    name: str
    arch: str
    processors: int
    clock: float
    bandwidth: float


B200 = Device("B200", "sm_100a", 148, 1.85e9, 8.0e12)
"""Multiprocessors: what its driver reports (https://github.com/pytorch/ao/pull/4002, which also finds 7.67 TB/s from
bus width and memory clock). Bandwidth: NVIDIA's data sheet. Clock: the one at which the data sheet's 2.25 PFLOP/s of
dense bf16 are 8192 operations a clock and multiprocessor, twice Hopper's; without tensor cores it may run faster."""

H200 = Device("H200", "sm_90", 132, 1.98e9, 4.8e12)
"""Multiprocessors and bandwidth: NVIDIA's data sheet; clock: the highest that nvidia-smi reports. The bandwidth is
replaced by the copy bandwidth of the measurement where there is one."""


@dataclasses.dataclass(frozen=True)
class Counted:
    """A kernel, its bytes an element, how many elements a thread has in a pass of its loop, and how many passes."""

    name: str
    kernel: Kernel
    bytes: float
    elements: int
    passes: int


def kernels(device: Device) -> list[Counted]:
    """The nvfp4 kernels that SIZE gets there, bf16. Scales are in tiles where the tensor cores read them."""
    isa = ISAS[aot.capability_of_architecture(device.arch)]
    native, x = isa.matmul == "block_scaled", torch.bfloat16
    result = []
    for rounding in ("nearest", "stochastic"):
        stochastic = rounding == "stochastic"
        by_rows = rows.choose(ELEMENTS // 16, stochastic, device.processors)
        one = rows.kernel(isa, x, "nvfp4", stochastic, by_rows, native)
        result.append(Counted(f"rows nvfp4 {rounding}", one, 2.5625, 16, by_rows.loop))
    width = columns.COLUMNS[16][2]
    by_columns, shape = columns.choose(SIZE[0], SIZE[1] // width, 16)
    for rounding in ("nearest", "stochastic"):
        one = columns.kernel(isa, x, "nvfp4", rounding == "stochastic", True, SIGNS, by_columns, shape, native)
        result.append(Counted(f"rotated columns nvfp4 {rounding}", one, 2.5625, 16 * width, 1))
    result.append(
        Counted("weights both ways", weights.kernel(isa, x, True, True, weights.choose(), native), 3.125, 128, 1)
    )
    whole = amax.choose(ELEMENTS // 8, device.processors)
    result.append(Counted("amax", amax.kernel(isa, x, whole), 2, 8, whole.loop))
    both = amax.choose_both(SIZE[0] // 16, SIZE[1] // 8, device.processors)
    result.append(Counted("amax both", amax.kernel_both(isa, x, True, SIGNS, both), 2, 128, both.loop))
    unpack = decode.choose()
    decoded = decode.kernel(isa, "nvfp4", x, unpack)
    result.append(Counted("decode nvfp4 to bfloat16", decoded, 2.5625, 8, unpack.loop))
    return result + produced_kernels(isa, native)


def produced_kernels(isa: Isa, native: bool) -> list[Counted]:
    """With a scale a row, in one kernel: rows as they are, and the norm of a residual, which is written."""
    value = Value("i0", "full", "bfloat16")
    plain = Program("tiles" if native else "values", SIZE[1], (value,), (), value, ())
    norm = dataclasses.replace(produced.EXAMPLE, result=plain.result)
    name, written = ("", 0.5625) if native else (", decoded", 2.0)
    return [
        Counted(f"rows with their amaxes nvfp4 nearest{name}", produced.kernel(isa, plain), 2 + written, 16, 1),
        Counted(f"norm of a residual and its rows{name}", produced.kernel(isa, norm), 6 + written, 16, 1),
    ]


_LABEL = re.compile(r"^(\.L\w+):")
_BRANCH = re.compile(r"BRA[^`]*`\((\.L\w+)\)")
_SUBROUTINE = re.compile(r"^\$?__internal\S*:$")
_LOAD = re.compile(r"LDG\.E(?:\.\w+)*")


def main_lines(text: str) -> list[str]:
    """Of the kernel itself, up to its last EXIT or to where a loop around that goes back, whichever is later."""
    lines = text.splitlines()
    end = len(sass.main_path(text).splitlines())
    for number, line in enumerate(lines[end:], end):
        branch = _BRANCH.search(line)
        if _SUBROUTINE.match(line):
            break
        if branch and f"{branch.group(1)}:" in lines[:end]:
            return lines[: number + 1]
    return lines[:end]


def loop_of(lines: list[str]) -> tuple[int, int]:
    """First and last line of the longest loop: from a label to the branch that goes back to it. Empty where there is
    none."""
    labels: dict[str, int] = {}
    longest = (0, -1)
    for number, line in enumerate(lines):
        if label := _LABEL.match(line):
            labels[label.group(1)] = number
        branch = _BRANCH.search(line)
        if branch and branch.group(1) in labels:
            first = labels[branch.group(1)]
            longest = max(longest, (first, number), key=lambda span: span[1] - span[0])
    return longest


def executed(text: str, passes: int, loads: int) -> Counter[str]:
    """Instructions that a thread executes: the main path once, its loop as often as it turns.

    The assembler may have put several passes in one turn: ``loads`` is the number of bytes that one pass loads.
    """
    lines = main_lines(text)
    first, last = loop_of(lines)
    body = sass.count_instructions("\n".join(lines[first : last + 1]))
    once = sass.count_instructions("\n".join(lines)) - body
    inside = sum(_loaded_bytes(opcode) * count for opcode, count in body.items())
    turns = passes // max(1, inside // loads) if body else 0
    return once + Counter({opcode: count * turns for opcode, count in body.items()})


def _loaded_bytes(opcode: str) -> int:
    if not _LOAD.fullmatch(opcode):
        return 0
    parts = opcode.split(".")
    return next((int(part) // 8 for part in parts if part in ("64", "128", "256")), 4 if "U8" not in parts else 0)


def cycles(opcodes: Counter[str]) -> dict[str, float]:
    """Clocks that a multiprocessor needs for one thread's instructions, by what bounds it: issue or a pipe."""
    needed = {"issue": opcodes.total() / (32 * ISSUED)}
    for opcode, count in opcodes.items():
        pipe = sass.pipe_of(opcode)
        if pipe in sass.LANES:
            half = 2 if opcode.partition(".")[0] == "IMAD" else 1  # IMAD has half of its pipe
            needed[pipe] = needed.get(pipe, 0.0) + half * count / sass.LANES[pipe]
    return needed


def predict(counted: Counted, device: Device) -> dict[str, Any]:
    compiled = aot.compile_kernel(counted.kernel, device.arch)
    assert compiled.sass is not None
    loads = 4 if counted.kernel.family == "decode" else 2 * counted.elements
    opcodes = executed(compiled.sass, counted.passes, loads)
    per_element = 1 / (counted.elements * counted.passes)
    seconds = {
        bound: clocks * per_element * ELEMENTS / (device.processors * device.clock)
        for bound, clocks in cycles(opcodes).items()
    }
    memory = counted.bytes * ELEMENTS / device.bandwidth
    slowest = max(seconds, key=lambda bound: seconds[bound])
    bound = "memory" if memory >= seconds[slowest] else slowest
    return {
        "kernel": counted.name,
        "bytes an element": counted.bytes,
        "instructions an element": opcodes.total() * per_element,
        "memory ms": memory * 1e3,
        "issue ms": seconds["issue"] * 1e3,
        "busiest pipe": max((pipe for pipe in seconds if pipe != "issue"), key=lambda pipe: seconds[pipe]),
        "pipe ms": max(value for pipe, value in seconds.items() if pipe != "issue") * 1e3,
        "bound by": bound,
        "predicted ms": max(memory, *seconds.values()) * 1e3,
        "predicted share of bandwidth": memory / max(memory, *seconds.values()),
        "registers": compiled.registers,
        "spilled bytes": compiled.spilled,
    }


def predict_products(device: Device) -> list[dict[str, Any]]:
    """Each configuration of the native product: tensor cores against memory, and what level 2 would have to deliver."""
    m, n, k = PRODUCT
    tensor = 2 * m * n * k / FP4_PEAK
    memory = ((m + n) * k * 0.5625 + m * n * 2) / device.bandwidth
    result = []
    capability = aot.capability_of_architecture(device.arch)
    for config in gemm.candidates(m, n, k, torch.bfloat16, capability, device.processors):
        compiled = aot.compile_kernel(gemm.kernel("nvfp4", torch.bfloat16, config), device.arch)
        matters = sass.count_what_matters(compiled.opcodes)
        loaded = config.tiles(m, n) * (config.block_m + config.block_n) * k * 0.5625
        result.append(
            {
                "configuration": config.name,
                "tensor cores ms": tensor * 1e3,
                "memory ms": memory * 1e3,
                "bound by": "tensor cores" if tensor >= memory else "memory",
                "GB loaded": loaded / 1e9,
                "bytes a clock and SM": loaded / tensor / (device.processors * device.clock),
                **{name: matters[name] for name in ("FP4 MMA", "scale copies", "TMA loads")},
                "registers": compiled.registers,
                "spilled bytes": compiled.spilled,
                "shared KB": compiled.shared / 1024,
            }
        )
    return result


def measured() -> tuple[dict[str, float], float | None]:
    """Kernel -> milliseconds on an H200, and the copy bandwidth of that run."""
    path = RESULTS / "kernels_gpu.json"
    speed = json.loads(path.read_text()).get("speed") if path.exists() else None
    if not speed or "H200" not in (speed["environment"]["gpu"] or ""):
        return {}, None
    found = [row for row in speed["rows"] if row["size"] == f"{SIZE[0]}x{SIZE[1]}"]
    return {row["kernel"]: row["ms"] for row in found}, found[0]["TB/s"] / found[0]["share"] * 1e12


def main() -> None:
    times, copy = measured()
    h200 = dataclasses.replace(H200, bandwidth=copy or H200.bandwidth)
    predicted = [predict(counted, B200) for counted in kernels(B200)]
    validation = []
    for counted in kernels(h200):
        row = predict(counted, h200)
        ms = times.get(counted.name)
        validation.append(row | {"measured ms": ms, "predicted / measured": row["predicted ms"] / ms if ms else None})
    shown = [
        "kernel",
        "bytes an element",
        "instructions an element",
        "memory ms",
        "issue ms",
        "busiest pipe",
        "pipe ms",
        "bound by",
        "predicted ms",
        "predicted share of bandwidth",
    ]
    size = f"bf16 [{SIZE[0]}, {SIZE[1]}]"
    print_table(f"PREDICTED, not measured: {size} on a B200", [{key: row[key] for key in shown} for row in predicted])
    shown += ["measured ms", "predicted / measured"]
    print_table(f"the same model, {size} on an H200", [{key: row[key] for key in shown} for row in validation])
    products = predict_products(B200)
    print_table(f"PREDICTED, not measured: nvfp4 product {PRODUCT} on a B200", products)
    devices = {device.name: dataclasses.asdict(device) for device in (B200, h200)}
    more = {"prediction": True, "size": list(SIZE), "devices": devices, "validation": validation, "products": products}
    write_results("blackwell_model", predicted, more=more)


if __name__ == "__main__":
    main()
