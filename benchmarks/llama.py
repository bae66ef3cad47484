"""A Llama-style model to measure on: RMSNorm, attention with rotary positions, SwiGLU, no bias anywhere.

Query, key and value, and gate and up, are layers of their own that read the same input. Nothing here knows about FP4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class LlamaConfig:
    dim: int
    layers: int
    heads: int
    hidden: int
    vocab: int = 32000
    seq: int = 2048

    @property
    def weights(self) -> int:
        """Elements of all matrices that tokens are multiplied by."""
        return self.layers * (4 * self.dim**2 + 3 * self.dim * self.hidden) + self.dim * self.vocab

    def flops(self, tokens: int) -> float:
        """Operations of the matrix products of a training step: forward and both gradients, attention apart."""
        return 6.0 * self.weights * tokens


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(config.dim, config.dim, bias=False) for _ in range(4))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (self.wq(x), self.wk(x), self.wv(x)))
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each pair (i, i + head_dim / 2) of x [..., seq, head_dim] turned by its position's angle."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).type_as(x)


class SwiGLU(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(config.dim, config.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(config.dim), nn.RMSNorm(config.dim)
        self.attention, self.mlp = Attention(config), SwiGLU(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Output(nn.Module):
    """Norm, head and loss."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.dim)
        self.lm_head = nn.Linear(config.dim, config.vocab, bias=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.lm_head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


class Llama(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.output = Output(config)
        half = config.dim // config.heads // 2
        angles = torch.outer(torch.arange(config.seq), 10000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                residual = name.endswith(("wo.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * config.layers) if residual else 0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats, float32 0-d. tokens and targets: int64 [batch, seq]."""
        x = self.embed(tokens)
        for block in self.layers:
            x = block(x, self.cos, self.sin)
        return self.output(x, targets)


def bfloat16_llama(config: LlamaConfig, device: torch.device) -> Llama:
    """Weights in bfloat16, the same in every call; angles stay in float32."""
    torch.manual_seed(0)
    with device:
        model = Llama(config)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return model
