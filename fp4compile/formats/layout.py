"""The order in which tensor cores read block scales: tiles of 128 rows x 4 scales, 512 bytes each.

Scale (m, k) of a [rows, cols] matrix is byte (m % 32) * 16 + (m // 32 % 4) * 4 + k % 4 of the tile
(m // 128) * ceil(cols / 4) + k // 4. What fills the last tiles is written as zero, never left uninitialised.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .packing import pad_columns, pad_rows

TILE_ROWS = 128
TILE_COLS = 4


def tiles_shape(rows: int, cols: int) -> tuple[int, int, int, int, int]:
    """Of the tiles of a [rows, cols] matrix of scales."""
    return (rows + TILE_ROWS - 1) // TILE_ROWS, (cols + TILE_COLS - 1) // TILE_COLS, 32, 4, TILE_COLS


def to_tiles(scales: Tensor) -> Tensor:
    """[rows, cols] of one-byte scales -> [ceil(rows/128), ceil(cols/4), 32, 4, 4], contiguous, same dtype."""
    padded = pad_rows(pad_columns(scales.view(torch.uint8), TILE_COLS), TILE_ROWS)
    tiles = padded.unflatten(0, (-1, 4, 32)).unflatten(-1, (-1, TILE_COLS)).permute(0, 3, 2, 1, 4)
    return tiles.contiguous().view(scales.dtype)


def from_tiles(tiles: Tensor, rows: int, cols: int) -> Tensor:
    """The inverse of to_tiles: [rows, cols], contiguous, same dtype."""
    flat = tiles.view(torch.uint8).permute(0, 3, 2, 1, 4).flatten(3, 4).flatten(0, 2)
    return flat[:rows, :cols].contiguous().view(tiles.dtype)
