"""Which lowering a device has is a pure table: it can be read for every GPU on a machine without one."""

from __future__ import annotations

import pytest
import torch

from fp4compile.lowering import targets
from fp4compile.lowering.targets import ISAS, Isa, capability_of, target_for

NO_CVT_RS = [(11, 0), (12, 0), (12, 1)]
DATACENTER_BLACKWELL = [(10, 0), (10, 3)]
EMULATED = [(8, 0), (8, 6), (8, 7), (8, 9), (9, 0)]


def isa(capability: tuple[int, int]) -> Isa:
    found = target_for("cuda", capability).isa
    assert found is not None
    return found


def test_every_known_capability_has_kernels_and_says_which() -> None:
    assert sorted(ISAS) == sorted([*EMULATED, *DATACENTER_BLACKWELL, *NO_CVT_RS])
    for capability in ISAS:
        target = target_for("cuda", capability)
        assert (target.device, target.lowering) == ("cuda", "kernels")
        assert f"sm_{capability[0]}{capability[1]}" in target.reason
        assert isa(capability).inline


@pytest.mark.parametrize("capability", DATACENTER_BLACKWELL)
def test_datacenter_blackwell_uses_every_instruction(capability: tuple[int, int]) -> None:
    assert isa(capability) == Isa("cvt", "cvt", "cvt", "block_scaled")


@pytest.mark.parametrize("capability", NO_CVT_RS)
def test_where_there_is_no_cvt_rs_stochastic_codes_come_from_noise(capability: tuple[int, int]) -> None:
    assert isa(capability) == Isa("cvt", "noise", "cvt", "block_scaled")


@pytest.mark.parametrize("capability", EMULATED)
def test_without_fp4_instructions_codes_come_from_formulas(capability: tuple[int, int]) -> None:
    found = isa(capability)
    assert (found.nearest, found.stochastic, found.matmul) == ("formula", "noise", "decoded")


@pytest.mark.parametrize("capability", ISAS)
def test_e4m3_is_integer_arithmetic_before_8_9_only(capability: tuple[int, int]) -> None:
    assert isa(capability).e4m3 == ("integer" if capability < (8, 9) else "cvt")


@pytest.mark.parametrize("capability", ISAS)
def test_native_fp4_means_block_scaled_products(capability: tuple[int, int]) -> None:
    target = target_for("cuda", capability)
    assert target.native_fp4 == (capability >= (10, 0))
    assert ("native FP4" in target.reason) == target.native_fp4


@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (9, 9), (13, 0)])
def test_an_unknown_gpu_runs_the_reference_and_the_reason_names_it(capability: tuple[int, int]) -> None:
    target = target_for("cuda", capability)
    assert (target.lowering, target.isa, target.native_fp4) == ("reference", None, False)
    assert f"sm_{capability[0]}{capability[1]}" in target.reason
    assert "10.0" in target.reason


def test_a_cpu_compiles_the_formulas() -> None:
    target = target_for("cpu")
    assert (target.lowering, target.isa, target.native_fp4) == ("compiled", None, False)
    assert target.reason


@pytest.mark.parametrize("device", ["cuda", "mps", "xpu", "privateuseone"])
def test_a_device_without_capability_runs_the_reference(device: str) -> None:
    target = target_for(device)
    assert (target.device, target.lowering, target.isa) == (device, "reference", None)
    assert target.reason


def test_the_interpreter_has_no_inline_ptx_and_no_cvt() -> None:
    assert Isa("formula", "noise", "integer", "decoded", inline=False) == targets.INTERPRETER


def test_the_table_asks_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("a device was asked")

    monkeypatch.setattr(torch.cuda, "get_device_capability", refuse)
    monkeypatch.setattr(torch.cuda, "is_available", refuse)
    assert target_for("cuda", (10, 0)) == target_for("cuda", (10, 0))
    assert capability_of(torch.device("cpu")) is None
