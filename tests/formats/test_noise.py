"""The random bits: their definition, what they depend on and do not, and their statistics."""

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
def test_definition(seed, site, rows, pairs):
    expected = [[oracle.noise16(seed, site, r, c, 2 * pairs) for c in range(2 * pairs)] for r in range(rows)]
    assert_same(bits(seed, site, rows, 2 * pairs), expected)


@given(seeds, sites, st.integers(1, 40))
def test_rows_do_not_depend_on_how_many_there_are(seed, site, rows):
    assert torch.equal(bits(seed, site, rows, 32), bits(seed, site, 41, 32)[:rows])


def test_more_elements_than_distinct_noise_are_refused():
    noise.check_size(2**20, 2**13)
    with pytest.raises(ConfigError, match="pieces"):
        noise.check_size(2**20, 2**13 + 16)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**40 + 7])
@pytest.mark.parametrize("half", [0, 1], ids=["even columns", "odd columns"])
def test_every_value_is_equally_frequent(seed, half):
    counts = torch.bincount(bits(seed, rows=8 * ROWS)[:, half::2].flatten(), minlength=2**16).double()
    expected = counts.mean()
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    z = (chi_square - (2**16 - 1)) / (2 * (2**16 - 1)) ** 0.5
    assert -12 < z < 6  # the hash is a bijection of words, so it may be more even than chance


@pytest.mark.parametrize("seed", [0, 1, -1, 2**40 + 7])
def test_every_bit_is_unbiased(seed):
    x = bits(seed).flatten()
    for bit in range(16):
        z = ((x >> bit & 1).double().mean().item() - 0.5) * 2 * len(x) ** 0.5
        assert abs(z) < 5, bit


@pytest.mark.parametrize("seed", [0, 12345])
@pytest.mark.parametrize("lag", [1, 2, 3, 16, 32, 64, COLS // 2, COLS, 8 * COLS, 16 * COLS])
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
