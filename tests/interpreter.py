"""Runs generated kernels on the CPU, by Triton's interpreter, with what the interpreter lacks.

``tl.dot_scaled`` of packed E2M1 is given its meaning: both operands are decoded to float32 and multiplied by their
scales, which is exact, and then multiplied in float32. A cast to bfloat16 rounds. Functions of libdevice are PyTorch's.
Everything else of a kernel (tensor
descriptors and what they read past the end, the order of the scales' tiles, loops, masks) is the interpreter's own
execution of the kernel's body.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle
from triton.runtime.jit import JITFunction

from fp4compile.lowering.kernels import kernel

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Inside, functions of generated sources are interpreted, on tensors of the CPU.

    ``triton.jit`` decides when it decorates. For generated kernels that is when a source is loaded, so loaded ones are
    forgotten on the way in and out. For Triton's own library (``tl.cdiv``) it was at the import.
    """
    kernel.load.cache_clear()
    with contextlib.ExitStack() as stack:
        stack.enter_context(np.errstate(all="ignore"))  # a GPU does not warn of overflow and NaN
        stack.enter_context(triton.knobs.runtime.scope())  # restores the environment variable too
        triton.knobs.runtime.interpret = True
        stack.enter_context(mock.patch.object(TritonSemantic, "dot_scaled", dot_scaled))
        stack.enter_context(mock.patch.object(InterpreterBuilder, "cast_impl", _cast))
        stack.enter_context(mock.patch.object(InterpretedFunction, "__call__", _call))
        stack.enter_context(mock.patch.object(interpreter, "_patch_lang_tensor", _patch_tensor))
        for name in ("rsqrt", "exp", "tanh", "erf"):
            stack.enter_context(
                mock.patch.object(libdevice, name, functools.partial(_elementwise, getattr(torch, name)))
            )
        for module, name, function in _library():
            stack.enter_context(mock.patch.object(module, name, InterpretedFunction(function.fn)))
        yield
    kernel.load.cache_clear()


def _elementwise(function: Any, x: Any) -> Any:
    """A function of libdevice, by its namesake in PyTorch."""
    result = function(torch.from_numpy(np.asarray(x.handle.data)))
    return tl.tensor(TensorHandle(result.numpy(), x.dtype), x.type)


_TRITONS_CAST = InterpreterBuilder.cast_impl


def _cast(self: Any, src: Any, dst_type: Any) -> Any:
    """The interpreter truncates float32 to bfloat16; a GPU rounds to nearest even."""
    if (src.dtype.scalar, dst_type.scalar) != (tl.float32, tl.bfloat16):
        return _TRITONS_CAST(self, src, dst_type)
    rounded = torch.from_numpy(np.array(src.data)).to(torch.bfloat16).view(torch.uint16)
    return TensorHandle(rounded.numpy(), tl.bfloat16)


def _call(self: Any, *args: Any, **named: Any) -> Any:
    """A function called by a kernel: what the interpreter puts in the place of Triton's builtins for it is taken back,
    which the interpreter itself does for kernels only."""
    languages = [value for value in self.fn.__globals__.values() if value is tl or value is tl.core]
    if not any(tl.core.is_builtin(language.load) for language in languages):  # the caller's are in place
        return self.rewrite()(*args, **named)
    scope = interpreter._patch_lang(self.fn)
    try:
        return self.rewrite()(*args, **named)
    finally:
        scope.restore()


_TRITONS_PATCH_OF_TENSORS = interpreter._patch_lang_tensor


def _patch_tensor(tensor: Any, scope: Any) -> None:
    """Triton 3.6 makes an integer of an array of one element, which numpy 2.4 refuses."""
    _TRITONS_PATCH_OF_TENSORS(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _library() -> list[tuple[Any, str, JITFunction[Any]]]:
    """(module, name, function) of what Triton's language defines by ``triton.jit``."""
    modules = [module for name, module in sys.modules.items() if name.split(".")[:2] == ["triton", "language"]]
    names = ((module, name, value) for module in modules for name, value in vars(module).items())
    return [found for found in names if isinstance(found[2], JITFunction)]


def dot_scaled(
    self: Any,
    lhs: Any,
    lhs_scale: Any,
    lhs_format: Any,
    rhs: Any,
    rhs_scale: Any,
    rhs_format: Any,
    acc: Any,
    *options: Any,
    **named: Any,
) -> Any:
    """[M, K / 2] x [K / 2, N] packed along K, scales [M, nb] and [N, nb]: float32 [M, N] added to ``acc``."""
    for format in (lhs_format, rhs_format):
        assert getattr(format, "value", format) == "e2m1", "only packed E2M1 operands are interpreted"
    product = decoded(lhs.handle.data, lhs_scale) @ decoded(rhs.handle.data.T, rhs_scale).T
    total = product if acc is None else acc.handle.data + product
    return tl.tensor(TensorHandle(total, tl.float32), tl.block_type(tl.float32, list(total.shape)))


def decoded(packed: np.ndarray[Any, Any], scale: Any) -> np.ndarray[Any, Any]:
    """float32 [rows, K] of packed codes [rows, K / 2], the even element in the low nibble, and a tensor of scales."""
    codes = np.stack([packed & 15, packed.view(np.uint8) >> 4], axis=-1).reshape(packed.shape[0], -1)
    scales = scale_table(scale.dtype.name)[scale.handle.data.view(np.uint8)]
    return E2M1[codes] * np.repeat(scales, codes.shape[1] // scales.shape[1], axis=1)


@functools.cache
def scale_table(type_name: str) -> np.ndarray[Any, Any]:
    """float32 value of each of a scale's 256 bytes; E4M3 where Triton's type is fp8e4nv, else E8M0."""
    dtype = torch.float8_e4m3fn if type_name == "fp8e4nv" else torch.float8_e8m0fnu
    return torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float32).numpy()
