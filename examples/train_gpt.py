"""Train a small GPT in bf16 and in NVFP4 on the same text, and compare the two.

    python examples/train_gpt.py                    # both, on a CPU in a few minutes
    python examples/train_gpt.py --data book.txt --steps 2000 --dim 512 --layers 8 --heads 8

The two runs differ in one call: ``torch.compile(model)`` or ``torch.compile(model, backend="nvfp4")``. Seed,
first weights and batches are the same. Both keep float32 parameters and optimizer state and compute in bf16
under ``torch.autocast``. Without FP4 hardware the NVFP4 numbers are emulated: compare the losses then, not
the seconds.

Writes losses.jsonl (one line a step), losses.png and report.txt into --out.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # draws into files: no display needed

import matplotlib.pyplot as plt
import torch
from corpus import batches, read_text, split
from gpt import GPT, GPTConfig
from tqdm import tqdm

import fp4compile

BACKENDS = {"bf16": "inductor", "nvfp4": "nvfp4"}
LAST_STEPS = 25  # the final training loss is the mean over these
VALIDATION_BATCHES = 16

LossFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Step:
    """One line of losses.jsonl: loss in nats a byte, wall-clock seconds (step 1 includes compilation)."""

    step: int
    precision: str
    loss: float
    lr: float
    seconds: float


@dataclass(frozen=True)
class Run:
    precision: str
    steps: list[Step]
    validation_loss: float

    @property
    def final_loss(self) -> float:
        return mean([step.loss for step in self.steps[-LAST_STEPS:]])

    @property
    def median_seconds(self) -> float:
        return sorted(step.seconds for step in self.steps)[len(self.steps) // 2]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def make_model(args: argparse.Namespace) -> GPT:
    torch.manual_seed(args.seed)
    config = GPTConfig(seq=args.seq, dim=args.dim, layers=args.layers, heads=args.heads)
    return GPT(config).to(args.device)


def autocast(model: Callable[..., Any], device: str) -> Callable[..., Any]:
    """The model as a function of batches on any device, computing in bf16."""

    def call(tokens: torch.Tensor, targets: torch.Tensor) -> Any:
        with torch.autocast(device, torch.bfloat16):
            return model(tokens.to(device), targets.to(device))

    return call


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over the first 5 %, then a cosine down to a tenth of the peak. Steps count from 1."""
    warmup = max(1, steps // 20)
    if step <= warmup:
        return peak * step / warmup
    done = (step - warmup) / (steps - warmup)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def train(precision: str, train_data: torch.Tensor, val_data: torch.Tensor, args: argparse.Namespace) -> Run:
    model = make_model(args)
    loss_of: LossFunction = autocast(torch.compile(model, backend=BACKENDS[precision]), args.device)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    source = batches(train_data, args.batch, args.seq, args.seed)
    steps: list[Step] = []
    progress = tqdm(range(1, args.steps + 1), desc=f"{precision:>5}", unit="step")
    for step in progress:
        began = time.perf_counter()
        lr = learning_rate(step, args.steps, args.lr)
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss = loss_of(*next(source))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps.append(Step(step, precision, loss.item(), lr, time.perf_counter() - began))
        progress.set_postfix(loss=f"{steps[-1].loss:.3f}")
    return Run(precision, steps, validation_loss(loss_of, val_data, args))


def validation_loss(loss_of: LossFunction, val_data: torch.Tensor, args: argparse.Namespace) -> float:
    """Mean loss over the same held-out batches for every run.

    Gradients stay enabled on purpose: this reuses the graph compiled for training, where torch.no_grad()
    would compile a second one for a few batches.
    """
    source = batches(val_data, args.batch, args.seq, seed=0)
    return mean([loss_of(*next(source)).item() for _ in range(VALIDATION_BATCHES)])


def explain_sites(train_data: torch.Tensor, args: argparse.Namespace) -> Any:
    """What backend="nvfp4" does with each matmul of this model, and what it saves for the backward pass."""
    model = make_model(args)
    tokens, targets = next(batches(train_data, args.batch, args.seq, args.seed))
    with torch.autocast(args.device, torch.bfloat16):
        return fp4compile.explain(model, tokens.to(args.device), targets.to(args.device))


def compare_losses(runs: list[Run]) -> str:
    last = min(LAST_STEPS, len(runs[0].steps))
    lines = [f"{'loss':12} {f'train, last {last}':>16} {'validation':>12} {'median s/step':>15}"]
    for run in runs:
        losses = f"{run.final_loss:16.4f} {run.validation_loss:12.4f}"
        lines.append(f"{run.precision:12} {losses} {run.median_seconds:15.3f}")
    if len(runs) == 2:
        bf16, nvfp4 = runs
        train_gap = nvfp4.final_loss / bf16.final_loss - 1
        val_gap = nvfp4.validation_loss / bf16.validation_loss - 1
        lines.append(f"{'nvfp4 - bf16':12} {train_gap:+16.2%} {val_gap:+12.2%}")
    return "\n".join(lines)


def compare_saved_bytes(saved: dict[str, int]) -> str:
    """`saved` is the report's saved_for_backward: bytes, how many of them packed, and bytes in bf16."""
    bf16, nvfp4, packed = (saved[key] / 2**20 for key in ("baseline_bytes", "bytes", "packed_bytes"))
    return (
        f"saved for backward: bf16 {bf16:.1f} MiB, nvfp4 {nvfp4:.1f} MiB ({nvfp4 / bf16 - 1:+.1%}; "
        f"{packed:.1f} MiB of it packed)"
    )


def smooth(losses: list[float]) -> list[float]:
    """Mean over a window of 5 % of the run around each step; narrower at the start, where the loss falls steeply."""
    half = max(1, len(losses) // 40)
    return [mean(losses[i - min(half, i) : i + min(half, i) + 1]) for i in range(len(losses))]


def plot(runs: list[Run], title: str, path: Path) -> None:
    """Every run's losses, and below two runs by how many percent the second lies above the first."""
    panels = {"height_ratios": [3, 1][: len(runs)]}
    figure, grid = plt.subplots(
        len(runs), sharex=True, squeeze=False, gridspec_kw=panels, figsize=(8, 6), dpi=150, layout="constrained"
    )
    top, bottom = grid[0, 0], grid[-1, 0]
    steps = [step.step for step in runs[0].steps]
    raw = [[step.loss for step in run.steps] for run in runs]
    smoothed = [smooth(losses) for losses in raw]
    for run, faint, clear, style in zip(runs, raw, smoothed, ("-", "--"), strict=False):
        (line,) = top.plot(steps, clear, style, label=f"{run.precision} (validation {run.validation_loss:.3f})")
        top.plot(steps, faint, color=line.get_color(), alpha=0.25, linewidth=0.8)
    top.set(title=title, ylabel="training loss (nats a byte)")
    top.grid(alpha=0.3)
    top.legend()
    if len(runs) == 2:
        bottom.plot(steps, [100 * (b / a - 1) for a, b in zip(*smoothed, strict=True)], color="black")
        bottom.axhline(0, color="gray", linewidth=0.8)
        bottom.set_ylabel(f"{runs[1].precision} above\n{runs[0].precision} (%)")
        bottom.grid(alpha=0.3)
    bottom.set_xlabel("step")
    figure.savefig(path)
    plt.close(figure)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT in bf16 and in NVFP4; compare the two.")
    add = parser.add_argument
    add("--steps", type=int, default=120)
    add("--batch", type=int, default=8, help="sequences a step")
    add("--seq", type=int, default=128, help="bytes a sequence")
    add("--dim", type=int, default=256)
    add("--layers", type=int, default=4)
    add("--heads", type=int, default=4)
    add("--lr", type=float, default=1e-3, help="peak learning rate")
    add("--seed", type=int, default=1)
    add("--data", type=Path, help="a text file, plain or .xz; without it Python's own library source")
    add("--out", type=Path, default=Path("demo"))
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--precision", choices=["bf16", "nvfp4", "both"], default="both")
    args = parser.parse_args(argv)
    if args.dim % (2 * args.heads):
        parser.error(f"--dim {args.dim} must be a multiple of 2 * --heads {args.heads}: positions turn pairs")
    if args.steps < 1:
        parser.error("--steps must be at least 1")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    train_data, val_data = split(read_text(args.data))
    parameters = sum(p.numel() for p in make_model(args).parameters()) / 1e6
    print(f"{parameters:.1f} M parameters on {args.device}, {args.batch * args.seq} bytes a step")

    precisions = list(BACKENDS) if args.precision == "both" else [args.precision]
    runs = [train(precision, train_data, val_data, args) for precision in precisions]

    output = compare_losses(runs)
    if "nvfp4" in precisions:
        report = explain_sites(train_data, args)
        output = f"{report}\n{output}\n{compare_saved_bytes(report.to_dict()['saved_for_backward'])}"
    print(output)

    args.out.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(asdict(step)) for run in runs for step in run.steps]
    (args.out / "losses.jsonl").write_text("\n".join(lines) + "\n")
    (args.out / "report.txt").write_text(output + "\n")
    title = f"GPT, {parameters:.1f} M parameters, {args.layers} blocks, {args.batch * args.seq} bytes a step"
    plot(runs, title, args.out / "losses.png")
    print(f"wrote losses.jsonl, losses.png and report.txt to {args.out}/")


if __name__ == "__main__":
    main()
