"""NVFP4 tensors by hand, outside a compiled graph: quantize, look at the bytes, dequantize, multiply.

The same operators as in a rewritten graph, so the same bits. Not differentiable: training is the backend's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import ConfigError
from .formats import nvfp4, rotation
from .lowering import implementation
from .ops.library import check_input

_FORMAT = "nvfp4"


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A 2-D tensor in NVFP4, its blocks along the last dimension. With nb = ceil(K / 16):

    packed: uint8 [M, nb * 8], two E2M1 codes a byte, the even element in the low nibble.
    scales: float8_e4m3fn [M, nb], one for 16 elements; of 16x16 tiles repeated over the 16 rows.
    amax: 0-d float32, max |x| of the whole tensor, after the rotation if it is rotated; NaN or Inf if x has
    any. shape: what dequantize returns: [M, K], or [M, nb * 16] if rotated, because a rotation fills the
    padding. columns: K of the tensor that was quantized.
    rotated: whether groups of 16 elements along K went through the random Hadamard transform.

    Element (m, k) is worth code * scales[m, k // 16] * amax / 2688 (arXiv 2509.25149).
    """

    packed: Tensor
    scales: Tensor
    amax: Tensor
    shape: torch.Size
    columns: int
    rotated: bool

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values as a tensor of `shape`: computed in float32, then cast. A rotation is not undone."""
        values = nvfp4.dequantize(self.packed, self.scales, self.amax, dtype)
        return values[:, : self.shape[1]].contiguous()


def quantize(
    x: Tensor,
    *,
    block: tuple[int, int] = (1, 16),
    rounding: str = "nearest",
    rotate: bool = False,
    seed: int | Tensor | None = None,
    site: int = 0,
) -> QuantizedTensor:
    """Quantize a 2-D bfloat16, float16 or float32 tensor of any strides to NVFP4 along its last dimension.

    block: (1, 16), or (16, 16) for one scale a tile, so that x and its transpose have the same codes.
    rounding: "nearest" (to even) or "stochastic".
    rotate: apply the random Hadamard transform to groups of 16 along the last dimension first.
    seed: of stochastic rounding: an int or a 0-d int64 tensor; None draws one from torch's default generator.
    site: tells tensors apart that are rounded with one seed.

    A K that is no multiple of 16 is filled with zeros inside. Raises UnsupportedDtypeError or ConfigError.
    """
    check_input("quantize", x)
    x = x.detach()
    fp4, noise = torch.ops.fp4, _seed_tensor(seed, rounding, x.device)
    turn = (rotation.SIZE, rotation.SIGNS)
    if rotate and block == (1, rotation.SIZE):
        amax = implementation(fp4.rotated_amax.default, x.device)(x, *turn)
        fused = implementation(fp4.rotate_quantize.default, x.device)
        packed, scales = fused(x, amax, noise, _FORMAT, rounding, site, *turn)
    else:
        values = fp4.rotate(x, *turn) if rotate else x
        amax = implementation(fp4.amax.default, x.device)(values)
        plain = implementation(fp4.quantize.default, x.device)
        packed, scales = plain(values, amax, noise, _FORMAT, list(block), rounding, site)
    shape = torch.Size((x.shape[0], scales.shape[1] * nvfp4.BLOCK)) if rotate else x.shape
    return QuantizedTensor(packed, scales, amax, shape, columns=x.shape[1], rotated=rotate)


def scaled_mm(a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """[M, K] x [N, K]^T -> [M, N], accumulated in float32; the tensor scales multiply the float32
    accumulator.

    Raises ConfigError where K differs or only one operand is rotated, UnsupportedDtypeError for an out_dtype
    other than bfloat16, float16 and float32.
    """
    if a.columns != b.columns:
        raise ConfigError(
            f"scaled_mm: a is [{a.shape[0]}, {a.columns}] and b is [{b.shape[0]}, {b.columns}]; "
            "their last dimensions, K, must be equal (b is used transposed)"
        )
    if a.rotated != b.rotated:
        rotated, plain = ("a", "b") if a.rotated else ("b", "a")
        raise ConfigError(
            f"scaled_mm: {rotated} is rotated and {plain} is not; a rotation cancels only in a pair, "
            f"so quantize {plain} with rotate=True too"
        )
    product = implementation(torch.ops.fp4.scaled_mm.default, a.packed.device)
    return product(a.packed, a.scales, a.amax, _FORMAT, b.packed, b.scales, b.amax, _FORMAT, out_dtype)


def _seed_tensor(seed: int | Tensor | None, rounding: str, device: torch.device) -> Tensor | None:
    if rounding == "nearest":
        if seed is not None:
            raise ConfigError("quantize: rounding='nearest' uses no seed; drop it or round 'stochastic'")
        return None
    if isinstance(seed, Tensor):
        return seed.to(device)
    if seed is None:
        return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=device)
    if not -(2**63) <= seed < 2**63:
        raise ConfigError(f"quantize: seed is {seed}; a number of 64 bits (signed) is needed")
    return torch.tensor(seed, dtype=torch.int64, device=device)
