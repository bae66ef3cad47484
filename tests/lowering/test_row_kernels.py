"""A scale a row on a GPU: kernels run by Triton's interpreter, their machine code, products, Inductor's code."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import fake_gpu
import graphs
import pytest
import torch
from comparing import assert_same
from graphs import fp4
from interpreter import interpreted
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn import functional as F

from fp4compile import compat
from fp4compile.formats import nvfp4
from fp4compile.lowering import aot, cublas, cuda, sass
from fp4compile.lowering.compiled import forget
from fp4compile.lowering.emulate import emulate
from fp4compile.lowering.kernels import common, rows
from fp4compile.lowering.kernels.kernel import collecting
from fp4compile.lowering.targets import INTERPRETER, ISAS

SEED, SITE = torch.tensor(-(2**61) + 12345), 3_000_000_000
SHAPES = ((1, 1), (15, 8), (16, 16), (33, 40), (129, 48), (257, 8), (1, 272), (0, 16), (16, 0), (0, 0))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
of_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
SQUARE = ("nvfp4", [16, 16], "nearest", 0)
seeded = pytest.mark.parametrize("seed", [None, SEED], ids=["nearest", "stochastic"])


def values(height: int, width: int, dtype: torch.dtype) -> Tensor:
    """Rows of very different magnitudes, a zero row, subnormal ones, one with NaN and one with Inf."""
    random = torch.Generator().manual_seed(height * 1000 + width)
    x = torch.randn(height, width, generator=random) * 2.0 ** torch.randint(-12, 12, (height, 1), generator=random)
    x[3::16], x[4::16] = 0.0, x[4::16] * 2.0**-130
    x[9::32, :1], x[10::32, -1:] = torch.nan, -torch.inf
    return x.to(dtype)


def amaxes(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return x.abs().amax(-1).to(dtype or x.dtype) if x.shape[1] else x.new_zeros(x.shape[0])


def how(amax: Tensor, seed: Tensor | None) -> tuple[Any, ...]:
    return amax, seed, "nvfp4", [1, 16], "nearest" if seed is None else "stochastic", SITE


def as_bytes(value: Tensor) -> Tensor:
    return value.contiguous().view(torch.uint8)


def assert_codes(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Bytes. Codes of a block whose scale is NaN mean nothing."""
    assert_same(as_bytes(found[1]), as_bytes(expected[1]))
    meaningless = expected[1].float().isnan().repeat_interleave(8, 1)
    assert_same(*(codes.masked_fill(meaningless, 0) for codes in (found[0], expected[0])))


def assert_values(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == torch.bfloat16 and found.is_contiguous()
    assert_same(found, expected)
    assert_same(as_bytes(found.nan_to_num(1)), as_bytes(expected.nan_to_num(1)))  # zeros of either sign


# --- the kernels


@pytest.fixture
def on_a_cpu() -> Iterator[None]:
    with interpreted():
        yield


@of_dtypes
@seeded
def test_rows_with_a_scale_each(seed: Tensor | None, dtype: torch.dtype, on_a_cpu: None) -> None:
    for shape in SHAPES:
        x = values(*shape, dtype)
        for amax_dtype in {dtype, torch.float32}:
            arguments = how(amaxes(x, amax_dtype), seed)
            assert_codes(cuda.quantize(x, *arguments), fp4.quantize(x, *arguments))
            assert_values(cuda.quantize_decoded(x, *arguments), fp4.quantize_decoded(x, *arguments))


@pytest.mark.parametrize("shape", [(1, 16), (33, 40), (130, 80)], ids=str)
def test_scales_of_rows_in_tiles(shape: tuple[int, int], on_a_cpu: None) -> None:
    x = values(*shape, torch.bfloat16).nan_to_num(1, 1, 1)
    arguments = (*how(amaxes(x), SEED), True)
    for found, expected in zip(cuda.quantize(x, *arguments), fp4.quantize(x, *arguments), strict=True):
        assert_same(as_bytes(found), as_bytes(expected))


def test_a_row_does_not_depend_on_others(on_a_cpu: None) -> None:
    """Not even on NaN. By the scalar kernel, row by row."""
    x = values(33, 40, torch.bfloat16)
    codes, scales = cuda.quantize(x, *how(amaxes(x), None))
    for row in range(33):
        one = x[row : row + 1]
        alone = cuda.quantize(one, *how(fp4.amax(one), None))
        assert_codes((codes[row : row + 1], scales[row : row + 1]), alone)


def test_rows_are_found_by_programs_that_loop(on_a_cpu: None) -> None:
    x = values(67, 64, torch.bfloat16)
    expected = fp4.quantize_decoded(x, *how(amaxes(x), None))
    for config in (rows.Config(32, 3), rows.Config(128, 1), rows.Config(128, 8)):
        found = torch.empty_like(x)
        one = rows.kernel(INTERPRETER, x.dtype, "nvfp4", False, config, decoded=True, by_row=x.dtype)
        blocks = 67 * 4
        one.run(-(-blocks // (config.threads * config.loop)), x, amaxes(x), found, blocks, 4, 1)
        assert_values(found, expected)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.t(),
    "slice": lambda x: x[1:, 3:40],
    "every other row": lambda x: x[::2],
    "no row": lambda x: x[:0],
    "at an odd offset": lambda x: x.reshape(-1)[1 : 1 + 32 * 40].view(32, 40),
}


@pytest.mark.parametrize("view", VIEWS)
def test_every_layout_of_a_tensor_and_of_its_amaxes(view: str, on_a_cpu: None) -> None:
    """A tensor whose columns are contiguous, too, which without a scale a row is read as it lies."""
    x = VIEWS[view](values(33, 48, torch.bfloat16))
    amax = amaxes(x).repeat_interleave(3)[::3]
    assert_codes(cuda.quantize(x, *how(amax, SEED)), fp4.quantize(x, *how(amax, SEED)))
    assert_values(cuda.quantize_decoded(x, *how(amax, None)), fp4.quantize_decoded(x, *how(amax, None)))


def test_kernels_of_a_scale_a_row_are_found_ahead() -> None:
    """From the shapes alone; another dtype of the amaxes is another kernel."""
    x = torch.empty(64, 64, dtype=torch.bfloat16, device="meta")
    names = []
    for amax in (x.new_empty(64), x.new_empty(64, dtype=torch.float32), x.new_empty((), dtype=torch.float32)):
        with collecting() as found, pytest.MonkeyPatch.context() as patch:
            patch.setattr(common, "isa_of", lambda device: ISAS[9, 0])
            cuda.quantize_decoded(x, *how(amax, None))
        names += [kernel.name.removeprefix("quantize_rows_nvfp4_nearest_bfloat16") for kernel, _ in found]
    assert names == ["_by_bfloat16_row_decoded", "_by_float32_row_decoded", "_decoded"]


# --- machine code


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100a"])
@seeded
def test_machine_code(seed: Tensor | None, arch: str) -> None:
    """No stack; values are written by 16 bytes from their thread, which reads one amax more than a block."""
    isa, config = ISAS[aot.CAPABILITIES[arch]], rows.choose(2**26, seed is not None, 132)
    for dtype in (torch.bfloat16, torch.float32):
        one = rows.kernel(isa, dtype, "nvfp4", seed is not None, config, decoded=True, by_row=dtype)
        compiled = aot.compile_kernel(one, arch)
        assert compiled.spilled == compiled.shared == 0
        if compiled.sass is None:
            continue
        found = sass.count_what_matters(compiled.opcodes)
        assert found["global stores"] == compiled.opcodes["STG.E.128"] == 2
        assert compiled.opcodes["LDG.E.128"] == dtype.itemsize
        assert found["global loads"] == dtype.itemsize + 1 + (seed is not None)
        assert found["shuffles"] == found["barriers"] == found["local loads"] == found["local stores"] == 0


# --- products


def product(out_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, torch.dtype]:
    """Operands of decoded_mm whose accumulation is exact, with Inf in one row."""
    random = torch.Generator().manual_seed(3)
    a, b = (torch.randint(-6, 7, shape, generator=random).bfloat16() for shape in ((33, 48), (17, 48)))
    rows = torch.rand(33, generator=random).bfloat16()
    rows[5] = torch.inf
    return a, rows, b, torch.tensor(3.7), out_dtype


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
def test_a_product_multiplies_its_rows_afterwards(out_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS gets the factor of the right operand and gives float32."""
    asked = []

    def matmul(a: Tensor, b: Tensor, factors: Tensor | None, dtype: torch.dtype) -> Tensor:
        asked.append((None if factors is None else factors[0].item(), dtype))
        exact = a.float() @ b.float().t()
        return (exact if factors is None else exact * factors[0]).to(dtype)

    monkeypatch.setattr(cublas, "matmul", matmul)
    a, a_amax, b, b_amax, _ = product(out_dtype)
    codes = (*fp4.quantize(a, *how(a_amax.float(), None)), a_amax, "nvfp4")
    with interpreted():
        assert_same(cuda.decoded_mm(a, a_amax, b, b_amax, out_dtype), fp4.decoded_mm(a, a_amax, b, b_amax, out_dtype))
        assert_same(cuda.decoded_mm(a, a_amax, b, None, out_dtype), fp4.decoded_mm(a, a_amax, b, None, out_dtype))
        found = cuda.scaled_mm(*codes, b, None, None, "bf16", out_dtype)
    assert_same(found, fp4.scaled_mm(*codes, b, None, None, "bf16", out_dtype))
    factor = nvfp4.tensor_scale(b_amax).item()
    assert asked == [(factor, torch.float32), (None, torch.float32), (None, torch.float32)]


def traced(function: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    gm = compat.trace(function, [mode.from_tensor(x) for x in inputs], mode)
    gm.recompile()
    return gm


def emulated(function: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    gm = traced(function, *inputs)
    emulate(gm.graph, graphs.calls(gm, fp4.scaled_mm.default))
    gm.graph.lint()
    gm.recompile()
    return gm


def layer(x: Tensor, w: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The forward of a linear layer as the passes have it."""
    rows, amax = x.abs().amax(-1), fp4.amax(w)
    left = fp4.quantize(x, rows, None, "nvfp4", [1, 16], "nearest", 0)
    right = fp4.quantize(w, amax, None, "nvfp4", [16, 16], "nearest", 0)
    return fp4.scaled_mm(*left, rows, "nvfp4", *right, amax, "nvfp4", dtype)


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@of_dtypes
def test_an_emulated_product_has_the_same_bits(dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    x, w = values(33, 48, dtype), values(17, 48, torch.bfloat16).nan_to_num(1, 1, 1)
    gm = emulated(lambda x, w: layer(x, w, out_dtype), x, w)
    assert not graphs.calls(gm, fp4.scaled_mm.default) and not graphs.calls(gm, fp4.quantize.default)
    (one,) = graphs.calls(gm, fp4.decoded_mm.default)
    assert one.args[1] is None and one.args[4] == torch.float32
    (found,) = graphs.run(gm, [x, w])
    expected = layer(x, w, out_dtype)
    assert found.dtype == expected.dtype
    assert_same(found, expected)


# --- Inductor's code


@pytest.mark.parametrize("products", [1, 3])
def test_inductor_finds_row_maxima_with_the_rows_and_multiplies_in_what_follows(products: int) -> None:
    """The maxima are stored rounded, and what follows reads those, also where q, k and v share them."""
    shapes = [((4096, 1024), torch.bfloat16), ((1024,), torch.bfloat16), *[((2048, 1024), torch.bfloat16)] * products]

    def function(x: Tensor, weight: Tensor, *weights: Tensor) -> list[Tensor]:
        y = F.rms_norm(x, (1024,), weight)
        rows = y.abs().amax(-1)
        left = (*fp4.quantize(y, rows, None, "nvfp4", [1, 16], "nearest", 0), rows, "nvfp4")
        amax = fp4.amax(weights[0])
        return [
            F.silu(fp4.scaled_mm(*left, *fp4.quantize(w, amax, None, *SQUARE), amax, "nvfp4", torch.bfloat16))
            for w in weights
        ]

    gm = emulated(function, *(torch.empty(shape, dtype=dtype) for shape, dtype in shapes))
    norm, *after = fake_gpu.kernels(fake_gpu.generated(gm, shapes))
    assert "rsqrt" in norm and "triton_helpers.max2" in norm
    assert sorted(re.search(rf"'{name}': '\*(\w+)'", norm)[1] for name in stored(norm)) == ["bf16", "bf16"]
    assert len(after) == 1  # for all products
    assert "exp" in after[0] and len(stored(after[0])) == 1
    assert re.findall(r"'\w*ptr\d+': '\*(\w+)'", after[0]).count("fp32") == 1  # the product


def stored(kernel: str) -> list[str]:
    return re.findall(r"tl\.store\((\w+) \+", kernel)


@pytest.mark.slow
def test_inductors_maxima_are_those_of_the_rows_it_writes() -> None:
    """It has the rows in float32. A cast of the maxima to float32 in the graph would take the rounding away."""

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = (x.float() * y.float()).to(torch.bfloat16)
        return z, z.abs().amax(-1)

    gm = traced(function, values(48, 80, torch.bfloat16), values(48, 80, torch.bfloat16))
    compiled = torch.compile(gm)
    for seed in range(10):
        random = torch.Generator().manual_seed(seed)
        z, found = compiled(*(torch.randn(48, 80, generator=random).bfloat16() for _ in range(2)))
        assert torch.equal(found, z.abs().amax(-1))


@pytest.mark.slow
@pytest.mark.parametrize("height", [33, 17, 1, 0])
def test_compiled_operators_take_a_scale_a_row(height: int) -> None:
    """On a CPU, of several heights by one kernel."""
    forget()
    x, w, ops = values(height, 48, torch.float32), torch.randn(17, 48), torch.ops.fp4_compiled
    amax, w_amax = amaxes(x), torch.tensor(4.0)
    for seed in (None, SEED):
        found, expected = (one.quantize(x, *how(amax, seed)) for one in (ops, fp4))
        assert_codes(found, expected)
        assert_values(ops.quantize_decoded(x, *how(amax, seed)), fp4.quantize_decoded(x, *how(amax, seed)))
    right = fp4.quantize(w, w_amax, None, "nvfp4", [16, 16], "nearest", 0)
    arguments = (*expected, amax, "nvfp4", *right, w_amax, "nvfp4", torch.bfloat16)
    assert_same(ops.scaled_mm(*arguments), fp4.scaled_mm(*arguments))
