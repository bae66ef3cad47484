"""Machine code of the quantization kernels for every architecture, compiled ahead of time: what was meant is there."""

from __future__ import annotations

import functools
import re

import pytest
import torch

from fp4compile.formats.rotation import SIGNS
from fp4compile.lowering import aot, sass
from fp4compile.lowering.aot import CAPABILITIES, Compiled
from fp4compile.lowering.kernels import Kernel, all_kernels, amax, columns, common, decode, rows, weights
from fp4compile.lowering.targets import ISAS, Isa

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="TRITON_INTERPRET compiles nothing")

BLACKWELL = ["sm_100a", "sm_103a", "sm_120a", "sm_121a"]
MANY = 2**26
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FORMATS = ("nvfp4", "mxfp4")
BEFORE_3_7 = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)


def isa_of(arch: str) -> Isa:
    return ISAS[CAPABILITIES[arch]]


@functools.cache
def compiled_rows(
    arch: str, format: common.Format, stochastic: bool, dtype: torch.dtype = torch.bfloat16, decoded: bool = False
) -> Compiled:
    config = rows.choose(MANY, stochastic, 132)
    return aot.compile_kernel(
        rows.kernel(isa_of(arch), dtype, format, stochastic, config, decoded=decoded),
        arch,
    )


@functools.cache
def compiled_columns(
    arch: str, format: common.Format, stochastic: bool, dtype: torch.dtype = torch.bfloat16, decoded: bool = False
) -> Compiled:
    """Rotated, with masks."""
    config, shape = columns.choose(2**14 - 1, 2**10, 16, decoded)
    native = isa_of(arch).matmul == "block_scaled"
    one = columns.kernel(isa_of(arch), dtype, format, stochastic, True, SIGNS, config, shape, native, decoded)
    return aot.compile_kernel(one, arch)


@functools.cache
def compiled_weights(arch: str) -> Compiled:
    """Both layouts."""
    native = isa_of(arch).matmul == "block_scaled"
    one = weights.kernel(isa_of(arch), torch.bfloat16, True, True, weights.choose(), native)
    return aot.compile_kernel(one, arch)


def counts(compiled: Compiled) -> dict[str, int]:
    """What matters, zeros included; a test that needs it is skipped where Triton cannot disassemble."""
    if compiled.sass is None:
        pytest.skip(compiled.note)
    return sass.count_what_matters(compiled.opcodes)


def assert_no_spill(compiled: Compiled) -> None:
    """No stack, so nothing to store there: known without the disassembler."""
    assert compiled.spilled == 0, f"{compiled.kernel.name} on {compiled.arch}: {compiled.spilled} bytes of stack"
    if compiled.sass is not None:
        found = counts(compiled)
        assert found["local loads"] == found["local stores"] == 0


def quantization_kernels(arch: str) -> list[Kernel]:
    return [kernel for kernel in all_kernels(arch) if not kernel.family.startswith("gemm")]


# --- registers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100a", "sm_120a"])
def test_what_needs_most_registers_spills_none(arch: str) -> None:
    """A block of columns with rotation, noise and masks: one of each kind of instruction set."""
    assert_no_spill(compiled_columns(arch, "nvfp4", True))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
def test_values_of_columns_spill_no_registers(stochastic: bool, arch: str) -> None:
    """At most 96: of 5 programs on a multiprocessor."""
    compiled = compiled_columns(arch, "nvfp4", stochastic, decoded=True)
    assert compiled.registers <= 96
    assert_no_spill(compiled)


def test_weights_in_both_layouts_spill_no_registers() -> None:
    assert_no_spill(compiled_weights("sm_90"))


@pytest.mark.slow
@pytest.mark.parametrize("arch", CAPABILITIES)
def test_no_kernel_spills_registers(arch: str) -> None:
    for kernel in quantization_kernels(arch):
        assert_no_spill(aot.compile_kernel(kernel, arch))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_no_kernel_of_another_dtype_spills_registers(dtype: torch.dtype) -> None:
    isa = isa_of("sm_90")
    kernels = [
        amax.kernel(isa, dtype, amax.choose(MANY, 132)),
        amax.kernel_both(isa, dtype, True, SIGNS, amax.choose_both(2**20, 2**10, 132)),
        weights.kernel(isa, dtype, True, True, weights.choose()),
    ]
    for kernel in kernels:
        assert_no_spill(aot.compile_kernel(kernel, "sm_90"))
    for format in FORMATS:
        assert_no_spill(compiled_rows("sm_90", format, True, dtype))
        assert_no_spill(compiled_columns("sm_90", format, True, dtype))
        assert_no_spill(compiled_rows("sm_90", format, True, dtype, decoded=True))
        assert_no_spill(compiled_columns("sm_90", format, True, dtype, decoded=True))
    assert_no_spill(decoded_weights("sm_90", dtype))


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_rows_are_read_by_16_bytes_and_stay_in_their_thread(format: common.Format, dtype: torch.dtype) -> None:
    compiled = compiled_rows("sm_90", format, False, dtype)
    found = counts(compiled)
    block = {"nvfp4": 16, "mxfp4": 32}[format]
    assert compiled.opcodes["LDG.E.128"] == block * dtype.itemsize // 16
    others = 1 if format == "nvfp4" else 0  # the amax
    assert found["global loads"] == compiled.opcodes["LDG.E.128"] + others
    assert found["global stores"] == 2  # codes, scale
    stays_in_its_thread(compiled)
    assert_no_spill(compiled)


@pytest.mark.parametrize("format", FORMATS)
def test_values_are_written_by_16_bytes_from_their_thread(format: common.Format) -> None:
    size = {"nvfp4": 16, "mxfp4": 32}[format]
    of_rows = compiled_rows("sm_90", format, False, decoded=True)
    of_columns = compiled_columns("sm_90", format, True, decoded=True)
    for compiled, elements in ((of_rows, size), (of_columns, 64)):
        found = counts(compiled)
        assert found["global stores"] == compiled.opcodes["STG.E.128"] == elements * 2 // 16
        products = [n for opcode, n in compiled.opcodes.items() if re.fullmatch(r"H(MUL|FMA)2\..*BF16_V2", opcode)]
        assert sum(products) == elements // 2
        if not (BEFORE_3_7 and format == "mxfp4" and compiled is of_columns):  # Triton 3.6 moves what it stores there
            stays_in_its_thread(compiled)


@functools.cache
def decoded_weights(arch: str, dtype: torch.dtype = torch.bfloat16) -> Compiled:
    return aot.compile_kernel(
        weights.kernel(isa_of(arch), dtype, True, False, weights.choose(), decoded=True),
        arch,
    )


def test_values_of_weights_are_written_by_16_bytes() -> None:
    compiled = decoded_weights("sm_90")
    assert counts(compiled)["global stores"] == compiled.opcodes["STG.E.128"] == 16
    stays_in_its_thread(compiled, shuffles=1)
    assert_no_spill(compiled)


def test_columns_are_turned_in_registers() -> None:
    """No shared memory, no shuffles; bfloat16 is read by 16 bytes."""
    compiled = compiled_columns("sm_90", "nvfp4", True)
    assert compiled.opcodes["LDG.E.128"] == 16
    stays_in_its_thread(compiled)


def test_weights_are_turned_in_registers() -> None:
    """Two threads share a tile's amax by one shuffle. Triton 3.6 also moves each word of a row between threads to store
    it; the turning itself is in registers there, too."""
    compiled = compiled_weights("sm_90")
    assert compiled.opcodes["LDG.E.128"] == 16
    if BEFORE_3_7:
        found = counts(compiled)
        assert (found["shuffles"], found["shared stores"], found["shared loads"]) == (1, 16, 16)
        assert compiled.shared == 4 * 32 * compiled.warps  # one word of a thread
    else:
        stays_in_its_thread(compiled, shuffles=1)


def stays_in_its_thread(compiled: Compiled, shuffles: int = 0) -> None:
    assert compiled.shared == 0
    found = counts(compiled)
    assert found["shuffles"] == shuffles
    assert found["shared loads"] == found["shared stores"] == found["barriers"] == 0


# --- conversions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", BLACKWELL)
@pytest.mark.parametrize("format", FORMATS)
def test_blackwell_rounds_to_nearest_by_its_conversion(format: common.Format, arch: str) -> None:
    """One instruction packs two elements."""
    compiled = compiled_rows(arch, format, False)
    block = {"nvfp4": 16, "mxfp4": 32}[format]
    assert compiled.ptx.count("cvt.rn.satfinite.e2m1x2.f32") == block // 2
    assert "cvt.rs" not in compiled.ptx
    found = counts(compiled)
    assert found["E2M1 nearest"] == block // 2
    assert found["E2M1 stochastic"] == 0


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
def test_datacenter_blackwell_rounds_stochastically_by_its_conversion(arch: str) -> None:
    compiled = compiled_rows(arch, "nvfp4", True)
    assert compiled.ptx.count("cvt.rs.satfinite.e2m1x4.f32") == 4
    found = counts(compiled)
    assert found["E2M1 stochastic"] == 8
    assert found["E2M1 nearest"] == 0


@pytest.mark.parametrize("arch", ["sm_90", "sm_120a", "sm_121a"])
def test_stochastic_rounding_without_a_conversion_is_arithmetic(arch: str) -> None:
    compiled = compiled_rows(arch, "nvfp4", True)
    assert "cvt.rs" not in compiled.ptx and "e2m1" not in compiled.ptx
    found = counts(compiled)
    assert found["E2M1 stochastic"] == found["E2M1 nearest"] == 0
    assert compiled.opcodes["FFMA.SAT"] > 0 and compiled.opcodes["PRMT"] > 0


@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
def test_ampere_converts_scales_in_integers(stochastic: bool) -> None:
    compiled = compiled_rows("sm_80", "nvfp4", stochastic)
    assert "e4m3" not in compiled.ptx
    assert not [opcode for opcode in compiled.opcodes if "E4M3" in opcode or "E2M1" in opcode]


def test_ampere_decodes_scales_in_integers() -> None:
    compiled = aot.compile_kernel(decode.kernel(isa_of("sm_80"), "nvfp4", torch.bfloat16, decode.choose()), "sm_80")
    assert not [opcode for opcode in compiled.opcodes if "E4M3" in opcode]
    assert_no_spill(compiled)


@pytest.mark.parametrize("arch", ["sm_89", "sm_90", "sm_100a", "sm_120a"])
def test_others_convert_scales_by_one_instruction_each_way(arch: str) -> None:
    found = counts(compiled_rows(arch, "nvfp4", False))
    assert found["E4M3 encodes"] == found["E4M3 decodes"] == 1


def test_largest_magnitudes_of_pairs_take_one_instruction_where_there_is_one() -> None:
    """Of bfloat16; 8.0 takes the magnitudes first."""
    kernels = {arch: amax.kernel(isa_of(arch), torch.bfloat16, amax.choose(MANY, 132)) for arch in ("sm_80", "sm_89")}
    ampere, ada = (aot.compile_kernel(kernel, arch) for arch, kernel in kernels.items())
    assert "max.NaN.xorsign.abs.bf16x2" in ada.ptx
    assert "xorsign" not in ampere.ptx and "max.NaN.bf16x2" in ampere.ptx
    assert ada.opcodes["LDG.E.128"] > 0 and ampere.opcodes["LDG.E.128"] > 0
