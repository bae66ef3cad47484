"""Is a tensor computed and quantized faster in one kernel than in two?

With a scale a row, in emulation: the norm of a residual, SwiGLU of two products in float32, a tensor as it is. "one":
fp4.produce, the program that ``lowering/produce.py`` makes. "two": the same by ``torch.compile``, with the
amaxes of the rows, and then fp4.quantize_decoded. "x too": the tensor itself is written as well, as it is where the
weight gradient's operand is made of it in the forward. Bytes: the fewest that "one" can move.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from common import print_table, write_results
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fp4compile import compat
from fp4compile.lowering.produce import produce

NAME = "produced_gpu"
fp4 = torch.ops.fp4
TOKENS = 16384
WIDTHS = {"norm": (2048, 4096), "SwiGLU": (5632, 14336), "as it is": (2048, 4096)}


@dataclasses.dataclass(frozen=True)
class Case:
    """before: inputs -> (x, what else is written)."""

    name: str
    width: int
    with_x: bool
    inputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    before: Callable[..., tuple[Tensor, ...]]


def norm(total: Tensor, product: Tensor, factors: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    total = total + (product * factors).to(torch.bfloat16)
    wide = total.float()
    root = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    return (wide * root * weight).to(torch.bfloat16), total, root


def swiglu(gate: Tensor, up: Tensor, factors: Tensor) -> tuple[Tensor, ...]:
    gate, up = ((product * factors).to(torch.bfloat16) for product in (gate, up))
    return (torch.nn.functional.silu(gate.float()).to(torch.bfloat16) * up), gate, up


def as_it_is(x: Tensor) -> tuple[Tensor, ...]:
    return (x,)


def cases(tokens: int) -> Iterator[Case]:
    bf16, fp32 = torch.bfloat16, torch.float32
    factors = ((tokens, 1), fp32)
    for name, widths in WIDTHS.items():
        for width in widths:
            half, full = ((tokens, width), bf16), ((tokens, width), fp32)
            for with_x in (False, True) if name != "as it is" else (False,):
                if name == "norm":
                    yield Case(name, width, with_x, (half, full, factors, ((width,), bf16)), norm)
                elif name == "SwiGLU":
                    yield Case(name, width, with_x, (full, full, factors), swiglu)
                else:
                    yield Case(name, width, with_x, (half,), as_it_is)


def joined(case: Case) -> Callable[..., object]:
    """The graph that lowering makes, run node by node: one operator and views."""

    def function(*inputs: Tensor) -> list[Tensor]:
        x, *others = case.before(*inputs)
        amaxes = fp4.row_amax(x)
        values = fp4.quantize_decoded(x, amaxes, None, "nvfp4", [1, 16], "nearest", 0)
        return [values, amaxes, *others, *([x.t().contiguous()[:1]] if case.with_x else [])]

    mode = FakeTensorMode(shape_env=ShapeEnv())
    blanks = [torch.empty(shape, dtype=dtype) for shape, dtype in case.inputs]
    gm = compat.trace(function, [mode.from_tensor(x, static_shapes=True) for x in blanks], mode)
    produce(gm.graph, lambda device: True)
    (node,) = gm.graph.find_nodes(op="call_function", target=fp4.produce.default)
    order = [list(gm.graph.find_nodes(op="placeholder")).index(one) for one in node.args[0]]
    assert all(isinstance(one, fx.Node) for one in node.args[0])
    return lambda *inputs: fp4_on(inputs[0].device).produce([inputs[at] for at in order], node.args[1])


def fp4_on(device: torch.device) -> Any:
    return torch.ops.fp4_cuda if device.type == "cuda" else fp4


def apart(case: Case) -> Callable[..., object]:
    def before(*inputs: Tensor) -> tuple[Tensor, ...]:
        x, *others = case.before(*inputs)
        return x, x.abs().amax(-1), *others

    compiled = torch.compile(before, dynamic=False)

    def run(*inputs: Tensor) -> object:
        x, amaxes, *_ = compiled(*inputs)
        return fp4_on(x.device).quantize_decoded(x, amaxes, None, "nvfp4", [1, 16], "nearest", 0)

    return run


def milliseconds(call: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        call()
        return float("nan")
    from triton.testing import do_bench

    return float(do_bench(call, warmup=15, rep=60, return_mode="median"))


def measure(case: Case, device: torch.device) -> dict[str, object]:
    inputs = [torch.randn(shape, device=device).to(dtype) for shape, dtype in case.inputs]
    one, two = (functools.partial(way(case), *inputs) for way in (joined, apart))
    results = one()
    assert isinstance(results, list)
    moved = sum(tensor.numel() * tensor.element_size() for tensor in (*inputs, *results))
    times: dict[str, list[float]] = {"one": [], "two": []}
    for _ in range(3):  # in turns
        for name, call in (("one", one), ("two", two)):
            times[name].append(milliseconds(call, device))
    first, second = (sorted(times[name])[1] for name in ("one", "two"))
    return {
        "case": f"{case.name}, x too" if case.with_x else case.name,
        "size": f"{case.inputs[0][0][0]}x{case.width}",
        "one ms": first,
        "two ms": second,
        "one / two": first / second,
        "bytes an element": moved / (case.inputs[0][0][0] * case.width),
        "one TB/s": moved / first / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--out", type=Path, help="write the JSON there, too")
    args = parser.parse_args()
    if args.device.type == "cuda" and not torch.cuda.is_available():
        print("needs a CUDA device")
        return
    rows = [measure(case, args.device) for case in cases(args.tokens)]
    print_table("computed and quantized", rows)
    if args.device.type == "cuda":
        write_results(NAME, rows, copy_to=args.out)


if __name__ == "__main__":
    main()
