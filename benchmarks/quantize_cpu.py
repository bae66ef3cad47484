"""How much faster than eager PyTorch is NVFP4 quantization on a CPU once Inductor has fused it?

Quantizes a bf16 matrix [rows, cols] in 1x16 blocks, to nearest and stochastically; the amax is given. The
eager side is the operator's reference, the compiled side what the CPU lowering puts in its place. Both sides must
produce the same bytes.
"""

from __future__ import annotations

import argparse
import functools

import torch
from common import print_table, time_side_by_side, write_results

import fp4compile  # noqa: F401  (registers the operators)

TARGET = 10.0


def main() -> None:
    parser = argparse.ArgumentParser(description="NVFP4 quantization on a CPU: compiled against eager.")
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--cols", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()

    torch.manual_seed(0)
    x = torch.randn(args.rows, args.cols).to(torch.bfloat16)
    amax = torch.ops.fp4.amax(x)
    sides = {"eager": torch.ops.fp4.quantize, "compiled": torch.ops.fp4_compiled.quantize}
    roundings = {"nearest": None, "stochastic": torch.tensor(1234)}
    cases = {
        f"{rounding} {side}": functools.partial(operator, x, amax, seed, "nvfp4", [1, 16], rounding, 0)
        for rounding, seed in roundings.items()
        for side, operator in sides.items()
    }
    for rounding in roundings:
        expected, got = cases[f"{rounding} eager"](), cases[f"{rounding} compiled"]()
        for a, b in zip(expected, got, strict=True):
            torch.testing.assert_close(a.view(torch.uint8), b.view(torch.uint8), rtol=0, atol=0)

    timings = time_side_by_side(cases, repeats=args.repeats)
    rows = []
    for rounding in roundings:
        eager, fused = timings[f"{rounding} eager"].median_ms, timings[f"{rounding} compiled"].median_ms
        rows.append(
            {
                "rounding": rounding,
                "eager ms": eager,
                "compiled ms": fused,
                "ratio": eager / fused,
                "elements / ns": x.numel() / fused / 1e6,
                f"at least {TARGET:g}x": eager / fused >= TARGET,
            }
        )
    print_table(f"quantize bf16 [{args.rows}, {args.cols}] to NVFP4, {torch.get_num_threads()} threads", rows)
    write_results("quantize_cpu", rows, timings)


if __name__ == "__main__":
    main()
