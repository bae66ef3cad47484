"""On a CUDA device: the same bytes as on a CPU, and training that follows the seed."""

import pytest
import torch
from torch import nn

import fp4compile.ops  # noqa: F401
from fp4compile import Policy, Recipe, lowering
from fp4compile.lowering import cublas
from fp4compile.ops.produced import DTYPES, Program, Step, Value

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

fp4 = torch.ops.fp4


def spread(rows, columns, dtype):
    """Values over many magnitudes, the same on every machine."""
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    scale = torch.exp2(torch.randint(-20, 20, (rows, 1), generator=generator).float())
    return (torch.randn(rows, columns, generator=generator) * scale).to(dtype)


def as_bytes(tensor):
    return tensor.cpu().reshape(-1).view(torch.uint8)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Memory that a result comes from is full of ones first, which are NaN: what a kernel does not write shows."""
    plain_empty = torch.Tensor.new_empty

    def new_empty(self, *args, **kwargs):
        result = plain_empty(self, *args, **kwargs)
        if result.is_cuda and result.dim() and result.numel():
            result.view(torch.uint8).fill_(255)
        return result

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)


def assert_same_bytes_on_both(op, *args, libraries=("fp4_cuda",)):
    """The operator's results on the CPU are, shape, dtype and bytes, those of its namesakes in ``libraries`` on the
    GPU. The CPU, which takes longer, computes them once."""
    expected = as_tuple(op(*args))
    moved = [arg.cuda() if isinstance(arg, torch.Tensor) else arg for arg in args]  # a transposed view stays one
    for library in libraries:
        results = as_tuple(getattr(getattr(torch.ops, library), op.__name__)(*moved))
        for cpu, gpu in zip(expected, results, strict=True):
            assert cpu.shape == gpu.shape and cpu.dtype == gpu.dtype
            assert torch.equal(as_bytes(cpu), as_bytes(gpu)), (library, str(op), args[2:])


def as_tuple(result):
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (33, 48), (129, 1000), (512, 1024), (1024, 4096)])
def test_every_operator_gives_the_same_bytes_as_on_a_cpu(rows, columns, dtype):
    """By its formulas on the GPU, and by its kernels."""
    x = spread(rows, columns, dtype)
    if dtype is torch.float16:
        x = x.clamp(-6e4, 6e4)
    seed = torch.tensor(1234567890123)
    amax, rotated = fp4.amax(x), fp4.rotated_amax(x.t(), 16, 0xD7E8)
    calls = [(fp4.amax, x), (fp4.rotated_amax, x.t(), 16, 0xD7E8), (fp4.amax_both, x, 16, 0xD7E8)]
    for view in (x, x.t()):
        calls.append((fp4.quantize, view, amax, None, "nvfp4", [16, 16], "nearest", 0))
        for rounding, how in (("nearest", (None, 0)), ("stochastic", (seed, 5))):
            calls += [
                (fp4.quantize, view, amax, how[0], "nvfp4", [1, 16], rounding, how[1]),
                (fp4.quantize, view, None, how[0], "mxfp4", [1, 32], rounding, how[1]),
                (fp4.rotate_quantize, view, rotated, how[0], "nvfp4", rounding, how[1], 16, 0xD7E8),
                (fp4.rotate_quantize, view, None, how[0], "mxfp4", rounding, how[1], 32, 0xD7E8),
            ]
    for op, *args in calls:
        assert_same_bytes_on_both(op, *args, libraries=("fp4", "fp4_cuda"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (129, 1000), (512, 1024)])
def test_decoded_values_are_the_same_bytes_as_on_a_cpu(rows, columns, dtype):
    x, seed = spread(rows, columns, dtype).clamp(-6e4, 6e4), torch.tensor(1234567890123)
    amax, rotated = fp4.amax(x), fp4.rotated_amax(x.t(), 16, 0xD7E8)
    for view in (x, x.t()):
        calls = [(fp4.quantize_decoded, view, amax, None, "nvfp4", [16, 16], "nearest", 0)]
        for rounding, how in (("nearest", (None, 0)), ("stochastic", (seed, 5))):
            calls += [
                (fp4.quantize_decoded, view, amax, how[0], "nvfp4", [1, 16], rounding, how[1]),
                (fp4.quantize_decoded, view, None, how[0], "mxfp4", [1, 32], rounding, how[1]),
                (fp4.rotate_quantize_decoded, view, rotated, how[0], "nvfp4", rounding, how[1], 16, 0xD7E8),
                (fp4.rotate_quantize_decoded, view, None, how[0], "mxfp4", rounding, how[1], 32, 0xD7E8),
            ]
        for op, *args in calls:
            assert_same_bytes_on_both(op, *args)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (33, 40), (129, 1000), (1024, 4096)])
def test_a_scale_a_row_gives_the_same_bytes_as_on_a_cpu(rows, columns, dtype):
    """Of rows, and of the columns of a tensor that lies by rows."""
    x, seed = spread(rows, columns, dtype).clamp(-6e4, 6e4), torch.tensor(1234567890123)
    for view in (x, x.t()):
        maxima = view.abs().amax(-1)
        for amax in (maxima, maxima.float()):
            for rounding, how in (("nearest", (None, 0)), ("stochastic", (seed, 5))):
                for op in (fp4.quantize, fp4.quantize_decoded):
                    assert_same_bytes_on_both(op, view, amax, how[0], "nvfp4", [1, 16], rounding, how[1])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (33, 48), (129, 2048), (65, 14336)])
def test_a_tensor_is_computed_and_quantized_by_one_kernel(rows, columns, dtype):
    """As it is, the same bytes as on a CPU; a norm: what is quantized is what is written, near the CPU's."""
    x = spread(rows, columns, DTYPES[dtype])
    value = Value("i0", "full", dtype)
    plain = Program("values", columns, (value,), (), value, ())
    for found, expected in zip(*both([x], plain), strict=True):
        assert torch.equal(as_bytes(found), as_bytes(expected))
    steps = (
        Step("s0", "mul", ("i0", "i0"), "full"),
        Step("s1", "sum", ("s0",), "row"),
        Step("s2", "div", ("s1", float(columns)), "row"),
        Step("s3", "rsqrt", ("s2",), "row"),
        Step("s4", "mul", ("i0", "s3"), "full"),
        Step("s5", "mul", ("s4", "i1"), "full"),
    )
    y = Value("s5", "full", dtype)
    norm = Program(
        "values", columns, (value, Value("i1", "column", dtype)), steps, y, (y, Value("s3", "row", "float32"))
    )
    (values, amaxes, written, roots), expected = both([x, torch.rand(columns).to(DTYPES[dtype])], norm)
    torch.testing.assert_close(roots, expected[3], rtol=1e-5, atol=0)  # the order of a sum, and an approximate root
    torch.testing.assert_close(written, expected[2], rtol=2**-7 if dtype == "bfloat16" else 1e-5, atol=0)
    assert torch.equal(amaxes, written.abs().amax(-1))
    assert torch.equal(values, fp4.quantize_decoded(written, amaxes, None, "nvfp4", [1, 16], "nearest", 0))


def both(inputs, program):
    """On the GPU, brought back, and on the CPU."""
    text = program.to_json()
    found = torch.ops.fp4_cuda.produce([one.cuda() for one in inputs], text)
    return [one.cpu() for one in found], fp4.produce(inputs, text)


@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 8, 16), (96, 64, 128), (40, 24, 1000)])
def test_a_product_reads_operands_by_rows_and_by_columns(layout, m, n, k):
    """Small whole numbers, whose products and sums are exact in any order."""
    generator = torch.Generator().manual_seed(k)
    a, b = (torch.randint(-3, 4, (rows, k), generator=generator).bfloat16() for rows in (m, n))
    amaxes = torch.tensor(2688.0), torch.tensor(1344.0)
    expected = fp4.decoded_mm(a, amaxes[0], b, amaxes[1], torch.float32)
    left, right = (x.cuda() if layout == "rows" else x.cuda().t().contiguous().t() for x in (a, b))
    scales = [amax.cuda() for amax in amaxes]
    for operands in ((left, right), (a.cuda(), right), (left, b.cuda())):
        got = torch.ops.fp4_cuda.decoded_mm(operands[0], scales[0], operands[1], scales[1], torch.float32)
        assert torch.equal(got.cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("format", "block"), [("nvfp4", [1, 16]), ("mxfp4", [1, 32])])
def test_decoding_gives_the_same_bytes_as_on_a_cpu(format, block, dtype):
    x = spread(257, 4128, torch.bfloat16)
    codes, scales = fp4.quantize(x, fp4.amax(x) if format == "nvfp4" else None, None, format, block, "nearest", 0)
    assert_same_bytes_on_both(fp4.decode, codes, scales, format, dtype)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_visible(value):
    x = spread(64, 128, torch.bfloat16)
    x[37, 41] = value
    x = x.cuda()
    amax, rotated = torch.ops.fp4_cuda.amax_both(x, 16, 0xD7E8)
    assert not amax.isfinite() and not rotated.isfinite()
    codes, scales = torch.ops.fp4_cuda.quantize(x, amax, None, "nvfp4", [1, 16], "nearest", 0)
    operand = (codes, scales, amax, "nvfp4")
    assert not torch.ops.fp4_cuda.scaled_mm(*operand, *operand, torch.float32).isfinite().all()


@pytest.mark.parametrize("library", ["fp4", "fp4_cuda"])
def test_a_product_is_within_float32_accumulation_error_of_the_decoded_operands(library):
    a, b = spread(256, 512, torch.bfloat16), torch.randn(384, 512, generator=torch.Generator().manual_seed(1))
    quantized = []
    for operand, block in ((a, [1, 16]), (b, [16, 16])):
        amax = fp4.amax(operand)
        quantized.append((*fp4.quantize(operand, amax, None, "nvfp4", block, "nearest", 0), amax, "nvfp4"))
    flat = [item.cuda() if isinstance(item, torch.Tensor) else item for one in quantized for item in one]
    got = getattr(torch.ops, library).scaled_mm(*flat, torch.float32).cpu().double()
    decoded = [fp4.decode(codes, scales, "nvfp4", torch.float32).double() for codes, scales, _, _ in quantized]
    factor = quantized[0][2].double() * quantized[1][2].double() / 2688**2
    exact, magnitude = (decoded[0] @ decoded[1].T) * factor, (decoded[0].abs() @ decoded[1].abs().T) * factor
    # 512 float32 additions in any order, plus the factor's three roundings.
    assert ((got - exact).abs() <= magnitude * (512 + 3) * 2.0**-24 + 1e-45).all()


@pytest.mark.parametrize("formats", [("mxfp4", "mxfp4"), ("bf16", "nvfp4"), ("nvfp4", "mxfp4"), ("bf16", "bf16")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("m", [1, 96])
def test_products_of_all_formats_are_those_of_the_reference(formats, dtype, m):
    """Whole numbers in blocks of one power of two, whose products and sums are exact in any order."""
    generator = torch.Generator().manual_seed(m)
    arguments = []
    for format, rows in zip(formats, (m, 64), strict=True):
        x = torch.randint(-3, 4, (rows, 128), generator=generator).bfloat16()
        x[:, ::16] = 6
        amax = torch.tensor(2688.0) if format == "nvfp4" else None
        if format == "bf16":
            arguments += [x, None, None, format]
        else:
            block = [1, 16] if format == "nvfp4" else [1, 32]
            arguments += [*fp4.quantize(x, amax, None, format, block, "nearest", 0), amax, format]
    moved = [one.cuda() if isinstance(one, torch.Tensor) else one for one in arguments]
    got = torch.ops.fp4_cuda.scaled_mm(*moved, dtype).cpu()
    assert torch.equal(got, fp4.scaled_mm(*arguments, dtype))
    assert cublas.available()


def gradients(mode):
    """Of four steps with the same weights and input, so that only the noise differs."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).cuda().bfloat16()
    compiled = torch.compile(model, backend="nvfp4", fullgraph=True, mode=mode)
    x = torch.randn(96, 64, device="cuda", dtype=torch.bfloat16)
    found = []
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        compiled(x).float().square().mean().backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
        model.zero_grad()
    return found


def test_cuda_graphs_replay_with_fresh_noise_and_the_same_numbers():
    plain, replayed = gradients(None), gradients("reduce-overhead")
    for one, other in zip(plain, replayed, strict=True):
        assert all(map(torch.equal, one, other))
    weights = [step[0] for step in replayed]
    assert not any(torch.equal(a, b) for i, a in enumerate(weights) for b in weights[:i])


def train(seed):
    torch.manual_seed(seed)
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).cuda().bfloat16()
    compiled = torch.compile(model, backend="nvfp4", fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(96, 64, device="cuda", dtype=torch.bfloat16)
    losses = []
    for _ in range(30):
        loss = (compiled(x) - x.roll(1, 0)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_training_falls_and_follows_the_seed():
    first, again, other = train(0), train(0), train(1)
    assert first == again
    assert first != other
    assert first[-1] < 0.9 * first[0]


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.down = nn.RMSNorm(128), nn.Linear(256, 128)
        self.gate, self.up = nn.Linear(128, 256), nn.Linear(128, 256)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


def test_a_scale_a_row_trains_as_well_in_joined_kernels(monkeypatch):
    """Against the same step with nothing joined: other orders of sums, so codes may move where they are near a tie."""
    found = []
    for joins in (True, False):
        if not joins:
            monkeypatch.setattr(lowering, "produce", lambda *args: None)
        torch.manual_seed(0)
        torch.compiler.reset()
        model = nn.Sequential(Normed(), Normed()).cuda().bfloat16()
        options = {"recipe": Recipe.nvidia(activation_scale="row", stochastic=()), "policy": Policy()}
        compiled = torch.compile(model, backend="nvfp4", fullgraph=True, options=options)
        x = torch.randn(4, 48, 128, device="cuda", dtype=torch.bfloat16)
        loss = (compiled(x) - x.roll(1, 0)).float().square().mean()
        loss.backward()
        found.append((loss.detach(), *(parameter.grad for parameter in model.parameters())))
    for one, other in zip(*found, strict=True):
        assert (one - other).float().norm() <= 0.02 * other.float().norm()
