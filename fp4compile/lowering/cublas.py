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

from .kernels.common import on_device_of

_TRANSPOSED, _PLAIN = 1, 0
_HOST_POINTERS, _DEVICE_POINTERS = 0, 1
_FLOAT32_REDUCTIONS = 16  # CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION: no bf16 between parts of a sum
_COMPUTE_FLOAT32 = 68
_DEFAULT_ALGORITHM = -1
_TYPES = {torch.float32: 0, torch.bfloat16: 14}


def matmul(a: Tensor, b: Tensor, factors: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """bfloat16 [M, K] and [N, K] -> factor * a @ b^T, [M, N] in bfloat16, float16 or float32.

    Of each operand rows or columns are contiguous.
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
    (b_by_rows, *b_matrix), (a_by_rows, *a_matrix), (_, *out_matrix) = map(_matrix, (b, a, out))
    with on_device_of(a), _settings(on_device=factors is not None) as handle:
        # cuBLAS has column-major matrices, for which rows are columns: out^T = b a^T.
        status = _library().cublasGemmEx(  # type: ignore[union-attr]
            handle,
            _TRANSPOSED if b_by_rows else _PLAIN,
            _PLAIN if a_by_rows else _TRANSPOSED,
            n,
            m,
            k,
            alpha,
            *b_matrix,
            *a_matrix,
            beta,
            *out_matrix,
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
        library = ctypes.CDLL(f"libcublas.so.{torch.version.cuda.split('.')[0]}", mode=mode)
    except OSError:
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int
    matrix = (pointer, number, number)
    library.cublasGemmEx.argtypes = (pointer, *(number,) * 5, pointer, *matrix * 2, pointer, *matrix, number, number)
    for get in (library.cublasGetPointerMode_v2, library.cublasGetMathMode):
        get.argtypes = (pointer, ctypes.POINTER(number))
    for put in (library.cublasSetPointerMode_v2, library.cublasSetMathMode):
        put.argtypes = (pointer, number)
    return library


def _scalars(factors: Tensor | None) -> tuple[Any, Any]:
    """Pointers to the factor of the product and to 0, that of what was in the result before."""
    if factors is None:
        return ctypes.byref(ctypes.c_float(1.0)), ctypes.byref(ctypes.c_float(0.0))
    assert factors.dtype == torch.float32 and factors.shape == (2,)
    return factors.data_ptr(), factors.data_ptr() + factors.itemsize


def takes(x: Tensor) -> bool:
    """Whether the product reads a matrix as it lies in memory."""
    return _is_by_rows(x) or _is_by_rows(x.t())


def _is_by_rows(x: Tensor) -> bool:
    # A single row may have any stride in PyTorch, and a single column too.
    return (x.stride(1) == 1 or x.shape[1] == 1) and (x.stride(0) >= x.shape[1] or x.shape[0] == 1)


def _matrix(x: Tensor) -> tuple[bool, int, int, int]:
    """Whether rows are contiguous; pointer, element type and distance of rows, or else of columns."""
    by_rows = _is_by_rows(x)
    stride, length = (x.stride(0), x.shape[1]) if by_rows else (x.stride(1), x.shape[0])
    return by_rows, x.data_ptr(), _TYPES[x.dtype], max(stride, length)


@contextlib.contextmanager
def _settings(on_device: bool) -> Iterator[int]:
    """PyTorch's handle on the current stream, set to read factors where they are and keep sums in float32; and back."""
    library = _library()
    assert library is not None
    handle = torch.cuda.current_blas_handle()
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
