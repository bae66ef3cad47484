"""The native product as Inductor's template: one kernel with its epilogue, in machine code and interpreted."""

from __future__ import annotations

import re
from typing import Any

import fake_gpu
import pytest
import torch
from interpreter import interpreted
from torch import Tensor
from torch.nn import functional

import fp4compile.ops  # noqa: F401  registers torch.ops.fp4
from fp4compile import compat
from fp4compile.formats import nvfp4
from fp4compile.formats.layout import to_tiles
from fp4compile.lowering import aot, sass, template
from fp4compile.lowering.kernels import gemm

fp4 = torch.ops.fp4

CODES, SCALES, FLOAT, BF16 = torch.uint8, torch.float8_e4m3fn, torch.float32, torch.bfloat16


def operands(m: int, n: int, k: int, format: str = "nvfp4") -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of a, its scales and amax, and of b's."""
    found: list[tuple[tuple[int, ...], torch.dtype]] = []
    blocks = k // gemm.BLOCKS[format]
    for rows in (m, n):
        found.append(((rows, k // 2), CODES))
        found.append(((-(-rows // 128), -(-blocks // 4), 32, 4, 4), SCALES if format == "nvfp4" else CODES))
        found += [((), FLOAT)] if format == "nvfp4" else []
    return found


def gated(a: Any, a_s: Any, a_m: Any, b: Any, b_s: Any, b_m: Any, bias: Any, residual: Any) -> Any:
    product = template.OPERATOR(a, a_s, a_m, b, b_s, b_m, "nvfp4", BF16)
    return functional.silu(product + bias) * residual


def affine(a: Any, a_s: Any, a_m: Any, b: Any, b_s: Any, b_m: Any, bias: Any, residual: Any) -> Any:
    return template.OPERATOR(a, a_s, a_m, b, b_s, b_m, "nvfp4", FLOAT) * residual + bias


def plain_mxfp4(a: Any, a_s: Any, b: Any, b_s: Any) -> Any:
    return template.OPERATOR(a, a_s, None, b, b_s, None, "mxfp4", BF16)


def program(function: Any, m: int, n: int, k: int, dtype: torch.dtype = BF16, format: str = "nvfp4") -> str:
    """For B200."""
    template.register()
    rest = [] if function is plain_mxfp4 else [((n,), dtype), ((m, n), dtype)]
    return fake_gpu.generated(function, [*operands(m, n, k, format), *rest])


@pytest.mark.parametrize(("m", "n", "columns"), [(1024, 512, 128), (8192, 8192, 256)])
def test_what_is_guessed_where_nothing_is_measured(m: int, n: int, columns: int) -> None:
    (source,) = fake_gpu.kernels(program(gated, m, n, 2048))
    assert f"BLOCK_N : tl.constexpr = {columns}" in source and "warp_specialize" not in source


@pytest.mark.parametrize("config", gemm.DATACENTER_CONFIGS, ids=lambda config: config.name)
def test_the_epilogue_is_in_the_same_kernel_and_spills_nothing(
    config: gemm.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every configuration that Inductor may measure; specialized warps load and multiply in loops of their own."""
    (config,) = template.distinct([config])
    monkeypatch.setattr(template, "_configs", lambda *facts: [config])
    code = program(gated, 8192, 8192, 2048)
    (source,) = fake_gpu.kernels(code)
    assert "fp4_native" not in code.partition("def call(")[2]
    assert "tl.dot_scaled" in source and "libdevice.exp" in source
    assert f"BLOCK_N : tl.constexpr = {config.block_n}" in source
    binary = fake_gpu.compile_kernel(fake_gpu.load(source))
    specialized = config.schedule != "tiles"
    assert (binary.metadata.num_warps > config.num_warps) == specialized == ("warp_specialize=True" in source)
    assert binary.metadata.tmem_size <= 512
    text, note, usage = aot._inspect(binary.asm["cubin"])
    assert text is not None, note
    found = sass.count_instructions(text)
    assert found["LDL"] == found["STL"] == 0 and "STACK:0" in usage
    assert found["UTMALDG.2D"] == (2 if specialized else 2 * config.num_stages + 2)
    for needed in (r"UTCOMMA\.4X", "UTCCP", r"UTMALDG\.2D", r"UTMALDG\.5D"):
        assert re.search(needed, text)
    assert binary.metadata.shared <= 227 << 10


def test_mxfp4() -> None:
    (source,) = fake_gpu.kernels(program(plain_mxfp4, 1024, 512, 2048, format="mxfp4"))
    assert "kind::mxf4.block_scale" in fake_gpu.compile_kernel(fake_gpu.load(source)).asm["ptx"]


@pytest.mark.parametrize("shape", [(150, 136, 320), (128, 300, 64)])
def test_the_generated_kernel_computes_the_reference(shape: tuple[int, int, int]) -> None:
    """Inductor's source, interpreted: product, residual and bias."""
    m, n, k = shape
    (source,) = fake_gpu.kernels(program(affine, m, n, k, FLOAT))
    random = torch.Generator().manual_seed(m)
    left, right = (quantized(torch.randn(rows, k, generator=random)) for rows in (m, n))
    bias, residual = torch.randn(n, generator=random), torch.randn(m, n, generator=random)
    out = torch.full((m, n), torch.nan)
    with interpreted():
        # Arguments: the operands, what the epilogue reads in its order, the result.
        fake_gpu.load(source).function[(3,)](*operands_of(left, right), residual, bias, out)
    expected = fp4.scaled_mm(*left, "nvfp4", *right, "nvfp4", FLOAT) * residual + bias
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-4)


def by_rows(a: Any, a_s: Any, b: Any, b_s: Any, b_m: Any, rows: Any, residual: Any) -> Any:
    product = template.OPERATOR(a, a_s, None, b, b_s, b_m, "nvfp4", FLOAT)
    return residual + (product * (rows.float() * nvfp4.ROW_FACTOR).unsqueeze(1)).to(BF16)


def test_scales_of_rows_and_a_residual_are_in_the_products_kernel() -> None:
    """Interpreted, it computes the reference; nothing of float32 is written."""
    m, n, k = 150, 136, 320
    a, a_s, _, b, b_s, b_m = operands(m, n, k)
    template.register()
    code = fake_gpu.generated(by_rows, [a, a_s, b, b_s, b_m, ((m,), BF16), ((m, n), BF16)])
    (source,) = fake_gpu.kernels(code)
    assert "tl.dot_scaled" in source
    random = torch.Generator().manual_seed(m)
    x, residual = torch.randn(m, k, generator=random), torch.randn(m, n, generator=random).to(BF16)
    right, amaxes = quantized(torch.randn(n, k, generator=random)), x.abs().amax(-1).to(BF16)
    left = fp4.quantize(x, amaxes.float(), None, "nvfp4", (1, 16), "nearest", 0)
    out = torch.full((m, n), torch.nan, dtype=BF16)
    packed, tiles, amax = tiled(right)
    with interpreted():
        fake_gpu.load(source).function[(3,)](left[0], to_tiles(left[1]), packed, tiles, amax, residual, amaxes, out)
    expected = residual.float() + fp4.scaled_mm(*left, amaxes, "nvfp4", *right, "nvfp4", FLOAT)  # rounded once
    # Sums of another order may round to the next bfloat16, and near zero are off by what they are made of.
    torch.testing.assert_close(out, expected.to(BF16), rtol=2**-7, atol=1e-4)


def test_rows_that_tma_cannot_take_stay_a_call_of_the_operator() -> None:
    code = program(gated, 128, 128, 48)
    assert "fp4_native.gemm.default(" in code
    assert not any("dot_scaled" in source for source in fake_gpu.kernels(code))


def test_the_operators_result() -> None:
    shapes = operands(150, 136, 320)
    mode = torch._subclasses.fake_tensor.FakeTensorMode()
    with mode:
        tensors = [torch.empty(shape, dtype=dtype, device="cuda") for shape, dtype in shapes]
        out = template.OPERATOR(*tensors, "nvfp4", torch.float16)
    assert out.shape == (150, 136) and out.dtype == torch.float16
    assert not [problem for problem in compat.self_test() if "templates" in problem]


def quantized(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    amax = fp4.amax(x)
    return (*fp4.quantize(x, amax, None, "nvfp4", (1, 16), "nearest", 0), amax)


def operands_of(left: tuple[Tensor, Tensor, Tensor], right: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    """As the kernel has them: the left amax last, for that a product may have none."""
    (a, a_s, a_m), (b, b_s, b_m) = tiled(left), tiled(right)
    return [a, a_s, b, b_s, b_m, a_m]


def tiled(operand: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    packed, scales, amax = operand
    return packed, to_tiles(scales), amax
