"""The tensor core's order of block scales."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp4compile.formats import layout

DTYPES = st.sampled_from((torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu))


def scales(rows, cols, seed, dtype):
    random = torch.Generator().manual_seed(seed)
    return torch.randint(1, 256, (rows, cols), generator=random, dtype=torch.uint8).view(dtype)


@given(st.integers(1, 300), st.integers(1, 11), st.integers(0, 99), DTYPES)
def test_round_trip(rows, cols, seed, dtype):
    original = scales(rows, cols, seed, dtype)
    tiles = layout.to_tiles(original)
    assert tiles.dtype == dtype and tiles.is_contiguous()
    assert tiles.shape == (-(-rows // 128), -(-cols // 4), 32, 4, 4)
    back = layout.from_tiles(tiles, rows, cols)
    assert back.dtype == dtype and torch.equal(back.view(torch.uint8), original.view(torch.uint8))


@pytest.mark.parametrize(("rows", "cols"), [(128, 4), (130, 9), (1, 1), (257, 3)])
def test_every_scale_is_at_its_offset_and_the_rest_is_zero(rows, cols):
    original = scales(rows, cols, 0, torch.uint8)
    memory = layout.to_tiles(original).flatten()
    tiles_across = -(-cols // 4)
    seen = torch.zeros_like(memory, dtype=torch.bool)
    for m in range(rows):
        for k in range(cols):
            tile = (m // 128) * tiles_across + k // 4
            offset = tile * 512 + (m % 32) * 16 + (m // 32 % 4) * 4 + k % 4
            assert memory[offset] == original[m, k]
            seen[offset] = True
    assert seen.sum() == rows * cols and not memory[~seen].any()
