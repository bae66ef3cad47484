"""Products of packed NVFP4 operands by cuBLAS, through PyTorch's ``aten::_scaled_mm_v2``, into a given result.

| PyTorch | here |
|---|---|
| A [M, K / 2], row-major, and B [K / 2, N], column-major, ``float4_e2m1fn_x2`` | the codes, B's transposed |
| a block scale for 1x16 elements in the 32x4x4 order, ceil(rows / 128) * 128 * ceil(K / 64) * 4 of E4M3 | our tiles |
| a float32 scale for each tensor, whose product multiplies the float32 accumulator | our factor, and 1 |

PyTorch would multiply ``gamaxA / 2688`` and ``gamaxB / 2688``, each rounded before. Our factor (formats/nvfp4.py,
``gemm_factor``) is rounded once and overflows later, so it stands for both: cuBLAS and the template give the same
numbers but for the order of accumulation. A scale a row multiplies the result afterwards, which is then float32.

Inductor has no such choice: torch 2.13 fails on the operator (pytorch/pytorch#186960), 2.14 calls it eagerly and never
measures it. So it is an operator of ours, which a graph calls with a buffer of Inductor's.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from .. import compat
from ..errors import ConfigError
from ..formats import layout, nvfp4
from .kernels import factor
from .product import Product, unfit

RECIPE = [ScalingType.BlockWise1x16.value, ScalingType.TensorWise.value]
SWIZZLE = [SwizzleType.SWIZZLE_32_4_4.value, SwizzleType.NO_SWIZZLE.value]
ALIGNMENT = 16
"""Bytes, of every tensor's beginning: cuBLASLt, https://docs.nvidia.com/cuda/cublas/#cublasltmatmul."""

library = torch.library.Library("fp4_native", "FRAGMENT")
SCHEMA = (
    "scaled_mm_out(Tensor a, Tensor a_scales, Tensor b, Tensor b_scales, Tensor b_amax, Tensor? a_amax=None, *,"
    " Tensor(a!) out) -> ()"
)

_devices: set[torch.device] = set()


def scaled_mm_out(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    b_amax: Tensor,
    a_amax: Tensor | None = None,
    *,
    out: Tensor,
) -> None:
    """``out [M, N] = factor * decode(a) @ decode(b)^T`` of packed uint8 [M, K / 2] and [N, K / 2].

    scales: float8_e4m3fn tiles (formats/layout.py). amaxes: 0-d float32; a_amax None where rows have scales of their
    own. out: bfloat16 or float32, contiguous.

    Raises:
        ConfigError: what cuBLAS cannot take (``product.unfit``), or tensors of another shape, dtype or layout.
    """
    check(a, a_scales, b, b_scales, b_amax, a_amax, out=out)
    _check_alignment(a=a, a_scales=a_scales, b=b, b_scales=b_scales, out=out)
    _check_device(a.device)
    factors = factor.factors(a_amax, b_amax, beside=1.0)
    assert factors is not None
    compat.SCALED_MM_OUT(
        a.view(torch.float4_e2m1fn_x2),
        b.view(torch.float4_e2m1fn_x2).t(),
        [a_scales.flatten(), factors[:1]],
        RECIPE,
        SWIZZLE,
        [b_scales.flatten(), factors[1:]],
        RECIPE,
        SWIZZLE,
        None,
        out.dtype,
        out=out,
    )


def check(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    b_amax: Tensor,
    a_amax: Tensor | None = None,
    *,
    out: Tensor,
) -> None:
    """What needs no data: shapes, dtypes, strides. Also the fake of the operator."""
    product = Product(a.shape[0], b.shape[0], 2 * a.shape[1], 2 * b.shape[1], "nvfp4", out.dtype)
    reason = unfit(product)
    if reason is not None:
        raise ConfigError(f"cuBLAS cannot multiply {product}: {reason}; options={{'product': 'triton'}} can")
    for name, codes, scales in (("a", a, a_scales), ("b", b, b_scales)):
        _check_layout(name, codes, torch.uint8, tuple(codes.shape))
        tiles = layout.tiles_shape(codes.shape[0], 2 * codes.shape[1] // nvfp4.BLOCK)
        _check_layout(f"{name}_scales", scales, torch.float8_e4m3fn, tiles)
    for name, amax in (("a_amax", a_amax), ("b_amax", b_amax)):
        if amax is not None:
            _check_layout(name, amax, torch.float32, ())
    _check_layout("out", out, out.dtype, (a.shape[0], b.shape[0]))


def _check_layout(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous():
        raise ConfigError(
            f"cuBLAS's product takes {name} as contiguous {dtype} {list(shape)}; this one is {tensor.dtype} "
            f"{list(tensor.shape)} with strides {tensor.stride()}"
        )


def _check_alignment(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.data_ptr() % ALIGNMENT:
            raise ConfigError(f"cuBLAS's product takes tensors that begin at a multiple of 16 bytes; {name} does not")


def _check_device(device: torch.device) -> None:
    """PyTorch before 2.14 has one place for the factor of all products of a process, on the first GPU that asked
    (pytorch/pytorch#191536)."""
    _devices.add(device)
    if len(_devices) > 1 and compat.version() < (2, 14):
        raise ConfigError(
            f"cuBLAS's FP4 product on {', '.join(sorted(map(str, _devices)))}: PyTorch before 2.14 can have it on one "
            "GPU of a process; use torch 2.14, a process for each GPU, or options={'product': 'triton'}"
        )


library.define(SCHEMA)
library.impl("scaled_mm_out", scaled_mm_out, "CUDA")
torch.library.register_fake("fp4_native::scaled_mm_out", check, lib=library)
OPERATOR = torch.ops.fp4_native.scaled_mm_out.default
