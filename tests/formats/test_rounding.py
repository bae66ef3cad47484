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


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=64))
def test_codes_of_any_number(values):
    v = torch.tensor(values)
    assert_codes(rounding.e2m1_codes(v), v)


@given(st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=64))
def test_codes_of_floats_in_range(values):
    v = torch.tensor(values)
    assert_codes(rounding.e2m1_codes(v), v)


def assert_codes(codes, v):
    assert_same(codes, [oracle.e2m1(x) for x in v.tolist()])


def all_codes(v):
    """To nearest, and stochastic of the least and the largest noise."""
    yield rounding.e2m1_codes(v)
    for noise in (0, 2**16 - 1):
        yield rounding.e2m1_codes_stochastic(v, torch.full(v.shape, noise, dtype=torch.int32))


def test_infinities_saturate():
    for codes in all_codes(torch.tensor([math.inf, -math.inf])):
        assert codes.tolist() == [7, 15]


def test_nan_becomes_some_code():
    """Any, but one of the sixteen: a code is packed beside others."""
    v = torch.tensor([0x7FC00000, -0x400000, 0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    assert v.isnan().all()
    for codes in all_codes(v):
        assert set(codes.tolist()) <= set(range(16))


def test_the_sign_is_the_sign_bit_of_zero_too():
    for codes in all_codes(torch.tensor([0.0, -0.0])):
        assert codes.tolist() == [0, 8]
    v = torch.tensor([2.0**-149, -(2.0**-149)])
    assert rounding.e2m1_codes(v).tolist() == [0, 8]
    assert rounding.e2m1_values(torch.tensor([0.0, 8.0])).signbit().tolist() == [False, True]


def test_stochastic_codes_at_and_beside_every_threshold():
    assert_stochastic_codes(neighbours_of_every_threshold().tolist())


@given(st.lists(st.one_of(st.floats(-8, 8, width=32), st.floats(width=32, allow_nan=False)), min_size=1, max_size=16))
def test_stochastic_codes_of_any_number(values):
    assert_stochastic_codes(values)


@given(st.sampled_from(range(7)), st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=16))
def test_stochastic_codes_of_ties(index, fractions):
    """g half a unit above a multiple of 2^-16: where it goes depends on whether the noise is even."""
    units = [(fraction + 0.5) * 2.0**-16 for fraction in fractions]
    assert_stochastic_codes([oracle.MAGNITUDES[index] + STEPS[index] * unit for unit in units])


def assert_stochastic_codes(values):
    """Of both signs, for the noises that decide: those that carry g just below, to and just above a whole number."""
    values = [sign * value for value in values for sign in (1, -1)]
    v, noises = [], []
    for value in values:
        a = abs(value)
        index = min(sum(magnitude <= a for magnitude in oracle.MAGNITUDES) - 1, 6)
        needed = 2**16 - int(min((a - oracle.MAGNITUDES[index]) / STEPS[index], 1) * 2**16)
        for noise in {0, 1, 2**15, 2**16 - 2, 2**16 - 1, *range(needed - 3, needed + 3)} & set(range(2**16)):
            v.append(value)
            noises.append(noise)
    codes = rounding.e2m1_codes_stochastic(torch.tensor(v), torch.tensor(noises, dtype=torch.int32))
    assert_same(codes, [oracle.e2m1_stochastic(value, noise) for value, noise in zip(v, noises, strict=True)])


def test_values_are_the_table_and_round_to_themselves():
    codes = torch.arange(16.0)
    values = rounding.e2m1_values(codes)
    assert values.tolist() == [oracle.e2m1_value(code) for code in range(16)]
    for again in all_codes(values):
        assert torch.equal(again, codes)


@given(st.floats(-6, 6, width=32))
def test_stochastic_mean_over_all_noise_is_within_its_bound(x):
    """|E[SR(v)] - v| <= step * 2^-17: 16 bits of fraction keep v to half a unit of step * 2^-16."""
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
