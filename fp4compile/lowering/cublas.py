"""bf16 products with a float32 factor that lives on the device, by cuBLAS: D = factor * (A @ B^T), rounded once.

PyTorch gives cuBLAS its factor from the host. Reading it back would stop the stream, and a pass of its own over a
float32 result costs part of the product's time again. cuBLAS itself multiplies the float32 accumulator by a factor it
reads from the device, for free; it is called through ctypes on PyTorch's own handle, stream and workspace.
https://docs.nvidia.com/cuda/cublas/#cublasgemmex
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_TRANSPOSED, _PLAIN = 1, 0
_HOST_POINTERS, _DEVICE_POINTERS = 0, 1
_FLOAT32_REDUCTIONS = 16  # CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION: no bf16 between parts of a sum
_COMPUTE_FLOAT32 = 68
_DEFAULT_ALGORITHM = -1
_TYPES = {torch.float32: 0, torch.bfloat16: 14}


def matmul(a: Tensor, b: Tensor, factors: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """bfloat16 [M, K] and [N, K], rows contiguous -> factor * a @ b^T, [M, N] in bfloat16, float16 or float32.

    factors: float32 [2] on the same device, the factor and 0 (kernels/factor.py), or None for 1. Accumulated in
    float32, multiplied, rounded once to the result.
    """
    m, n, k = a.shape[0], b.shape[0], a.shape[1]
    if m == 0 or n == 0 or k == 0:
        return a.new_zeros((m, n), dtype=out_dtype)
    stored = torch.float32 if out_dtype == torch.float16 else out_dtype
    if _library() is None:
        product = torch.mm(a, b.t(), out_dtype=torch.float32)
        return (product if factors is None else product * factors[0]).to(out_dtype)
    out = a.new_empty((m, n), dtype=stored)
    alpha, beta = _scalars(factors)
    with torch.cuda.device(a.device), _settings(on_device=factors is not None) as handle:
        # cuBLAS has column-major matrices: out^T = b a^T.
        status = _library().cublasGemmEx(  # type: ignore[union-attr]
            handle,
            _TRANSPOSED,
            _PLAIN,
            n,
            m,
            k,
            alpha,
            *_matrix(b),
            *_matrix(a),
            beta,
            *_matrix(out),
            _COMPUTE_FLOAT32,
            _DEFAULT_ALGORITHM,
        )
    _check(status, f"product of {list(a.shape)} and {list(b.shape)} transposed")
    return out.to(out_dtype)


def available() -> bool:
    """Whether the library of PyTorch's CUDA version could be loaded; without it the factor is a pass of its own."""
    return _library() is not None


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The one that PyTorch has loaded."""
    if torch.version.cuda is None:
        return None
    try:
        # Never another copy of the library: PyTorch's handle means nothing to it.
        mode = os.RTLD_NOLOAD | os.RTLD_NOW
        return ctypes.CDLL(f"libcublas.so.{torch.version.cuda.split('.')[0]}", mode=mode)
    except OSError:
        return None


def _scalars(factors: Tensor | None) -> tuple[Any, Any]:
    """Pointers to the factor of the product and to 0, that of what was in the result before."""
    if factors is None:
        return ctypes.byref(ctypes.c_float(1.0)), ctypes.byref(ctypes.c_float(0.0))
    assert factors.dtype == torch.float32 and factors.shape == (2,)
    return ctypes.c_void_p(factors.data_ptr()), ctypes.c_void_p(factors.data_ptr() + factors.itemsize)


def _matrix(tensor: Tensor) -> tuple[ctypes.c_void_p, int, int]:
    """Pointer, element type and leading dimension, which of a single row may be anything in PyTorch."""
    return ctypes.c_void_p(tensor.data_ptr()), _TYPES[tensor.dtype], max(tensor.stride(0), tensor.shape[1])


@contextlib.contextmanager
def _settings(on_device: bool) -> Iterator[ctypes.c_void_p]:
    """PyTorch's handle on the current stream, set to read factors where they are and keep sums in float32; and back."""
    library = _library()
    assert library is not None
    handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
    pointers, math = ctypes.c_int(), ctypes.c_int()
    _check(library.cublasGetPointerMode_v2(handle, ctypes.byref(pointers)), "reading the pointer mode")
    _check(library.cublasGetMathMode(handle, ctypes.byref(math)), "reading the math mode")
    try:
        _check(
            library.cublasSetPointerMode_v2(handle, _DEVICE_POINTERS if on_device else _HOST_POINTERS),
            "setting the pointer mode",
        )
        _check(library.cublasSetMathMode(handle, _FLOAT32_REDUCTIONS), "setting the math mode")
        yield handle
    finally:
        library.cublasSetPointerMode_v2(handle, pointers)
        library.cublasSetMathMode(handle, math)


def _check(status: int, what: str) -> None:
    if status != 0:
        raise RuntimeError(f"cuBLAS failed with status {status}: {what}")
