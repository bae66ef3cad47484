"""The random bits: their definition, what they depend on and do not, and their statistics."""

import itertools

import oracle
import pytest
import torch
from comparing import assert_same
from hypothesis import given
from hypothesis import strategies as st
from strategies import seeds, sites

from fp4compile.errors import ConfigError
from fp4compile.formats import noise

CPU = torch.device("cpu")
ROWS, COLS = 512, 1024


def bits(seed, site=0, rows=ROWS, cols=COLS):
    return noise.noise16(torch.tensor(seed), site, rows, cols, CPU)


def centred(x):
    """Uniform in (-0.5, 0.5), flat."""
    return (x.double().flatten() + 0.5) / 2**16 - 0.5


def z_of_product(a, b):
    """Standard deviations from 0 of the mean of a * b, were a and b independent and uniform."""
    return (a * b).mean().item() * 12 * len(a) ** 0.5


@given(seeds, sites, st.integers(1, 5), st.integers(1, 9))
def test_definition(seed, site, rows, fours):
    assert_same(bits(seed, site, rows, 4 * fours), oracle.noise_of(seed, site, rows, 4 * fours))


@given(seeds, sites, st.integers(1, 40))
def test_rows_do_not_depend_on_how_many_there_are(seed, site, rows):
    assert torch.equal(bits(seed, site, rows, 32), bits(seed, site, 41, 32)[:rows])


def test_more_elements_than_distinct_noise_are_refused():
    noise.check_size(2**20, 2**14)
    with pytest.raises(ConfigError, match=r"2\^34 elements; quantize it in pieces"):
        noise.check_size(2**20, 2**14 + 16)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**40 + 7])
@pytest.mark.parametrize("place", range(4))
def test_every_value_is_equally_frequent(seed, place):
    values = bits(seed, rows=8 * ROWS)[:, place::4]
    assert -6 < z_of_counts(values.flatten()) < 6


@pytest.mark.parametrize("seed", [0, 1, -1, 2**40 + 7])
@pytest.mark.parametrize("shift", [0, 8], ids=["low bytes", "high bytes"])
def test_two_values_of_a_counter_are_jointly_uniform(seed, shift):
    """Any two of the four: all pairs of their high, or of their low, 8 bits are equally frequent."""
    values = bits(seed, rows=4 * ROWS).view(-1, 4) >> shift & 0xFF
    for i, j in itertools.combinations(range(4), 2):
        assert -6 < z_of_counts(values[:, i] << 8 | values[:, j]) < 6, (i, j)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**40 + 7])
@pytest.mark.parametrize("place", range(4))
def test_neighbouring_counters_are_jointly_uniform(seed, place):
    values = bits(seed, rows=4 * ROWS).view(-1, 4)[:, place] >> 8
    assert -6 < z_of_counts(values[:-1] << 8 | values[1:]) < 6


def z_of_counts(values):
    """Standard deviations of chi-square, of the counts of 2^16 values, from its mean were they equally likely."""
    counts = torch.bincount(values, minlength=2**16).double()
    expected = counts.mean()
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    return (chi_square - (2**16 - 1)) / (2 * (2**16 - 1)) ** 0.5


@pytest.mark.parametrize("seed", [0, 1, -1, 2**40 + 7])
def test_every_bit_is_unbiased(seed):
    x = bits(seed).flatten()
    for bit in range(16):
        z = ((x >> bit & 1).double().mean().item() - 0.5) * 2 * len(x) ** 0.5
        assert abs(z) < 5, bit


@pytest.mark.parametrize("seed", [0, 12345])
@pytest.mark.parametrize("lag", [*range(1, 8), 16, 32, 64, COLS // 2, COLS, 8 * COLS, 16 * COLS])
def test_neighbours_and_rows_are_uncorrelated(seed, lag):
    x = centred(bits(seed))
    assert abs(z_of_product(x[:-lag], x[lag:])) < 6


@pytest.mark.parametrize("other", [(1, 0), (2**32, 0), (-1, 0), (0, 1), (0, 2), (0, 2**31)])
def test_other_seeds_and_sites_have_other_noise(other):
    a, b = bits(0, 0), bits(*other)
    assert abs(z_of_product(centred(a), centred(b))) < 5
    assert abs((a == b).double().mean().item() - 2.0**-16) < 6 * (2.0**-16 / a.numel()) ** 0.5


def test_one_element_is_uniform_over_consecutive_seeds_and_sites():
    by_seed = torch.stack([bits(seed, 3, 2, 16).flatten() for seed in range(4096)])
    by_site = torch.stack([bits(5, site, 2, 16).flatten() for site in range(4096)])
    for x in (by_seed, by_site):
        z = (x.double().mean(0) / 2**16 - 0.5) * (12 * len(x)) ** 0.5
        assert z.abs().max() < 5
        steps = [z_of_product(centred(x[1:, i]), centred(x[:-1, i])) for i in range(x.shape[1])]
        assert max(map(abs, steps)) < 5
