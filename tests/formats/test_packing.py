"""Packing and its inverse."""

import torch
from comparing import assert_same
from hypothesis import given
from hypothesis import strategies as st

from fp4compile.formats import packing


@given(st.lists(st.lists(st.integers(0, 15), min_size=16, max_size=16), min_size=1, max_size=8))
def test_the_even_element_is_in_the_low_nibble(rows):
    packed = packing.pack_codes(torch.tensor(rows, dtype=torch.float32))
    expected = [row[i] | row[i + 1] << 4 for row in rows for i in range(0, 16, 2)]
    assert_same(packed, expected)


@given(st.integers(0, 5), st.integers(0, 4), st.integers(0, 2**32 - 1))
def test_unpacking_is_the_inverse(rows, blocks, seed):
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, blocks, 16), generator=random).float()
    packed = packing.pack_codes(codes)
    assert packed.shape == (rows, blocks * 8) and packed.dtype == torch.uint8
    assert_same(packing.unpack_codes(packed, blocks), codes.flatten(1))


def test_padding_is_added_only_where_needed():
    x = torch.ones(3, 5)
    assert packing.pad_columns(x, 5) is x and packing.pad_rows(x, 3) is x
    assert packing.pad_columns(x, 4).tolist() == [[1] * 5 + [0] * 3] * 3
    assert packing.pad_rows(x, 2).tolist() == [[1] * 5] * 3 + [[0] * 5]
