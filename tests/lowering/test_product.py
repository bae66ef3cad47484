"""cuBLAS beside the template: the rule, what is handed to PyTorch's operator, and the code that Inductor writes."""

from __future__ import annotations

import functools
import logging
import re
import warnings
from typing import Any

import compiling
import fake_gpu
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from interpreter import interpreted
from test_template import BF16, CODES, FLOAT, SCALES, operands, quantized, tiled
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn import functional

from fp4compile import backend, compat, lowering
from fp4compile.errors import ConfigError, Fp4Warning
from fp4compile.formats import nvfp4
from fp4compile.lowering import cublas_fp4, product, template
from fp4compile.lowering.product import CAPABILITIES, Choice, Product, choose_product, unfit
from fp4compile.options import parse_options

fp4 = torch.ops.fp4

LARGE = Product(8192, 8192, 8192, 8192, "nvfp4", BF16)
B200, CUDA = (10, 0), (13, 0)

# --- the rule --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "capability", "measured", "kernel"),
    [
        ("auto", (10, 0), False, "cublas"),
        ("auto", (10, 3), True, "both"),
        ("auto", (12, 0), True, "both"),
        ("auto", (12, 1), True, "cublas"),  # where the template cannot be compiled
        ("auto", (11, 0), False, "triton"),
        ("triton", (10, 0), True, "triton"),
        ("cublas", (10, 0), True, "cublas"),
        ("cublas", (11, 0), False, "triton"),
    ],
)
def test_what_multiplies_a_large_product(asked: str, capability: tuple[int, int], measured: bool, kernel: str) -> None:
    choice = choose_product(asked, LARGE, capability, CUDA, measured)
    assert choice.kernel == kernel and choice.reason
    assert choice.unfit == (capability not in CAPABILITIES)


UNFIT = [
    (Product(8192, 8192, 8192, 8192, "mxfp4", BF16), "mxfp4"),
    (Product(8192, 8192, 8192, 8192, "nvfp4", torch.float16), "torch.float16"),
    (Product(8192, 8200, 8192, 8192, "nvfp4", BF16), "N is not known to be a multiple of 16"),
    (Product(8192, 8192, 8208, 8208, "nvfp4", BF16), "K is not known to be a multiple of 32"),
    (Product(8192, 8192, 8192, 8224, "nvfp4", BF16), "different K"),
    (Product(0, 8192, 8192, 8192, "nvfp4", BF16), "nothing to multiply"),
]


@pytest.mark.parametrize(("one", "words"), UNFIT)
@pytest.mark.parametrize("asked", ["auto", "cublas"])
def test_what_cublas_cannot_take_is_the_templates_with_the_reason(one: Product, words: str, asked: str) -> None:
    choice = choose_product(asked, one, B200, CUDA, measured=True)
    assert choice.kernel == "triton" and choice.unfit and words in choice.reason


def test_a_build_without_block_scales_has_the_template() -> None:
    choice = choose_product("auto", LARGE, B200, (12, 6), measured=False)
    assert choice == Choice("triton", "PyTorch is built for CUDA 12.6: cuBLAS multiplies FP4 from 12.8 on", unfit=True)


@given(
    st.builds(
        Product,
        *(st.integers(0, 300) for _ in range(4)),
        st.sampled_from(["nvfp4", "mxfp4"]),
        st.sampled_from([BF16, torch.float16, FLOAT]),
    ),
    st.sampled_from(["auto", "cublas", "triton"]),
    st.booleans(),
)
def test_cublas_never_gets_what_it_cannot_take(one: Product, asked: str, measured: bool) -> None:
    choice = choose_product(asked, one, B200, CUDA, measured)
    if choice.kernel != "triton":
        assert one.m > 0 and one.n > 0 and one.k == one.right_k > 0 and one.k % 32 == one.n % 16 == 0
        assert one.format == "nvfp4" and one.out_dtype in (BF16, FLOAT)
    else:
        assert choice.unfit == (asked != "triton")


def test_a_batch_of_any_size_is_taken_and_adds_no_guard() -> None:
    """Rows of x in the forward are K in wgrad: of a batch times 1024 tokens it is known to be a multiple of 32."""
    environment = ShapeEnv()
    dynamic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])  # type: ignore[var-annotated]
    mode = FakeTensorMode(shape_env=environment)
    (batch,) = mode.from_tensor(torch.empty(8), static_shapes=False, symbolic_context=dynamic).shape
    assert isinstance(batch, torch.SymInt)
    assert unfit(Product(batch, 512, 512, 512, "nvfp4", BF16)) is None
    assert unfit(Product(512, 512, 1024 * batch, 1024 * batch, "nvfp4", BF16)) is None
    assert unfit(Product(512, 512, batch, batch, "nvfp4", BF16)) == "K is not known to be a multiple of 32"
    assert not environment.guards


# --- what PyTorch gets -----------------------------------------------------------------------------------------------

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def emulated(
    a: Tensor,
    b: Tensor,
    a_scales: list[Tensor],
    a_recipe: list[int],
    a_swizzle: list[int],
    b_scales: list[Tensor],
    b_recipe: list[int],
    b_swizzle: list[int],
    bias: Tensor | None,
    out_dtype: torch.dtype,
    *,
    out: Tensor,
) -> Tensor:
    """``aten::_scaled_mm_v2`` with two levels of nvfp4 scales, as PyTorch describes and checks it; nothing of ours."""
    assert a_recipe == b_recipe == [2, 0] and a_swizzle == b_swizzle == [1, 0] and bias is None
    assert a.is_contiguous() and b.t().is_contiguous() and a.shape[1] == b.shape[0]
    assert b.shape[1] % 16 == 0 and 2 * b.shape[0] % 32 == 0 and out_dtype == out.dtype
    alpha = a_scales[1] * b_scales[1]
    assert alpha.dtype == torch.float32 and a_scales[1].numel() == b_scales[1].numel() == 1
    left, right = _decoded(a, a_scales[0]), _decoded(b.t(), b_scales[0])
    return out.copy_((left @ right.t()) * alpha)


def _decoded(x: Tensor, scales: Tensor) -> Tensor:
    assert x.dtype == torch.float4_e2m1fn_x2 and scales.dtype == torch.float8_e4m3fn
    rows, columns = x.shape[0], 2 * x.shape[1]
    wide = -(-columns // 64)
    assert scales.is_contiguous() and scales.numel() == -(-rows // 128) * 128 * wide * 4
    packed = x.view(torch.uint8).long()
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1)  # the first element in the low bits
    m, k = torch.arange(rows)[:, None], torch.arange(columns // 16)[None, :]
    # Tiles of 128 rows and 4 scales, row major; in one, 32 rows of 16 bytes: 4 scales of rows 32 apart.
    place = (m // 128 * wide + k // 4) * 512 + m % 32 * 16 + m % 128 // 32 * 4 + k % 4
    return torch.tensor(E2M1)[codes] * scales.flatten()[place].float().repeat_interleave(16, 1)


@pytest.fixture
def emulation(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(compat, "SCALED_MM_OUT", emulated)
    monkeypatch.setattr(cublas_fp4, "_devices", set())
    with interpreted():  # the kernel of the factor
        yield


Operand = tuple[Tensor, Tensor, Tensor]


def pair(m: int, n: int, k: int) -> tuple[Operand, Operand]:
    random = torch.Generator().manual_seed(m)
    left, right = (quantized(torch.randn(rows, k, generator=random)) for rows in (m, n))
    return left, right


def multiplied(left: Operand, right: Operand, dtype: torch.dtype, by_rows: bool = False) -> Tensor:
    (a, a_s, a_m), (b, b_s, b_m) = tiled(left), tiled(right)
    out = torch.full((a.shape[0], b.shape[0]), torch.nan, dtype=dtype)
    cublas_fp4.scaled_mm_out(a, a_s, b, b_s, b_m, None if by_rows else a_m, out=out)
    return out


@pytest.mark.parametrize("shape", [(150, 144, 320), (1, 16, 32), (300, 128, 96)])
@pytest.mark.parametrize("dtype", [BF16, FLOAT])
def test_cublas_is_handed_what_gives_the_reference(
    emulation: None, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Bit for bit: the emulation adds in the reference's order, and the factor is rounded once."""
    left, right = pair(*shape)
    expected = fp4.scaled_mm(*left, "nvfp4", *right, "nvfp4", dtype)
    assert torch.equal(multiplied(left, right, dtype), expected)


@pytest.mark.parametrize("amaxes", [(3e38, 1e-20), (1e-30, 2e-30), (3e38, 3e38), (torch.nan, 1.0), (0.0, 5.0)])
def test_the_factor_is_ours_where_scales_for_each_would_round_or_overflow(
    emulation: None, amaxes: tuple[float, float]
) -> None:
    left, right = ((*one[:2], torch.tensor(amax)) for one, amax in zip(pair(3, 16, 32), amaxes, strict=True))
    expected = fp4.scaled_mm(*left, "nvfp4", *right, "nvfp4", FLOAT)
    torch.testing.assert_close(multiplied(left, right, FLOAT), expected, rtol=0, atol=0, equal_nan=True)


def test_rows_with_scales_of_their_own_leave_the_right_factor(emulation: None) -> None:
    left, right = pair(5, 16, 32)
    plain = fp4.decode(*left[:2], "nvfp4", FLOAT) @ fp4.decode(*right[:2], "nvfp4", FLOAT).t()
    assert torch.equal(multiplied(left, right, FLOAT, by_rows=True), plain * nvfp4.tensor_scale(right[2]))


@pytest.mark.parametrize("kernel", ["cublas", "both"])
def test_the_operator_of_a_graph_called_eagerly_gives_the_same(emulation: None, kernel: str) -> None:
    left, right = pair(5, 16, 32)
    out = template._call(*tiled(left), *tiled(right), "nvfp4", BF16, kernel)
    assert torch.equal(out, multiplied(left, right, BF16))


Arguments = dict[str, Tensor | None]


def arguments(m: int = 128, n: int = 144, k: int = 320, dtype: torch.dtype = BF16) -> Arguments:
    shapes = dict(zip(("a", "a_scales", "a_amax", "b", "b_scales", "b_amax"), operands(m, n, k), strict=True))
    tensors: Arguments = {name: torch.zeros(shape, dtype=one) for name, (shape, one) in shapes.items()}
    return {**tensors, "out": torch.zeros(m, n, dtype=dtype)}


def wide(rows: int, columns: int) -> Tensor:
    return torch.zeros(rows, 2 * columns, dtype=CODES)[:, :columns]


REFUSED = [
    (arguments(n=136), "N is not known to be a multiple of 16.*'product': 'triton'"),
    (arguments(k=336), "K is not known to be a multiple of 32"),
    (arguments() | {"b": torch.zeros(144, 176, dtype=CODES)}, "different K"),
    (arguments(dtype=torch.float16), "float16"),
    (arguments() | {"a": torch.zeros(128, 160, dtype=torch.int8)}, "takes a as contiguous torch.uint8"),
    (arguments() | {"b": wide(144, 160)}, r"takes b as .*strides \(320, 1\)"),
    (arguments() | {"a_scales": torch.zeros(1, 5, 32, 4, 4, dtype=CODES)}, "takes a_scales as .*float8_e4m3fn"),
    (arguments() | {"b_scales": torch.zeros(1, 5, 32, 4, 4).to(SCALES)}, r"takes b_scales as .*\[2, 5, 32, 4, 4\]"),
    (arguments() | {"a_amax": torch.zeros(128)}, r"takes a_amax as .*float32 \[\]"),
    (arguments() | {"b_amax": torch.zeros((), dtype=BF16)}, "takes b_amax as .*float32"),
    (arguments() | {"out": torch.zeros(144, 128, dtype=BF16)}, r"takes out as .*\[128, 144\]"),
    (arguments() | {"out": torch.zeros(144, 128, dtype=BF16).t()}, "takes out as contiguous"),
]


@pytest.mark.parametrize(("given", "words"), REFUSED)
@pytest.mark.parametrize("fake", [True, False])
def test_what_the_operator_refuses_when_it_is_traced_and_when_it_is_called(
    given: Arguments, words: str, fake: bool
) -> None:
    if not fake:
        with pytest.raises(ConfigError, match=words):
            cublas_fp4.scaled_mm_out(**given)  # type: ignore[arg-type]
        return
    with FakeTensorMode() as mode:
        fakes = {name: one if one is None else mode.from_tensor(one) for name, one in given.items()}
        with pytest.raises(ConfigError, match=words):
            cublas_fp4.OPERATOR(**fakes)


def test_what_the_operator_takes_when_it_is_traced() -> None:
    with FakeTensorMode() as mode:
        for one in (arguments(), arguments(dtype=FLOAT), arguments() | {"a_amax": None}):
            fakes = {name: value if value is None else mode.from_tensor(value) for name, value in one.items()}
            assert cublas_fp4.OPERATOR(**fakes) is None


def test_tensors_that_begin_anywhere_are_refused() -> None:
    odd = torch.zeros(128 * 160 + 8, dtype=CODES)[8:].view(128, 160)
    with pytest.raises(ConfigError, match="begin at a multiple of 16 bytes; a does not"):
        cublas_fp4.scaled_mm_out(**(arguments() | {"a": odd}))  # type: ignore[arg-type]


@pytest.mark.parametrize(("version", "refused"), [((2, 13), True), ((2, 14), False)])
def test_a_second_gpu_of_a_process_is_refused_where_pytorch_has_one_factor_for_all(
    version: tuple[int, int], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cublas_fp4, "_devices", set())
    monkeypatch.setattr(compat, "version", lambda: version)
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    cublas_fp4._check_device(first)
    cublas_fp4._check_device(first)
    if not refused:
        cublas_fp4._check_device(second)
        return
    with pytest.raises(ConfigError, match=r"cuda:0, cuda:1.*torch 2\.14"):
        cublas_fp4._check_device(second)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [BF16, FLOAT])
def test_on_a_device(dtype: torch.dtype) -> None:
    """Codes times one scale, in sums below 2^24 units: exact in any order, and factor and cast are rounded once."""
    if torch.cuda.get_device_capability() not in CAPABILITIES:
        pytest.skip("cuBLAS has no FP4 product here")
    random = torch.Generator().manual_seed(5)
    for m, n, k in ((1, 16, 32), (129, 144, 320), (300, 512, 2048)):
        x, w = (torch.randint(-6, 7, (rows, k), generator=random).float() for rows in (m, n))
        x[:, ::16] = w[:, ::16] = 6
        left, right = quantized(x), quantized(w)
        (a, a_s, a_m), (b, b_s, b_m) = (tuple(each.cuda() for each in tiled(one)) for one in (left, right))
        out = torch.empty(m, n, dtype=dtype, device="cuda")
        cublas_fp4.scaled_mm_out(a, a_s, b, b_s, b_m, a_m, out=out)
        assert torch.equal(out.cpu(), fp4.scaled_mm(*left, "nvfp4", *right, "nvfp4", dtype)), (m, n, k)


# --- in a compiled graph ---------------------------------------------------------------------------------------------


def gated(a: Any, a_s: Any, a_m: Any, b: Any, b_s: Any, b_m: Any, bias: Any, residual: Any) -> Any:
    multiplied = fp4.scaled_mm(a, a_s, a_m, "nvfp4", b, b_s, b_m, "nvfp4", BF16, True)
    return functional.silu(multiplied + bias) * residual


def plain_mxfp4(a: Any, a_s: Any, b: Any, b_s: Any) -> Any:
    tiles = (a_s.view(torch.float8_e8m0fnu), b_s.view(torch.float8_e8m0fnu))
    return fp4.scaled_mm(a, tiles[0], None, "mxfp4", b, tiles[1], None, "mxfp4", BF16, True)


def calls(option: str, m: int = 1024, n: int = 512, k: int = 2048, by_rows: bool = False, **settings: Any) -> str:
    """What Inductor writes for a B200: the calls, without what declares kernels."""
    inputs = operands(m, n, k)
    if by_rows:
        inputs[2] = ((m,), BF16)
    change = functools.partial(lowering.lower, product=option)
    code = fake_gpu.generated(gated, [*inputs, ((n,), BF16), ((m, n), BF16)], change, **settings)
    return code.partition("def call(")[2].partition("return (")[0]


CALL = re.compile(r"torch\.ops\.fp4_native\.scaled_mm_out\.default\(([\w, ]+), out=(\w+)\)")


@pytest.mark.parametrize("by_rows", [False, True])
def test_the_template_is_one_kernel_with_all_that_follows(by_rows: bool) -> None:
    code = calls("triton", by_rows=by_rows)
    assert "fp4_native" not in code
    assert len(re.findall(r"triton_\w+\.run\(", code)) == 1 and "triton_tem_" in code
    assert code.count("empty_strided_cuda(") == 1 and "torch.float32" not in code


@pytest.mark.parametrize("option", ["cublas", "auto"])
@pytest.mark.parametrize("by_rows", [False, True])
def test_cublas_writes_into_inductors_buffer_and_one_kernel_follows(option: str, by_rows: bool) -> None:
    """No copy, and nothing of float32 but the product that rows are still to be multiplied with."""
    code = calls(option, by_rows=by_rows)
    ((inputs, out),) = CALL.findall(code)
    assert len(inputs.split(", ")) == 6 - by_rows
    dtype = "torch.float32" if by_rows else "torch.bfloat16"
    assert f"{out} = empty_strided_cuda((1024, 512), (512, 1), {dtype})" in code
    assert len(re.findall(r"triton_\w+\.run\(", code)) == 1 and "triton_tem_" not in code
    assert code.count("empty_strided_cuda(") == 1 + by_rows and code.count("torch.float32") == by_rows


@pytest.mark.parametrize(("option", "folds"), [("cublas", True), ("triton", False)])
def test_the_kernel_behind_cublas_finds_the_amax_of_what_it_computes(option: str, folds: bool) -> None:
    """Behind the template it would take the epilogue from it."""

    def activated(*inputs: Any) -> Any:
        y = gated(*inputs)
        return y, fp4.amax(y)

    inputs = [*operands(1024, 512, 2048), ((512,), BF16), ((1024, 512), BF16)]
    code = fake_gpu.generated(activated, inputs, functools.partial(lowering.lower, product=option))
    assert ("fp4_cuda.amax" in code) != folds


def test_max_autotune_measures_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """The template in every schedule, and the operator, by a name that a process has which compiles nothing."""
    from torch._inductor import select_algorithm

    offered: list[Any] = []

    def select(name: str, choices: list[Any], *rest: Any, **named: Any) -> Any:
        offered.extend(choices)
        return choices[0].output_node()

    monkeypatch.setattr(select_algorithm, "autotune_select_algorithm", select)
    code = calls("auto", m=8192, n=8192, max_autotune=True)
    assert CALL.search(code)
    (called,) = [one for one in offered if type(one).__name__ == "ExternKernelCaller"]
    assert called.to_callable() is cublas_fp4.OPERATOR
    assert called.choice.call_name() == "torch.ops.fp4_native.scaled_mm_out.default"
    assert len(offered) == 1 + len(template.distinct(template.gemm.DATACENTER_CONFIGS))


def test_the_option_wins_over_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    code = calls("cublas", max_autotune=True)
    assert CALL.search(code) and "triton_tem_" not in code


def test_what_cublas_cannot_take_is_multiplied_by_the_template_with_one_warning() -> None:
    with pytest.warns(Fp4Warning) as caught:
        code = calls("cublas", n=520)
    assert "triton_tem_" in code and "scaled_mm_out" not in code
    (words,) = [str(one.message) for one in caught if one.category is Fp4Warning]
    assert "[1024, 2048] x [520, 2048] transposed, nvfp4 to bfloat16 (N is not known to be a multiple of 16)" in words
    with pytest.warns(Fp4Warning, match="mxfp4"):
        change = functools.partial(lowering.lower, product="cublas")
        fake_gpu.generated(plain_mxfp4, operands(128, 128, 256, "mxfp4"), change)


def test_automatically_it_does_not_warn_and_the_log_has_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "fp4compile.lowering")
    with warnings.catch_warnings():
        warnings.simplefilter("error", Fp4Warning)
        calls("auto", n=520)
    assert "[520, 2048] transposed, nvfp4 to bfloat16: triton (N is not known to be a multiple of 16)" in caplog.text


def test_where_the_template_cannot_be_compiled_cublas_spares_the_eager_call(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (lowering, template):
        monkeypatch.setattr(module, "capability_of", lambda device: (12, 1))
    assert CALL.search(calls("auto")) and CALL.search(calls("auto", max_autotune=True))
    assert "fp4_native.gemm.default(" in calls("triton")


# --- the option ------------------------------------------------------------------------------------------------------


def test_the_option_is_checked_and_part_of_the_key() -> None:
    assert parse_options(None).product == "auto"
    keys = {parse_options({"product": one}).key() for one in ("auto", "cublas", "triton")}
    assert len(keys) == 3
    for wrong in ("cutlass", True, None, ["triton"]):
        with pytest.raises(ConfigError, match="'product' must be one of 'auto', 'cublas', 'triton'"):
            parse_options({"product": wrong})


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 32, bias=False))


@pytest.mark.parametrize("option", ["cublas", "triton"])
def test_a_cpu_cannot_honour_it(option: str) -> None:
    words = f"option 'product' is '{option}'.*of cpu.*leave it 'auto'"
    with compiling.lowered(), pytest.raises(Exception, match=words):
        compiling.compiled(model(), product=option)(torch.ones(16, 64))


def test_neither_can_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = fx.Graph()
    node = graph.call_function(lowering.SCALED_MM)
    node.meta["val"] = torch.empty(0, device="meta")
    monkeypatch.setattr(lowering, "_device", lambda node: torch.device("cuda", 0))
    monkeypatch.setattr(lowering.targets, "capability_of", lambda device: (9, 0))
    with pytest.raises(ConfigError, match=r"cuda:0.*sm_90"):
        lowering.refuse_product(graph, "cublas")
    lowering.refuse_product(graph, "auto")


def test_where_nothing_is_rewritten_there_is_nothing_to_honour() -> None:
    with compiling.lowered(), pytest.warns(Fp4Warning, match="rewrote nothing"):
        compiling.compiled(model(), product="cublas", policy={"skip": ["*"]})(torch.ones(16, 64))


def test_the_option_reaches_the_lowering(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(backend, "refuse_product", lambda graph, product: seen.append(product))
    monkeypatch.setattr(backend, "lower", lambda graph, product: seen.append(product))
    with compiling.lowered():
        compiling.compiled(model(), product="cublas")(torch.ones(16, 64))
    assert len(seen) >= 2 and set(seen) == {"cublas"}


def test_the_rules_numbers_are_pytorchs() -> None:
    assert cublas_fp4.RECIPE == [2, 0] and cublas_fp4.SWIZZLE == [1, 0]
    assert "Tensor(a!) out" in str(compat.SCALED_MM_OUT._schema)
    assert product.unfit(LARGE) is None
