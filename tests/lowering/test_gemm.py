"""The native product of packed operands: its machine code, and its body run by Triton's interpreter."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
import triton
from interpreter import interpreted
from torch import Tensor

import fp4compile.ops  # noqa: F401  registers torch.ops.fp4
from fp4compile.errors import ConfigError
from fp4compile.formats import nvfp4
from fp4compile.formats.layout import to_tiles
from fp4compile.lowering import aot
from fp4compile.lowering.kernels import gemm
from fp4compile.lowering.kernels.kernel import Kernel
from fp4compile.lowering.targets import BLACKWELL, HOPPER

fp4 = torch.ops.fp4

ROWS = (1, 15, 17, 128, 129, 300)
DEPTHS = (16, 48, 64, 256, 272)
FORMATS = ("nvfp4", "mxfp4")
CONFIGS = (*gemm.DATACENTER_CONFIGS, *gemm.CONSUMER_CONFIGS)
LARGE = (8192, 8192, 8192, torch.bfloat16)
BEFORE_3_7 = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)


# --- machine code ----------------------------------------------------------------------------------------------------


def compiled(kernel: Kernel, arch: str) -> aot.Compiled:
    """As ``launch`` would compile it on a device of that architecture."""
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.override_arch = gemm.compile_options(aot.CAPABILITIES[arch]).get("arch")
        return aot.compile_kernel(kernel, arch)


def chosen(format: str, arch: str) -> Kernel:
    return gemm.kernel(format, torch.bfloat16, gemm.choose(*LARGE, aot.CAPABILITIES[arch]))


def spills(found: Counter[str]) -> int:
    """Spilled registers that are read again. (Triton 3.6's assembler adds checks to TMA on 12.x that store a message's
    argument: that is no spill.)"""
    return found["LDL"] + (0 if BEFORE_3_7 else found["STL"])


def kinds(found: Counter[str], name: str) -> int:
    return sum(count for opcode, count in found.items() if re.match(rf"{name}(\.|$)", opcode))


def loop_with(sass: str, opcode: str) -> str:
    """The shortest text between a label and a branch back to it that has the opcode in it."""
    loops = []
    for label in re.finditer(r"^(\.L_x_\d+):", sass, re.MULTILINE):
        for branch in re.finditer(rf"BRA[^\n]*`\({re.escape(label[1])}\)", sass[label.end() :]):
            loops.append(sass[label.end() : label.end() + branch.end()])
    return min((loop for loop in loops if opcode in loop), key=len)


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
@pytest.mark.parametrize("format", FORMATS)
def test_datacenter_blackwell_multiplies_codes_from_shared_and_tensor_memory(format: str, arch: str) -> None:
    result = compiled(chosen(format, arch), arch)
    assert result.spilled == 0 and result.tensor_memory <= 512 and result.shared <= 227 << 10
    kind = "mxf4nvf4" if format == "nvfp4" else "mxf4"
    assert f"kind::{kind}.block_scale" in result.ptx
    assert "tcgen05.cp" in result.ptx and "cp.async.bulk.tensor.5d" in result.ptx
    if result.sass is None:
        pytest.skip(result.note)
    loop = loop_with(result.sass, "UTCOMMA")
    assert re.search(r"UTCOMMA\.(4X|BLOCK16)", loop) or format == "mxfp4"
    for needed in ("UTCCP", "UTMALDG.2D", "UTMALDG.5D"):
        assert needed in loop
    assert spills(result.main_opcodes) == 0


@pytest.mark.parametrize("arch", ["sm_120a", "sm_121a"])
@pytest.mark.parametrize("format", FORMATS)
def test_consumer_blackwell_multiplies_codes_from_registers(format: str, arch: str) -> None:
    result = compiled(chosen(format, arch), arch)
    assert result.shared <= 99 << 10
    assert "mma.sync.aligned.m16n8k64" in result.ptx and "block_scale" in result.ptx
    if result.sass is None:
        pytest.skip(result.note)
    loop = loop_with(result.sass, "OMMA.SF")
    assert "UTMALDG" in loop
    assert spills(result.main_opcodes) == 0


@pytest.mark.parametrize("schedule", ["specialized", "persistent"])
def test_specialized_warps(schedule: str) -> None:
    """Loads and products are in loops of their own; bias and all, nothing spills."""
    config = next(config for config in gemm.DATACENTER_CONFIGS if config.schedule == schedule)
    result = compiled(gemm.kernel("nvfp4", torch.bfloat16, config, bias=torch.bfloat16), "sm_100a")
    assert result.spilled == 0 and result.sass is not None
    assert result.warps > config.num_warps
    assert "UTMALDG" not in loop_with(result.sass, "UTCOMMA")
    assert kinds(result.opcodes, "UTMALDG") == 4


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.float32])
def test_other_outputs_and_masked_stores(out_dtype: torch.dtype) -> None:
    """float32 tiles are what fills shared memory most."""
    for arch, boxed in itertools.product(("sm_100a", "sm_120a"), (True, False)):
        config = gemm.choose(*LARGE[:3], out_dtype, aot.CAPABILITIES[arch])
        result = compiled(gemm.kernel("mxfp4", out_dtype, config, boxed=boxed), arch)
        assert result.shared <= (227 if arch == "sm_100a" else 99) << 10
        assert spills(result.main_opcodes) == 0


# --- choices ---------------------------------------------------------------------------------------------------------


def test_the_widest_tile_that_fills_the_device() -> None:
    assert gemm.choose(*LARGE, (10, 0)) == gemm.WIDE
    assert gemm.choose(512, 2048, 8192, torch.bfloat16, (10, 3)) == gemm.SQUARE
    assert gemm.choose(*LARGE, (10, 0), processors=1 << 20) == gemm.SQUARE
    assert gemm.choose(*LARGE, (12, 1)) == gemm.CONSUMER_CONFIGS[0]


def test_masked_stores_are_not_given_to_specialized_warps() -> None:
    schedules = {config.schedule for config in gemm.candidates(*LARGE, (10, 0))}
    assert schedules == {"tiles", "specialized", "persistent"}
    assert {config.schedule for config in gemm.candidates(300, 301, 64, torch.bfloat16, (10, 0))} == {"tiles"}


def test_tiles_are_whole_tiles_of_scales() -> None:
    for config, block in itertools.product(CONFIGS, gemm.BLOCKS.values()):
        assert config.block_m % 128 == config.block_n % 128 == config.block_k % (4 * block) == 0


def test_kernels_of_an_architecture() -> None:
    found = gemm.kernels(BLACKWELL, (10, 0))
    names = [kernel.name for kernel in found]
    assert len(set(names)) == len(names)
    for name in ("nvfp4_bf16_bias_128x256x256_8w_4s_tiles", "mxfp4_fp32_128x128x256_8w_4s_persistent"):
        assert f"gemm_{name}" in names
    for kernel in found:
        assert list(kernel.signature) == kernel.function.arg_names
    assert {kernel.name.split("_")[1] for kernel in gemm.kernels(HOPPER, (9, 0))} == {"mxfp4"}
    assert gemm.kernels(HOPPER, (8, 9)) == []


# --- the body, interpreted -------------------------------------------------------------------------------------------


@pytest.fixture
def interpreter() -> Iterator[None]:
    with interpreted():
        yield


Operand = tuple[Tensor, Tensor, Tensor | None]


def quantized(x: Tensor, format: str) -> Operand:
    """(packed, scales [rows, nb], amax)."""
    amax = fp4.amax(x) if format == "nvfp4" else None
    packed, scales = fp4.quantize(x, amax, None, format, (1, gemm.BLOCKS[format]), "nearest", 0)
    return packed, scales, amax


def random_operand(rows: int, k: int, format: str) -> Operand:
    return quantized(torch.randn(rows, k, generator=torch.Generator().manual_seed(rows * 1000 + k)), format)


def native(a: Operand, b: Operand, format: str, out_dtype: torch.dtype, **options: object) -> Tensor:
    tiled = [(packed, to_tiles(scales), amax) for packed, scales, amax in (a, b)]
    return gemm.launch(*tiled[0], *tiled[1], format, out_dtype, **options)  # type: ignore[arg-type]


def reference(a: Operand, b: Operand, format: str, out_dtype: torch.dtype) -> Tensor:
    return fp4.scaled_mm(*a, format, *b, format, out_dtype)


def error_bound(a: Operand, b: Operand, format: str) -> Tensor:
    """Products are exact in float32. Of two sums of K of them in any order each is at most K 2^-24 of the sum of their
    magnitudes from the exact one; the factor's product adds one rounding to each."""
    left, right = (fp4.decode(x[0], x[1], format, torch.float32).double().abs() for x in (a, b))
    k = min(left.shape[1], right.shape[1])
    factor = nvfp4.gemm_factor(a[2], b[2])
    magnitude = left[:, :k] @ right[:, :k].t() * (1 if factor is None else factor.double())
    return 2 * (k + 1) * 2**-24 * magnitude


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("k", DEPTHS)
def test_ragged_products_are_the_references(interpreter: None, k: int, format: str) -> None:
    configs = itertools.cycle(CONFIGS)
    for m, n in itertools.product(ROWS, ROWS):
        a, b = random_operand(m, k, format), random_operand(n, k, format)
        out = native(a, b, format, torch.float32, config=next(configs))
        difference = (out.double() - reference(a, b, format, torch.float32).double()).abs()
        assert (difference <= error_bound(a, b, format)).all(), (m, n)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_whole_sums_have_the_references_bits(interpreter: None, out_dtype: torch.dtype, config: gemm.Config) -> None:
    """Codes times one scale, in sums below 2^24 units: the accumulation is exact, factor and cast are rounded once."""
    random = torch.Generator().manual_seed(5)
    x, w = (torch.randint(-6, 7, (rows, 320), generator=random).float() for rows in (130, 136))
    x[:, ::16] = w[:, ::16] = 6
    a, b = quantized(x, "nvfp4"), quantized(w, "nvfp4")
    assert torch.equal(native(a, b, "nvfp4", out_dtype, config=config), reference(a, b, "nvfp4", out_dtype))


@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.float32])
def test_bias_is_added_to_the_float32_product(interpreter: None, bias_dtype: torch.dtype) -> None:
    a, b = random_operand(17, 64, "nvfp4"), random_operand(33, 64, "nvfp4")
    bias = torch.linspace(-5, 5, 33).to(bias_dtype)
    expected = reference(a, b, "nvfp4", torch.float32) + bias
    out = native(a, b, "nvfp4", torch.float32, bias=bias)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("format", FORMATS)
def test_operands_padded_to_different_k(interpreter: None, format: str) -> None:
    block = gemm.BLOCKS[format]
    a, b = random_operand(17, 5 * block, format), random_operand(33, 5 * block, format)
    longer = (torch.nn.functional.pad(b[0], (0, block // 2)), torch.nn.functional.pad(b[1].view(torch.uint8), (0, 1)))
    wide = (longer[0], longer[1].view(b[1].dtype), b[2])
    for left, right in ((a, wide), (wide, a)):
        out = native(left, right, format, torch.float32)
        assert torch.equal(out, native(*((a, b) if left is a else (b, a)), format, torch.float32))


def test_memory_around_the_operands_is_not_read(interpreter: None) -> None:
    """Views of larger buffers: rows below and columns beside them hold codes of +-6."""
    a, b = random_operand(17, 64, "nvfp4"), random_operand(33, 64, "nvfp4")

    def surrounded(x: Operand) -> Operand:
        buffer = torch.full((200, 256), 0xF7, dtype=torch.uint8)
        buffer[: x[0].shape[0], : x[0].shape[1]] = x[0]
        return buffer[: x[0].shape[0], : x[0].shape[1]], x[1], x[2]

    out = native(surrounded(a), surrounded(b), "nvfp4", torch.float32)
    assert torch.equal(out, native(a, b, "nvfp4", torch.float32))


@pytest.mark.parametrize("a_max", [0.0, 2.0**-100, 1.5, 3e38, torch.inf, torch.nan])
@pytest.mark.parametrize("b_max", [0.0, 2.0**-100, 1.5, 3e38, torch.inf, torch.nan])
def test_the_factor_is_gemm_factors(interpreter: None, a_max: float, b_max: float) -> None:
    """Where the product of the two overflows and the factor does not, too; NaN and Inf are seen in every output."""
    a, b = (quantized(torch.ones(rows, 16), "nvfp4") for rows in (3, 4))
    left, right = (*a[:2], torch.tensor(a_max)), (*b[:2], torch.tensor(b_max))
    out = native(left, right, "nvfp4", torch.float32)
    expected = reference(left, right, "nvfp4", torch.float32)
    assert torch.equal(out.nan_to_num(1, 2, 3), expected.nan_to_num(1, 2, 3))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
@pytest.mark.parametrize("b_max", [0.0, 2.0**-100, 1.7, 3e38, torch.inf, torch.nan])
def test_a_left_operand_without_a_tensor_scale(interpreter: None, b_max: float, config: gemm.Config) -> None:
    """Its rows are multiplied afterwards: here by 1 / 2688 of 2688, so that the factor is seen alone."""
    a, b = (quantized(torch.full((rows, 16), 2.0), "nvfp4") for rows in (3, 4))
    right = (*b[:2], torch.tensor(b_max))
    out = native((*a[:2], None), right, "nvfp4", torch.float32, config=config)
    expected = (fp4.decode(*a[:2], "nvfp4", torch.float32) @ fp4.decode(*b[:2], "nvfp4", torch.float32).t()) * (
        torch.tensor(b_max) / torch.tensor(2688.0)
    )
    assert torch.equal(out.nan_to_num(1, 2, 3), expected.nan_to_num(1, 2, 3))


def test_nan_is_visible_in_its_row_of_mxfp4(interpreter: None) -> None:
    x = torch.ones(17, 64)
    x[5, 40] = torch.nan
    out = native(quantized(x, "mxfp4"), quantized(torch.ones(3, 64), "mxfp4"), "mxfp4", torch.float32)
    assert out[5].isnan().all()
    assert (out[torch.arange(17) != 5] == 64).all()


@pytest.mark.parametrize("shapes", [((0, 32), (4, 32)), ((4, 32), (0, 32)), ((3, 0), (4, 0))])
def test_empty_operands(interpreter: None, shapes: tuple[tuple[int, int], tuple[int, int]]) -> None:
    a, b = (quantized(torch.ones(shape), "nvfp4") for shape in shapes)
    out = native(a, b, "nvfp4", torch.bfloat16)
    assert out.shape == (shapes[0][0], shapes[1][0]) and not out.any()


def test_what_launch_refuses() -> None:
    a, b = random_operand(17, 64, "nvfp4"), random_operand(33, 64, "nvfp4")
    with pytest.raises(ConfigError, match="to_tiles"):
        gemm.launch(*a, *b, "nvfp4", torch.bfloat16)
    for left, right in ((a, (b[0], b[1], None)), ((a[0], a[1], None), (b[0], b[1], None))):
        with pytest.raises(ConfigError, match="amax"):
            native(left, right, "nvfp4", torch.bfloat16)


# --- on a device -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("format", FORMATS)
def test_on_a_device(format: str) -> None:
    """Every configuration of the device, ragged and whole: TMA's own zeros, the tensor cores' own sums."""
    capability = torch.cuda.get_device_capability()
    if capability < (9, 0) or (capability < (10, 0) and format == "nvfp4"):
        pytest.skip("no tensor descriptors, or no product of E4M3 scales")
    for m, n, k in itertools.product((1, 129, 300), (17, 136), DEPTHS):
        a, b = random_operand(m, k, format), random_operand(n, k, format)
        on_device = [tuple(each if each is None else each.cuda() for each in operand) for operand in (a, b)]
        for config in gemm.candidates(m, n, k, torch.float32, capability, processors=1):
            out = native(*on_device, format, torch.float32, config=config)  # type: ignore[arg-type]
            difference = (out.cpu().double() - reference(a, b, format, torch.float32).double()).abs()
            assert (difference <= error_bound(a, b, format)).all(), (m, n, k, config)
