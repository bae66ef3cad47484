"""The inline PTX that gives decoded values, run instruction by instruction: the bits of the formats."""

from __future__ import annotations

import numpy as np
import ptx
import pytest
import torch
from torch import Tensor

from fp4compile.formats import rounding
from fp4compile.lowering.kernels import common, decode, rows
from fp4compile.lowering.targets import HOPPER

FORMATS = ("nvfp4", "mxfp4")


def words(x: Tensor) -> ptx.Words:
    """The 32-bit words of a tensor's memory."""
    return x.contiguous().view(torch.uint8).numpy().reshape(-1).view(np.uint32)


def scales_of(format: str) -> Tensor:
    """Every scale that a block can have, float32; NaN too, with the bits that kernels give it."""
    count, dtype = (128, torch.float8_e4m3fn) if format == "nvfp4" else (256, torch.float8_e8m0fnu)
    scales = torch.arange(count, dtype=torch.uint8).view(dtype).float()
    return torch.where(scales.isnan(), torch.nan, scales)


def assert_values(found: list[ptx.Words], expected: Tensor) -> None:
    """expected: [n, 8], against n in each of four words of two bfloat16; NaN is NaN."""
    result = torch.from_numpy(np.stack(found, 1).view(np.int16)).view(torch.bfloat16)
    expected = expected.to(torch.bfloat16)
    assert torch.equal(result.isnan(), expected.isnan())
    zeroed = [torch.where(x.isnan(), 0, x).view(torch.int16) for x in (result, expected)]
    assert torch.equal(*zeroed)


@pytest.mark.parametrize("format", FORMATS)
def test_every_code_with_every_scale_is_decoded(format: common.Format) -> None:
    source = decode.kernel(HOPPER, format, torch.bfloat16, decode.choose()).source
    codes = torch.arange(256, dtype=torch.uint8).repeat_interleave(4).roll(1).reshape(-1, 4)
    scales = scales_of(format)
    codes, scale = codes.repeat(len(scales), 1), scales.repeat_interleave(len(codes))
    nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(1).float()
    expected = rounding.e2m1_values(nibbles) * scale[:, None]
    assert_values(ptx.run(ptx.assembly_of(source, "decoded"), 4, [words(codes), words(scale)]), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("format", FORMATS)
def test_elements_become_values(format: common.Format, stochastic: bool, dtype: torch.dtype) -> None:
    """Of every magnitude, ties included, with every scale."""
    source = rows.kernel(HOPPER, dtype, format, stochastic, rows.Config(), decoded=True).source
    random = torch.Generator().manual_seed(0)
    scale = scales_of(format).repeat_interleave(64)
    x = torch.randn(len(scale), 8, generator=random) * 2.0 ** torch.randint(-6, 3, (len(scale), 1), generator=random)
    x[::2] = torch.randint(-28, 29, (len(scale) // 2, 8), generator=random) / 4
    x[torch.rand(x.shape, generator=random) < 0.1] = -0.0
    x, encode = x.to(dtype), torch.rand(len(scale), generator=random) + 0.5
    encode[::4] = 1.0
    noise = torch.randint(-(2**31), 2**31, (4, len(scale)), generator=random).int()
    elements = words(x).reshape(len(scale), -1).T
    addend = np.full(len(scale), 0x43000000 if stochastic else 0x4B000000, np.uint32)
    inputs = [words(scale), *elements, words(encode), addend, *map(words, noise if stochastic else ())]
    v = x.float() * encode[:, None]
    halves = torch.stack([noise & 0xFFFF, noise >> 16 & 0xFFFF], 1).flatten(0, 1).t()
    codes = rounding.e2m1_codes_stochastic(v, halves) if stochastic else rounding.e2m1_codes(v)
    expected = rounding.e2m1_values(codes) * scale[:, None]
    assert_values(ptx.run(ptx.assembly_of(source, "values"), 4, inputs), expected)
