"""MXFP4 against the scalar oracle, and its scale that never saturates."""

import math

import oracle
import pytest
import strategies
import torch
from comparing import assert_codes, assert_same
from hypothesis import given
from hypothesis import strategies as st

from fp4compile.formats import mxfp4, packing


def codes(packed):
    return packing.unpack_codes(packed, packed.shape[1] // 8)


def numbers(scales):
    """Scale bytes as float32."""
    return scales.view(torch.float8_e8m0fnu).float()


@given(st.one_of(strategies.matrices(), strategies.matrices_with_nonfinite()))
def test_bytes_and_values_are_the_oracle_s(x):
    expected = oracle.Mxfp4(x.float().tolist())
    packed, scales = mxfp4.quantize(x)
    assert_same(scales, expected.bytes)
    assert_codes(codes(packed), expected.codes, numbers(scales))
    assert_same(mxfp4.decode(packed, scales)[:, : x.shape[1]], expected.values)


@given(st.one_of(strategies.matrices(), strategies.matrices_with_nonfinite()), strategies.seeds, strategies.sites)
def test_stochastic_bytes_are_the_oracle_s(x, seed, site):
    packed, scales = mxfp4.quantize(x, seed=torch.tensor(seed), site=site)
    noise = oracle.noise_of(seed, site, x.shape[0], scales.shape[1] * 32)
    expected = oracle.Mxfp4(x.float().tolist(), noise)
    assert_same(scales, expected.bytes)
    assert_codes(codes(packed), expected.codes, numbers(scales))


@given(st.floats(min_value=0, allow_infinity=False, width=32))
def test_the_scale_is_the_smallest_power_of_two_that_saturates_nothing(bamax):
    byte = mxfp4.scale_bytes(torch.tensor([bamax])).item()
    assert 6 * 2.0 ** (byte - 127) >= bamax
    assert byte == 0 or 6 * 2.0 ** (byte - 128) < bamax


def test_a_zero_block_is_zero_with_the_smallest_scale():
    packed, scales = mxfp4.quantize(torch.zeros(3, 40))
    assert not packed.any() and not scales.any()
    assert mxfp4.decode(packed, scales).eq(0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_make_their_block_nan_and_no_other(bad):
    x = torch.ones(2, 64)
    x[1, 5] = bad
    packed, scales = mxfp4.quantize(x)
    values = mxfp4.decode(packed, scales)
    assert scales.tolist() == [[125, 125], [255, 125]]
    assert values[1, :32].isnan().all() and values[0].eq(1).all() and values[1, 32:].eq(1).all()


@given(strategies.matrices())
def test_decoding_is_exact_in_bfloat16(x):
    packed, scales = mxfp4.quantize(x)
    assert torch.equal(mxfp4.decode(packed, scales, torch.bfloat16).float(), mxfp4.decode(packed, scales))


@given(strategies.matrices(), strategies.seeds, strategies.sites)
def test_stochastic_codes_are_neighbours_under_the_same_scales(x, seed, site):
    packed, scales = mxfp4.quantize(x, seed=torch.tensor(seed), site=site)
    assert_same(scales, oracle.Mxfp4(x.float().tolist()).bytes)
    powers = packing.repeat_columns(2.0 ** (scales.double() - 127), 32)[:, : x.shape[1]]
    values, v = mxfp4.decode(packed, scales)[:, : x.shape[1]].double() / powers, x.double() / powers
    steps = torch.where(v.abs() < 2, 0.5, torch.where(v.abs() < 4, 1.0, 2.0))
    representable = x.double().abs() < 2.0**127  # above, the neighbour may lie beyond float32
    assert ((values - v).abs() < steps)[representable].all()


def test_stochastic_mean_over_seeds_is_the_value():
    x = torch.rand(16, 64, generator=torch.Generator().manual_seed(1)) * 6
    x[:, ::32] = 6.0
    total = sum(mxfp4.decode(*mxfp4.quantize(x, seed=torch.tensor(seed))).double() for seed in range(400))
    error = total / 400 - x
    assert abs(error.mean().item()) < 4 / (6 * 400 * x.numel()) ** 0.5
    assert error.abs().max() < 6 * 2.0 / (4 * 400) ** 0.5
