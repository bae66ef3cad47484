"""The random Hadamard transform: its order of additions, its orthogonality, its padding."""

import math

import oracle
import pytest
import strategies
import torch
from comparing import assert_same
from hypothesis import given
from hypothesis import strategies as st

from fp4compile.formats import rotation

SIZES = st.sampled_from(rotation.SIZES)
MASKS = st.one_of(st.just(rotation.SIGNS), st.integers(0, 2**16 - 1))


def test_the_default_signs_are_transformer_engine_s():
    expected = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
    # The first output of a group is the sum of its signed elements / 4.
    assert (rotation.rotate(torch.eye(16))[:, 0] * 4).tolist() == expected


@given(strategies.matrices(rows=(1, 3), cols=(1, 16, 33, 130)), SIZES, MASKS)
def test_bits_are_the_oracle_s(x, size, signs):
    """Float32 additions in one order; fp16 and fp32 are rounded to bfloat16 first, the result once more."""
    cols = -(-x.shape[1] // size) * size
    rows = [[oracle.bf16(v) for v in row] + [0.0] * (cols - len(row)) for row in x.float().tolist()]
    expected = [[v for i in range(0, cols, size) for v in oracle.rotate(row[i : i + size], signs)] for row in rows]
    result = rotation.rotate(x, size, signs)
    assert result.dtype == torch.bfloat16
    assert_same(result.float(), expected)


@pytest.mark.parametrize("size", rotation.SIZES)
def test_large_terms_that_cancel_leave_the_oracle_s_rounding(size):
    """2^24 + 1 is no float32: in which order such terms meet shows in the sum."""
    choice = torch.tensor([2.0**24, -(2.0**24), 1.0, -1.0, 3.0, 0.5])
    indices = torch.randint(0, len(choice), (64, size), generator=torch.Generator().manual_seed(size))
    x = choice[indices]
    expected = [oracle.rotate(row, rotation.SIGNS) for row in x.tolist()]
    assert_same(rotation.rotate(x, size).float(), expected)


@pytest.mark.parametrize("size", [4, 16, 64])
def test_no_sum_overflows_whose_result_does_not(size):
    """sqrt(size) terms of the largest magnitude: their sum divided by sqrt(size) is that magnitude."""
    largest = torch.finfo(torch.bfloat16).max
    x = torch.zeros(8, size)
    for row in x:
        row[torch.randperm(size, generator=torch.Generator().manual_seed(size))[: math.isqrt(size)]] = largest
    result = rotation.rotate(x, size).double()
    assert result.isfinite().all() and result.abs().max() == largest
    expected = x.double() @ (rotation.rotate(torch.eye(size), size).double())
    assert torch.equal(result, expected.to(torch.bfloat16).double())


@pytest.mark.parametrize("size", rotation.SIZES)
def test_the_matrix_is_orthogonal_and_sylvester_s(size):
    signs = [-1.0 if rotation.SIGNS >> (i % 16) & 1 else 1.0 for i in range(size)]
    matrix = rotation.rotate(torch.eye(size), size).double()
    scale = matrix[0, 0].abs()
    assert torch.equal(matrix / scale, torch.tensor(signs).double().unsqueeze(1) * sylvester(size))
    assert scale.item() == pytest.approx(1 / math.sqrt(size), rel=2**-9)


def sylvester(size):
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < size:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return h


@pytest.mark.parametrize("size", rotation.SIZES)
def test_a_product_of_two_rotated_matrices_is_the_product(size):
    """(A H)(B H)^T = A B^T but for the roundings to bfloat16, 2^-9 relative each."""
    random = torch.Generator().manual_seed(size)
    a, b = torch.randn(24, 3 * size - 5, generator=random), torch.randn(40, 3 * size - 5, generator=random)
    a, b = a.to(torch.bfloat16), b.to(torch.bfloat16)
    product = rotation.rotate(a, size).double() @ rotation.rotate(b, size).double().t()
    expected = a.double() @ b.double().t()
    assert ((product - expected).norm() / expected.norm()).item() < 2**-8


@given(strategies.matrices(), SIZES, MASKS)
def test_no_rotation_exceeds_the_bound(x, size, signs):
    """What x's largest element is in bfloat16, times the growth: a bfloat16 number, so that rounding stays below it.
    Where the rotation overflows, so does the bound."""
    bound = bound_of(x.to(torch.bfloat16), size)
    result = rotation.rotate(x, size, signs).float().abs()
    assert bound == torch.inf or (result <= bound).all()


def bound_of(x, size):
    bound = x.abs().amax().float()
    for factor in rotation.bound_factors(size):
        bound = bound * factor
    return bound


@given(SIZES, MASKS, st.integers(0, 7), st.integers(-2, 1))
def test_where_a_rotation_overflows_the_bound_is_no_number(size, signs, row, exponent):
    """Magnitudes around those at which a sum, or the result, is larger than float32 or bfloat16."""
    matrix = rotation.rotate(torch.eye(size), size, signs)
    for scale in (size, rotation.growth(size)):
        x = (matrix[:, row % size].sign() * 2.0**exponent * (2.0**127 / scale)).to(torch.bfloat16)
        result = rotation.rotate(x[None], size, signs)
        assert result.isfinite().all() or bound_of(x, size) == torch.inf


def test_the_factors_are_exact_and_their_product_is_the_growth():
    for size in rotation.SIZES:
        factors = rotation.bound_factors(size)
        assert math.prod(factors) == rotation.growth(size)
        assert all(math.frexp(factor)[0] == 0.5 for factor in factors)


@given(SIZES, MASKS, st.integers(0, 127), st.floats(2.0**-126, 2.0**120), st.booleans())
def test_signs_of_a_row_of_the_matrix_grow_most_and_reach_no_more_than_the_bound(size, signs, row, magnitude, flip):
    """All of a group at its largest magnitude, with the signs that add it all up in one place: sqrt(size) times it."""
    matrix = rotation.rotate(torch.eye(size), size, signs).double()
    x = (matrix[:, row % size].sign() * magnitude * (-1 if flip else 1)).to(torch.bfloat16)
    found = rotation.rotate(x[None], size, signs).double().abs().amax()
    largest = x.double().abs().amax()
    assert found <= largest * rotation.growth(size)
    assert found == pytest.approx(largest.item() * math.sqrt(size), rel=2**-7)


@pytest.mark.parametrize("size", [4, 16, 64])
def test_the_bound_is_loosest_for_one_element_alone(size):
    x = torch.zeros(1, size)
    x[0, size // 3] = 3.0
    assert rotation.rotate(x, size).float().abs().amax() * math.sqrt(size) == 3.0


def test_the_growth_is_the_power_of_two_above_the_square_root():
    for size in rotation.SIZES:
        assert math.sqrt(size) <= rotation.growth(size) < 2 * math.sqrt(size)
        assert math.frexp(rotation.growth(size))[0] == 0.5


@given(strategies.matrices_with_nonfinite(exponents=(0,)))
def test_nan_and_inf_spread_over_their_group(x):
    result = rotation.rotate(x).unflatten(-1, (-1, 16))
    padded = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % 16)).unflatten(-1, (-1, 16))
    bad = ~padded.isfinite().all(-1)
    assert not result[bad].isfinite().any() and result[~bad].isfinite().all()


@given(strategies.matrices(), SIZES)
def test_strides_do_not_matter_and_the_result_is_contiguous(x, size):
    result = rotation.rotate(x, size)
    assert torch.equal(result.view(torch.int16), rotation.rotate(x.contiguous(), size).view(torch.int16))
    assert result.is_contiguous() and result.shape == (x.shape[0], -(-x.shape[1] // size) * size)


@pytest.mark.parametrize("shape", [(0, 16), (3, 0)])
def test_empty(shape):
    assert rotation.rotate(torch.empty(shape)).shape == shape
