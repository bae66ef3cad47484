"""The public quantize, QuantizedTensor and scaled_mm."""

import dataclasses
import math

import pytest
import strategies
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp4compile import QuantizedTensor, quantize, scaled_mm
from fp4compile.errors import ConfigError, UnsupportedDtypeError
from fp4compile.formats import rotation


def matrix(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def same(a, b):
    return torch.equal(a.packed, b.packed) and torch.equal(a.scales.view(torch.uint8), b.scales.view(torch.uint8))


@given(strategies.matrices(), st.sampled_from(((1, 16), (16, 16))), st.booleans(), st.booleans())
def test_shapes_and_dtypes(x, block, rotate, stochastic):
    q = quantize(x, block=block, rotate=rotate, rounding="stochastic" if stochastic else "nearest")
    rows, blocks = x.shape[0], -(-x.shape[1] // 16)
    assert q.packed.shape == (rows, blocks * 8) and q.packed.dtype == torch.uint8
    assert q.scales.shape == (rows, blocks) and q.scales.dtype == torch.float8_e4m3fn
    assert q.amax.shape == () and q.amax.dtype == torch.float32
    assert q.columns == x.shape[1] and q.rotated == rotate
    assert q.shape == ((rows, blocks * 16) if rotate else x.shape)
    for dtype in (torch.float32, torch.bfloat16):
        values = q.dequantize(dtype)
        assert values.shape == q.shape and values.dtype == dtype and values.is_contiguous()


def test_the_scales_of_a_tile_are_repeated_over_its_rows():
    q = quantize(matrix(20, 40), block=(16, 16))
    scales = q.scales.view(torch.uint8)
    assert (scales[:16] == scales[0]).all() and (scales[16:] == scales[16]).all()


def test_rotate_quantizes_the_rotated_tensor():
    x = matrix(20, 40)
    rotated = rotation.rotate(x)
    q, expected = quantize(x, rotate=True), quantize(rotated)
    assert same(q, expected) and q.amax == rotated.abs().max() == expected.amax
    assert torch.equal(q.dequantize(), expected.dequantize())


def test_a_quantized_tensor_is_frozen_and_needs_no_gradient():
    q = quantize(matrix(4, 16).requires_grad_())
    assert not q.scales.requires_grad and not q.amax.requires_grad and not q.dequantize().requires_grad
    with pytest.raises(dataclasses.FrozenInstanceError):
        q.amax = torch.tensor(1.0)
    assert not issubclass(QuantizedTensor, torch.Tensor)


class TestSeed:
    X = matrix(32, 64)

    def stochastic(self, **options):
        return quantize(self.X, rounding="stochastic", **options)

    def test_a_number_and_a_tensor_are_the_same_seed(self):
        for seed in (0, -1, 2**63 - 1, -(2**63)):
            assert same(self.stochastic(seed=seed), self.stochastic(seed=torch.tensor(seed)))

    def test_seed_and_site_decide_the_codes(self):
        assert same(self.stochastic(seed=1, site=2), self.stochastic(seed=1, site=2))
        assert not same(self.stochastic(seed=1, site=2), self.stochastic(seed=1, site=3))
        assert not same(self.stochastic(seed=1, site=2), self.stochastic(seed=2, site=2))

    def test_without_one_it_follows_manual_seed(self):
        torch.manual_seed(5)
        first, second = self.stochastic(), self.stochastic()
        torch.manual_seed(5)
        assert same(first, self.stochastic()) and not same(first, second)

    def test_nearest_neither_takes_a_seed_nor_draws_one(self):
        with pytest.raises(ConfigError, match="uses no seed"):
            quantize(self.X, seed=1)
        before = torch.get_rng_state()
        quantize(self.X)
        assert torch.equal(before, torch.get_rng_state())

    @pytest.mark.parametrize("seed", [2**63, -(2**63) - 1])
    def test_a_number_of_more_than_64_bits_is_refused(self, seed):
        with pytest.raises(ConfigError, match="64 bits"):
            self.stochastic(seed=seed)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.complex64])
def test_unsupported_dtypes_name_the_cast(dtype):
    with pytest.raises(UnsupportedDtypeError, match=r"quantize: x is torch\.\w+; cast it to torch\.bfloat16"):
        quantize(torch.ones(4, 16, dtype=dtype))


@pytest.mark.parametrize("shape", [(16,), (2, 3, 16), ()])
def test_other_ranks_are_refused(shape):
    with pytest.raises(ConfigError, match="2-D"):
        quantize(torch.ones(shape))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block": (1, 32)}, r"block is \(1, 32\)"),
        ({"block": (16, 1)}, r"block is \(16, 1\)"),
        ({"rounding": "floor"}, "'floor'"),
        ({"site": -1}, "site is -1"),
    ],
)
def test_unknown_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        quantize(torch.ones(4, 16), **options)


class TestScaledMm:
    @pytest.mark.parametrize("rotate", [False, True])
    @pytest.mark.parametrize("k", [32, 37])
    @pytest.mark.parametrize("block", [(1, 16), (16, 16)])
    def test_is_the_product_of_the_dequantized(self, rotate, k, block):
        a, b = (
            quantize(matrix(17, k), rotate=rotate),
            quantize(matrix(33, k, seed=1), block=block, rotate=rotate),
        )
        expected = a.dequantize().double() @ b.dequantize().double().t()
        torch.testing.assert_close(scaled_mm(a, b, torch.float32).double(), expected, rtol=1e-5, atol=1e-5)
        assert scaled_mm(a, b).dtype == torch.bfloat16

    def test_rotated_operands_give_nearly_the_plain_product(self):
        x, w = matrix(64, 250), matrix(48, 250, seed=1)
        product = scaled_mm(quantize(x, rotate=True), quantize(w, rotate=True), torch.float32)
        expected = x @ w.t()
        assert ((product - expected).norm() / expected.norm()).item() < 0.16

    def test_the_product_of_two_amax_may_overflow_where_a_result_does_not(self):
        x, w = torch.zeros(2, 16), torch.zeros(1, 16)
        x[0, 0], x[1, 0], w[0, 0] = 3e38, 1e38, 1.5
        result = scaled_mm(quantize(x), quantize(w), torch.float32).flatten().tolist()
        assert result == [math.inf, pytest.approx(1.5e38, rel=2**-4)]

    def test_the_largest_operand_times_zero_is_zero(self):
        assert not scaled_mm(quantize(torch.full((2, 16), 3e38)), quantize(torch.zeros(2, 16))).any()

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_nothing_finite_comes_out_of_nan_or_inf(self, bad):
        x = matrix(4, 32)
        x[2, 3] = bad
        assert not scaled_mm(quantize(x), quantize(matrix(5, 32))).isfinite().any()

    @pytest.mark.parametrize("rotate", [False, True])
    def test_different_k_is_refused_even_if_the_padding_hides_it(self, rotate):
        with pytest.raises(ConfigError, match=r"a is \[2, 20\] and b is \[3, 24\]"):
            scaled_mm(quantize(matrix(2, 20), rotate=rotate), quantize(matrix(3, 24), rotate=rotate))

    @pytest.mark.parametrize("rotated", ["a", "b"])
    def test_a_rotated_and_a_plain_operand_are_refused(self, rotated):
        a, b = quantize(matrix(2, 16), rotate=rotated == "a"), quantize(matrix(3, 16), rotate=rotated == "b")
        with pytest.raises(ConfigError, match=f"{rotated} is rotated"):
            scaled_mm(a, b)

    def test_an_unsupported_output_is_refused(self):
        q = quantize(matrix(2, 16))
        with pytest.raises(UnsupportedDtypeError, match=r"out_dtype is torch\.float64"):
            scaled_mm(q, q, torch.float64)

    def test_no_rows(self):
        assert scaled_mm(quantize(torch.empty(0, 16)), quantize(matrix(3, 16))).shape == (0, 3)
