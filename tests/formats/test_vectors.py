"""The published cases: bytes of an independent implementation of the formulas."""

import json
from pathlib import Path

import pytest
import torch

from fp4compile import quantize

CASES = json.loads((Path(__file__).parents[1] / "data" / "vectors.json").read_text())["cases"]


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_published_case(case):
    x = torch.tensor([float.fromhex(v) for v in case["input_hex"]], dtype=torch.float32).view(case["shape"])
    result = quantize(x, block=tuple(case["block"]), rotate=case["rotate_last_dim"])
    assert result.amax.item() == float.fromhex(case["amax_hex"])
    assert bytes(result.scales.view(torch.uint8).flatten().tolist()).hex() == case["scale_bytes_hex"]
    assert nibbles(result.packed.flatten().tolist()) == nibbles(bytes.fromhex(case["packed_hex"]))
    # Equality of floats: -0.0 and 0.0 are one value, all others are compared to the last bit.
    assert result.dequantize().flatten().tolist() == [float.fromhex(v) for v in case["value_hex"]]


def nibbles(packed):
    """Codes, with 8 (-0.0) read as 0."""
    codes = [code for byte in packed for code in (byte & 15, byte >> 4)]
    return [0 if code == 8 else code for code in codes]
