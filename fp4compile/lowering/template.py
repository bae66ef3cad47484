"""The native product as a template of Inductor: bias, activation, residual and cast join its epilogue.

``fp4_native::gemm`` is the product of operands whose scales are in 128x4 tiles (kernels/gemm.py describes them). Called
eagerly it launches that kernel. In a compiled graph Inductor writes the same loop itself, as one kernel with the
pointwise operations that follow, and picks the configuration and schedule by measurement under max-autotune. The
descriptors of operands are made in the kernel, once for a program that stays for many tiles. torch 2.13 rounds the
product to its dtype before the epilogue, torch 2.11 hands over the float32 accumulator.

Its argument ``kernel`` says whether cuBLAS (cublas_fp4.py) multiplies in the template's place, or both are measured:
product.py decides. Of what the template multiplies, these stay the eager call: empty operands, operands whose rows are
not known to be multiples of 16 bytes apart, as TMA needs, and devices for which Triton needs options
(gemm.compile_options) that a template cannot pass on.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from importlib import resources
from typing import Any

import torch
from torch import Tensor

from .. import compat
from ..formats import nvfp4
from . import cublas_fp4
from .kernels import gemm
from .targets import capability_of

library = torch.library.Library("fp4_native", "DEF")

SCHEMA = (
    "gemm(Tensor a, Tensor a_scales, Tensor? a_amax, Tensor b, Tensor b_scales, Tensor? b_amax, str format,"
    " ScalarType out_dtype, str kernel='triton') -> Tensor"
)


def _call(
    a: Tensor,
    a_scales: Tensor,
    a_amax: Tensor | None,
    b: Tensor,
    b_scales: Tensor,
    b_amax: Tensor | None,
    format: str,
    out_dtype: torch.dtype,
    kernel: str = "triton",
) -> Tensor:
    """Eagerly, where there is nothing to measure, cuBLAS is taken for "both"."""
    if kernel == "triton":
        return gemm.launch(a, a_scales, a_amax, b, b_scales, b_amax, format, out_dtype)
    assert b_amax is not None
    out = a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)
    cublas_fp4.scaled_mm_out(a, a_scales, b, b_scales, b_amax, a_amax, out=out)
    return out


def _fake(
    a: Tensor,
    a_scales: Tensor,
    a_amax: Tensor | None,
    b: Tensor,
    b_scales: Tensor,
    b_amax: Tensor | None,
    format: str,
    out_dtype: torch.dtype,
    kernel: str = "triton",
) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


library.define(SCHEMA)
library.impl("gemm", _call, "CUDA")
torch.library.register_fake("fp4_native::gemm", _fake, lib=library)
OPERATOR = torch.ops.fp4_native.gemm.default
"""(a, a_scales, a_amax, b, b_scales, b_amax, format, out_dtype, kernel) -> [M, N]; see kernels/gemm.py. kernel: a
``product.Kernel``."""

WARPS = 8
SLICE = 64
"""Columns of D that an epilogue has at a time; its registers come on top of the accumulators'."""


def _grid(m: Any, n: Any, meta: dict[str, Any], *, cdiv: Any, min: Any) -> tuple[Any, int, int]:
    return min(cdiv(m, meta["BLOCK_M"]) * cdiv(n, meta["BLOCK_N"]), meta["PROGRAMS"]), 1, 1


@functools.cache
def register() -> None:
    """Tell Inductor how the operator is lowered. Idempotent."""
    source = resources.files(__package__).joinpath("kernels", "templates", "product.py.jinja").read_text()
    template = compat.triton_template("fp4_gemm", source, _grid)

    def lower(
        a: Any,
        a_scales: Any,
        a_amax: Any,
        b: Any,
        b_scales: Any,
        b_amax: Any,
        format: str,
        out_dtype: torch.dtype,
        kernel: str = "triton",
    ) -> Any:
        device = a.get_device()
        capability = capability_of(device) or gemm.DATACENTER
        aligned = all(compat.rows_known_aligned(codes, gemm.ALIGNMENT) for codes in (a, b))
        size = [a.get_size()[0], b.get_size()[0]]
        shape = [compat.lowered_size_hint(each) for each in (*size, a.get_size()[1])]
        operators = [] if kernel == "triton" else [cublas_fp4.OPERATOR]
        if not operators and (gemm.compile_options(capability) or not aligned or 0 in shape):
            return compat.eager_call(OPERATOR, a, a_scales, a_amax, b, b_scales, b_amax, format, out_dtype)
        inputs = [each for each in (a, a_scales, b, b_scales, b_amax, a_amax) if each is not None]
        if kernel == "cublas":
            return compat.lower_by_template(template, "fp4_gemm", inputs, size, out_dtype, [], operators)
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        configs = _configs((shape[0], shape[1], 2 * shape[2]), out_dtype, capability, processors)
        scales = gemm.tensor_scales_of(format, a_amax is not None)
        choices = [_options(config, format, scales, processors) for config in configs]
        return compat.lower_by_template(template, "fp4_gemm", inputs, size, out_dtype, choices, operators)

    compat.register_lowering(OPERATOR, lower)


def _configs(
    shape: tuple[int, int, int], out_dtype: torch.dtype, capability: tuple[int, int], processors: int
) -> list[gemm.Config]:
    """The best guess, or all that are worth measuring where Inductor measures."""
    found = distinct(gemm.candidates(*shape, out_dtype, capability, processors))
    return found if compat.autotunes_products() else found[:1]


def distinct(configs: Iterable[gemm.Config]) -> list[gemm.Config]:
    """Each once, with the warps that an epilogue needs."""
    return list(dict.fromkeys(dataclasses.replace(config, num_warps=WARPS) for config in configs))


def _options(config: gemm.Config, format: str, tensor_scales: int, processors: int) -> dict[str, Any]:
    """Constants of the template in one configuration."""
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP": config.group,
        "STAGES": config.num_stages,
        "SLICE": SLICE,
        "BLOCK": gemm.BLOCKS[format],
        "PROGRAMS": processors,
        "SPECIALIZED": config.schedule == "specialized",
        "PERSISTENT": config.schedule == "persistent",
        "TENSOR_SCALES": tensor_scales,
        "LARGE_AMAX": 2.0**63,
        "SHRINK": 2.0**-32,
        "DIVISOR": float(nvfp4.TENSOR_MAX**2),
        "LARGEST": float(nvfp4.TENSOR_MAX),
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
