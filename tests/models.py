"""Models for the tests of backend, passes and report: every way of writing a weight matmul, and a small transformer.

T, K and N are three different numbers, so that a transposed shape in a report cannot pass for the right one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

B, S, K, N = 2, 12, 32, 64
T = B * S


def tokens(*shape: int, grad: bool = True, dtype: torch.dtype = torch.float32) -> Tensor:
    """A fixed random input; [B, S, K] unless a shape is given."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape or (B, S, K), generator=generator).to(dtype).requires_grad_(grad)


class Weights(nn.Module):
    """Parameters w0, w1 ... of the given shapes and a function of (module, input)."""

    def __init__(self, function: Callable[[Any, Tensor], Any], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for index, shape in enumerate(shapes):
            self.register_parameter(f"w{index}", nn.Parameter(torch.randn(shape, generator=generator) * 0.1))
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


class Twice(nn.Module):
    """One linear layer called two times."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(K, K, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.relu(self.inner(x)))


class LoRA(nn.Module):
    """A frozen linear layer with a trainable low-rank side path."""

    def __init__(self, rank: int = 16) -> None:
        super().__init__()
        self.base = nn.Linear(K, N).requires_grad_(False)
        self.down = nn.Linear(K, rank, bias=False)
        self.up = nn.Linear(rank, N, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Tied(nn.Module):
    """Embedding and output head with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(N, K)
        self.mixer = nn.Linear(K, K, bias=False)
        self.lm_head = nn.Linear(K, N, bias=False)
        self.lm_head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.lm_head(self.mixer(self.embedding(ids)))


class Checkpointed(nn.Module):
    """Another module with its activations recomputed in the backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


class Broken(nn.Module):
    """A graph break between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(K, N, bias=False)
        self.second = nn.Linear(N, K, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        torch._dynamo.graph_break()
        return self.second(y)


class _UserLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return dy @ w, dy.t() @ x


class UserFunction(nn.Module):
    """A linear layer whose gradients the user wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(N, K) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return _UserLinear.apply(x, self.weight)


class UserFunctions(nn.Module):
    """The same function with two weights on one input, and with one of them on another."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Parameter(torch.randn(K, K) * 0.1)
        self.k = nn.Parameter(torch.randn(K, K) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k = _UserLinear.apply(x, self.q), _UserLinear.apply(x, self.k)
        return _UserLinear.apply(torch.relu(q - k), self.q)


class QKV(nn.Module):
    """Three linear layers that read one input."""

    def __init__(self, dim: int = K) -> None:
        super().__init__()
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, dim, bias=False)
        self.v = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.q(x) * torch.sigmoid(self.k(x)) + self.v(x)


class Attention(nn.Module):
    """Single-head causal attention with separate projections; explicit matmuls or PyTorch's fused one."""

    def __init__(self, dim: int, fused: bool) -> None:
        super().__init__()
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, dim, bias=False)
        self.v = nn.Linear(dim, dim, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.fused:
            return self.o(
                F.scaled_dot_product_attention(*(a.unsqueeze(1) for a in (q, k, v)), is_causal=True).squeeze(1)
            )
        return self.o(torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, -1) @ v)


class Block(nn.Module):
    def __init__(self, dim: int = K, hidden: int = N, fused: bool = True) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(dim)
        self.attn = Attention(dim, fused)
        self.norm2 = nn.RMSNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Embedding, ``layers`` blocks and a head; [batch, sequence] token numbers to logits."""

    def __init__(self, blocks: int = 2, recompute: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(N, K)
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.RMSNorm(K)
        self.lm_head = nn.Linear(K, N, bias=False)
        self.recompute = recompute

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return self.lm_head(self.norm(x))


def seeded(factory: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
    """A module with the same parameters at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return factory(*args, **kwargs)


def ids(batch: int = B, length: int = S) -> Tensor:
    """[batch, length] token numbers, the same at every call."""
    return torch.arange(batch * length).reshape(batch, length) * 7 % N
