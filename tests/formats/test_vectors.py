"""The published cases: bytes of an independent implementation of the formulas."""

import json
from pathlib import Path

import pytest
import torch
from comparing import assert_same

from fp4compile import quantize

CASES = json.loads((Path(__file__).parents[1] / "data" / "vectors.json").read_text())["cases"]


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_published_case(case):
    x = torch.tensor([float.fromhex(v) for v in case["input_hex"]], dtype=torch.float32).view(case["shape"])
    result = quantize(x, block=tuple(case["block"]), rotate=case["rotate_last_dim"])
    assert_same(result.amax, float.fromhex(case["amax_hex"]))
    assert_same(result.scales.view(torch.uint8).flatten(), list(bytes.fromhex(case["scale_bytes_hex"])))
    assert_same(result.packed.flatten(), list(bytes.fromhex(case["packed_hex"])))
    assert_same(result.dequantize().flatten(), [float.fromhex(v) for v in case["value_hex"]])
