"""NVFP4: E2M1 elements, an E4M3 scale for 16 elements (or a 16x16 tile), a float32 scale for the tensor.

    gamax = max |x| of the tensor                     bamax = max |x| of the block
    S_enc = min(2688 / gamax, FLT_MAX)                1 where gamax or S_enc is 0; 2688 = 6 * 448
    s_b   = e4m3(min(bamax * (S_enc * (1/6)), 448))   the stored block scale, rounded to nearest even
    code  = e2m1(x * min(1 / (s_b * (1 / S_enc)), FLT_MAX))
    value = (e2m1(code) * s_b) * (gamax / 2688)

Source: "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149), in the order of operations of
NVIDIA's Transformer Engine.

Load-bearing details, each of which changes bytes if "simplified"
- float32 throughout and in this order: bamax * (S_enc * (1/6)), not bamax / 6 * S_enc; 1/6 is rounded first.
- True divisions. PyTorch computes `number / tensor`, and on a GPU `tensor / number`, as a reciprocal and a
  product: two roundings. Hence both operands of a division are tensors.
- No lower clamp on the block scale: E4M3 subnormals are used, and 0 where a block's amax is below about
  2.2e-6 of gamax. The codes of such a block may be anything, its values are 0.
- NaN and Inf travel in gamax: it makes the GEMM's factor and every dequantized value non-finite. A block's
  own NaN is also in its scale.
- Below gamax = 2688 / FLT_MAX (8e-36) S_enc is clamped and the values fade to 0.

A scale a row: gamax may be [R] in place of 0-d. Each row is then quantized as a tensor of its own, bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import packing, rounding
from .noise import noise16

BLOCK = 16
E4M3_MAX = 448
TENSOR_MAX = rounding.E2M1_MAX * E4M3_MAX  # 2688: the largest code times the largest block scale


def amax(x: Tensor) -> Tensor:
    """max |x| as a 0-d float32; NaN propagates; 0 for an empty tensor."""
    if isinstance(x.numel(), int) and x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    return x.abs().amax().to(torch.float32)


def quantize(
    x: Tensor, gamax: Tensor, *, square: bool = False, seed: Tensor | None = None, site: int | Tensor = 0
) -> tuple[Tensor, Tensor]:
    """[R, C] floating point, any strides -> (packed uint8 [R, nb * 8], scales float8_e4m3fn [R, nb]).

    nb = ceil(C / 16) blocks run along the last dimension. gamax: 0-d float32 of the whole tensor, or [R] of its rows.
    square: one scale for 16 rows x 16 columns, repeated over the rows; not of a tensor with a gamax a row.
    seed: 0-d int64 makes the codes (never the scales) stochastic.
    A ragged last block is filled with zeros; neither they nor missing rows of a last tile change an amax.
    """
    s_enc = _of_rows(encode_scale(gamax))
    blocks = packing.pad_columns(x, BLOCK).to(torch.float32).unflatten(-1, (-1, BLOCK))
    bamax = blocks.abs().amax(-1)
    scales = block_scales(_tile_amax(bamax) if square else bamax, s_enc)
    v = blocks * block_encode(scales, s_enc).unsqueeze(-1)
    if seed is None:
        codes = rounding.e2m1_codes(v)
    else:
        noise = noise16(seed, site, x.shape[0], blocks.shape[1] * BLOCK, x.device)
        codes = rounding.e2m1_codes_stochastic(v, noise.unflatten(-1, (-1, BLOCK)))
    return packing.pack_codes(codes), scales


def _tile_amax(bamax: Tensor) -> Tensor:
    """[R, nb] of rows' blocks -> the amax of 16-row tiles, repeated over their rows."""
    tiles = packing.pad_rows(bamax, BLOCK).unflatten(0, (-1, BLOCK)).amax(1, keepdim=True)
    return tiles.expand(-1, BLOCK, -1).flatten(0, 1)[: bamax.shape[0]]


def _of_rows(value: Tensor) -> Tensor:
    """A number a row as what [R, n] is multiplied by; one number as it is."""
    return value.unsqueeze(1) if value.dim() else value


def encode_scale(gamax: Tensor) -> Tensor:
    """S_enc, float32 of the shape of gamax. NaN stays NaN."""
    s_enc = (torch.full_like(gamax, TENSOR_MAX) / gamax).clamp(max=torch.finfo(torch.float32).max)
    return torch.where((gamax == 0) | (s_enc == 0), 1.0, s_enc)


def block_scales(bamax: Tensor, s_enc: Tensor) -> Tensor:
    """The stored E4M3 scales. abs() only fixes the sign of NaN, which differs between devices."""
    return (bamax * (s_enc * (1 / 6))).clamp(max=E4M3_MAX).abs().to(torch.float8_e4m3fn)


def block_encode(scales: Tensor, s_enc: Tensor) -> Tensor:
    """What a block's elements are multiplied by before they become codes."""
    step = scales.to(torch.float32) * (torch.ones_like(s_enc) / s_enc)
    return (torch.ones_like(step) / step).clamp(max=torch.finfo(torch.float32).max)


def decode(packed: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """code * block scale, [R, nb * 16], without the tensor scale; at most 6 bits, exact in bfloat16 too."""
    values = rounding.e2m1_values(packing.unpack_codes(packed, scales.shape[1]))
    return (values * packing.repeat_columns(scales.to(torch.float32), BLOCK)).to(dtype)


def dequantize(packed: Tensor, scales: Tensor, gamax: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values (code * s_b) * (gamax / 2688), [R, nb * 16], in float32 and then cast."""
    return (decode(packed, scales) * _of_rows(tensor_scale(gamax))).to(dtype)


def tensor_scale(gamax: Tensor) -> Tensor:
    """gamax / 2688, float32 of the shape of gamax."""
    return gamax / torch.full_like(gamax, TENSOR_MAX)


ROW_FACTOR = 1 / TENSOR_MAX


def row_factors(gamax: Tensor) -> Tensor:
    """[M] -> float32 [M, 1], gamax * (1 / 2688): what the rows of a product are multiplied by, after its other factor.

    1/2688 is rounded first. Devices multiply rows in generated code that also does what follows, and such code divides
    only nearly right (Triton's ``/``).
    """
    return (gamax.to(torch.float32) * ROW_FACTOR).unsqueeze(1)


def gemm_factor(a_amax: Tensor | None, b_amax: Tensor | None) -> Tensor | None:
    """What a float32 accumulator of decoded operands is multiplied by: 0-d float32, or None for nothing.

    gamaxA * gamaxB / (2688 * 2688); gamax / 2688 where only one operand has a tensor scale.
    """
    if a_amax is None or b_amax is None:
        amax = b_amax if a_amax is None else a_amax
        return None if amax is None else tensor_scale(amax)
    large, small = torch.maximum(a_amax, b_amax), torch.minimum(a_amax, b_amax)
    # The product of the two may overflow where the factor does not. A power of two taken out of both sides
    # changes no bit, and above 2^63 it cannot make the product subnormal.
    shrink = torch.where(large > 2.0**63, torch.full_like(large, 2.0**-32), 1.0)
    return (large * shrink) * small / (shrink * TENSOR_MAX**2)
