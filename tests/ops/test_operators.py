"""The operators as torch.library sees them: schemas, fakes (also with symbolic sizes), strides, checks."""

import pytest
import torch

import fp4compile.ops  # noqa: F401  registers torch.ops.fp4
from fp4compile.errors import ConfigError, UnsupportedDtypeError
from fp4compile.formats import noise, rotation
from fp4compile.formats.layout import to_tiles

fp4 = torch.ops.fp4
SEED = torch.tensor(9)
HOW = ("nvfp4", (1, 16), "nearest", 0)
SHAPES = [(33, 72), (16, 16), (1, 1)]


def matrix(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def nvfp4(x, block=(1, 16), seed=None):
    amax = fp4.amax(x)
    rounding = "nearest" if seed is None else "stochastic"
    return *fp4.quantize(x, amax, seed, "nvfp4", block, rounding, 3), amax


def mxfp4(x):
    return fp4.quantize(x, None, None, "mxfp4", (1, 32), "nearest", 0)


def calls(x):
    """Every operator, format, block and rounding, on x."""
    amax = fp4.amax(x)
    packed, scales, _ = nvfp4(x)
    mx_packed, mx_scales = mxfp4(x)
    yield fp4.amax, (x,)
    yield fp4.rotate, (x, 16, rotation.SIGNS)
    yield fp4.rotate, (x, 32, 0)
    yield fp4.quantize, (x, amax, None, "nvfp4", (1, 16), "nearest", 0)
    yield fp4.quantize, (x, amax, SEED, "nvfp4", (16, 16), "stochastic", 1)
    yield fp4.quantize, (x, None, SEED, "mxfp4", (1, 32), "stochastic", 2)
    yield fp4.decode, (packed, scales, "nvfp4", torch.bfloat16)
    yield fp4.decode, (mx_packed, mx_scales, "mxfp4", torch.float32)
    quantized, plain = (packed, scales, amax, "nvfp4"), (x, None, None, "bf16")
    yield fp4.scaled_mm, (*quantized, *quantized, torch.bfloat16)
    yield fp4.scaled_mm, (*plain, mx_packed, mx_scales, None, "mxfp4", torch.float32)
    yield fp4.quantize_decoded, (x, amax, SEED, "nvfp4", (1, 16), "stochastic", 4)
    yield fp4.quantize_decoded, (x, amax, None, "nvfp4", (16, 16), "nearest", 0)
    yield fp4.quantize_decoded, (x, None, None, "mxfp4", (1, 32), "nearest", 0)
    yield fp4.rotate_quantize_decoded, (x, amax, SEED, "nvfp4", "stochastic", 5, 16, rotation.SIGNS)
    yield fp4.rotate_quantize_decoded, (x, None, None, "mxfp4", "nearest", 0, 16, 0)
    values = x.to(torch.bfloat16)
    yield fp4.decoded_mm, (values, amax, values.clone(), None, torch.float32)
    row_amax = x.abs().amax(-1)
    yield fp4.row_amax, (x,)
    by_row = fp4.quantize(x, row_amax, None, *HOW)
    yield fp4.quantize, (x, row_amax, SEED, "nvfp4", (1, 16), "stochastic", 6)
    yield fp4.quantize_decoded, (x, row_amax, None, *HOW)
    yield fp4.scaled_mm, (*by_row, row_amax, "nvfp4", packed, scales, amax, "nvfp4", torch.bfloat16)
    yield fp4.decoded_mm, (values, row_amax, values.clone(), amax, torch.float16)
    yield fp4.decoded_mm, (values, amax, fp4.quantize_decoded(x, amax, None, *HOW), amax, torch.bfloat16)


CALLS = [
    pytest.param(op, args, id=f"{op.__name__}-{'x'.join(map(str, shape))}-{i}")
    for shape in SHAPES
    for i, (op, args) in enumerate(calls(matrix(*shape)))
]


@pytest.mark.parametrize(("op", "args"), CALLS)
def test_opcheck(op, args):
    """Schema, fake, and tracing with static and with symbolic sizes."""
    tests = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if any(tensor.dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu) for tensor in tensors(args)):
        tests.remove("test_schema")  # PyTorch cannot compare float8 inputs with themselves; see the next test
    torch.library.opcheck(op, args, test_utils=tests)


@pytest.mark.parametrize(("op", "args"), CALLS)
def test_inputs_are_left_alone(op, args):
    before = [tensor.clone() for tensor in tensors(args)]
    results = tensors(as_tuple(op(*args)))
    for tensor, copy in zip(tensors(args), before, strict=True):
        assert torch.equal(
            tensor.view(torch.uint8) if tensor.dim() else tensor,
            copy.view(torch.uint8) if copy.dim() else copy,
        )
        assert all(tensor.data_ptr() != result.data_ptr() for result in results)


@pytest.mark.parametrize(("op", "args"), CALLS)
def test_the_fake_is_exact(op, args):
    real = as_tuple(op(*args))
    fake = as_tuple(op(*(a.to("meta") if isinstance(a, torch.Tensor) else a for a in args)))
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
        assert a.is_contiguous() and b.is_meta


def tensors(args):
    return [a for a in args if isinstance(a, torch.Tensor)]


def as_tuple(result):
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("shape", [(33, 72), (16, 32)])
def test_strided_operands_give_the_contiguous_result(shape):
    """Views with other strides, and offsets, of plain and of packed operands."""
    x = matrix(*shape)
    view = x.t().contiguous().t()
    for (op, args), (_, same) in zip(calls(x), calls(view), strict=True):
        for a, b in zip(as_tuple(op(*args)), as_tuple(op(*same)), strict=True):
            assert torch.equal(a.float(), b.float())
    packed, scales, _ = nvfp4(x)
    strided = packed.t().contiguous().t(), scales.view(torch.uint8).t().contiguous().t().view(scales.dtype)
    expected = fp4.decode(packed, scales, "nvfp4", torch.float32)
    assert torch.equal(fp4.decode(*strided, "nvfp4", torch.float32), expected)
    assert torch.equal(fp4.decode(packed[5:], scales[5:], "nvfp4", torch.float32), expected[5:])


def test_one_dynamic_graph_serves_other_sizes():
    def step(x, seed):
        amax = fp4.amax(x)
        packed, scales = fp4.quantize(x, amax, seed, "nvfp4", (1, 16), "stochastic", 1)
        return fp4.scaled_mm(packed, scales, amax, "nvfp4", x, None, None, "bf16", torch.float32)

    torch.compiler.reset()
    counter = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((33, 72), (17, 40), (64, 48)):
        x = matrix(*shape)
        assert torch.equal(counter(x, SEED), step(x, SEED))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.complex64, torch.float8_e4m3fn, torch.bool])
def test_unsupported_dtypes_name_the_cast(dtype):
    x = torch.ones(16, 16).to(dtype)
    amax = torch.tensor(1.0)
    for call in (
        lambda: fp4.amax(x),
        lambda: fp4.rotate(x, 16, 0),
        lambda: fp4.quantize(x, amax, None, "nvfp4", (1, 16), "nearest", 0),
        lambda: fp4.quantize_decoded(x, amax, None, *HOW),
        lambda: fp4.rotate_quantize_decoded(x, amax, None, "nvfp4", "nearest", 0, 16, 0),
        lambda: fp4.scaled_mm(x, None, None, "bf16", x, None, None, "bf16", torch.float32),
    ):
        with pytest.raises(UnsupportedDtypeError, match=r"cast it to torch\.bfloat16"):
            call()


X, AMAX, ROWS = matrix(16, 32), torch.tensor(3.0), torch.full((16,), 3.0)
PACKED, SCALES = fp4.quantize(X, AMAX, None, "nvfp4", (1, 16), "nearest", 0)
MX_PACKED, MX_SCALES = mxfp4(X)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((X[0], AMAX, None, "nvfp4", (1, 16), "nearest", 0), r"shape \[32\].*2-D"),
        ((X[None], AMAX, None, "nvfp4", (1, 16), "nearest", 0), r"shape \[1, 16, 32\].*reshape"),
        ((X, AMAX, None, "fp4", (1, 16), "nearest", 0), "'fp4'; one of 'nvfp4', 'mxfp4'"),
        (
            (X, AMAX, None, "nvfp4", (1, 32), "nearest", 0),
            r"block is \(1, 32\); nvfp4 has \(1, 16\) or \(16, 16\)",
        ),
        ((X, None, None, "mxfp4", (1, 16), "nearest", 0), r"mxfp4 has \(1, 32\)"),
        ((X, None, None, "nvfp4", (1, 16), "nearest", 0), "needs the amax"),
        ((X, AMAX, None, "mxfp4", (1, 32), "nearest", 0), "leave amax None"),
        ((X, AMAX.double(), None, "nvfp4", (1, 16), "nearest", 0), "amax has shape .*float64"),
        ((X, AMAX[None], None, "nvfp4", (1, 16), "nearest", 0), r"amax has shape \[1\].*a scale a row, \[16\]"),
        ((X, ROWS[:, None], None, "nvfp4", (1, 16), "nearest", 0), r"amax has shape \[16, 1\]"),
        ((X, ROWS.half(), None, "nvfp4", (1, 16), "nearest", 0), r"float16; .* in torch\.float32 or torch\.float32"),
        ((X, ROWS, None, "nvfp4", (16, 16), "nearest", 0), r"with block \(16, 16\); that needs block \(1, 16\)"),
        ((X, ROWS, None, "mxfp4", (1, 32), "nearest", 0), "leave amax None"),
        ((X, AMAX, None, "nvfp4", (1, 16), "up", 0), "'up'; 'nearest' or 'stochastic'"),
        ((X, AMAX, None, "nvfp4", (1, 16), "stochastic", 0), "needs a seed"),
        ((X, AMAX, SEED, "nvfp4", (1, 16), "nearest", 0), "takes no seed"),
        ((X, AMAX, SEED.int(), "nvfp4", (1, 16), "stochastic", 0), "seed has shape .*int32"),
        ((X, AMAX, SEED, "nvfp4", (1, 16), "stochastic", -1), "site is -1"),
        ((X, AMAX, SEED, "nvfp4", (1, 16), "stochastic", 2**32), "site is 4294967296"),
    ],
)
def test_quantize_refuses(arguments, message):
    with pytest.raises(ConfigError, match=message):
        fp4.quantize(*arguments)
    meta = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in arguments]
    with pytest.raises(ConfigError, match=message):
        fp4.quantize(*meta)
    for given in (arguments, meta):
        with pytest.raises(ConfigError, match=message):
            fp4.quantize_decoded(*given)


def test_stochastic_rounding_refuses_more_elements_than_noise():
    x = torch.zeros(1, 1).expand(noise.MAX_ELEMENTS // 2**16 + 1, 2**16)
    with pytest.raises(ConfigError, match="pieces"):
        fp4.quantize(x, AMAX, SEED, "nvfp4", (1, 16), "stochastic", 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((X, 12, 0), "size is 12; one of 4, 8, 16"), ((X, 16, 2**16), "0x10000"), ((X[0], 16, 0), "2-D")],
)
def test_rotate_refuses(arguments, message):
    with pytest.raises(ConfigError, match=message):
        fp4.rotate(*arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((PACKED, SCALES, "nvfp4", torch.float16), UnsupportedDtypeError, "decode to torch.bfloat16"),
        ((PACKED, SCALES, "bf16", torch.float32), ConfigError, "'bf16'; one of"),
        ((PACKED.float(), SCALES, "nvfp4", torch.float32), ConfigError, "uint8"),
        ((PACKED, SCALES, "mxfp4", torch.float32), ConfigError, "mxfp4 has torch.float8_e8m0fnu"),
        ((PACKED[:, :8], SCALES, "nvfp4", torch.float32), ConfigError, "one scale for 8 bytes"),
        ((PACKED[:, :12], SCALES[:, :1], "nvfp4", torch.float32), ConfigError, "one scale for 8 bytes"),
        ((PACKED[:4], SCALES, "nvfp4", torch.float32), ConfigError, "one scale for 8 bytes"),
    ],
)
def test_decode_refuses(arguments, error, message):
    with pytest.raises(error, match=message):
        fp4.decode(*arguments)


PLAIN = (X, None, None, "bf16")
QUANTIZED = (PACKED, SCALES, AMAX, "nvfp4")


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ((X, SCALES, None, "bf16"), PLAIN, "a is 'bf16'"),
        (PLAIN, (X, None, AMAX, "bf16"), "b is 'bf16'"),
        ((PACKED, None, AMAX, "nvfp4"), PLAIN, "a is nvfp4 and needs its block scales"),
        ((PACKED, SCALES, None, "nvfp4"), PLAIN, "a is nvfp4 and needs its amax"),
        (PLAIN, (MX_PACKED, MX_SCALES, AMAX, "mxfp4"), "b is mxfp4, without a tensor scale"),
        (PLAIN, (PACKED, SCALES, AMAX, "fp8"), "b_format is 'fp8'"),
        (QUANTIZED, (matrix(4, 64), None, None, "bf16"), "a has K = 32 and b has K = 64"),
        (QUANTIZED, (PACKED, SCALES, AMAX.half(), "nvfp4"), "b_amax has shape"),
        (QUANTIZED, (PACKED, SCALES, ROWS, "nvfp4"), r"b_amax has shape \[16\].*0-d"),
        ((PACKED, SCALES, ROWS[:8], "nvfp4"), QUANTIZED, r"a_amax has shape \[8\].*a scale a row, \[16\]"),
        ((PACKED, SCALES, ROWS.double(), "nvfp4"), QUANTIZED, "a_amax has shape .*float64"),
    ],
)
def test_scaled_mm_refuses(a, b, message):
    with pytest.raises(ConfigError, match=message):
        fp4.scaled_mm(*a, *b, torch.float32)


def test_scaled_mm_refuses_an_output_dtype():
    with pytest.raises(UnsupportedDtypeError, match=r"out_dtype is torch\.float64"):
        fp4.scaled_mm(*QUANTIZED, *QUANTIZED, torch.float64)


VALUES = X.to(torch.bfloat16)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((X, AMAX, VALUES, AMAX, torch.float32), UnsupportedDtypeError, r"a is torch\.float32; decoded values"),
        ((VALUES, AMAX, PACKED, AMAX, torch.float32), UnsupportedDtypeError, r"b is torch\.uint8; decoded values"),
        ((VALUES, AMAX, VALUES[0], AMAX, torch.float32), ConfigError, r"b has shape \[32\]; a 2-D"),
        ((VALUES, AMAX.half(), VALUES, AMAX, torch.float32), ConfigError, "a_amax has shape .*float16"),
        ((VALUES, AMAX, VALUES, AMAX[None], torch.float32), ConfigError, r"b_amax has shape \[1\]"),
        ((VALUES, AMAX, VALUES, ROWS, torch.float32), ConfigError, r"b_amax has shape \[16\]"),
        ((VALUES, ROWS[1:], VALUES, AMAX, torch.float32), ConfigError, r"a_amax has shape \[15\].*\[16\]"),
        ((VALUES, AMAX, VALUES.t(), AMAX, torch.float32), None, None),
        ((VALUES[:, :1], AMAX, VALUES.repeat(1, 2), AMAX, torch.float32), ConfigError, "a has K = 1 and b has K = 64"),
        ((VALUES, AMAX, VALUES, AMAX, torch.float64), UnsupportedDtypeError, r"out_dtype is torch\.float64"),
    ],
)
def test_decoded_mm_refuses(arguments, error, message):
    """But not K that differ by padding only."""
    for given in (arguments, [a.to("meta") if isinstance(a, torch.Tensor) else a for a in arguments]):
        if error is None:
            assert fp4.decoded_mm(*given).shape == (16, 32)
            continue
        with pytest.raises(error, match=message):
            fp4.decoded_mm(*given)


def test_scales_of_rows_with_and_without_tiles():
    codes, scales = fp4.quantize(X, ROWS, None, *HOW)
    tiles = fp4.quantize(X, ROWS, None, *HOW, True)
    assert torch.equal(tiles[0], codes) and torch.equal(tiles[1].view(torch.uint8), to_tiles(scales).view(torch.uint8))
    right = fp4.quantize(X, AMAX, None, *HOW), fp4.quantize(X, AMAX, None, *HOW, True)
    plain = fp4.scaled_mm(codes, scales, ROWS, "nvfp4", *right[0], AMAX, "nvfp4", torch.float32)
    tiled = fp4.scaled_mm(*tiles, ROWS, "nvfp4", *right[1], AMAX, "nvfp4", torch.float32, True)
    assert torch.equal(plain, tiled)


def test_a_rotated_operand_has_no_scales_of_rows():
    with pytest.raises(ConfigError, match=r"amax has shape \[16\]"):
        fp4.rotate_quantize(X, ROWS, None, "nvfp4", "nearest", 0, 16, 0)


def test_rotate_quantize_decoded_refuses():
    for arguments, message in (
        ((X, AMAX, None, "nvfp4", "nearest", 0, 12, 0), "size is 12"),
        ((X, None, None, "nvfp4", "nearest", 0, 16, 0), "needs the amax"),
        ((X, ROWS, None, "nvfp4", "nearest", 0, 16, 0), r"amax has shape \[16\].*0-d"),
    ):
        with pytest.raises(ConfigError, match=message):
            fp4.rotate_quantize_decoded(*arguments)
