"""NVFP4 against the scalar oracle, and what has to hold at the edges, under padding and for 2-D blocks."""

import math

import oracle
import pytest
import strategies
import torch
from comparing import assert_codes, assert_same
from hypothesis import given
from hypothesis import strategies as st

from fp4compile.formats import nvfp4, packing, rotation

BLOCKS = st.sampled_from(((1, 16), (16, 16)))


def quantize(x, block=(1, 16), amax=None, **options):
    gamax = nvfp4.amax(x) if amax is None else amax
    packed, scales = nvfp4.quantize(x, gamax, square=block[0] == 16, **options)
    return packed, scales, gamax


def codes(packed):
    return packing.unpack_codes(packed.contiguous(), packed.shape[1] // 8)


def scale_bytes(scales):
    return scales.view(torch.uint8)


@given(strategies.matrices(), BLOCKS)
def test_bytes_and_values_are_the_oracle_s(x, block):
    check_against_oracle(x, block)


@given(strategies.matrices_with_nonfinite(rows=(1, 17), cols=(16, 33)), BLOCKS)
def test_bytes_are_the_oracle_s_with_nan_and_inf(x, block):
    check_against_oracle(x, block)


@given(
    st.one_of(strategies.matrices(), strategies.matrices_with_nonfinite()), BLOCKS, strategies.seeds, strategies.sites
)
def test_stochastic_bytes_are_the_oracle_s(x, block, seed, site):
    noise = oracle.noise_of(seed, site, x.shape[0], -(-x.shape[1] // 16) * 16)
    check_against_oracle(x, block, noise, seed=torch.tensor(seed), site=site)


def check_against_oracle(x, block, noise=None, **options):
    expected = oracle.Nvfp4(x.float().tolist(), block, noise)
    packed, scales, gamax = quantize(x, block, **options)
    assert_same(gamax, expected.amax)
    assert_same(scale_bytes(scales), expected.scales)
    assert_codes(codes(packed), expected.codes, scales.float())
    values = nvfp4.dequantize(packed, scales, gamax)[:, : x.shape[1]].contiguous()
    assert_same(values, expected.values)


@given(st.integers(0, 2**32 - 1), st.booleans())
def test_scale_bytes_are_the_oracle_s_for_many_blocks(seed, narrow):
    """Block amax of few bits are often just between two scales, where the order of operations decides."""
    bamax = torch.rand(256, generator=torch.Generator().manual_seed(seed)) + 2.0**-12
    bamax = bamax.to(torch.bfloat16).float() if narrow else bamax
    x = torch.zeros(1, 256 * 16)
    x[0, ::16] = bamax
    _, scales, _ = quantize(x)
    assert_same(scale_bytes(scales), oracle.Nvfp4(x.tolist()).scales)


matrices = strategies.matrices() | strategies.matrices_with_nonfinite()


@given(matrices)
def test_with_a_gamax_a_row_each_row_is_a_tensor_of_its_own(x):
    gamax = x.abs().amax(-1).float()
    packed, scales, _ = quantize(x, amax=gamax)
    values = nvfp4.dequantize(packed, scales, gamax)
    for row in range(x.shape[0]):
        alone = quantize(x[row : row + 1])
        assert_same(gamax[row], alone[2])
        assert_same(scale_bytes(scales)[row], scale_bytes(alone[1])[0])
        assert_same(packed[row], alone[0][0])
        assert_same(values[row], nvfp4.dequantize(*alone)[0])


@given(matrices, strategies.seeds, strategies.sites)
def test_with_a_gamax_a_row_noise_is_still_that_of_the_place(x, seed, site):
    gamax, how = x.abs().amax(-1).float(), {"seed": torch.tensor(seed), "site": site}
    packed, scales, _ = quantize(x, amax=gamax, **how)
    for row in range(x.shape[0]):
        of_all = quantize(x, amax=gamax[row], **how)
        assert_same(scale_bytes(scales)[row], scale_bytes(of_all[1])[row])
        if not gamax[row].isnan():  # every scale is NaN then, and codes are any
            assert_same(packed[row], of_all[0][row])


@given(strategies.matrices(), BLOCKS)
def test_padding_is_zero_and_changes_nothing(x, block):
    """Zeros appended by hand give the same bytes, and the same rows, as the padding inside."""
    rows, cols = x.shape
    larger = torch.zeros(-(-rows // 16) * 16, -(-cols // 16) * 16, dtype=x.dtype)
    larger[:rows, :cols] = x
    packed, scales, gamax = quantize(x, block)
    expected_packed, expected_scales, expected_gamax = quantize(larger, block)
    assert torch.equal(gamax, expected_gamax)
    assert torch.equal(packed, expected_packed[:rows])
    assert torch.equal(scale_bytes(scales), scale_bytes(expected_scales)[:rows])
    assert not codes(packed)[:, cols:].any()


@given(strategies.matrices(rows=(16, 33), cols=(16, 33)))
def test_square_blocks_give_the_transpose_the_same_values(x):
    packed, scales, gamax = quantize(x, (16, 16))
    packed_t, scales_t, _ = quantize(x.t(), (16, 16))
    rows, cols = x.shape
    assert torch.equal(codes(packed)[:, :cols], codes(packed_t)[:, :rows].t())
    values = nvfp4.dequantize(packed, scales, gamax)[:, :cols]
    assert torch.equal(values, nvfp4.dequantize(packed_t, scales_t, gamax)[:, :rows].t())


@pytest.mark.parametrize("seed", [None, torch.tensor(5)])
def test_zeros_keep_their_sign(seed):
    """Also what underflows to zero, and in a block that is nothing but zeros."""
    x = torch.full((2, 32), -0.0)
    x[:, ::2] = 0.0
    x[0, 0], x[0, 3], x[0, 4] = 6.0, -(2.0**-140), 2.0**-140
    packed, scales, gamax = quantize(x, seed=seed)
    assert codes(packed).tolist() == [[7, 8] + [0, 8] * 15, [0, 8] * 16]
    assert torch.equal(nvfp4.dequantize(packed, scales, gamax).signbit(), x.signbit())


@given(strategies.matrices())
def test_strides_and_dtype_do_not_matter(x):
    packed, scales, _ = quantize(x)
    for same in (x.contiguous(), x.float(), x.t().contiguous().t()):
        other_packed, other_scales, _ = quantize(same)
        assert torch.equal(packed, other_packed)
        assert torch.equal(scale_bytes(scales), scale_bytes(other_scales))


@given(strategies.matrices(), BLOCKS)
def test_decoding_is_exact_in_bfloat16(x, block):
    packed, scales, _ = quantize(x, block)
    assert torch.equal(nvfp4.decode(packed, scales, torch.bfloat16).float(), nvfp4.decode(packed, scales))


@pytest.mark.parametrize("block", [(1, 16), (16, 16)])
def test_a_zero_tensor_is_zero(block):
    packed, scales, gamax = quantize(torch.zeros(17, 40), block)
    assert not packed.any() and not scale_bytes(scales).any() and gamax == 0
    assert not nvfp4.dequantize(packed, scales, gamax).any()


def test_a_zero_block_has_scale_zero_and_codes_zero():
    x = torch.ones(2, 48)
    x[:, 16:32] = 0
    packed, scales, _ = quantize(x)
    assert scale_bytes(scales)[:, 1].tolist() == [0, 0] and not codes(packed)[:, 16:32].any()
    assert scale_bytes(scales)[:, 0].tolist() == scale_bytes(scales)[:, 2].tolist() == [0x7E, 0x7E]


def test_a_block_far_below_the_tensor_is_worth_zero():
    x = torch.full((1, 32), 2.1e-6)
    x[0, 0] = 1.0
    packed, scales, gamax = quantize(x)
    assert scale_bytes(scales)[0, 1] == 0
    assert not nvfp4.dequantize(packed, scales, gamax)[0, 16:].any()


@given(strategies.matrices_with_nonfinite(), BLOCKS, st.booleans())
def test_nothing_finite_comes_out_of_nan_or_inf(x, block, stochastic):
    seed = torch.tensor(3) if stochastic else None
    packed, scales, gamax = quantize(x, block, seed=seed)
    assert not nvfp4.dequantize(packed, scales, gamax).isfinite().any()
    other = torch.tensor(2.0)
    assert not nvfp4.gemm_factor(gamax, other).isfinite() and not nvfp4.gemm_factor(other, gamax).isfinite()
    if x.isnan().any():
        assert (scale_bytes(scales) == oracle.E4M3_NAN).all()


@given(strategies.matrices(exponents=(126, 127), dtypes=(torch.float32,)), BLOCKS)
def test_the_largest_numbers_stay_finite_and_close(x, block):
    packed, scales, gamax = quantize(x, block)
    values = nvfp4.dequantize(packed, scales, gamax)
    assert values.isfinite().all() and values.abs().max() <= gamax * (1 + 2.0**-22)


@pytest.mark.parametrize("shape", [(0, 16), (4, 0), (0, 0)])
@pytest.mark.parametrize("block", [(1, 16), (16, 16)])
def test_empty(shape, block):
    for seed in (None, torch.tensor(1)):
        packed, scales, gamax = quantize(torch.empty(shape), block, seed=seed)
        assert packed.shape == (shape[0], -(-shape[1] // 16) * 8) and scales.shape == (
            shape[0],
            -(-shape[1] // 16),
        )
        assert gamax == 0
        assert nvfp4.dequantize(packed, scales, gamax).shape == (shape[0], -(-shape[1] // 16) * 16)


class TestStochastic:
    @given(strategies.matrices(), BLOCKS, strategies.seeds, strategies.sites)
    def test_scales_are_those_of_nearest_and_codes_are_neighbours(self, x, block, seed, site):
        rows = x.float().tolist()
        expected = oracle.Nvfp4(rows, block)
        packed, scales, _ = quantize(x, block, seed=torch.tensor(seed), site=site)
        assert_same(scale_bytes(scales), expected.scales)
        for scaled, row in zip(expected.scaled, codes(packed).tolist(), strict=True):
            for v, code in zip(scaled, row, strict=False):
                assert int(code) in neighbours(v)

    @given(strategies.matrices(rows=(17,), cols=(33, 48)), strategies.seeds)
    def test_a_code_does_not_depend_on_other_elements(self, x, seed):
        """Beyond the block's and the tensor's amax: other rows changed, or left out, change nothing."""
        gamax, seed = nvfp4.amax(x), torch.tensor(seed)
        packed, _, _ = quantize(x, amax=gamax, seed=seed)
        changed = x.clone()
        changed[1::2] = 0
        assert torch.equal(quantize(changed, amax=gamax, seed=seed)[0][::2], packed[::2])
        assert torch.equal(quantize(x[:5], amax=gamax, seed=seed)[0], packed[:5])

    @given(strategies.matrices(), strategies.seeds)
    def test_strides_do_not_matter(self, x, seed):
        seed = torch.tensor(seed)
        assert torch.equal(quantize(x, seed=seed)[0], quantize(x.t().contiguous().t(), seed=seed)[0])

    def test_seeds_and_sites_give_different_codes(self):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
        results = [
            quantize(x, seed=torch.tensor(seed), site=site)[0] for seed, site in ((0, 0), (1, 0), (0, 1), (2**32, 0))
        ]
        for i, a in enumerate(results):
            assert all(not torch.equal(a, b) for b in results[i + 1 :])
        assert torch.equal(results[0], quantize(x, seed=torch.tensor(0), site=0)[0])

    def test_the_mean_over_seeds_is_the_value(self):
        """The error of 400 draws of uniform numbers below the clip, over its own deviation."""
        x = torch.rand(32, 64, generator=torch.Generator().manual_seed(1)) * 5 + 0.01
        x[:, ::16] = 6.0
        total = torch.zeros_like(x, dtype=torch.float64)
        for seed in range(400):
            total += nvfp4.dequantize(*quantize(x, seed=torch.tensor(seed)))
        error = total / 400 - x
        assert abs(error.mean().item()) < 4 * 1.0 / (6 * 400 * x.numel()) ** 0.5
        assert error.abs().max() < 6 * 2.0 / (4 * 400) ** 0.5


def neighbours(v):
    """The codes v may be rounded to."""
    sign = 8 if math.copysign(1, v) < 0 else 0
    if abs(v) >= 6:
        return {7 + sign}
    upper = next(i for i in range(1, 8) if abs(v) <= oracle.MAGNITUDES[i])
    allowed = {upper - 1, upper}
    if abs(v) == oracle.MAGNITUDES[upper]:
        allowed.discard(upper - 1)
    return {code + sign for code in allowed}


def test_the_factors_of_rows_are_products():
    """With 1/2688 rounded first, in any dtype of an amax."""
    for dtype in strategies.DTYPES:
        gamax = torch.tensor([3.7, 0.0, 1e-4, math.inf, math.nan], dtype=dtype)
        expected = [oracle.f32(value * oracle.f32(1 / 2688)) for value in gamax.tolist()]
        factors = nvfp4.row_factors(gamax)
        assert factors.shape == (5, 1) and factors.dtype == torch.float32
        assert_same(factors[:, 0], expected)


class TestGemmFactor:
    def test_is_the_formula(self):
        a, b = torch.tensor(3.7), torch.tensor(0.011)
        expected = oracle.f32(oracle.f32(a.item() * b.item()) / (2688.0 * 2688.0))
        assert nvfp4.gemm_factor(a, b).item() == expected == nvfp4.gemm_factor(b, a).item()

    def test_of_one_operand_is_its_tensor_scale(self):
        a = torch.tensor(3.7)
        expected = oracle.f32(a.item() / 2688.0)
        assert nvfp4.gemm_factor(a, None).item() == nvfp4.gemm_factor(None, a).item() == expected
        assert nvfp4.gemm_factor(None, None) is None

    @given(st.integers(-126, 127), st.integers(-126, 127))
    def test_does_not_overflow_before_the_division(self, i, j):
        """Powers of two times a fixed pair: wherever nothing underflows, exactly the scaled formula."""
        a, b = 1.3984375, 1.7109375
        base = oracle.f32(a * b / 2688.0**2)
        if i + j - 23 >= -125:
            expected = oracle.f32(base * 2.0 ** (i + j))
            assert nvfp4.gemm_factor(torch.tensor(a * 2.0**i), torch.tensor(b * 2.0**j)).item() == expected

    def test_of_zero_is_zero_even_against_the_largest(self):
        assert nvfp4.gemm_factor(torch.tensor(0.0), torch.tensor(oracle.FLT_MAX)).item() == 0


@pytest.mark.parametrize(
    ("distribution", "case", "expected", "tolerance"),
    [
        ("gaussian", "1x16", 0.0955, 0.001),
        ("gaussian", "16x16", 0.1110, 0.001),
        ("gaussian", "rotated", 0.0947, 0.001),
        ("student", "1x16", 0.0911, 0.004),
        ("student", "16x16", 0.1819, 0.02),
        ("student", "rotated", 0.0991, 0.004),
    ],
)
def test_relative_error_is_the_measured_one(distribution, case, expected, tolerance):
    """Mean Frobenius error of 8 draws of 256x256 bfloat16. Single draws differ by 1 % (Gaussian) to 20 % (heavy
    tails, where a few outliers set the block scales); the tolerance is what the mean of 8 keeps to."""
    errors = []
    for seed in range(8):
        torch.manual_seed(seed)
        x = torch.randn(256, 256) if distribution == "gaussian" else student_t3(256, 256)
        x = x.to(torch.bfloat16)
        x = rotation.rotate(x) if case == "rotated" else x
        values = nvfp4.dequantize(*quantize(x, (16, 16) if case == "16x16" else (1, 16)))
        errors.append(((values - x).norm() / x.float().norm()).item())
    assert sum(errors) / 8 == pytest.approx(expected, abs=tolerance)


def student_t3(*shape):
    return torch.distributions.StudentT(3.0).sample(shape)
