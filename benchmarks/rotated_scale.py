"""What does it cost wgrad in accuracy to bound the tensor scale of its rotated operands instead of measuring it?

dw = dy^T x, both operands rotated along the tokens and quantized as NVIDIA's recipe has them: dy stochastically, x to
nearest. "amax" takes the tensor scale from the rotated tensor, "bound" from the tensor before it is rotated, times
4. The error is |dw - exact| / |exact| (Frobenius), exact: float64 of the same bf16 dy and x. A row of dw has one
output channel's gradient; the mean of the rows' own errors gives small ones the weight of large ones. Noise is the same
for both.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from common import print_table, write_results
from torch import Tensor

import fp4compile  # noqa: F401  (registers the operators)
from fp4compile.formats.rotation import SIGNS, SIZE, growth

fp4 = torch.ops.fp4

SIZES = ((1024, 256, 256), (4096, 256, 512), (16384, 256, 128))
"""Tokens, N, K."""

Draw = Callable[[int, int], Tensor]
"""Of [tokens, channels]."""


def normal(tokens: int, channels: int) -> Tensor:
    return torch.randn(tokens, channels)


def student(tokens: int, channels: int) -> Tensor:
    """Three degrees of freedom: the variance is finite, the fourth moment is not."""
    return normal(tokens, channels) / (normal(3 * tokens, channels).unflatten(0, (3, -1)).square().mean(0)).sqrt()


def outlier_columns(tokens: int, channels: int) -> Tensor:
    """One channel in 64 is a hundred times as large, as in the activations of large language models."""
    x = normal(tokens, channels)
    x[:, ::64] *= 100
    return x


def small_gradients(tokens: int, channels: int) -> Tensor:
    """Channels of 1e-6 down to 1e-11: the smallest are near the smallest block scales of either choice."""
    return normal(tokens, channels) * 1e-6 * 10 ** (-5 * torch.rand(channels))


def one_large_token(tokens: int, channels: int) -> Tensor:
    """Ten thousand times as large as the others: the rotation spreads its largest element over a group, so the bound is
    16 times too large, the most it can be."""
    x = normal(tokens, channels)
    x[tokens // 2] *= 1e4
    return x


DATA: dict[str, tuple[Draw, Draw]] = {
    "normal": (normal, normal),
    "heavy tails (t, 3)": (student, student),
    "outlier columns in x": (outlier_columns, normal),
    "small gradients": (normal, small_gradients),
    "one large token in x": (one_large_token, normal),
}
"""How x and dy are drawn."""


def bound_of(x: Tensor) -> Tensor:
    return fp4.amax(x) * growth(SIZE)


def quantized(x: Tensor, bound: bool, seed: Tensor | None) -> tuple[Tensor, Tensor, Tensor, str]:
    """The rotated transpose of [tokens, channels] as an operand of ``scaled_mm``."""
    rotated = fp4.rotate(x.t(), SIZE, SIGNS)
    amax = bound_of(x) if bound else fp4.amax(rotated)
    rounding = "nearest" if seed is None else "stochastic"
    return *fp4.quantize(rotated, amax, seed, "nvfp4", [1, SIZE], rounding, 0), amax, "nvfp4"


def errors(x: Tensor, dy: Tensor, exact: Tensor, bound: bool, seed: int) -> tuple[float, float]:
    """Of dw: the relative error, and the mean of its rows' relative errors."""
    left, right = quantized(dy, bound, torch.tensor(seed)), quantized(x, bound, None)
    difference = fp4.scaled_mm(*left, *right, torch.float32).double() - exact
    rows = difference.norm(dim=1) / exact.norm(dim=1)
    return float(difference.norm() / exact.norm()), float(rows.mean())


def measure(name: str, size: tuple[int, int, int], draws: int) -> dict[str, object]:
    """Means over several draws."""
    tokens, n, k = size
    make_x, make_dy = DATA[name]
    found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    larger: list[tuple[float, float]] = []
    for seed in range(draws):
        torch.manual_seed(seed)
        x, dy = make_x(tokens, k).to(torch.bfloat16), make_dy(tokens, n).to(torch.bfloat16)
        exact = dy.double().t() @ x.double()
        for bound, values in found.items():
            values.append(errors(x, dy, exact, bound, seed))
        ratios = [float(bound_of(one) / fp4.amax(fp4.rotate(one.t(), SIZE, SIGNS))) for one in (x, dy)]
        larger.append((ratios[0], ratios[1]))
    amax, bounded = (tuple(map(statistics.mean, zip(*values, strict=True))) for values in found.values())
    x_larger, dy_larger = map(statistics.mean, zip(*larger, strict=True))
    return {
        "data": name,
        "tokens, N, K": f"{tokens}, {n}, {k}",
        "x scale": x_larger,
        "dy scale": dy_larger,
        "error, amax": amax[0],
        "error, bound": bounded[0],
        "error ratio": bounded[0] / amax[0],
        "row error, amax": amax[1],
        "row error, bound": bounded[1],
        "row error ratio": bounded[1] / amax[1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="The error of wgrad with a measured and with a bounded tensor scale.")
    parser.add_argument("--draws", type=int, default=3)
    args = parser.parse_args()

    rows = [measure(name, size, args.draws) for name in DATA for size in SIZES]
    print_table("wgrad in NVFP4 against float64; scale: how much larger the bound is than the amax", rows)
    write_results("rotated_scale", rows)


if __name__ == "__main__":
    main()
