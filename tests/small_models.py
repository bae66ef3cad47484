"""Small models whose names and shapes the tests of policy and plan are about."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

DIM, HIDDEN, VOCABULARY, CONTEXT = 32, 64, 96, 48


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.wo = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.attn = Attention()
        self.up = nn.Linear(DIM, HIDDEN)
        self.down = nn.Linear(HIDDEN, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        return x + self.down(F.silu(self.up(x)))


class GPT(nn.Module):
    """Token and position embeddings, a ModuleList of blocks, a head that is tied to the tokens if asked."""

    def __init__(self, blocks: int = 8, tied: bool = True) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCABULARY, DIM)
        self.pos = nn.Embedding(CONTEXT, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.RMSNorm(DIM)
        self.lm_head = nn.Linear(DIM, VOCABULARY, bias=False)
        if tied:
            self.lm_head.weight = self.tok.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok(tokens) + self.pos.weight[: tokens.shape[-1]]
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


class Functional(nn.Module):
    """Parameters of the root, used by functions; no module owns a ``weight`` and there is no list of
    blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(HIDDEN, DIM))
        self.w2 = nn.Parameter(torch.randn(DIM, HIDDEN))
        self.gain = nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.relu(x @ self.w1.t()), self.w2) * self.gain


class Conv1D(nn.Module):
    """GPT-2's linear layer: weight [in, out]."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).unflatten(0, x.shape[:-1])


class Experts(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(count))


class Mixer(nn.Module):
    """A block with a depthwise convolution and a parameter that only elementwise code reads."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(DIM, DIM, 4, groups=DIM)
        self.in_proj = nn.Linear(DIM, 2 * DIM)
