"""What fp4::scaled_mm computes, for every pair of formats."""

import math

import pytest
import strategies
import torch
from hypothesis import given
from hypothesis import strategies as st

import fp4compile.ops  # noqa: F401  registers torch.ops.fp4
from fp4compile.formats import nvfp4

fp4 = torch.ops.fp4
FORMATS = ("nvfp4", "mxfp4", "bf16")


def operand(x, format):
    """(tensor, scales, amax, format), and the float64 values it stands for (with the tensor scale)."""
    if format == "bf16":
        return (x, None, None, format), x.double()
    amax = fp4.amax(x) if format == "nvfp4" else None
    block = (1, 16) if format == "nvfp4" else (1, 32)
    packed, scales = fp4.quantize(x, amax, None, format, block, "nearest", 0)
    values = fp4.decode(packed, scales, format, torch.float32).double()
    return (packed, scales, amax, format), values * (1 if amax is None else amax.double() / 2688)


@pytest.mark.parametrize("a_format", FORMATS)
@pytest.mark.parametrize("b_format", FORMATS)
@pytest.mark.parametrize("k", [32, 40, 7])
def test_is_the_product_of_the_values(a_format, b_format, k):
    random = torch.Generator().manual_seed(k)
    a, a_values = operand(torch.randn(17, k, generator=random), a_format)
    b, b_values = operand(torch.randn(33, k, generator=random), b_format)
    out = fp4.scaled_mm(*a, *b, torch.float32)
    assert out.shape == (17, 33) and out.dtype == torch.float32
    torch.testing.assert_close(out.double(), a_values[:, :k] @ b_values[:, :k].t(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_float32_result_is_rounded_once(dtype):
    """Small whole sums: the accumulation is exact, so the factor and the cast are all that is rounded."""
    x = torch.randint(-6, 7, (16, 48), generator=torch.Generator().manual_seed(2)).float()
    x[:, ::16] = 6
    a, _ = operand(x, "nvfp4")
    accumulator = fp4.decode(a[0], a[1], "nvfp4", torch.float32)
    exact = (accumulator.double() @ accumulator.double().t()).float()
    expected = (exact * nvfp4.gemm_factor(a[2], a[2])).to(dtype)
    assert torch.equal(fp4.scaled_mm(*a, *a, dtype), expected)


@given(
    strategies.matrices_with_nonfinite(rows=(1, 17), cols=(16, 33)),
    st.sampled_from(FORMATS),
    st.sampled_from(FORMATS),
)
def test_nan_and_inf_are_visible(x, a_format, b_format):
    """In every output of an NVFP4 operand, in the operand's row at least of the others."""
    bad_rows = ~x.isfinite().all(1)
    a, _ = operand(x, a_format)
    b, _ = operand(torch.ones(3, x.shape[1]), b_format)
    out = fp4.scaled_mm(*a, *b, torch.float32)
    assert not out[bad_rows].isfinite().any()
    if a_format == "nvfp4":
        assert not out.isfinite().any()


@pytest.mark.parametrize("a_format", FORMATS)
@pytest.mark.parametrize("shapes", [((0, 32), (4, 32)), ((4, 32), (0, 32)), ((3, 0), (4, 0))])
def test_empty_operands(a_format, shapes):
    a, _ = operand(torch.ones(shapes[0]), a_format)
    b, _ = operand(torch.ones(shapes[1]), "nvfp4")
    out = fp4.scaled_mm(*a, *b, torch.bfloat16)
    assert out.shape == (shapes[0][0], shapes[1][0]) and not out.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_amax(dtype):
    assert fp4.amax(torch.tensor([[1.0, -3.0], [2.0, 0.5]]).to(dtype)).item() == 3.0
    assert fp4.amax(torch.empty(0, 16, dtype=dtype)).item() == 0.0
    assert math.isnan(fp4.amax(torch.tensor([1.0, math.nan, math.inf]).to(dtype)).item())
    assert fp4.amax(torch.tensor([[[1.0, -math.inf]]]).to(dtype)).item() == math.inf
    assert fp4.amax(torch.tensor(-5.0, dtype=dtype)).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_row_amax(dtype):
    x = torch.tensor([[1.0, -3.0], [2.0, 0.5], [math.nan, math.inf], [-math.inf, 0.0]]).to(dtype)
    found = fp4.row_amax(x)
    assert found.dtype == dtype and found.is_contiguous()
    assert found[[0, 1, 3]].tolist() == [3.0, 2.0, math.inf] and found[2].isnan()
    for shape in ((0, 16), (3, 0)):
        assert torch.equal(fp4.row_amax(torch.empty(shape, dtype=dtype)), torch.zeros(shape[0], dtype=dtype))
