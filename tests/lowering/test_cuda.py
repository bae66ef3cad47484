"""The operators of CUDA devices, run by Triton's interpreter on a CPU: layouts, fallbacks and tuning change no bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from comparing import assert_same
from interpreter import interpreted
from torch import Tensor

import fp4compile.ops  # noqa: F401
from fp4compile.errors import ConfigError
from fp4compile.formats import nvfp4
from fp4compile.lowering import cublas, cuda
from fp4compile.lowering.kernels import columns, decode, factor, rows, tuning, weights

fp4 = torch.ops.fp4
SIGNS = 0xD7E8
SEED = torch.tensor(-98765432109876)


@pytest.fixture(autouse=True)
def on_a_cpu() -> Iterator[None]:
    with interpreted():
        yield


def matrix(rows: int = 33, columns: int = 48, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + columns)).to(dtype)


def as_bytes(value: Tensor) -> Tensor:
    return value.contiguous().view(torch.uint8)


def same(found: Any, expected: Any) -> None:
    for one, wanted in zip(found, expected, strict=True):
        assert one.dtype == wanted.dtype
        assert_same(as_bytes(one), as_bytes(wanted))


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x,
    "transposed": lambda x: x.t(),
    "slice": lambda x: x[1:, 3:40],
    "every other row": lambda x: x[::2],
    "no row": lambda x: x[:0],
    "at an odd offset": lambda x: x.reshape(-1)[1 : 1 + 32 * 40].view(32, 40),
    "one row of an odd stride": lambda x: x.reshape(-1)[: 32 * 47].view(32, 47)[2:3, :32],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("tiled", [False, True])
def test_quantize_takes_every_layout(view: str, tiled: bool) -> None:
    x = VIEWS[view](matrix())
    amax = fp4.amax(x)
    for how in (
        (amax, None, "nvfp4", [1, 16], "nearest", 0, tiled),
        (amax, SEED, "nvfp4", [1, 16], "stochastic", 7, tiled),
        (amax, None, "nvfp4", [16, 16], "nearest", 0, tiled),
        (None, SEED, "mxfp4", [1, 32], "stochastic", 7, tiled),
    ):
        same(cuda.quantize(x, *how), fp4.quantize(x, *how))


@pytest.mark.parametrize("view", VIEWS)
def test_decoded_values_are_those_of_the_codes_in_every_layout(view: str) -> None:
    x = VIEWS[view](matrix())
    amax = fp4.amax(x)
    for how in (
        (amax, None, "nvfp4", [1, 16], "nearest", 0),
        (amax, SEED, "nvfp4", [1, 16], "stochastic", 7),
        (amax, None, "nvfp4", [16, 16], "nearest", 0),
        (amax, SEED, "nvfp4", [16, 16], "stochastic", 7),
        (None, SEED, "mxfp4", [1, 32], "stochastic", 7),
    ):
        found = cuda.quantize_decoded(x, *how)
        assert found.is_contiguous()
        same([found], [fp4.decode(*fp4.quantize(x, *how), how[2], torch.bfloat16)])
    for size in (16, 32):
        for format, scale in (("nvfp4", amax), ("mxfp4", None)):
            turning = (scale, SEED, format, "stochastic", 3, size, SIGNS)
            found = cuda.rotate_quantize_decoded(x, *turning)
            assert found.is_contiguous()
            same([found], [fp4.decode(*fp4.rotate_quantize(x, *turning), format, torch.bfloat16)])


def test_a_product_of_values_reads_them_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows or columns that are contiguous; what cuBLAS cannot read is copied, and longer operands are cut."""
    calls: list[tuple[Tensor, Tensor, Tensor | None]] = []

    def matmul(a: Tensor, b: Tensor, factors: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        assert cublas.takes(a) and cublas.takes(b)
        calls.append((a, b, factors))
        product = a.float() @ b.float().t()
        return (product if factors is None else product * factors[0]).to(out_dtype)

    monkeypatch.setattr(cublas, "matmul", matmul)
    a, b, amax = matrix(33, 48), matrix(17, 64), torch.tensor(3.0)
    turned = b.t().contiguous().t()
    for left, right in ((a, b), (a, turned), (a[:, :40], b[:, ::2])):
        for amaxes in ((amax, None), (None, None), (amax, amax)):
            found = cuda.decoded_mm(left, amaxes[0], right, amaxes[1], torch.bfloat16)
            assert_same(found, fp4.decoded_mm(left, amaxes[0], right, amaxes[1], torch.bfloat16))
            assert calls[-1][0].data_ptr() == left.data_ptr()
            assert (calls[-1][1].data_ptr() == right.data_ptr()) == (right.stride() != (64, 2))
            assert (calls[-1][2] is None) == (amaxes == (None, None))
    codes = (*fp4.quantize(a, amax, None, "nvfp4", [1, 16], "nearest", 0), amax, "nvfp4", b[:, :48], None, None, "bf16")
    assert_same(cuda.scaled_mm(*codes, torch.float32), fp4.scaled_mm(*codes, torch.float32))


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("size", [8, 16, 32, 64])
def test_rotation_takes_every_layout_and_size(view: str, size: int) -> None:
    x = VIEWS[view](matrix())
    amax = fp4.rotated_amax(x, size, SIGNS)
    assert_same(cuda.rotated_amax(x, size, SIGNS), amax)
    for format, scale, tiled in (("nvfp4", amax, True), ("nvfp4", amax, False), ("mxfp4", None, False)):
        how = (scale, SEED, format, "stochastic", 3, size, SIGNS, tiled)
        same(cuda.rotate_quantize(x, *how), fp4.rotate_quantize(x, *how))


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("size", [16, 32])
def test_both_amaxes_are_those_of_the_reference(view: str, size: int) -> None:
    x = VIEWS[view](matrix())
    found, expected = cuda.amax_both(x, size, SIGNS), fp4.amax_both(x, size, SIGNS)
    for one, wanted in zip(found, expected, strict=True):
        assert_same(one, wanted)
    assert found[0].data_ptr() != found[1].data_ptr()


@pytest.mark.parametrize(
    "amaxes", [(3.7,), (3.7, 0.25), (3e38, 1e-20), (1e-30, 2e-30), (float("nan"), 1.0), (0.0, 0.0)]
)
def test_the_factor_of_a_product_has_the_references_bits(amaxes: tuple[float, ...]) -> None:
    tensors = [torch.tensor(value) for value in amaxes]
    a, b = tensors if len(tensors) == 2 else (tensors[0], None)
    expected = nvfp4.gemm_factor(a, b)
    assert expected is not None
    assert_same(factor.factors(a, b), torch.stack([expected, torch.zeros(())]))
    assert_same(factor.factors(a, b, beside=1.0), torch.stack([expected, torch.ones(())]))
    assert factor.factors(None, None) is None


@pytest.mark.parametrize("shape", [(64, 120), (64, 36), (130, 300)])
@pytest.mark.parametrize("value", [1.0, float("nan")])
def test_what_no_scale_fills_in_the_tiles_is_zero(
    shape: tuple[int, int], value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where columns were appended, and under an amax that is NaN; the memory is full of ones before."""
    plain_empty = Tensor.new_empty

    def poisoned(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result = plain_empty(self, *args, **kwargs)
        result.view(torch.uint8).fill_(255)
        return result

    x, amax = matrix(*shape), torch.tensor(value)
    expected = [
        fp4.quantize(view, amax, None, "nvfp4", block, "nearest", 0, True)[1]
        for block in ([1, 16], [16, 16])
        for view in (x, x.t())
    ]
    monkeypatch.setattr(Tensor, "new_empty", poisoned)
    found = [
        cuda.quantize(view, amax, None, "nvfp4", block, "nearest", 0, True)[1]
        for block in ([1, 16], [16, 16])
        for view in (x, x.t())
    ]
    same(found, expected)


@pytest.mark.parametrize(
    ("block", "rounding", "seed", "site"),
    [([2, 16], "nearest", None, 0), ([1, 16], "foo", SEED, 0), ([1, 16], "stochastic", SEED, -1)],
)
def test_a_wrong_call_is_the_same_error_on_every_device(
    block: list[int], rounding: str, seed: Tensor | None, site: int
) -> None:
    x, amax = matrix(), torch.tensor(3.0)
    checked = cuda._checked(fp4.quantize.default, cuda.quantize)
    for call in (fp4.quantize, checked):
        with pytest.raises(ConfigError):
            call(x, amax, seed, "nvfp4", block, rounding, site)


def test_too_many_columns_are_refused() -> None:
    wide = torch.zeros(1, 1, dtype=torch.bfloat16).expand(1, 2**26 + 1)
    with pytest.raises(ConfigError, match="too many columns"):
        cuda.amax_both(wide, 16, SIGNS)


def test_a_single_row_has_a_leading_dimension_that_cublas_takes() -> None:
    row = torch.randn(7, 1).bfloat16().t()
    assert row.stride(0) == 1
    assert cublas._matrix(row)[3] == 7


CANDIDATES: dict[str, tuple[Any, Callable[[], Any]]] = {
    "rows": (rows, lambda: cuda.quantize(matrix(), torch.tensor(3.0), SEED, "nvfp4", [1, 16], "stochastic", 1)),
    "columns": (columns, lambda: columns.quantize(matrix(), torch.tensor(3.0), SEED, "nvfp4", 1, SIGNS)),
    "decoded rows": (
        rows,
        lambda: (cuda.quantize_decoded(matrix(), torch.tensor(3.0), None, "nvfp4", [1, 16], "nearest", 1),),
    ),
    "decoded columns": (columns, lambda: (columns.decoded(matrix(), torch.tensor(3.0), SEED, "nvfp4", 1, SIGNS),)),
    "decoded weights": (weights, lambda: (weights.decoded(matrix(), torch.tensor(3.0)),)),
    "weights": (weights, lambda: weights.quantize(matrix(), torch.tensor(3.0), True, True)),
    "decode": (
        decode,
        lambda: (
            cuda.decode(*fp4.quantize(matrix(), None, None, "mxfp4", [1, 32], "nearest", 0), "mxfp4", torch.float32),
        ),
    ),
}


@pytest.mark.parametrize("family", CANDIDATES)
def test_every_configuration_gives_the_same_bytes(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is made the fastest in turn; tuning measures all of them, once."""
    module, call = CANDIDATES[family]
    flat = lambda results: [t for r in results for t in (r if isinstance(r, tuple) else (r,))]  # noqa: E731
    expected = flat(call())
    count = len(_configs(module, family))
    measured: list[int] = []
    for fastest in range(count):
        monkeypatch.setattr(tuning, "_fastest", {})
        times = iter([float(i != fastest) for i in range(count)])
        monkeypatch.setattr(tuning, "_milliseconds", lambda run, times=times: (measured.append(1), next(times))[1])
        with tuning.tuning():
            same(flat(call()), expected)
            same(flat(call()), expected)
    assert len(measured) == count * count


def _configs(module: Any, family: str) -> list[Any]:
    arguments = {"rows": (99, True, 1), "columns": (33, 6, 16), "weights": (), "decode": ()}[family.split()[-1]]
    return module.candidates(*arguments)
