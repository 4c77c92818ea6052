"""Modules that lose everything in half, and that FP32 computes well from what half gives them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH = 8


class Cancelling(nn.Module):
    """A sum that takes all digits, and a difference that shows it."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + 5000.0) - 5000.0


class Softmax(nn.Module):
    """Large logits: softmax depends on their differences alone, which half rounds away."""

    def forward(self, x: Tensor) -> Tensor:
        return ((x * 4.0 + 7000.0) - 1000.0).softmax(-1) * x * 4.0


class Overflowing(nn.Module):
    """A mean of squares that is beyond float16, with weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = x * 1000.0
        return y / ((y * y).mean(-1, keepdim=True) + 1.0) ** 0.5 * self.weight


class Centred(nn.Module):
    """A norm that subtracts a mean as large as what bfloat16 has digits for."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + 4096.0
        return (x - x.mean(-1, keepdim=True)) * self.weight


class Attending(nn.Module):
    """A module with others in it, whose own operations are the ones that lose."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        scores = (self.query(x) + 6000.0) - 6000.0
        return scores * self.value(x)


PLANTS = {
    "cancelling": Cancelling,
    "softmax": Softmax,
    "overflowing": Overflowing,
    "centred": Centred,
    "attending": Attending,
}
LOSE = {
    level: [kind for kind in PLANTS if kind != "overflowing" or level in ("O1", "O2")]
    for level in ("O1", "O2", "O4", "O5")
}


class Model(nn.Module):
    """Blocks of layers that are at home in half, with `kinds` planted at the places given."""

    def __init__(self, **kinds: str) -> None:
        super().__init__()
        self.first = nn.Linear(4, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(Block(PLANTS[kinds[f"b{i}"]]() if f"b{i}" in kinds else None) for i in range(3))
        self.drop = nn.Dropout(0.25)
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.last(self.drop(x))


class Block(nn.Module):
    """A residual layer, with batch norm, and what is planted."""

    def __init__(self, planted: nn.Module | None) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.planted = planted

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.linear(x))
        if self.planted is not None:
            y = self.planted(y)
        return x + torch.relu_(y + 0.5)


class Batch:
    """Inputs and targets, and the loss of a model on them."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x, self.y = torch.randn(16, 4, generator=generator), torch.randn(16, 2, generator=generator)

    def __call__(self, model: nn.Module) -> Tensor:
        return (model(self.x).float() - self.y).square().mean()
