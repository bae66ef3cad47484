"""A linear layer and its gradients in NVFP4, written out with the formulas of ``fp4compile.formats``."""

from __future__ import annotations

import torch
from torch import Tensor

from fp4compile.formats import nvfp4, rotation


def gemm(
    a: Tensor,
    b: Tensor,
    *,
    square_b: bool = False,
    rotate: bool = False,
    seed: Tensor | None = None,
    site: int = 0,
) -> Tensor:
    """a [M, C] times b [N, C] transposed, both quantized along C -> float32 [M, N]. A seed rounds a stochastically."""
    if rotate:
        a, b = rotation.rotate(a), rotation.rotate(b)
    a_max, b_max = nvfp4.amax(a), nvfp4.amax(b)
    left = nvfp4.decode(*nvfp4.quantize(a, a_max, seed=seed, site=site))
    right = nvfp4.decode(*nvfp4.quantize(b, b_max, square=square_b))
    return (left @ right.t()) * nvfp4.gemm_factor(a_max, b_max)


def forward(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K], w [N, K], bias [N] -> [T, N] in x's dtype, rounded once."""
    product = gemm(x, w, square_b=True)
    return (product if bias is None else product + bias.float()).to(x.dtype)


def dgrad(dy: Tensor, w: Tensor, seed: Tensor | None = None, site: int = 0) -> Tensor:
    """dy [T, N], w [N, K] -> [T, K] in dy's dtype."""
    return gemm(dy, w.t(), square_b=True, seed=seed, site=site).to(dy.dtype)


def wgrad(dy: Tensor, x: Tensor, dtype: torch.dtype, seed: Tensor | None = None, site: int = 0) -> Tensor:
    """dy [T, N], x [T, K] -> [N, K]."""
    return gemm(dy.t(), x.t(), rotate=True, seed=seed, site=site).to(dtype)


def drawn_seed(generated_code: bool) -> Tensor:
    """The seed that a graph draws next from the CPU's generator, 0-d int64. Inductor's code and the operator that it is
    generated from draw differently."""
    if generated_code:
        limits = torch.iinfo(torch.int64)
        return torch.randint(limits.min, limits.max, [1], dtype=torch.int64)[0]
    return torch.ops.prims.inductor_seeds(1, torch.device("cpu"))[0]
