"""Quantization, amax and decoding by generated kernels, run by Triton's interpreter: the bits are the operators'."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import strategies as matrix
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import interpreted
from torch import Tensor
from torch.nn import functional as F

import fp4compile.ops  # noqa: F401  registers torch.ops.fp4
from fp4compile.formats.layout import to_tiles
from fp4compile.formats.rotation import SIGNS
from fp4compile.lowering.aot import CAPABILITIES
from fp4compile.lowering.kernels import Kernel, all_kernels, amax, columns, common, decode, rows, weights
from fp4compile.lowering.kernels.kernel import _environment
from fp4compile.lowering.targets import AMPERE, INTERPRETER, ISAS
from fp4compile.ops.library import BLOCKS, SCALE_DTYPES

fp4 = torch.ops.fp4

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FORMATS = ("nvfp4", "mxfp4")
SEED = torch.tensor(-(2**61) + 12345)
SITE = 3_000_000_000  # more than a signed number of 32 bits holds
SHAPES = ((1, 1), (15, 8), (16, 16), (17, 40), (33, 48), (129, 16), (257, 8), (1, 272), (33, 1))
EMPTY = ((0, 16), (16, 0), (0, 0))
OTHER_SIGNS = 0x1234

Quantized = tuple[Tensor, Tensor]


@pytest.fixture(scope="module", autouse=True)
def interpreter() -> Iterator[None]:
    """For the whole module: hypothesis refuses fixtures that are made for each test."""
    with interpreted():
        yield


def values(height: int, width: int, dtype: torch.dtype) -> Tensor:
    """Rows of very different magnitudes, zeros of both signs, a zero row and a subnormal one."""
    random = torch.Generator().manual_seed(height * 1000 + width)
    x = torch.randn(height, width, generator=random) * 2.0 ** torch.randint(-8, 8, (height, 1), generator=random)
    x[torch.rand(height, width, generator=random) < 0.1] = -0.0
    x[3::16] = 0.0
    x[4::16, :] *= 2.0**-130
    x[7::32, ::5] = 65504.0
    return x.to(dtype)


def amax_for(x: Tensor, format: str) -> Tensor | None:
    return fp4.amax(x) if format == "nvfp4" else None


def twin(x: Tensor, amax_: Tensor | None, seed: Tensor | None, format: str, square: bool = False) -> Quantized:
    """What the operator makes of x, blocks along its last dimension."""
    block = (16, 16) if square else (1, BLOCKS[format])
    return fp4.quantize(x, amax_, seed, format, block, "nearest" if seed is None else "stochastic", SITE)


def rotated(x: Tensor, format: str, signs: int | None) -> Tensor:
    """x^T as the operator quantizes it."""
    return x.t() if signs is None else fp4.rotate(x.t(), BLOCKS[format], signs)


def assert_bits(result: Quantized, expected: Quantized) -> None:
    """Bytes of codes and scales. Codes of a block whose scale is NaN mean nothing."""
    for one, other in zip(result, expected, strict=True):
        assert (one.shape, one.dtype, one.is_contiguous()) == (other.shape, other.dtype, True)
    scales = expected[1].view(torch.uint8)
    different = (result[1].view(torch.uint8) != scales).nonzero()
    assert not len(different), f"{len(different)} of {scales.numel()} scales differ, first at {different[0].tolist()}"
    meaningless = expected[1].float().isnan().repeat_interleave(BLOCKS[format_of(expected[1])] // 2, 1)
    different = ((result[0] != expected[0]) & ~meaningless).nonzero()
    assert not len(different), (
        f"{len(different)} of {result[0].numel()} bytes of codes differ, first at {different[0].tolist()}"
    )


def assert_tiles(result: Quantized, expected: Quantized) -> None:
    """The same with scales in tiles, zero where there is no scale."""
    assert torch.equal(result[0], expected[0])
    assert result[1].dtype == expected[1].dtype
    assert torch.equal(result[1].view(torch.uint8), to_tiles(expected[1]).view(torch.uint8))


def format_of(scales: Tensor) -> str:
    return next(format for format, dtype in SCALE_DTYPES.items() if dtype == scales.dtype)


def assert_same_scalar(result: Tensor | None, expected: Tensor) -> None:
    assert result is not None and result.shape == () and result.dtype == torch.float32
    assert torch.equal(result, expected) or (result.isnan() and expected.isnan()), (result, expected)


def sliced(x: Tensor) -> Tensor:
    """The same values as every second column of a larger tensor of 7s."""
    larger = torch.full((x.shape[0] + 1, 2 * x.shape[1] + 3), 7.0, dtype=x.dtype)
    larger[1:, 3::2] = x
    return larger[1:, 3::2]


def laid_out(x: Tensor) -> dict[str, Tensor]:
    return {"transposed": x.t().contiguous().t(), "sliced": sliced(x), "row slice": torch.cat([x, x])[1 : 1 + len(x)]}


seeded = pytest.mark.parametrize("seed", [None, SEED], ids=["nearest", "stochastic"])
of_formats = pytest.mark.parametrize("format", FORMATS)
of_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


# --- amax ------------------------------------------------------------------------------------------------------------


@of_dtypes
def test_amax_is_the_largest_magnitude(dtype: torch.dtype) -> None:
    for shape in (*SHAPES, *EMPTY):
        x = values(*shape, dtype)
        assert_same_scalar(amax.amax(x), fp4.amax(x))
    x = values(17, 40, dtype)
    for other in (*laid_out(x).values(), x.flatten(), x.view(17, 5, 8), x[0, 0]):
        assert_same_scalar(amax.amax(other), fp4.amax(other))


@of_dtypes
def test_amax_of_a_tensor_and_of_its_rotated_transpose(dtype: torch.dtype) -> None:
    for shape, signs in (((33, 40), OTHER_SIGNS), ((1, 1), SIGNS), *((shape, SIGNS) for shape in EMPTY)):
        x = values(*shape, dtype)
        both, alone = amax.amax_both(x, signs), amax.amax_both(x, signs, plain=False)
        expected = fp4.amax(fp4.rotate(x.t(), 16, signs))
        assert_same_scalar(both[0], fp4.amax(x))
        assert_same_scalar(both[1], expected)
        assert_same_scalar(alone[1], expected)
        assert alone[0] is None


def test_rotated_amax_of_several_programs_that_loop() -> None:
    x = values(257, 8, torch.bfloat16)
    assert amax.choose_both(17, 1, 1).loop > 1
    plain, turned = amax.amax_both(x, SIGNS)
    assert_same_scalar(plain, fp4.amax(x))
    assert_same_scalar(turned, fp4.amax(fp4.rotate(x.t(), 16, SIGNS)))


def test_the_largest_element_is_found_wherever_it_is() -> None:
    """Not only in a corner: at the ends of threads, programs and loops, of either sign."""
    for at, value in ((0, -9.0), (8 * 256 - 1, 9.0), (8 * 256, -9.0), (8 * 256 * 9 + 5, 9.0)):
        x = torch.linspace(-1, 1, 8 * 256 * 9 + 6).bfloat16()
        x[at] = value
        assert amax.amax(x).item() == 9.0
    looping = amax.Config(32, loop=3)
    for at in range(0, 8 * 32 * 4, 8 * 16 - 1):
        x = torch.ones(8 * 32 * 4).bfloat16()
        x[at] = -3.0
        result = torch.zeros(1)
        amax.kernel(INTERPRETER, x.dtype, looping).run(2, x, result, 32 * 4)
        assert result.item() == 3.0


@of_dtypes
def test_nan_and_infinity_are_seen_in_the_amax(dtype: torch.dtype) -> None:
    for value in (torch.nan, -torch.nan, torch.inf, -torch.inf):
        for at in ((0, 0), (16, 39), (5, 22)):
            x = values(17, 40, dtype)
            x[at] = value
            assert_same_scalar(amax.amax(x), fp4.amax(x))
    plain, turned = amax.amax_both(x, SIGNS)
    assert_same_scalar(plain, fp4.amax(x))
    assert_same_scalar(turned, fp4.amax(fp4.rotate(x.t(), 16, SIGNS)))
    assert plain is not None and plain.isinf() and not turned.isfinite()


# --- along rows ------------------------------------------------------------------------------------------------------


@of_dtypes
@of_formats
@seeded
def test_rows(seed: Tensor | None, format: common.Format, dtype: torch.dtype) -> None:
    for shape in (*SHAPES, *EMPTY):
        x = values(*shape, dtype)
        amax_ = amax_for(x, format)
        assert_bits(rows.quantize(x, amax_, seed, format, SITE), twin(x, amax_, seed, format))


def test_rows_of_several_programs() -> None:
    x = values(129, 272, torch.bfloat16)
    for format in FORMATS:
        amax_ = amax_for(x, format)
        assert_bits(rows.quantize(x, amax_, SEED, format, SITE), twin(x, amax_, SEED, format))


@of_dtypes
@of_formats
def test_rows_of_tensors_of_any_strides(format: common.Format, dtype: torch.dtype) -> None:
    for x in laid_out(values(17, 40, dtype)).values():
        amax_ = amax_for(x, format)
        assert_bits(rows.quantize(x, amax_, SEED, format, SITE), twin(x, amax_, SEED, format))


def run_rows(x: Tensor, seed: Tensor | None, format: common.Format, config: rows.Config, tiled: bool) -> Quantized:
    """(codes, scale bytes) of a bfloat16 tensor of whole blocks, in one configuration."""
    across = x.shape[1] // BLOCKS[format]
    blocks = x.shape[0] * across
    codes, scales = common.empty_quantized(x, x.shape[0], across, format, tiled)
    arguments = (x, *common.scalars(amax_for(x, format), seed, SITE), codes, scales, blocks)
    one = rows.kernel(INTERPRETER, x.dtype, format, seed is not None, config, tiled)
    one.run(-(-blocks // (config.threads * config.loop)), *arguments, *((across,) if tiled else ()), 1)
    return codes, scales


@pytest.mark.parametrize(("format", "seed"), [("nvfp4", SEED), ("mxfp4", None)], ids=["nvfp4", "mxfp4"])
def test_rows_in_every_configuration(seed: Tensor | None, format: common.Format) -> None:
    x = values(67, 64, torch.bfloat16)
    expected = twin(x, amax_for(x, format), seed, format)
    for config in (*rows.candidates(67, seed is not None, 132), rows.Config(32, 3)):
        codes, scales = run_rows(x, seed, format, config, tiled=False)
        assert_bits((codes, scales.view(SCALE_DTYPES[format])), expected)


@of_formats
@seeded
def test_rows_with_scales_in_tiles(seed: Tensor | None, format: common.Format) -> None:
    for shape in ((129, 96), (257, 32), (1, 160), (33, 128)):
        x = values(*shape, torch.bfloat16)
        expected = twin(x, amax_for(x, format), seed, format)
        assert_tiles(rows.quantize(x, amax_for(x, format), seed, format, SITE, tiled=True), expected)
    codes, scales = run_rows(x, seed, format, rows.Config(32, 3), tiled=True)
    assert_tiles((codes, scales.view(SCALE_DTYPES[format])), expected)


# --- along columns ---------------------------------------------------------------------------------------------------

COLUMN_SHAPES = ((15, 1), (16, 48), (33, 16), (1, 8), (257, 8), (17, 16), (129, 1))


def check_columns(
    x: Tensor, seed: Tensor | None, format: common.Format, signs: int | None, amax_: Tensor | None = None
) -> None:
    y = rotated(x, format, signs)
    amax_ = amax_for(y, format) if amax_ is None else amax_
    assert_bits(columns.quantize(x, amax_, seed, format, SITE, signs), twin(y, amax_, seed, format))


@of_dtypes
@of_formats
@seeded
@pytest.mark.parametrize("signs", [None, SIGNS], ids=["plain", "rotated"])
def test_columns(signs: int | None, seed: Tensor | None, format: common.Format, dtype: torch.dtype) -> None:
    """Every kernel with a ragged shape, and one more shape each in turn."""
    case = DTYPES.index(dtype) + 3 * FORMATS.index(format) + 6 * (seed is None) + 12 * (signs is None)
    for shape in ((17, 8), COLUMN_SHAPES[case % len(COLUMN_SHAPES)]):
        check_columns(values(*shape, dtype), seed, format, signs)


def test_columns_of_empty_tensors() -> None:
    for (format, shape), signs in itertools.product(itertools.product(FORMATS, EMPTY), (None, SIGNS)):
        check_columns(values(*shape, torch.bfloat16), None, format, signs)


def test_columns_of_several_programs_in_both_directions() -> None:
    x = values(272, 80, torch.bfloat16)
    assert columns.choose(272, 10, 16) == (columns.Config(), "ragged")
    check_columns(x, SEED, "nvfp4", SIGNS)


@pytest.mark.parametrize(
    ("format", "dtype", "seed", "signs"),
    [
        ("nvfp4", torch.bfloat16, None, SIGNS),
        ("nvfp4", torch.bfloat16, SEED, SIGNS),
        ("nvfp4", torch.float32, SEED, None),
        ("mxfp4", torch.bfloat16, SEED, SIGNS),
        ("mxfp4", torch.float16, None, None),
        ("mxfp4", torch.float32, None, SIGNS),
    ],
)
def test_columns_of_whole_programs_have_no_masks(
    format: common.Format, dtype: torch.dtype, seed: Tensor | None, signs: int | None
) -> None:
    size = BLOCKS[format]
    per_unit, config = columns.COLUMNS[size][dtype.itemsize], columns.Config()
    tokens, width = size * config.groups, per_unit * config.units
    _, shape = columns.choose(tokens, config.units, size)
    assert shape == "full"
    source = columns.kernel(INTERPRETER, dtype, format, seed is not None, signs is not None, 0, config, shape).source
    assert "mask=" not in source
    check_columns(values(tokens, width, dtype), seed, format, signs)


def test_columns_of_tensors_of_any_strides() -> None:
    for x in laid_out(values(17, 40, torch.bfloat16)).values():
        check_columns(x, SEED, "nvfp4", SIGNS)


@of_formats
def test_each_sign_of_the_rotation_is_its_own(format: common.Format) -> None:
    for signs in (0, OTHER_SIGNS):
        check_columns(values(33, 8, torch.bfloat16), None, format, signs)


def test_columns_in_every_configuration() -> None:
    x = values(70, 24, torch.bfloat16)
    y = rotated(x, "nvfp4", SIGNS)
    expected = twin(y, fp4.amax(y), None, "nvfp4")
    blocks, units = 5, 3
    for config, shape in columns.candidates(70, units, 16):
        codes, scales = common.empty_quantized(x, 24, blocks, "nvfp4")
        one = columns.kernel(INTERPRETER, x.dtype, "nvfp4", False, True, SIGNS, config, shape)
        programs = -(-blocks // config.groups) * -(-units // config.units)
        one.run(programs, x, fp4.amax(y), codes, scales, 70, blocks, units, 1)
        assert_bits((codes, scales.view(torch.float8_e4m3fn)), expected)


@pytest.mark.parametrize(
    ("format", "seed", "tokens", "width"),
    [
        ("nvfp4", SEED, 97, 135),
        ("nvfp4", None, 256, 64),
        ("mxfp4", None, 161, 31),
        ("mxfp4", SEED, 512, 32),
    ],
    ids=["nvfp4 ragged", "nvfp4 full", "mxfp4 ragged", "mxfp4 full"],
)
def test_columns_with_scales_in_tiles(format: common.Format, seed: Tensor | None, tokens: int, width: int) -> None:
    x = values(tokens, width, torch.bfloat16)
    y = rotated(x, format, SIGNS)
    expected = twin(y, amax_for(y, format), seed, format)
    assert_tiles(columns.quantize(x, amax_for(y, format), seed, format, SITE, SIGNS, tiled=True), expected)


# --- square tiles of weights -----------------------------------------------------------------------------------------


def check_weights(w: Tensor, outputs: tuple[bool, bool]) -> None:
    amax_ = fp4.amax(w)
    for wanted, result, source in zip(outputs, weights.quantize(w, amax_, *outputs), (w, w.t()), strict=True):
        assert (result is not None) == wanted
        if result is not None:
            assert_bits(result, twin(source, amax_, None, "nvfp4", square=True))


@of_dtypes
@pytest.mark.parametrize("outputs", [(True, False), (False, True), (True, True)], ids=["rows", "turned", "both"])
def test_weights(outputs: tuple[bool, bool], dtype: torch.dtype) -> None:
    for shape in (*(((1, 1), (15, 8), (33, 48), (129, 16)) if all(outputs) else ((17, 40),)), *EMPTY):
        check_weights(values(*shape, dtype), outputs)


def test_weights_of_several_programs_in_both_directions() -> None:
    check_weights(values(80, 272, torch.bfloat16), (True, True))


def test_weights_of_any_strides() -> None:
    for w in laid_out(values(17, 40, torch.bfloat16)).values():
        check_weights(w, (True, True))


def test_weights_in_both_layouts_decode_to_one_matrix() -> None:
    w = values(40, 56, torch.bfloat16)
    straight, turned = weights.quantize(w, fp4.amax(w), True, True)
    assert straight is not None and turned is not None
    decoded = fp4.decode(*straight, "nvfp4", torch.float32)[:, :56]
    assert torch.equal(decoded, fp4.decode(*turned, "nvfp4", torch.float32)[:, :40].t())


def test_weights_in_every_configuration() -> None:
    w = values(70, 80, torch.bfloat16)
    groups, tiles = 5, 5
    for config in weights.candidates():
        straight = common.empty_quantized(w, 70, tiles, "nvfp4")
        turned = common.empty_quantized(w, 80, groups, "nvfp4")
        outputs = (straight[0], straight[1], turned[0], turned[1])
        programs = -(-groups // config.groups) * -(-2 * tiles // config.units)
        one = weights.kernel(INTERPRETER, w.dtype, True, True, config)
        one.run(programs, w, fp4.amax(w), *outputs, 70, groups, tiles, 1)
        for (codes, scales), source in zip((straight, turned), (w, w.t()), strict=True):
            expected = twin(source, fp4.amax(w), None, "nvfp4", square=True)
            assert_bits((codes, scales.view(torch.float8_e4m3fn)), expected)


@pytest.mark.parametrize("shape", [(150, 80), (33, 272), (17, 40)], ids=str)
def test_weights_with_scales_in_tiles(shape: tuple[int, int]) -> None:
    w = values(*shape, torch.bfloat16)
    for result, source in zip(weights.quantize(w, fp4.amax(w), True, True, tiled=True), (w, w.t()), strict=True):
        assert result is not None
        assert_tiles(result, twin(source, fp4.amax(w), None, "nvfp4", square=True))


# --- decoding --------------------------------------------------------------------------------------------------------


def assert_same_numbers(result: Tensor, expected: Tensor) -> None:
    """Signs of zeros too; NaN is NaN."""
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(result.isnan(), expected.isnan())
    assert torch.equal(result.signbit() | result.isnan(), expected.signbit() | expected.isnan())
    assert torch.equal(result.nan_to_num(0.5), expected.nan_to_num(0.5))


@of_formats
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_code_with_every_scale_is_decoded(dtype: torch.dtype, format: common.Format) -> None:
    """A block scale of E4M3 has no sign: its bytes are below 128."""
    bytes_ = 128 if format == "nvfp4" else 256
    codes = torch.arange(256, dtype=torch.uint8).repeat(bytes_, 1)
    scales = torch.arange(bytes_, dtype=torch.int32).to(torch.uint8)
    scales = scales.unsqueeze(1).expand(-1, 256 * 2 // BLOCKS[format]).contiguous()
    out = torch.empty(bytes_, 512, dtype=dtype)
    config, words = decode.Config(1024, 16), codes.numel() // 4
    one = decode.kernel(INTERPRETER, format, dtype, config)
    one.run(-(-words // (1024 * 16)), codes, scales, out, words)
    assert_same_numbers(out, fp4.decode(codes, scales.view(SCALE_DTYPES[format]), format, dtype))


@of_formats
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_decoding_of_any_shape(dtype: torch.dtype, format: common.Format) -> None:
    for shape in ((1, 1), (17, 40), (33, 48), (129, 16), *EMPTY):
        x = values(*shape, torch.float32)
        codes, scales = twin(x, amax_for(x, format), None, format)
        for config in decode.candidates() if shape == (17, 40) else ():
            out = torch.empty(len(x), scales.shape[1] * BLOCKS[format], dtype=dtype)
            words = codes.numel() // 4
            one = decode.kernel(INTERPRETER, format, dtype, config)
            programs = -(-words // (config.threads * config.loop))
            one.run(programs, codes, scales.view(torch.uint8), out, words)
            assert_same_numbers(out, fp4.decode(codes, scales, format, dtype))
        assert_same_numbers(decode.decode(codes, scales, format, dtype), fp4.decode(codes, scales, format, dtype))


# --- values instead of codes -----------------------------------------------------------------------------------------


def decoded_twin(x: Tensor, amax_: Tensor | None, seed: Tensor | None, format: str, square: bool = False) -> Tensor:
    """What the operators make of x, blocks along its last dimension."""
    return fp4.decode(*twin(x, amax_, seed, format, square), format, torch.bfloat16)


def check_decoded_columns(x: Tensor, seed: Tensor | None, format: common.Format, signs: int | None) -> None:
    y = rotated(x, format, signs)
    amax_ = amax_for(y, format)
    found = columns.decoded(x, amax_, seed, format, SITE, signs)
    assert found.is_contiguous()
    assert_same_numbers(found, decoded_twin(y, amax_, seed, format))


@of_dtypes
@of_formats
@seeded
def test_decoded_rows(seed: Tensor | None, format: common.Format, dtype: torch.dtype) -> None:
    matrices = [values(*shape, dtype) for shape in ((17, 40), (1, 1), (129, 16), *EMPTY)]
    for x in (*matrices, *laid_out(matrices[0]).values()):
        amax_ = amax_for(x, format)
        assert_same_numbers(rows.decoded(x, amax_, seed, format, SITE), decoded_twin(x, amax_, seed, format))


@of_dtypes
@of_formats
@seeded
@pytest.mark.parametrize("signs", [None, SIGNS], ids=["plain", "rotated"])
def test_decoded_columns(signs: int | None, seed: Tensor | None, format: common.Format, dtype: torch.dtype) -> None:
    """Every kernel with a ragged shape, and one more shape each in turn."""
    case = DTYPES.index(dtype) + 3 * FORMATS.index(format) + 6 * (seed is None) + 12 * (signs is None)
    for shape in ((17, 7), COLUMN_SHAPES[case % len(COLUMN_SHAPES)], EMPTY[case % len(EMPTY)]):
        check_decoded_columns(values(*shape, dtype), seed, format, signs)


@of_formats
def test_decoded_columns_of_whole_programs_have_no_masks(format: common.Format) -> None:
    size, per_unit = BLOCKS[format], columns.columns_of(format, torch.bfloat16, decoded=True)
    config, shape = columns.choose(size * 8, 16, size, decoded=True)
    assert (config, shape) == (columns.Config(8, 16), "full")
    how = (False, True, SIGNS, config, shape)
    source = columns.kernel(INTERPRETER, torch.bfloat16, format, *how, decoded=True).source
    assert "mask=" not in source
    check_decoded_columns(values(size * 8, per_unit * 16, torch.bfloat16), None, format, SIGNS)


@of_dtypes
def test_decoded_weights(dtype: torch.dtype) -> None:
    for shape in ((1, 1), (17, 40), (129, 16), (80, 272), *EMPTY):
        w = values(*shape, dtype)
        for x in (w, w.t()) if shape == (17, 40) else (w,):
            assert_same_numbers(weights.decoded(x, fp4.amax(x)), decoded_twin(x, fp4.amax(x), None, "nvfp4", True))


def test_decoded_values_in_every_configuration() -> None:
    x = values(70, 64, torch.bfloat16)
    amax_ = fp4.amax(x)
    expected = decoded_twin(x, amax_, SEED, "nvfp4")
    for config in rows.candidates(280, True, 132):
        found = torch.empty(70, 64, dtype=torch.bfloat16)
        one = rows.kernel(INTERPRETER, x.dtype, "nvfp4", True, config, decoded=True)
        one.run(-(-280 // (config.threads * config.loop)), x, amax_, SEED, SITE, found, 280, 1)
        assert_same_numbers(found, expected)
    expected = decoded_twin(rotated(x, "nvfp4", SIGNS), amax_, None, "nvfp4")
    for choice in columns.candidates(70, 16, 16, decoded=True):
        found = torch.empty(64, 80, dtype=torch.bfloat16)
        one = columns.kernel(INTERPRETER, x.dtype, "nvfp4", False, True, SIGNS, *choice, decoded=True)
        programs = -(-5 // choice[0].groups) * -(-16 // choice[0].units)
        one.run(programs, x, amax_, found, 70, 5, 16, 1)
        assert_same_numbers(found, expected)
    expected = decoded_twin(x, amax_, None, "nvfp4", square=True)
    for shape in weights.candidates():
        found = torch.empty(70, 64, dtype=torch.bfloat16)
        one = weights.kernel(INTERPRETER, x.dtype, True, False, shape, decoded=True)
        one.run(-(-5 // shape.groups) * -(-8 // shape.units), x, amax_, found, 70, 5, 4, 1)
        assert_same_numbers(found, expected)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@of_formats
def test_nonfinite_elements_are_seen_in_values(format: common.Format, value: float) -> None:
    """NaN in all of their block; of an amax that is NaN everywhere."""
    x = values(16, 72, torch.bfloat16)
    x[5, 70] = value
    for amax_ in (torch.tensor(100.0), torch.tensor(torch.nan)) if format == "nvfp4" else (None,):
        expected = decoded_twin(x, amax_, None, format)
        assert expected.isnan().any() == (format == "mxfp4" or value != value or bool(amax_.isnan()))
        assert_same_numbers(rows.decoded(x, amax_, None, format, SITE), expected)
        found = columns.decoded(x, amax_, None, format, SITE, None)
        assert_same_numbers(found, decoded_twin(x.t(), amax_, None, format))
        if format == "nvfp4":
            assert_same_numbers(weights.decoded(x, amax_), decoded_twin(x, amax_, None, format, square=True))


@pytest.mark.parametrize("capability", ISAS)
def test_values_are_rendered_for_every_target(capability: tuple[int, int]) -> None:
    """Also where codes are made by a conversion."""
    for stochastic in (False, True):
        source = rows.kernel(ISAS[capability], torch.bfloat16, "nvfp4", stochastic, rows.Config(), decoded=True).source
        assert ("def decoded(" in source) == ("e2m1x" in source)


# --- any values ------------------------------------------------------------------------------------------------------

fewer = settings(max_examples=6)
options = {"rows": (1, 17, 33), "cols": (1, 16, 33)}
any_seed = st.none() | matrix.seeds.map(torch.tensor)


@fewer
@given(matrix.matrices(**options) | matrix.matrices_with_nonfinite(**options))
def test_amax_of_any_values(x: Tensor) -> None:
    plain, turned = amax.amax_both(x, SIGNS)
    assert_same_scalar(amax.amax(x), fp4.amax(x))
    assert_same_scalar(plain, fp4.amax(x))
    assert_same_scalar(turned, fp4.amax(fp4.rotate(x.t(), 16, SIGNS)))


@settings(max_examples=25)
@given(matrix.matrices(**options), st.sampled_from(FORMATS), any_seed, matrix.sites)
def test_rows_of_any_values(x: Tensor, format: common.Format, seed: Tensor | None, site: int) -> None:
    amax_ = amax_for(x, format)
    rounding = "nearest" if seed is None else "stochastic"
    expected = fp4.quantize(x, amax_, seed, format, (1, BLOCKS[format]), rounding, site)
    assert_bits(rows.quantize(x, amax_, seed, format, site), expected)


@fewer
@given(matrix.matrices(**options), st.sampled_from(FORMATS), any_seed, st.sampled_from((None, SIGNS)))
def test_columns_of_any_values(x: Tensor, format: common.Format, seed: Tensor | None, signs: int | None) -> None:
    check_columns(x, seed, format, signs)


@fewer
@given(matrix.matrices(**options))
def test_weights_of_any_values(w: Tensor) -> None:
    check_weights(w, (True, True))


@fewer
@given(matrix.matrices(**options), st.sampled_from(FORMATS), any_seed, st.sampled_from((None, SIGNS)))
def test_decoded_values_of_any_values(x: Tensor, format: common.Format, seed: Tensor | None, signs: int | None) -> None:
    amax_ = amax_for(x, format)
    assert_same_numbers(rows.decoded(x, amax_, seed, format, SITE), decoded_twin(x, amax_, seed, format))
    check_decoded_columns(x, seed, format, signs)
    expected = decoded_twin(x, fp4.amax(x), None, "nvfp4", square=True)
    assert_same_numbers(weights.decoded(x, fp4.amax(x)), expected)


@pytest.mark.parametrize("amax_", [0.0, 2.0**-149, 1e-36, 1e-20, 3e38, torch.inf, torch.nan])
def test_every_tensor_scale(amax_: float) -> None:
    """Clamped, zero and NaN ones; the amax need not be the tensor's own."""
    x = values(17, 32, torch.float32) * 2.0**-20
    assert_bits(rows.quantize(x, torch.tensor(amax_), None, "nvfp4", 0), twin(x, torch.tensor(amax_), None, "nvfp4"))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@of_formats
def test_nonfinite_elements_are_seen_in_scales(format: common.Format, value: float) -> None:
    """Of their own block where the amax is another's; infinity saturates an NVFP4 scale, and the amax has it."""
    x = values(16, 64, torch.bfloat16)
    x[5, 40] = value
    amax_ = torch.tensor(100.0) if format == "nvfp4" else None
    result = rows.quantize(x, amax_, None, format, 0)
    assert_bits(result, twin(x, amax_, None, format))
    scale = result[1][5, 40 // BLOCKS[format]].float()
    assert scale.isnan() if format == "mxfp4" or value != value else scale == 448
    assert result[1].float().isnan().sum() == scale.isnan()
    check_columns(x, None, format, SIGNS, amax_)
    if format == "nvfp4":
        for turned, w in zip(weights.quantize(x, amax_, True, True), (x, x.t()), strict=True):
            assert turned is not None
            assert_bits(turned, twin(w, amax_, None, "nvfp4", square=True))


# --- E4M3 in integer arithmetic --------------------------------------------------------------------------------------

E4M3_SOURCE = """
{% import "pieces.jinja" as pieces %}
{{ pieces.imports() }}


{{ pieces.e4m3(isa) }}

@triton.jit
def e4m3(x_ptr, byte_ptr, value_ptr, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    byte = e4m3_byte(tl.load(x_ptr + at))
    tl.store(byte_ptr + at, byte.to(tl.uint8))
    tl.store(value_ptr + at, e4m3_value(byte))
"""


def test_integer_e4m3_rounds_and_decodes_as_the_dtype_does() -> None:
    """Every number of E4M3, every tie between two, and 64 float32 on both sides of each; saturated; NaN."""
    assert AMPERE.e4m3 == INTERPRETER.e4m3 == "integer"
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (numbers[1:] + numbers[:-1]) / 2
    bits = torch.cat([numbers, ties, torch.tensor([464.0, 480.0, 1e10])]).view(torch.int32)
    near = (bits.unsqueeze(1) + torch.arange(-64, 65, dtype=torch.int32)).flatten().clamp(min=0).view(torch.float32)
    others = torch.tensor([2.0**-149, 2.0**-126, 2.0**-30, torch.finfo(torch.float32).max, torch.inf, torch.nan])
    x = torch.cat([near, others])
    x = F.pad(x, (0, 2**16 - len(x)))
    byte, value = torch.empty(len(x), dtype=torch.uint8), torch.empty(len(x))
    source = _environment().from_string(E4M3_SOURCE).render(isa=AMPERE)
    pointers = {"x_ptr": "*fp32", "byte_ptr": "*u8", "value_ptr": "*fp32", "N": "constexpr"}
    one = Kernel("e4m3", "e4m3", source, pointers, {"N": 2**16}, (), num_warps=4)
    one.run(1, x, byte, value)
    expected = x.clamp(max=448).to(torch.float8_e4m3fn)
    assert torch.equal(byte, expected.view(torch.uint8))
    assert_same_numbers(value, expected.float())


# --- choices ---------------------------------------------------------------------------------------------------------

PROCESSORS = (1, 2, 132, 148)
SIZES = (1, 15, 128, 1000, 2**12, 2**16, 2**20, 2**26)


def test_rows_loop_only_where_all_processors_have_programs() -> None:
    for blocks, stochastic, processors in itertools.product(SIZES, (False, True), PROCESSORS):
        config = rows.choose(blocks, stochastic, processors)
        assert config.loop == 1 or blocks // (config.threads * config.loop) >= 8 * processors
    assert rows.choose(2**26, False, 148).loop > 1 and rows.choose(2**26, True, 148).loop > 1
    assert rows.choose(1000, True, 132).loop == 1


def test_amax_loops_only_where_all_processors_have_programs() -> None:
    for count, processors in itertools.product(SIZES, PROCESSORS):
        config = amax.choose(count, processors)
        assert config.loop == 1 or count // (config.units * config.loop) >= 4 * processors
        for units in (1, 64, 1000):
            config = amax.choose_both(count, units, processors)
            programs = -(-count // (config.groups * config.loop)) * -(-units // config.units)
            assert config.loop == 1 or programs >= 2 * processors
    assert amax.choose(2**26, 148).loop > 1 and amax.choose_both(2**16, 512, 148).loop > 1


def test_columns_have_no_masks_only_where_programs_are_whole() -> None:
    found = set()
    for tokens, units, size in itertools.product((1, 255, 256, 512, 513, 2**14), (1, 8, 9, 16, 512), (16, 32)):
        config, shape = columns.choose(tokens, units, size)
        whole = tokens % (size * config.groups) == 0 and units % config.units == 0
        assert (shape == "full") == whole
        found.add(shape)
    assert found == {"full", "ragged"}


def test_the_choice_is_the_first_candidate_and_none_is_twice() -> None:
    found = [
        *(
            [rows.choose(n, s, p), *rows.candidates(n, s, p)]
            for n, s, p in itertools.product(SIZES, (0, 1), PROCESSORS)
        ),
        *(
            [columns.choose(n, 64, size, decoded), *columns.candidates(n, 64, size, decoded)]
            for n, size, decoded in ((256, 16, False), (257, 32, False), (256, 16, True), (257, 32, True))
        ),
        [weights.choose(), *weights.candidates()],
        [decode.choose(), *decode.candidates()],
    ]
    for choice, *candidates in found:
        assert candidates[0] == choice
        assert len(set(candidates)) == len(candidates) > 2


@pytest.mark.parametrize("arch", CAPABILITIES)
def test_kernels_of_an_architecture(arch: str) -> None:
    """Names tell them apart, and the signature is the function's."""
    found = [kernel for kernel in all_kernels(arch) if not kernel.family.startswith("gemm")]
    assert len({kernel.name for kernel in found}) == len(found) >= 19
    decoded = [kernel for kernel in found if kernel.name.endswith("_decoded")]
    by_row = [
        kernel for kernel in decoded if "_row_" in kernel.name
    ]  # products with a scale a row are emulated everywhere
    assert len(by_row) == 2
    assert len(decoded) - len(by_row) == (0 if ISAS[CAPABILITIES[arch]].matmul == "block_scaled" else 13)
    for kernel in found:
        assert f"def {kernel.name}(" in kernel.source
        assert set(kernel.constants) == {name for name, type in kernel.signature.items() if type == "constexpr"}
        assert set(kernel.aligned) <= set(kernel.signature)
        assert kernel.num_warps in (1, 2, 4, 8)


def test_kernels_have_the_arguments_that_their_signature_names() -> None:
    for kernel in all_kernels("sm_100a"):
        if not kernel.family.startswith("gemm"):
            assert list(kernel.function.arg_names) == list(kernel.signature)
