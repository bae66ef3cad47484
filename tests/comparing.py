"""Equality of tensors with a message of what differs where. An assertion on large lists takes pytest minutes."""

import torch


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
