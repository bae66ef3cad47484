"""What does a training step cost in NVFP4 emulation, against the same step in bf16?

Forward, backward and fused AdamW of a Llama-style model in bfloat16, every variant with a model of its own, in turns:

bf16             torch.compile
nvfp4            torch.compile(backend="nvfp4"), NVIDIA's recipe and the default policy
nvfp4-all        the same with every block in NVFP4
nvfp4-bound      nvfp4 with rotated_scale="bound"
nvfp4-row        nvfp4 with activation_scale="row"
nvfp4-row-bound  both
nvfp4-graphs     nvfp4 as CUDA graphs, mode="reduce-overhead"
eager            the recipe and policy of nvfp4 written as an eager, fake-quantizing autograd.Function
compiled-eager   that one, its blocks compiled by torch.compile; left out if that takes too long, which is found out in
                 another process

Written for each: time of a step, losses, peak memory of a step, and what is held between forward and backward: by the
allocator ("held", in the table) and by the autograd graph ("saved", by dtype and shape). Of bf16 and nvfp4 a profile by
kernel, and beside it a floor: the kernel time of bf16 plus the bytes of every FP4 kernel at the copy bandwidth.

The first step compiles, from empty caches. Variants come one after the other, so a later one finds the Triton kernels
that it has in common with an earlier one; --variants bf16,nvfp4 compiles nothing in another process beside them.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from common import Timing, environment, print_table, time_side_by_side, write_results
from llama import Llama, LlamaConfig, bfloat16_llama
from torch import Tensor, nn

from fp4compile import Policy, Recipe
from fp4compile.formats import nvfp4, packing, rotation, rounding
from fp4compile.formats.noise import noise16
from fp4compile.policy import resolve

NAME = "train_step"


@dataclass(frozen=True)
class Setup:
    model: LlamaConfig
    batch: int

    @property
    def tokens(self) -> int:
        return self.batch * self.model.seq


SETUPS = {
    "tiny": Setup(LlamaConfig(dim=64, layers=4, heads=4, hidden=160, vocab=128, seq=32), 2),
    "small": Setup(LlamaConfig(dim=512, layers=4, heads=4, hidden=1408, vocab=8192, seq=512), 8),
    "2048": Setup(LlamaConfig(dim=2048, layers=16, heads=16, hidden=5632), 8),
    "4096": Setup(LlamaConfig(dim=4096, layers=4, heads=32, hidden=14336), 8),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "nvfp4": {},
    "nvfp4-all": {"policy": Policy(first=0, last=0)},
    "nvfp4-bound": {"recipe": Recipe.nvidia(rotated_scale="bound")},
    "nvfp4-row": {"recipe": Recipe.nvidia(activation_scale="row")},
    "nvfp4-row-bound": {"recipe": Recipe.nvidia(activation_scale="row", rotated_scale="bound")},
    "nvfp4-graphs": {"mode": "reduce-overhead"},
}
VARIANTS = ("bf16", *OPTIONS, "eager", "compiled-eager")
SLOW = ("eager", "compiled-eager")
SLOW_STEPS = 3
MARKS = {"step": 1.25, "saved": 0.85, "peak": 0.92, "eager": 5.0}
TIMED_SECONDS = 25
"""Kept for what comes after the compilations of a setup."""


# The recipe as an autograd.Function


def fake_quantize(
    x: Tensor, amax: Tensor, *, square: bool = False, seed: Tensor | None = None, site: int = 0
) -> Tensor:
    """[R, C], C a multiple of 16 -> code * block scale in bfloat16, exact; what nvfp4.decode makes of nvfp4.quantize,
    without packing."""
    s_enc = nvfp4.encode_scale(amax)
    blocks = packing.pad_columns(x, nvfp4.BLOCK).to(torch.float32).unflatten(-1, (-1, nvfp4.BLOCK))
    bamax = blocks.abs().amax(-1)
    scales = nvfp4.block_scales(nvfp4._tile_amax(bamax) if square else bamax, s_enc)
    v = blocks * nvfp4.block_encode(scales, s_enc).unsqueeze(-1)
    if seed is None:
        codes = rounding.e2m1_codes(v)
    else:
        noise = noise16(seed, site, x.shape[0], x.shape[1], x.device)
        codes = rounding.e2m1_codes_stochastic(v, noise.unflatten(-1, (-1, nvfp4.BLOCK)))
    return (rounding.e2m1_values(codes) * scales.to(torch.float32).unsqueeze(-1)).flatten(1).to(torch.bfloat16)


def product(a: Tensor, b: Tensor, a_amax: Tensor, b_amax: Tensor, dtype: torch.dtype) -> Tensor:
    """a [M, C] times b [N, C] transposed, accumulated in float32, times the tensor scales, rounded once."""
    out = torch.mm(a, b.t(), out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float().t()
    factor = nvfp4.gemm_factor(a_amax, b_amax)
    assert factor is not None
    return (out * factor).to(dtype)


def rotate(x: Tensor, hadamard: Tensor | None) -> Tensor:
    """By a product with the matrix of 16, as one does it in PyTorch, or without it by the reference's butterfly."""
    if hadamard is None:
        return rotation.rotate(x)
    return (x.reshape(-1, rotation.SIZE) @ hadamard).view(x.shape)


class FakeQuantized(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, hadamard: Tensor | None, seed: Tensor) -> Tensor:
        """x [T, K], w [N, K] -> [T, N]; seed: 0-d int64."""
        x_amax, w_amax = nvfp4.amax(x), nvfp4.amax(w)
        quantized = fake_quantize(w, w_amax, square=True)
        ctx.save_for_backward(x, quantized, w_amax, hadamard, seed)
        return product(fake_quantize(x, x_amax), quantized, x_amax, w_amax, x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, w, w_amax, hadamard, seed = ctx.saved_tensors
        amax = nvfp4.amax(dy)
        dx = product(fake_quantize(dy, amax, seed=seed), w.t(), amax, w_amax, dy.dtype)
        left, right = rotate(dy.t(), hadamard), rotate(x.t(), hadamard)
        left_amax, right_amax = nvfp4.amax(left), nvfp4.amax(right)
        left = fake_quantize(left, left_amax, seed=seed, site=1)
        dw = product(left, fake_quantize(right, right_amax), left_amax, right_amax, x.dtype)
        return dx, dw, None, None


class FakeQuantizedLinear(nn.Module):
    def __init__(self, linear: nn.Linear, butterfly: bool) -> None:
        super().__init__()
        self.weight = linear.weight
        identity = torch.eye(rotation.SIZE, dtype=torch.bfloat16, device=linear.weight.device)
        self.register_buffer("hadamard", None if butterfly else rotation.rotate(identity), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        seed = torch.randint(2**62, (), dtype=torch.int64, device=x.device)
        return FakeQuantized.apply(x.flatten(0, -2), self.weight, self.hadamard, seed).unflatten(0, x.shape[:-1])


def participating(model: nn.Module, policy: Policy) -> tuple[list[str], Counter[str]]:
    """Linear layers that the policy leaves to the recipe, and reasons of the others with their count."""
    decisions = resolve(model, policy)
    chosen, reasons = [], Counter[str]()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            decision = decisions.of_parameter(f"{name}.weight")
            if decision.precisions() == ("recipe",) * 3:
                chosen.append(name)
            else:
                reasons[decision.forward.reason] += 1
    return chosen, reasons


def replace_linears(model: nn.Module, butterfly: bool) -> None:
    for name in participating(model, Policy())[0]:
        parent, _, last = name.rpartition(".")
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        setattr(model.get_submodule(parent), last, FakeQuantizedLinear(linear, butterfly))


# A variant in training


def batches(setup: Setup, device: torch.device, count: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Tokens of frequencies that fall as 1 / rank, so that there is something to learn."""
    generator = torch.Generator().manual_seed(1)
    frequencies = 1 / (torch.arange(setup.model.vocab) + 10.0)
    shape = (count, setup.batch, setup.model.seq + 1)
    tokens = torch.multinomial(frequencies, math.prod(shape), replacement=True, generator=generator)
    return [(b[:, :-1].contiguous(), b[:, 1:].contiguous()) for b in tokens.view(shape).to(device)]


@dataclass
class Trainer:
    """Called, it does one step."""

    variant: str
    model: Llama
    call: Callable[[Tensor, Tensor], Tensor]
    optimizer: torch.optim.Optimizer
    data: Sequence[tuple[Tensor, Tensor]]
    losses: list[Tensor] = field(default_factory=list)

    def __call__(self) -> None:
        torch.compiler.cudagraph_mark_step_begin()
        loss = self.forward()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss.detach().clone())  # a CUDA graph's next replay writes over it

    def forward(self) -> Tensor:
        return self.call(*self.data[len(self.losses) % len(self.data)])


def make_trainer(
    variant: str, setup: Setup, data: Sequence[tuple[Tensor, Tensor]], device: torch.device, butterfly: bool
) -> Trainer:
    model = bfloat16_llama(setup.model, device)
    call: Any = model
    if variant in SLOW:
        replace_linears(model, butterfly)
    if variant == "bf16":
        call = torch.compile(model, dynamic=False)
    elif variant in OPTIONS:
        call = torch.compile(model, backend="nvfp4", dynamic=False, options=OPTIONS[variant])
    elif variant == "compiled-eager":
        for part in (*model.layers, model.output):
            part.compile(dynamic=False)
    # The optimizer is the same eager kernel for all.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    return Trainer(variant, model, call, optimizer, data)


def seconds(call: Callable[[], object], device: torch.device) -> float:
    wait(device)
    began = time.perf_counter()
    call()
    wait(device)
    return time.perf_counter() - began


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


# Memory


def first_steps(
    variant: str, setup: Setup, data: Sequence[tuple[Tensor, Tensor]], device: torch.device, butterfly: bool
) -> tuple[Trainer, dict[str, Any]]:
    """Compile; then what a step holds, above what was allocated before the model was made."""
    cuda = device.type == "cuda"
    before = torch.cuda.memory_allocated() if cuda else 0
    trainer = make_trainer(variant, setup, data, device, butterfly)
    record: dict[str, Any] = {"first step s": seconds(trainer, device)}
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    record["second step s"] = seconds(trainer, device)
    record["peak bytes"] = torch.cuda.max_memory_allocated() - before if cuda else None
    between = torch.cuda.memory_allocated() if cuda else 0
    loss = trainer.forward()
    record["held bytes"] = torch.cuda.memory_allocated() - between if cuda else None
    record |= saved_for_backward(loss, itertools.chain(trainer.model.parameters(), trainer.model.buffers(), *data))
    return trainer, record


def saved_for_backward(loss: Tensor, known: Iterable[Tensor]) -> dict[str, Any]:
    """What the autograd graph of a loss keeps: storages counted once, ``known`` ones (weights, inputs) not at all."""
    seen = {tensor.untyped_storage().data_ptr() for tensor in known}
    kinds: dict[tuple[str, tuple[int, ...]], list[int]] = defaultdict(lambda: [0, 0])
    for tensor in _kept(loss):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            kind = kinds[str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)]
            kind[0] += 1
            kind[1] += storage.nbytes()
    by_dtype: Counter[str] = Counter()
    for (dtype, _), (_, size) in kinds.items():
        by_dtype[dtype] += size
    ranked = sorted(kinds.items(), key=lambda kind: -kind[1][1])
    largest = [{"dtype": d, "shape": list(s), "count": n, "bytes": size} for (d, s), (n, size) in ranked[:15]]
    return {"saved bytes": by_dtype.total(), "saved by dtype": dict(by_dtype), "saved, largest": largest}


def _kept(loss: Tensor) -> Iterator[Tensor]:
    waiting, visited = [loss.grad_fn], set()
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in visited or hasattr(node, "variable"):
            continue
        visited.add(node)
        waiting += [after for after, _ in node.next_functions]
        values = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        values += [getattr(node, "saved_tensors", ()), getattr(node, "_tensors_no_vc_check", ())]
        for value in values:
            for one in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(one, Tensor):
                    yield one


# Kernels

GROUPS = [
    (group, re.compile(pattern, re.IGNORECASE))
    for group, pattern in (
        ("fp4 amax", r"^amax_"),
        ("fp4 produced rows", r"^quantize_produced_rows"),
        ("fp4 rows", r"^quantize_rows"),
        ("fp4 rotated columns", r"^quantize_rotated_columns"),
        ("fp4 columns", r"^quantize_columns"),
        ("fp4 weights", r"^quantize_weights"),
        ("fp4 decode", r"^decode_"),
        ("fp4 factor", r"^gemm_factor"),
        ("fp4 other", r"^(quantize|rotated?|nvfp4|fp4)_"),
        ("attention", r"flash|fmha|sdpa|attention"),
        ("matrix products", r"gemm|nvjet|cutlass|xmma|gemv|splitk|triton_tem_"),
        ("optimizer", r"multi_tensor_apply|fusedadam"),
        (
            "pointwise",
            r"^triton_|elementwise|reduce_kernel|softmax|nll_loss|rms_?norm|layer_?norm|embed|catarray|index",
        ),
    )
]


def group_of(kernel: str) -> str:
    """What a kernel is for, by its name. "pointwise" has reductions, too."""
    return next((group for group, pattern in GROUPS if pattern.search(kernel)), "other")


@dataclass(frozen=True)
class Profile:
    """Milliseconds on the GPU of one step: by group, and of the longest kernels; from its first kernel to its last."""

    groups: Mapping[str, float]
    kernels: Sequence[Mapping[str, Any]]
    busy_ms: float
    span_ms: float


def profile_of(trace: Mapping[str, Any], top: int = 25) -> Profile:
    """Of a Chrome trace of the profiler's."""
    found = [e for e in trace["traceEvents"] if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    times: dict[str, list[float]] = defaultdict(list)
    for event in found:
        times[event["name"]].append(event["dur"] / 1e3)
    groups: dict[str, float] = defaultdict(float)
    for name, samples in times.items():
        groups[group_of(name)] += sum(samples)
    ranked = sorted(times.items(), key=lambda item: -sum(item[1]))[:top]
    kernels = [{"group": group_of(n), "kernel": n[:160], "ms": sum(s), "launches": len(s)} for n, s in ranked]
    span = max(e["ts"] + e["dur"] for e in found) - min(e["ts"] for e in found) if found else 0.0
    ordered = dict(sorted(groups.items(), key=lambda item: -item[1]))
    return Profile(ordered, kernels, sum(groups.values()), span / 1e3)


def profiled(trainer: Trainer) -> Profile:
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        trainer()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return profile_of(json.loads(path.read_text()))


@contextlib.contextmanager
def counted(launches: Counter[str], moved: Counter[str]) -> Iterator[None]:
    """Inside, generated kernels are counted by group, with the bytes of the tensors that they are given."""
    from fp4compile.lowering.kernels.kernel import Kernel

    launch = Kernel.run

    def run(self: Kernel, programs: int, *arguments: Any) -> None:
        group = group_of(self.name)
        launches[group] += 1
        moved[group] += bytes_of(arguments)
        launch(self, programs, *arguments)

    with mock.patch.object(Kernel, "run", run):
        yield


def bytes_of(arguments: Iterable[Any]) -> int:
    """Of the tensors among them, each memory once."""
    tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
    return sum({tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in tensors}.values())


def copy_bandwidth(device: torch.device, elements: int = 2**29, repeats: int = 20) -> float:
    """Bytes a second, read and written."""
    x = torch.ones(elements, dtype=torch.bfloat16, device=device)
    y = torch.empty_like(x)
    times = []
    for _ in range(repeats + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        y.copy_(x)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return 2 * x.nbytes / statistics.median(times[3:]) * 1e3


def floor(base: Mapping[str, float], moved: Mapping[str, int], bandwidth: float) -> dict[str, float]:
    """Milliseconds by group: everything that bf16 does as measured, and FP4 kernels at the copy bandwidth."""
    return {**base, **{group: size / bandwidth * 1e3 for group, size in moved.items()}}


def compared(
    bf16: Profile, other: Profile, launches: Mapping[str, int], moved: Mapping[str, int], bandwidth: float
) -> list[dict[str, Any]]:
    """Group by group: bf16's milliseconds, the other's, and the floor."""
    least = floor(bf16.groups, moved, bandwidth)
    rows: list[dict[str, Any]] = [
        {
            "group": group,
            "bf16 ms": bf16.groups.get(group, 0.0),
            "ms": other.groups.get(group, 0.0),
            "floor ms": least.get(group, 0.0),
            "launches": launches.get(group),
            "GB": moved[group] / 1e9 if group in moved else None,
        }
        for group in dict.fromkeys((*other.groups, *least))
    ]
    total = {key: sum(row[key] for row in rows) for key in ("bf16 ms", "ms", "floor ms")}
    return [*rows, {"group": "total", **total, "launches": None, "GB": sum(moved.values()) / 1e9}]


# One setup


class Child:
    """Another process that compiles compiled-eager into the caches of this one."""

    def __init__(self, args: argparse.Namespace, setup: str) -> None:
        self.began = time.perf_counter()
        self.seconds = 0.0
        self.log = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / f"compiled-eager {setup}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, __file__, "--compile-only", "--config", setup, "--device", str(args.device)]
        threads = str(max(1, (os.cpu_count() or 1) // 2))
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, *(["--butterfly"] if args.butterfly else [])],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": threads},
                start_new_session=True,
            )

    def why_not(self, patience: float) -> str | None:
        """Wait. None: it is compiled."""
        try:
            self.process.wait(max(patience, 0.0))
        except subprocess.TimeoutExpired:
            self.end()
            return f"not compiled within {time.perf_counter() - self.began:.0f} s"
        self.seconds = time.perf_counter() - self.began
        return None if self.process.returncode == 0 else self.log.read_text()[-600:]

    def end(self) -> None:
        """With all that it started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def measure(name: str, args: argparse.Namespace, patience: float) -> dict[str, Any]:
    """Everything of one setup, in about ``patience`` seconds."""
    setup, device = SETUPS[name], args.device
    deadline = time.perf_counter() + patience
    data = batches(setup, device)
    record: dict[str, Any] = {"setup": asdict(setup), "tokens": setup.tokens, "left out": {}, "variants": {}}
    record["layers"] = {v: layers(setup, OPTIONS[v].get("policy", Policy())) for v in ("nvfp4", "nvfp4-all")}
    child = Child(args, name) if "compiled-eager" in args.variants else None
    record["compiled beside another process"] = child is not None
    trainers: dict[str, Trainer] = {}
    try:
        for variant in sorted(args.variants, key=VARIANTS.index):
            left = deadline - time.perf_counter()
            if variant == "compiled-eager" and child is not None:
                reason = child.why_not(left - TIMED_SECONDS)
            else:
                reason = "no time left" if variant == "eager" and left < 10 else None
            if reason is None:
                try:
                    steps = first_steps(variant, setup, data, device, args.butterfly)
                    trainers[variant], record["variants"][variant] = steps
                except Exception as error:
                    reason = f"{type(error).__name__}: {error}"[:600]
                gc.collect()
            if reason is not None:
                record["left out"][variant] = reason
            print(f"  {name} {variant}: {reason or 'ready'}, {deadline - time.perf_counter():.0f} s left", flush=True)
            if reason is None and variant == "compiled-eager" and child is not None:
                record["variants"][variant]["first step s, alone"] = child.seconds
    finally:
        if child is not None:
            child.end()
    timings = time_in_turns(trainers, args.steps)
    for variant, trainer in trainers.items():
        record["variants"][variant]["losses"] = [float(loss) for loss in trainer.losses[:8]]
    record["timings"] = {phase: {v: asdict(t) for v, t in times.items()} for phase, times in timings.items()}
    if device.type == "cuda":
        try:
            record |= profiles(trainers, setup, device)
        except Exception as error:  # what was timed is kept
            record["left out"]["profiles"] = f"{type(error).__name__}: {error}"[:600]
    record["rows"] = table(name, record["variants"], timings)
    record["marks"] = marks(record["rows"])
    return record


def layers(setup: Setup, policy: Policy) -> dict[str, Any]:
    """Which of a model take part."""
    with torch.device("meta"):
        chosen, reasons = participating(Llama(setup.model), policy)
    blocks = sorted({int(name.split(".")[1]) for name in chosen})
    return {"linear layers": len(chosen), "blocks": blocks, "of": setup.model.layers, "bf16": dict(reasons)}


def time_in_turns(trainers: Mapping[str, Trainer], steps: int) -> dict[str, dict[str, Timing]]:
    """Of "all" a few turns, of the "fast" ones many."""
    fast = {variant: trainer for variant, trainer in trainers.items() if variant not in SLOW}
    found = {}
    if len(fast) < len(trainers):
        found["all"] = time_side_by_side(trainers, repeats=min(steps, SLOW_STEPS), warmup=0)
    if fast:
        found["fast"] = time_side_by_side(fast, repeats=steps, warmup=2)
    return found


def profiles(trainers: Mapping[str, Trainer], setup: Setup, device: torch.device) -> dict[str, Any]:
    """By kernel, with the floor."""
    found: dict[str, Profile] = {v: profiled(trainers[v]) for v in VARIANTS if v in trainers and v not in SLOW}
    record: dict[str, Any] = {"profiles": {variant: asdict(profile) for variant, profile in found.items()}}
    if "bf16" not in found:
        return record
    record["copy bandwidth TB/s"] = (bandwidth := copy_bandwidth(device)) / 1e12
    products = found["bf16"].groups.get("matrix products", 0.0)
    record["bf16 products TFLOP/s"] = setup.model.flops(setup.tokens) / products / 1e9 if products else None
    record["floors"] = {}
    for variant in (variant for variant in found if variant != "bf16"):
        launches, moved = Counter[str](), Counter[str]()
        with counted(launches, moved):
            trainers[variant]()
        record["floors"][variant] = compared(found["bf16"], found[variant], launches, moved, bandwidth)
    return record


def table(
    name: str, variants: Mapping[str, Mapping[str, Any]], timings: Mapping[str, Mapping[str, Timing]]
) -> list[dict[str, Any]]:
    """One row a variant. Ratios are of times of the same turns; "saved" is what the allocator holds, else what the
    autograd graph does."""
    rows = []
    for variant, record in variants.items():
        times = timings["all" if variant in SLOW else "fast"]
        row: dict[str, Any] = {"config": name, "variant": variant, "ms": times[variant].median_ms}
        for base in ("bf16", "nvfp4"):
            row[f"of {base}"] = ratio(row["ms"], times[base].median_ms) if base in times else None
        row["first step s"] = record["first step s"]
        for what, sizes in (("peak", memory(variants, "peak bytes")), ("saved", memory(variants, "held bytes"))):
            row[f"{what} GB"] = None if sizes[variant] is None else sizes[variant] / 1e9
            row[f"{what} of bf16"] = ratio(sizes[variant], sizes.get("bf16"))
        rows.append(row)
    return rows


def memory(variants: Mapping[str, Mapping[str, Any]], what: str) -> dict[str, Any]:
    known = {variant: record[what] for variant, record in variants.items()}
    if what == "held bytes" and None in known.values():
        return memory(variants, "saved bytes")
    return known


def ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def marks(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What was to be reached, and whether it was."""
    by_variant = {row["variant"]: row for row in rows}
    ours, eager, compiled = (by_variant.get(v, {}) for v in ("nvfp4", "eager", "compiled-eager"))
    values: list[tuple[str, float | None, float, int]] = [
        ("step of bf16, at most", ours.get("of bf16"), MARKS["step"], -1),
        ("saved of bf16, at most", ours.get("saved of bf16"), MARKS["saved"], -1),
        ("peak of bf16, at most", ours.get("peak of bf16"), MARKS["peak"], -1),
        ("eager of nvfp4, at least", eager.get("of nvfp4"), MARKS["eager"], 1),
        ("compiled-eager of nvfp4, at least", compiled.get("of nvfp4"), 1.0, 1),
    ]
    return [
        {"what": what, "value": value, "mark": mark, "met": (value - mark) * sign >= 0}
        for what, value, mark, sign in values
        if value is not None
    ]


# Everything together


def names(known: Iterable[str]) -> Callable[[str], list[str]]:
    def read(text: str) -> list[str]:
        found = text.split(",")
        if unknown := set(found) - set(known):
            raise argparse.ArgumentTypeError(f"unknown {', '.join(sorted(unknown))}; known: {', '.join(known)}")
        return found

    return read


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A training step in NVFP4 emulation against bf16.")
    parser.add_argument("--config", type=names(SETUPS), default=["2048", "4096"], help=f"of {', '.join(SETUPS)}")
    default = ["bf16", "nvfp4", *SLOW]
    parser.add_argument("--variants", type=names(VARIANTS), default=default, help=f"of {', '.join(VARIANTS)}")
    parser.add_argument("--steps", type=int, default=20, help="timed, of the variants that are not slow")
    parser.add_argument("--budget", type=float, default=225, help="seconds; what is slow is left out to keep to it")
    parser.add_argument("--butterfly", action="store_true", help="eager rotation by the reference, not by a product")
    parser.add_argument(
        "--cache",
        type=Path,
        help="folder of compiled code, to be kept: a second run starts warm, and has a result of its own",
    )
    parser.add_argument("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="write the JSON there, too; without a GPU only there")
    parser.add_argument("--compile-only", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.device = torch.device(args.device)
    args.warm = args.cache is not None and args.cache.exists()
    return args


def compile_only(args: argparse.Namespace) -> None:
    setup = SETUPS[args.config[0]]
    data = batches(setup, args.device)
    seconds(make_trainer("compiled-eager", setup, data, args.device, args.butterfly), args.device)


def warm_up_compiler(device: torch.device) -> None:
    """What the first compilation of a process pays once is nobody's first step."""
    x = torch.ones(64, device=device, requires_grad=True)
    torch.compile(lambda x: (x * 2).exp().sum(), dynamic=False)(x).backward()


def run(args: argparse.Namespace) -> None:
    began = time.perf_counter()
    if set(args.variants) != {"eager"}:
        warm_up_compiler(args.device)
    records: dict[str, Any] = {}
    for index, name in enumerate(args.config):
        if index:
            torch.compiler.reset()
            gc.collect()
        weights = [SETUPS[later].model.layers + 4 for later in args.config[index:]]
        left = args.budget - (time.perf_counter() - began)
        records[name] = measure(name, args, left * weights[0] / sum(weights))
        gc.collect()
        write(records, args)
    show(records)
    print(f"{time.perf_counter() - began:.0f} s")


def write(records: Mapping[str, Any], args: argparse.Namespace) -> None:
    rows = [row for record in records.values() for row in record["rows"]]
    if args.device.type == "cuda":
        name = "_".join((NAME, *args.config, *(("warm",) if args.warm else ())))
        write_results(name, rows, more={"setups": records}, copy_to=args.out)
    elif args.out is not None:
        args.out.write_text(json.dumps({"environment": environment(), "rows": rows, "setups": records}, indent=2))


def show(records: Mapping[str, Any]) -> None:
    for name, record in records.items():
        for variant, rows in record.get("floors", {}).items():
            print_table(f"{name} {variant}: kernels of a step", [_shown(row) for row in rows])
        print(f"{name} in NVFP4: {record['layers']['nvfp4']}; left out: {record['left out'] or 'nothing'}")
    for title, key in (("marks", "marks"), ("a training step", "rows")):
        if rows := [_shown(row) for record in records.values() for row in record[key]]:
            print_table(title, rows)


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: "-" if value is None else value for key, value in row.items()}


def main() -> None:
    args = arguments()
    if args.compile_only:
        compile_only(args)
        return
    if args.device.type == "cpu" and set(args.config) != {"tiny"}:
        print("needs a CUDA device; on a CPU there is --config tiny")
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as empty:
        cache = args.cache or Path(empty)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache.absolute() / "inductor")
        os.environ["TRITON_CACHE_DIR"] = str(cache.absolute() / "triton")
        run(args)


if __name__ == "__main__":
    main()
