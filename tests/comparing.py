"""Equality of tensors with a message of what differs where. An assertion on large lists takes pytest minutes."""

import torch
from torch.nn import functional as F


def assert_same(result, expected):
    """Shapes and values; 0.0 equals -0.0, NaN equals NaN. `expected` may be nested lists."""
    if not isinstance(expected, torch.Tensor):
        expected = torch.tensor(expected, dtype=result.dtype)
    assert result.shape == expected.shape
    different = ~((result == expected) | ((result != result) & (expected != expected)))
    where = different.nonzero()
    if len(where):
        first = tuple(where[0].tolist())
        got, wanted = result[first].item(), expected[first].item()
        raise AssertionError(f"{len(where)} of {result.numel()} differ, first at {first}: {got} is not {wanted}")


def assert_codes(result, expected, scales):
    """Codes [R, C] of the oracle's rows: NaN where the code may be any, and there the block's scale must be NaN.

    scales: float32 [R, C / block]. Columns beyond the expected ones are padding, of code 0.
    """
    expected = torch.tensor(expected)
    expected = F.pad(expected.float(), (0, result.shape[1] - expected.shape[1]))
    meaningless = scales.isnan().repeat_interleave(result.shape[1] // scales.shape[1], 1)
    assert meaningless[expected.isnan()].all()
    assert_same(torch.where(meaningless, 0, result), torch.where(meaningless, 0, expected).to(result.dtype))
