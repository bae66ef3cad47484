"""Ahead-of-time compilation, on a machine without a GPU: facts are the compiler's, names are the disassembler's."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
import tiny_kernels

from fp4compile.errors import ConfigError
from fp4compile.lowering import aot, sass
from fp4compile.lowering.aot import CAPABILITIES, Compiled, compile_kernel
from fp4compile.lowering.kernels.kernel import Kernel
from fp4compile.lowering.targets import ISAS

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="TRITON_INTERPRET compiles nothing")

BLACKWELL = ["sm_100a", "sm_103a", "sm_120a", "sm_121a"]


@pytest.fixture(autouse=True)
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton must not look for a GPU."""

    def refuse(*args: object) -> None:
        raise AssertionError("Triton's driver was asked")

    monkeypatch.setattr(type(triton.runtime.driver), "active", property(refuse))


def counts(compiled: Compiled) -> dict[str, int]:
    """What matters, zeros left out; a test that needs it is skipped where Triton cannot disassemble."""
    if compiled.sass is None:
        pytest.skip(compiled.note)
    return {name: count for name, count in sass.count_what_matters(compiled.opcodes).items() if count}


def test_every_architecture_is_one_of_the_targets() -> None:
    assert set(CAPABILITIES.values()) <= set(ISAS)


@pytest.mark.parametrize("arch", CAPABILITIES)
def test_a_kernel_compiles_for_every_architecture(arch: str) -> None:
    compiled = compile_kernel(tiny_kernels.DIVIDE, arch)
    major, minor = CAPABILITIES[arch]
    assert f"cuda:{major}{minor}" in compiled.ttgir
    assert f".target sm_{major}{minor}" in compiled.ptx
    assert compiled.cubin.startswith(b"\x7fELF")
    assert (compiled.warps, compiled.spilled, compiled.tensor_memory) == (4, 0, 0)
    assert 8 <= compiled.registers <= 255
    assert compiled.shared > 0  # the sum goes across warps
    found = counts(compiled)
    assert found["divisions"] == found["calls"] == 8
    assert found["shuffles"] > 0
    assert 0 < compiled.main_opcodes.total() < compiled.opcodes.total()


def test_the_disassembler_knows_what_it_must() -> None:
    """Else the tests that read machine code would all be skipped. Triton 3.6's knows neither 10.3 nor 12.1."""
    for arch in ("sm_80", "sm_89", "sm_90", "sm_100a", "sm_120a"):
        assert compile_kernel(tiny_kernels.DIVIDE, arch).sass is not None


def test_aligned_pointers_are_read_by_vectors() -> None:
    aligned = compile_kernel(tiny_kernels.DIVIDE, "sm_90")
    unaligned = compile_kernel(dataclasses.replace(tiny_kernels.DIVIDE, aligned=()), "sm_90")
    assert aligned.opcodes["LDG.E.128"] == 2
    assert unaligned.opcodes["LDG.E.128"] == 0
    assert unaligned.opcodes["LDG.E"] == 8


@pytest.mark.parametrize("arch", BLACKWELL)
def test_nearest_conversion_is_one_instruction(arch: str) -> None:
    compiled = compile_kernel(tiny_kernels.NEAREST, arch)
    assert "cvt.rn.satfinite.e2m1x2.f32" in compiled.ptx
    assert counts(compiled)["E2M1 nearest"] == 8
    assert "E2M1 stochastic" not in counts(compiled)


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
def test_stochastic_conversion_is_two_instructions(arch: str) -> None:
    compiled = compile_kernel(tiny_kernels.STOCHASTIC, arch)
    assert "cvt.rs.satfinite.e2m1x4.f32" in compiled.ptx
    assert counts(compiled)["E2M1 stochastic"] == 16
    assert "E2M1 nearest" not in counts(compiled)


@pytest.mark.parametrize(
    ("kernel", "arch"),
    [
        (tiny_kernels.STOCHASTIC, "sm_120a"),
        (tiny_kernels.STOCHASTIC, "sm_121a"),
        (tiny_kernels.STOCHASTIC, "sm_90"),
        (tiny_kernels.NEAREST, "sm_90"),
    ],
)
def test_the_table_of_targets_leaves_out_what_the_assembler_refuses(
    kernel: Kernel, arch: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Exception, match=r"(?s)ptxas.*not supported on \.target"):
        compile_kernel(kernel, arch)
    assert ".visible .entry" not in capfd.readouterr().out
    isa = ISAS[CAPABILITIES[arch]]
    assert "cvt" not in ((isa.stochastic,) if kernel is tiny_kernels.STOCHASTIC else (isa.nearest, isa.stochastic))


@pytest.mark.parametrize("arch", BLACKWELL)
def test_e2m1_decodes_in_one_instruction(arch: str) -> None:
    assert counts(compile_kernel(tiny_kernels.DECODE, arch))["E2M1 decodes"] == 8


@pytest.mark.parametrize("arch", CAPABILITIES)
def test_e4m3_converts_in_hardware_where_the_table_says_so(arch: str) -> None:
    if ISAS[CAPABILITIES[arch]].e4m3 == "integer":
        with pytest.raises(Exception, match="fp8e4nv not supported"):
            compile_kernel(tiny_kernels.E4M3, arch)
        return
    found = counts(compile_kernel(tiny_kernels.E4M3, arch))
    assert found["E4M3 encodes"] > 0 and found["E4M3 decodes"] > 0


@pytest.mark.parametrize("arch", BLACKWELL)
def test_block_scaled_products_use_fp4_tensor_cores(arch: str) -> None:
    compiled = compile_kernel(tiny_kernels.PRODUCT, arch)
    assert "kind::mxf4nvf4" in compiled.ptx
    assert (compiled.tensor_memory > 0) == (arch in ("sm_100a", "sm_103a"))
    found = counts(compiled)
    assert found["FP4 MMA"] > 0
    assert "warp MMA" not in found


@pytest.mark.parametrize(
    ("arch", "product"), [("sm_80", "warp MMA"), ("sm_90", "warpgroup MMA"), ("sm_100a", "tcgen05 MMA")]
)
def test_tensor_descriptors_are_tma_where_there_is_one(arch: str, product: str) -> None:
    found = counts(compile_kernel(tiny_kernels.TILES, arch))
    assert found[product] > 0
    assert ("TMA loads" in found and "TMA stores" in found) == (arch != "sm_80")


def test_spilled_registers_are_seen() -> None:
    compiled = compile_kernel(tiny_kernels.SPILLING, "sm_90")
    assert compiled.spilled > 0
    found = counts(compiled)
    assert found["local loads"] > 0 and found["local stores"] > 0


def test_an_unknown_architecture_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'sm_42'.*sm_80.*sm_100a"):
        compile_kernel(tiny_kernels.NEAREST, "sm_42")


def test_both_names_of_hoppers_target_give_the_same() -> None:
    """Triton compiles 9.0 for sm_90a, whichever is asked for."""
    one, other = (compile_kernel(tiny_kernels.DIVIDE, arch) for arch in ("sm_90", "sm_90a"))
    assert one == other and one.arch == "sm_90" and ".target sm_90a" in one.ptx
    assert aot.architecture("sm_100a") == "sm_100a"


def test_the_interpreter_is_named_where_it_prevents_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ConfigError, match="unset it"):
        compile_kernel(tiny_kernels.NEAREST, "sm_100a")


def test_a_machine_code_that_cannot_be_disassembled_keeps_its_other_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    run = aot._run

    def without_nvdisasm(*command: str) -> object:
        return run("false") if "nvdisasm" in command[0] else run(*command)

    monkeypatch.setattr(aot, "_run", without_nvdisasm)
    compiled = compile_kernel(tiny_kernels.DIVIDE, "sm_90")
    assert compiled.sass is None
    assert "not disassembled" in compiled.note
    assert compiled.registers > 0
    assert not compiled.opcodes


def test_what_was_compiled_travels_between_processes() -> None:
    compiled = compile_kernel(tiny_kernels.DIVIDE, "sm_90")
    assert pickle.loads(pickle.dumps(compiled)) == compiled
