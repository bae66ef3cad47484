"""On a CUDA device: the same bytes as on a CPU, and training that follows the seed."""

import pytest
import torch
from torch import nn

import fp4compile.ops  # noqa: F401

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

fp4 = torch.ops.fp4


def spread(rows, columns, dtype):
    """Values over many magnitudes, the same on every machine."""
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    scale = torch.exp2(torch.randint(-20, 20, (rows, 1), generator=generator).float())
    return (torch.randn(rows, columns, generator=generator) * scale).to(dtype)


def as_bytes(tensor):
    return tensor.cpu().reshape(-1).view(torch.uint8)


def on_both(op, *args):
    """The operator's results on the CPU and on the GPU, as pairs."""
    moved = [arg.cuda() if isinstance(arg, torch.Tensor) else arg for arg in args]
    results = op(*args), op(*moved)
    return zip(*(result if isinstance(result, tuple) else (result,) for result in results), strict=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (33, 48), (129, 1000), (1024, 4096)])
def test_every_operator_gives_the_same_bytes_as_on_a_cpu(rows, columns, dtype):
    x = spread(rows, columns, dtype)
    if dtype is torch.float16:
        x = x.clamp(-6e4, 6e4)
    amax, seed = fp4.amax(x), torch.tensor(1234567890123)
    calls = [
        (fp4.amax, x),
        (fp4.rotate, x, 16, 0xD7E8),
        (fp4.quantize, x, amax, None, "nvfp4", [1, 16], "nearest", 0),
        (fp4.quantize, x, amax, None, "nvfp4", [16, 16], "nearest", 0),
        (fp4.quantize, x, amax, seed, "nvfp4", [1, 16], "stochastic", 5),
        (fp4.quantize, x, None, None, "mxfp4", [1, 32], "nearest", 0),
    ]
    for op, *args in calls:
        for cpu, gpu in on_both(op, *args):
            assert torch.equal(as_bytes(cpu), as_bytes(gpu)), (str(op), args[3:])


def test_a_product_is_within_float32_accumulation_error_of_the_decoded_operands():
    a, b = spread(256, 512, torch.bfloat16), torch.randn(384, 512, generator=torch.Generator().manual_seed(1))
    quantized = []
    for operand, block in ((a, [1, 16]), (b, [16, 16])):
        amax = fp4.amax(operand)
        quantized.append((*fp4.quantize(operand, amax, None, "nvfp4", block, "nearest", 0), amax, "nvfp4"))
    flat = [item.cuda() if isinstance(item, torch.Tensor) else item for one in quantized for item in one]
    got = fp4.scaled_mm(*flat, torch.float32).cpu().double()
    decoded = [fp4.decode(codes, scales, "nvfp4", torch.float32).double() for codes, scales, _, _ in quantized]
    factor = quantized[0][2].double() * quantized[1][2].double() / 2688**2
    exact, magnitude = (decoded[0] @ decoded[1].T) * factor, (decoded[0].abs() @ decoded[1].abs().T) * factor
    # 512 float32 additions in any order, plus the factor's three roundings.
    assert ((got - exact).abs() <= magnitude * (512 + 3) * 2.0**-24 + 1e-45).all()


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
