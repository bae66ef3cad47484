"""Values without codes are what codes decode to, and their product is fp4::scaled_mm's."""

import pytest
import strategies
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fp4compile.ops  # noqa: F401  registers torch.ops.fp4
from fp4compile.formats import rotation
from fp4compile.ops.library import BLOCKS

fp4 = torch.ops.fp4
matrices = strategies.matrices() | strategies.matrices_with_nonfinite()
any_seed = st.none() | strategies.seeds.map(torch.tensor)
recipes = st.sampled_from((("nvfp4", (1, 16)), ("nvfp4", (16, 16)), ("mxfp4", (1, 32))))


def assert_bits(result, expected):
    assert (result.shape, result.stride(), result.dtype) == (expected.shape, expected.stride(), torch.bfloat16)
    assert torch.equal(result.view(torch.int16), expected.view(torch.int16))


@settings(max_examples=60)
@given(matrices, recipes, any_seed, strategies.sites, st.booleans())
def test_quantize_decoded_is_quantize_then_decode(x, recipe, seed, site, by_row):
    (format, block), amax = recipe, fp4.amax(x) if recipe[0] == "nvfp4" else None
    if by_row and block == (1, 16):
        amax = x.abs().amax(-1)
    how = (amax, seed, format, block, "nearest" if seed is None else "stochastic", site)
    assert_bits(fp4.quantize_decoded(x, *how), fp4.decode(*fp4.quantize(x, *how), format, torch.bfloat16))


@settings(max_examples=40)
@given(matrices, st.sampled_from(tuple(BLOCKS)), any_seed, strategies.sites, st.sampled_from((8, 16, 32, 64)))
def test_rotate_quantize_decoded_is_rotate_quantize_then_decode(x, format, seed, site, size):
    amax = fp4.rotated_amax(x, size, rotation.SIGNS) if format == "nvfp4" else None
    how = (amax, seed, format, "nearest" if seed is None else "stochastic", site, size, rotation.SIGNS)
    expected = fp4.decode(*fp4.rotate_quantize(x, *how), format, torch.bfloat16)
    assert_bits(fp4.rotate_quantize_decoded(x, *how), expected)


def test_padding_is_zero():
    """Where the scale is a number; blocks that hold NaN are NaN to their end."""
    x = torch.randn(5, 20, generator=torch.Generator().manual_seed(0))
    x[1, 18] = torch.nan
    values = fp4.quantize_decoded(x, torch.tensor(3.0), None, "nvfp4", (1, 16), "nearest", 0)
    assert values.shape == (5, 32)
    assert values[1, 16:].isnan().all()
    values[1, 16:] = 0
    assert not values[:, 20:].any() and values.isfinite().all()


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("k", [32, 40, 7])
def test_decoded_mm_is_scaled_mm_of_the_codes(k, out_dtype):
    """Of two formats, whose padding differs; in every layout."""
    random = torch.Generator().manual_seed(k)
    a, b = torch.randn(17, k, generator=random), torch.randn(33, k, generator=random)
    amax = fp4.amax(a)
    a_how = (amax, None, "nvfp4", (1, 16), "nearest", 0)
    b_how = (None, None, "mxfp4", (1, 32), "nearest", 0)
    codes = (*fp4.quantize(a, *a_how), amax, "nvfp4", *fp4.quantize(b, *b_how), None, "mxfp4")
    expected = fp4.scaled_mm(*codes, out_dtype)
    left, right = fp4.quantize_decoded(a, *a_how), fp4.quantize_decoded(b, *b_how)
    strided = [x.repeat_interleave(2, 1)[:, ::2] for x in (left, right)]
    turned = [x.t().contiguous().t() for x in (left, right)]
    for one, other in ((left, right), turned, strided):
        assert torch.equal(fp4.decoded_mm(one, amax, other, None, out_dtype), expected)


def test_decoded_mm_has_the_factor_of_both_amaxes():
    values = torch.full((16, 16), 2.0, dtype=torch.bfloat16)
    amax, other = torch.tensor(2688.0), torch.tensor(1344.0)
    for a_amax, b_amax, factor in ((amax, other, 0.5), (other, None, 0.5), (None, amax, 1.0), (None, None, 1.0)):
        out = fp4.decoded_mm(values, a_amax, values, b_amax, torch.float32)
        assert torch.equal(out, torch.full((16, 16), 64.0 * factor))


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("amax_dtype", [torch.bfloat16, torch.float32])
def test_rows_are_multiplied_behind_the_other_factor_and_rounded_once(amax_dtype, out_dtype):
    """The rule to the bit: of whole numbers the accumulation is exact. With codes too, and without the other factor."""
    random = torch.Generator().manual_seed(0)
    a, b = torch.randn(17, 48, generator=random), torch.randn(33, 48, generator=random)
    rows, amax = a.abs().amax(-1).to(amax_dtype).float().to(amax_dtype), fp4.amax(b)
    left, right = ((4 * x).round().clamp(-6, 6).bfloat16() for x in (a, b))
    exact = left.float() @ right.float().t()
    of_rows = rows.float()[:, None] * torch.tensor(1 / 2688)
    for b_amax, scaled in ((amax, exact * (amax / torch.tensor(2688.0))), (None, exact)):
        expected = (scaled * of_rows).to(out_dtype)
        assert torch.equal(fp4.decoded_mm(left, rows, right, b_amax, out_dtype), expected)
    codes = fp4.quantize(a, rows.float(), None, "nvfp4", (1, 16), "nearest", 0)
    values = fp4.decode(*codes, "nvfp4", torch.bfloat16)
    found = fp4.scaled_mm(*codes, rows, "nvfp4", right, None, None, "bf16", out_dtype)
    assert torch.equal(found, fp4.decoded_mm(values, rows, right, None, out_dtype))


def test_a_product_with_scales_of_rows_is_as_close_as_one_of_each_row_alone():
    x, w = torch.randn(9, 64, generator=torch.Generator().manual_seed(1)), torch.ones(16, 64).bfloat16()
    x *= 2.0 ** torch.arange(-4, 5)[:, None]
    rows = x.abs().amax(-1)
    found = fp4.decoded_mm(
        fp4.quantize_decoded(x, rows, None, "nvfp4", (1, 16), "nearest", 0), rows, w, None, torch.float32
    )
    for row in range(9):
        one, amax = x[row : row + 1], rows[row]
        alone = fp4.quantize_decoded(one, amax, None, "nvfp4", (1, 16), "nearest", 0)
        torch.testing.assert_close(found[row : row + 1], fp4.decoded_mm(alone, amax, w, None, torch.float32))


@pytest.mark.parametrize("shapes", [((0, 32), (4, 32)), ((4, 32), (0, 32)), ((3, 0), (4, 0))])
def test_empty_operands(shapes):
    a, b = (torch.ones(shape, dtype=torch.bfloat16) for shape in shapes)
    for amax in (torch.tensor(1.0), torch.ones(shapes[0][0])):
        out = fp4.decoded_mm(a, amax, b, None, torch.bfloat16)
        assert out.shape == (shapes[0][0], shapes[1][0]) and not out.any()
        if amax.dim():
            values = fp4.quantize_decoded(a, amax, None, "nvfp4", (1, 16), "nearest", 0)
            assert values.shape == (shapes[0][0], shapes[0][1])
