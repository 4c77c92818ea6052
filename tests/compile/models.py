"""Models to compile, which meet every list of O1, and use no weight twice.

A weight that is used twice has one cast in eager mode and two in a graph, and so another order of its gradient's sum.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import models


class Functional(nn.Module):
    """linear, gelu, layer_norm, `@`, softmax, a sum and a product of mixed types: [N, 8] -> [N, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.gate = nn.Parameter(torch.randn(8, 16) / 3)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.first(x))
        hidden = F.layer_norm(hidden, (16,)) * F.softmax(x @ self.gate, -1) * self.scale
        return self.head(hidden + x.repeat(1, 2))


class Tiny(nn.Module):
    """A linear layer and a softmax, for compilers that take seconds per kernel: [N, 8] -> [N, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.softmax(self.linear(x), -1)


class Attention(nn.Module):
    """Embedding, one block of causal attention and a head: [N, T] int64 -> [N, T, 11]."""

    VOCABULARY = models.Transformer.VOCABULARY

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(self.VOCABULARY, 16)
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)
        self.mlp = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, self.VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        n, t, c = x.shape
        q, k, v = (y.view(n, t, 2, c // 2).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(n, t, c))
        return self.head(x + self.mlp(x))


TINY = models.Task("tiny", Tiny, models._regression_batch, models.mse)
FUNCTIONAL = models.Task("functional", Functional, models._regression_batch, models.mse)
ATTENTION = models.Task("attention", Attention, models._token_batch, models.token_loss)
CNN = models.CNN


def operators(x: Tensor, y: Tensor, w: Tensor, s: Tensor) -> dict[str, Tensor]:
    """Every kind of listed operator, method and function.

    Args:
        x: [4, 4], float32.
        y: [4, 4], float32.
        w: [4, 4], float32.
        s: float32, shape [].
    """
    low = x @ w  # low precision from here on
    rebound = low
    rebound += y
    return {
        "x @ w": low,
        "x.matmul": x.matmul(w),
        "x.mm": x.mm(w),
        "torch.mm": torch.mm(x, w),
        "torch.einsum": torch.einsum("ij,jk->ik", x, w),
        "F.linear": F.linear(x, w, y[0]),
        "low += float": rebound,
        "low + float": low + y,
        "float - low": y - low,
        "float.add(low)": y.add(low),
        "torch.mul": torch.mul(low, y),
        "low * 0-dim": low * s,
        "low / 0-dim": low / s,
        "low * number": low * 2.0,
        "number - low": 1.0 - low,
        "-low": -low,
        "low + low": low + low,
        "low ** 2": low**2,
        "2 ** low": 2.0**low,
        "low.softmax": low.softmax(-1),
        "low.sum": low.sum(),
        "low.exp": low.exp(),
        "low.norm": low.norm(),
        "torch.cumsum": torch.cumsum(low, 0),
        "torch.linalg.vector_norm": torch.linalg.vector_norm(low),
        "low < float": low < y,
        "low.eq(float)": low.eq(y),
        "torch.cat": torch.cat([low, y]),
        "torch.stack": torch.stack((y, low)),
        "low.relu": low.relu(),
        "F.mse_loss": F.mse_loss(low, y),
        "F.normalize": F.normalize(low),
    }


LOW = {
    *("x @ w", "x.matmul", "x.mm", "torch.mm", "torch.einsum", "F.linear"),
    *("low * number", "number - low", "-low", "low + low", "low.relu"),
}
BOOL = {"low < float", "low.eq(float)"}
