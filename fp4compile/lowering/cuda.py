"""The operators on CUDA devices with generated kernels: `torch.ops.fp4_cuda.*`, each a twin of its namesake in `fp4`.

What a kernel does not cover runs the reference on the device, with the same bits: rotations whose size is not the
format's block, stochastic rounding in 16x16 blocks, and products with an operand that is neither quantized nor
bfloat16.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ..compat import schema_of
from ..formats import nvfp4
from ..ops import REFERENCE
from ..ops.library import BLOCKS, CHECKS
from ..ops.produced import Program
from . import cublas
from .kernels import amax as amaxes
from .kernels import columns, factor, gemm, produced, rows, tuning, weights
from .kernels import decode as decoding

fp4 = torch.ops.fp4
library = torch.library.Library("fp4_cuda", "DEF")

tuned_library = torch.library.Library("fp4_cuda_tuned", "DEF")

CUDA: dict[Any, Any] = {}
"""Operator of ``fp4`` -> its twin."""

TUNED: dict[Any, Any] = {}
"""Operator of ``fp4`` -> the twin that measures its configurations, for max-autotune."""

IMPLEMENTATIONS: dict[Any, Callable[..., Any]] = {}
"""A twin of either kind -> the function that it calls."""


def amax(x: Tensor) -> Tensor:
    return amaxes.amax(x)


def rotated_amax(x: Tensor, size: int, signs: int) -> Tensor:
    if size != BLOCKS["nvfp4"]:
        return amaxes.amax(fp4.rotate(x, size, signs))
    return amaxes.amax_both(x.t(), signs, plain=False)[1]


def amax_both(x: Tensor, size: int, signs: int) -> tuple[Tensor, Tensor]:
    if size != BLOCKS["nvfp4"]:
        return amaxes.amax(x), rotated_amax(x.t(), size, signs)
    plain, rotated = amaxes.amax_both(x, signs)
    assert plain is not None
    return plain, rotated


def quantize(
    x: Tensor,
    amax: Tensor | None,
    seed: Tensor | None,
    format: Any,
    block: Sequence[int],
    rounding: str,
    site: int,
    tiled: bool = False,
) -> tuple[Tensor, Tensor]:
    turned = x.t().is_contiguous() and not x.is_contiguous()
    if _has_row_scales(amax):
        return rows.quantize(x, amax.contiguous(), seed, format, site, tiled)
    if block[0] == 1:
        if turned:
            return columns.quantize(x.t(), amax, seed, format, site, None, tiled)
        return rows.quantize(x, amax, seed, format, site, tiled)
    assert amax is not None
    if seed is not None:
        return fp4.quantize(x, amax, seed, format, list(block), rounding, site, tiled)
    w = x.t() if turned else x
    results = weights.quantize(w, amax, rows=not turned, turned=turned, tiled=tiled)[turned]
    assert results is not None
    return results


def rotate_quantize(
    x: Tensor,
    amax: Tensor | None,
    seed: Tensor | None,
    format: Any,
    rounding: str,
    site: int,
    size: int,
    signs: int,
    tiled: bool = False,
) -> tuple[Tensor, Tensor]:
    if size != BLOCKS[format]:
        return rows.quantize(fp4.rotate(x, size, signs), amax, seed, format, site, tiled)
    return columns.quantize(x.t(), amax, seed, format, site, signs, tiled)


def quantize_decoded(
    x: Tensor,
    amax: Tensor | None,
    seed: Tensor | None,
    format: Any,
    block: Sequence[int],
    rounding: str,
    site: int,
) -> Tensor:
    if _has_row_scales(amax):
        return rows.decoded(x, amax.contiguous(), seed, format, site)
    if block[0] == 1:
        if x.t().is_contiguous() and not x.is_contiguous():
            return columns.decoded(x.t(), amax, seed, format, site, None)
        return rows.decoded(x, amax, seed, format, site)
    assert amax is not None
    if seed is not None:
        return fp4.quantize_decoded(x, amax, seed, format, list(block), rounding, site)
    return weights.decoded(x, amax)


def rotate_quantize_decoded(
    x: Tensor,
    amax: Tensor | None,
    seed: Tensor | None,
    format: Any,
    rounding: str,
    site: int,
    size: int,
    signs: int,
) -> Tensor:
    if size != BLOCKS[format]:
        return rows.decoded(fp4.rotate(x, size, signs), amax, seed, format, site)
    return columns.decoded(x.t(), amax, seed, format, site, signs)


def produce(inputs: Sequence[Tensor], program: str) -> list[Tensor]:
    return produced.produce(inputs, Program.from_json(program))


def _has_row_scales(amax: Tensor | None) -> TypeGuard[Tensor]:
    """Whether an operand has a scale a row. Kernels that read columns take none: their x is copied to rows."""
    return amax is not None and amax.dim() == 1


def decode(codes: Tensor, scales: Tensor, format: Any, dtype: torch.dtype) -> Tensor:
    return decoding.decode(codes, scales, format, dtype)


def scaled_mm(
    a: Tensor,
    a_scales: Tensor | None,
    a_amax: Tensor | None,
    a_format: Any,
    b: Tensor,
    b_scales: Tensor | None,
    b_amax: Tensor | None,
    b_format: Any,
    out_dtype: torch.dtype,
    tiled: bool = False,
) -> Tensor:
    if tiled:
        assert a_scales is not None and b_scales is not None
        if not _has_row_scales(a_amax):
            return gemm.launch(a, a_scales, a_amax, b, b_scales, b_amax, a_format, out_dtype)
        product = gemm.launch(a, a_scales, None, b, b_scales, b_amax, a_format, torch.float32)
        return product.mul_(nvfp4.row_factors(a_amax)).to(out_dtype)
    if any(x.dtype not in (torch.uint8, torch.bfloat16) for x in (a, b)):
        return fp4.scaled_mm(a, a_scales, a_amax, a_format, b, b_scales, b_amax, b_format, out_dtype)
    left, right = _values(a, a_scales, a_format), _values(b, b_scales, b_format)
    return decoded_mm(left, a_amax, right, b_amax, out_dtype)


def _values(x: Tensor, scales: Tensor | None, format: Any) -> Tensor:
    return x if scales is None else decoding.decode(x, scales, format, torch.bfloat16)


def decoded_mm(a: Tensor, a_amax: Tensor | None, b: Tensor, b_amax: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    if _has_row_scales(a_amax):  # as emulate.py has it in a graph
        product = decoded_mm(a, None, b, b_amax, torch.float32)
        return product.mul_(nvfp4.row_factors(a_amax)).to(out_dtype)
    k = min(a.shape[1], b.shape[1])
    factors = factor.factors(a_amax, b_amax)
    return cublas.matmul(_operand(a, k), _operand(b, k), factors, out_dtype)


def _operand(x: Tensor, k: int) -> Tensor:
    """The first k columns of an operand, of which rows or columns are contiguous."""
    if x.shape[1] != k:
        x = x[:, :k]
    return x if cublas.takes(x) else x.contiguous()


def _checked(operator: Any, implementation: Callable[..., Any]) -> Callable[..., Any]:
    """The implementation behind the operator's own checks: a wrong call is the same error on every device."""

    @functools.wraps(implementation)
    def run(*args: Any) -> Any:
        CHECKS[operator](*args)
        return implementation(*args)

    return run


def _tuned(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """The same, measuring which configuration of its kernels is the fastest."""

    @functools.wraps(implementation)
    def run(*args: Any) -> Any:
        with tuning.tuning():
            return implementation(*args)

    return run


def _define(library: Any, twins: dict[Any, Any], operator: Any, implementation: Callable[..., Any]) -> None:
    schema = str(schema_of(operator)).partition("::")[2]
    name = schema.partition("(")[0]
    library.define(schema)
    library.impl(name, implementation, "CUDA")
    torch.library.register_fake(f"{library.ns}::{name}", operator, lib=library)
    twin = twins[operator] = getattr(getattr(torch.ops, library.ns), name).default
    IMPLEMENTATIONS[twin] = implementation


for _operator in REFERENCE:
    _implementation = globals().get(schema_of(_operator).name.partition("::")[2])
    if _implementation is not None:
        _define(library, CUDA, _operator, _checked(_operator, _implementation))
        _define(tuned_library, TUNED, _operator, _checked(_operator, _tuned(_implementation)))
