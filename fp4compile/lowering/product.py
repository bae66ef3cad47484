"""Which kernel multiplies packed FP4 operands where the tensor cores take them: cuBLAS or the template. Pure.

| | cuBLAS (cublas_fp4.py) | template (template.py) |
|---|---|---|
| run on Blackwell | by others, and published: triton-lang/triton#9697, #9044 | never |
| published, 8192^3, TFLOP/s | 5590; two-CTA kernels reach it, too | 4782 by a one-CTA kernel of its kind: 0.86 |
| what follows the product | kernels of their own | in its epilogue |
| formats, shapes | nvfp4, those of ``unfit`` | all |

So where nothing is measured, cuBLAS multiplies what it takes and the template the rest: a kernel that is known to work
comes before one that may save a pass. ``max-autotune`` measures both, with what follows the product.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import fx

from .. import compat
from ..graph import has_row_scales
from .kernels import gemm

Kernel = Literal["cublas", "triton", "both"]

CAPABILITIES = ((10, 0), (10, 3), (12, 0), (12, 1))
"""Where others have run cuBLAS's FP4 product: B200 and B300 (triton-lang/triton#9697), consumer Blackwell and GB10
(modular/modular#6596). PyTorch itself refuses below 8.9 only and leaves the rest to cuBLAS."""
FIRST_CUDA = (12, 8)
"""PyTorch built for less has no block scales: aten/src/ATen/cuda/CUDABlas.cpp, ``scaled_gemm``."""
OUT_DTYPES = (torch.bfloat16, torch.float32)

Size = int | torch.SymInt


@dataclasses.dataclass(frozen=True)
class Product:
    """What of ``[m, k] x [n, k]^T`` decides; sizes of unpacked elements. right_k: the right operand's, which may have
    more padding."""

    m: Size
    n: Size
    k: Size
    right_k: Size
    format: str
    out_dtype: torch.dtype

    def __str__(self) -> str:
        dtype = str(self.out_dtype).removeprefix("torch.")
        return f"[{self.m}, {self.k}] x [{self.n}, {self.right_k}] transposed, {self.format} to {dtype}"


def product_of(node: fx.Node) -> Product:
    """Of a ``scaled_mm`` of operands in one format. With a scale a row the kernel writes float32, which is multiplied
    afterwards."""
    a, b = (node.args[place].meta["val"].shape for place in (0, 4))  # type: ignore[union-attr]
    out_dtype = torch.float32 if has_row_scales(node) else node.args[8]
    return Product(a[0], b[0], 2 * a[1], 2 * b[1], node.args[3], out_dtype)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class Choice:
    """kernel: what multiplies; "both": Inductor measures both. unfit: cuBLAS cannot take the product."""

    kernel: Kernel
    reason: str
    unfit: bool = False


def choose_product(
    asked: str, product: Product, capability: tuple[int, int], cuda: tuple[int, int], measured: bool
) -> Choice:
    """The kernel of one product.

    asked: the option ``product``. cuda: the version PyTorch was built with. measured: whether Inductor measures its
    choices (max-autotune).
    """
    if asked == "triton":
        return Choice("triton", "the option 'product' says so")
    reason = _missing(capability, cuda) or unfit(product)
    if reason is not None:
        return Choice("triton", reason, unfit=True)
    if asked == "cublas":
        return Choice("cublas", "the option 'product' says so")
    if gemm.compile_options(capability):
        return Choice("cublas", "the template cannot be compiled for this GPU, whose Triton kernel is called eagerly")
    if measured:
        return Choice("both", "max-autotune measures both")
    return Choice("cublas", "its kernel has been run on such GPUs by others, the template has not")


def _missing(capability: tuple[int, int], cuda: tuple[int, int]) -> str | None:
    """Why cuBLAS has no FP4 product here; None if it has."""
    if capability not in CAPABILITIES:
        known = ", ".join(f"{major}.{minor}" for major, minor in CAPABILITIES)
        return f"compute capability {capability[0]}.{capability[1]}: cuBLAS's FP4 product is known to run on {known}"
    if cuda < FIRST_CUDA:
        return f"PyTorch is built for CUDA {cuda[0]}.{cuda[1]}: cuBLAS multiplies FP4 from 12.8 on"
    return None


def unfit(product: Product) -> str | None:
    """Why cuBLAS cannot take a product; None if it can. Whether a size divides must be known when compiling.

    PyTorch's ``aten::_scaled_mm_v2`` asks for N a multiple of 16; cuBLASLt's operands begin every 16 bytes, so that K
    is a multiple of 32 (https://docs.nvidia.com/cuda/cublas/#cublasltmatmul). On NVIDIA's GPUs PyTorch has mxfp4 from
    another library, in some builds, with bfloat16 alone.
    """
    if product.format != "nvfp4":
        return f"{product.format}: cuBLAS multiplies nvfp4 alone"
    if product.out_dtype not in OUT_DTYPES:
        return f"a result in {product.out_dtype}: cuBLAS writes bfloat16 and float32"
    if any(compat.known_equal(size, 0) for size in (product.m, product.n, product.k, product.right_k)):
        return "nothing to multiply"
    if not compat.known_equal(product.k, product.right_k):
        return "operands padded to different K"
    if not compat.known_multiple(product.k, 32):
        return "K is not known to be a multiple of 32"
    if not compat.known_multiple(product.n, 16):
        return "N is not known to be a multiple of 16"
    return None
