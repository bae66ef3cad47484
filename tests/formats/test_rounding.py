"""E2M1 rounding against thresholds, its stochastic form over all of its noise, and rounding to bfloat16."""

import math

import oracle
import pytest
import torch
from comparing import assert_same
from hypothesis import given
from hypothesis import strategies as st

from fp4compile.formats import rounding

floats = st.floats(width=32)
ALL_NOISE = torch.arange(2**16, dtype=torch.int32)
STEPS = [b - a for a, b in zip(oracle.MAGNITUDES, oracle.MAGNITUDES[1:], strict=False)]


def neighbours_of_every_threshold():
    bounds = [(a + b) / 2 for a, b in zip(oracle.MAGNITUDES, oracle.MAGNITUDES[1:], strict=False)]
    points = torch.tensor([*bounds, *oracle.MAGNITUDES, 2.0**-149, 3.4e38])
    up = torch.nextafter(points, torch.full_like(points, math.inf))
    down = torch.nextafter(points, torch.full_like(points, -math.inf))
    both_signs = torch.cat((points, up, down))
    return torch.cat((both_signs, -both_signs))


def test_codes_at_and_beside_every_threshold():
    v = neighbours_of_every_threshold()
    assert_codes(rounding.e2m1_codes(v), v)


@given(st.lists(floats, min_size=1, max_size=64))
def test_codes_of_any_float(values):
    v = torch.tensor(values)
    assert_codes(rounding.e2m1_codes(v), v)


@given(st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=64))
def test_codes_of_floats_in_range(values):
    v = torch.tensor(values)
    assert_codes(rounding.e2m1_codes(v), v)


def assert_codes(codes, v):
    assert_same(codes, [oracle.e2m1(x) if x else 0 for x in v.tolist()])


def test_nan_becomes_the_code_of_six_and_infinities_saturate():
    v = torch.tensor([math.nan, -math.nan, math.inf, -math.inf])
    assert rounding.e2m1_codes(v).tolist() == [7, 7, 7, 15]
    for noise in (0, 2**16 - 1):
        bits = torch.full((4,), noise, dtype=torch.int32)
        assert rounding.e2m1_codes_stochastic(v, bits).tolist() == [7, 7, 7, 15]


def test_values_are_the_table_and_round_to_themselves():
    codes = torch.arange(16.0)
    values = rounding.e2m1_values(codes)
    assert values.tolist() == [oracle.e2m1_value(code) for code in range(16)]
    assert rounding.e2m1_codes(values).tolist() == [0 if code == 8 else code for code in range(16)]


@given(st.floats(-6, 6, width=32))
def test_stochastic_mean_over_all_noise_is_within_its_bound(x):
    """|E[SR(v)] - v| <= step * 2^-17: the 16-bit fixed point keeps v to half a unit of step * 2^-16."""
    values = stochastic_values(x)
    upper = next(i for i in range(1, 8) if abs(x) <= oracle.MAGNITUDES[i])
    assert abs(values.mean().item() - x) <= STEPS[upper - 1] * 2.0**-17


@given(st.floats(-6, 6, width=32))
def test_stochastic_rounds_to_one_of_the_two_neighbours(x):
    upper = next(i for i in range(1, 8) if abs(x) <= oracle.MAGNITUDES[i])
    allowed = {math.copysign(oracle.MAGNITUDES[i], x) for i in (upper - 1, upper)}
    assert set(stochastic_values(x).tolist()) <= allowed


@given(st.sampled_from(oracle.MAGNITUDES), st.sampled_from((1, -1)))
def test_stochastic_keeps_what_is_representable(magnitude, sign):
    assert set(stochastic_values(sign * magnitude).tolist()) == {sign * magnitude}


@given(st.floats(min_value=6, allow_infinity=False, width=32))
def test_stochastic_saturates(x):
    assert set(stochastic_values(x).tolist()) == {6.0}


def stochastic_values(x):
    """float64, one for each of the 2^16 noises."""
    v = torch.full((2**16,), x)
    return rounding.e2m1_values(rounding.e2m1_codes_stochastic(v, ALL_NOISE)).double()


@given(st.lists(floats, min_size=1, max_size=64))
def test_round_to_bfloat16_is_torch_s_and_the_oracle_s(values):
    x = torch.tensor(values)
    rounded = rounding.round_to_bfloat16(x)
    assert torch.equal(rounded.isnan(), x.isnan())
    assert torch.equal(rounded.nan_to_num(0.0), x.to(torch.bfloat16).float().nan_to_num(0.0))
    numbers = [v for v in x.tolist() if not math.isnan(v)]
    assert_same(rounded[~x.isnan()], [oracle.bf16(v) for v in numbers])


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FFFFFFF, 0x7FC00000, -1, -0x400001])
def test_round_to_bfloat16_keeps_every_nan(bits):
    assert rounding.round_to_bfloat16(torch.tensor([bits], dtype=torch.int32).view(torch.float32)).isnan().all()
