"""Models of ten kinds of layers, each with a place where a forward or a backward can be made to overflow."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 8


class BackwardOverflow(torch.autograd.Function):
    """Passes on, and makes the first gradient infinite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * float("inf")


class Planted(nn.Module):
    """A layer, and what goes wrong behind it: "forward" or "backward", or nothing."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.bad = ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if isinstance(x, tuple):  # of RNNs and attention
            x = x[0]
        if self.bad == "forward":
            # As a layer does whose weights have grown: finite factors whose product is beyond every type of a level.
            x = x * 1e30 * 1e30
        if self.bad == "backward":
            x = BackwardOverflow.apply(x)
        return x


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        output, _ = self.attention(x, x, x)
        return output


class Convolution(nn.Module):
    """A convolution over the sequence: [batch, time, channels]."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


LAYERS = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "conv": lambda: Convolution(nn.Conv1d(WIDTH, WIDTH, 3, padding=1)),
    "transposed conv": lambda: Convolution(nn.ConvTranspose1d(WIDTH, WIDTH, 3, padding=1)),
    "batch norm": lambda: Convolution(nn.BatchNorm1d(WIDTH)),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "group norm": lambda: Convolution(nn.GroupNorm(2, WIDTH)),
    "lstm": lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True),
    "attention": Attention,
    "prelu": lambda: nn.PReLU(),
    "encoder layer": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True),
}


class Model(nn.Module):
    """A layer of a kind between two linear ones, which are registered the other way round."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, 2)
        self.planted = Planted(LAYERS[kind]())
        self.first = nn.Linear(4, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.planted(torch.tanh(self.first(x))))


def batch(index: int, bad: str = "") -> tuple[Tensor, Tensor]:
    """Inputs of shape [4, 3, 4] and targets of shape [4, 3, 2]; one NaN with `bad` "data"."""
    generator = torch.Generator().manual_seed(index)
    x, y = torch.randn(4, 3, 4, generator=generator), torch.randn(4, 3, 2, generator=generator)
    if bad == "data":
        x[1, 2, 3] = float("nan")
    return x, y
