"""Compiled code has the eager bits: every function of formats/ in one graph, without a graph break.

Inputs reach what a compiler may treat differently: subnormal numbers (flushed by some flags), NaN and Inf,
ties, values near the largest, zeros of both signs.
"""

import math

import pytest
import torch

from fp4compile.formats import mxfp4, nvfp4, rotation

SHAPE = (33, 72)  # both ragged
SEED = torch.tensor(-7)


def nearest(x):
    gamax = nvfp4.amax(x)
    packed, scales = nvfp4.quantize(x, gamax)
    mx_packed, mx_scales = mxfp4.quantize(x)
    return {
        "amax": gamax,
        "codes": packed,
        "scales": scales,
        "values": nvfp4.dequantize(packed, scales, gamax),
        "mxfp4 codes": mx_packed,
        "mxfp4 scales": mx_scales,
        "mxfp4 values": mxfp4.decode(mx_packed, mx_scales, torch.bfloat16),
        "rotated": rotation.rotate(x),
    }


def stochastic(x):
    """What the gradients get."""
    rotated = rotation.rotate(x)
    gamax = nvfp4.amax(rotated)
    packed, scales = nvfp4.quantize(rotated, gamax, seed=SEED, site=5)
    square_packed, square_scales = nvfp4.quantize(x, nvfp4.amax(x), square=True)
    return {
        "rotated": rotated,
        "codes": packed,
        "scales": scales,
        "decoded": nvfp4.decode(packed, scales, torch.bfloat16),
        "16x16 codes": square_packed,
        "16x16 scales": square_scales,
    }


def inputs():
    random = torch.Generator().manual_seed(0)
    x = torch.randn(SHAPE, generator=random)
    grid = torch.randint(-24, 25, SHAPE, generator=random) / 4
    grid[:, ::16] = 6
    spread = x * 10.0 ** (-10 * torch.rand(SHAPE[0], 1, generator=random))
    with_nan, with_inf = x.clone(), x.clone()
    with_nan[3, 4], with_inf[3, 4] = math.nan, -math.inf
    return {
        "gaussian": x,
        "ties": grid,
        "wide range": spread,
        "subnormal": x * 1e-39,
        "smallest": torch.where(x > 0, 2.0**-149, 0.0),
        "scales clamped": x * 1e-36,
        "largest": x.clamp(-1, 1) * 3.4e38,
        "zero": torch.zeros(SHAPE),
        "cancelling": torch.where(x > 0.5, torch.where(x < 0.7, -0.0, 0.0), x.sign()),
        "nan": with_nan,
        "inf": with_inf,
    }


@pytest.fixture(scope="module")
def compiled():
    torch.compiler.reset()
    return {f: torch.compile(f, fullgraph=True, dynamic=False) for f in (nearest, stochastic)}


@pytest.mark.parametrize("name", inputs())
@pytest.mark.parametrize("function", [nearest, stochastic])
def test_compiled_is_eager_bit_for_bit(compiled, name, function):
    x = inputs()[name]
    if function is stochastic:  # of a transposed bfloat16 view, as in the weight gradient
        x = x.to(torch.bfloat16).t()
    expected, result = function(x), compiled[function](x)
    for values in (expected, result):
        mask_meaningless(values)
    different = [part for part in expected if not same_bits(result[part], expected[part])]
    assert not different


def mask_meaningless(values):
    """The codes of blocks with a NaN scale become 0."""
    for part in [part for part in values if part.endswith("codes")]:
        scales = values[part.replace("codes", "scales")]
        bad = scales == 255 if scales.dtype == torch.uint8 else scales.float().isnan()
        codes = values[part].unflatten(-1, (scales.shape[1], -1))
        values[part] = torch.where(bad.unsqueeze(-1), 0, codes)


def same_bits(a, b):
    """Bytes; any NaN equals any NaN."""
    if a.dtype.is_floating_point and a.dtype.itemsize > 1:
        if not torch.equal(a.isnan(), b.isnan()):
            return False
        a, b = (torch.where(v.isnan(), 0.0, v.float()) for v in (a, b))
    a, b = a.contiguous().reshape(-1), b.contiguous().reshape(-1)
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
