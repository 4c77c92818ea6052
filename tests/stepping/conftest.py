"""The rooms of stepping/ by themselves: an optimizer, its rows, its window, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from amp_engine.scaling.scaler import LossScaler
from amp_engine.stepping.backward import Backward
from amp_engine.stepping.rows import MasterRows, Rows
from amp_engine.stepping.window import Window


class Room:
    """One optimizer of `params`, with rows and a window, at a static scale of 8."""

    def __init__(self, *params: nn.Parameter, makes_masters: bool = True) -> None:
        self.params = params
        self.optimizer = torch.optim.SGD([{"params": [p]} for p in params], lr=1.0)
        self.rows = MasterRows(self.optimizer) if makes_masters else Rows(self.optimizer)
        if makes_masters:
            self.rows.keep()
        self.window = Window(self.rows)
        self.scaler = LossScaler(8.0)

    @property
    def weights(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def backward(self) -> Backward:
        return Backward(self.scaler, 0, self.scaler.snapshot())

    def accumulate(self, *grads: Any) -> None:
        """Accumulate as a backward does: scaled, in the parameters' types; None leaves a parameter alone."""
        for p, grad in zip(self.params, grads, strict=True):
            if grad is not None:
                scaled = torch.full_like(p, 8.0 * grad)
                p.grad = scaled if p.grad is None else p.grad + scaled

    def run(self, *grads: Any) -> Backward:
        """A whole scaled backward, without looking at the scale."""
        backward = self.backward()
        self.rows.scan()
        self.window.open(backward)
        self.accumulate(*grads)
        self.window.close(backward, True, set())
        return backward

    def gradients(self) -> list[Any]:
        """The first element of each weight's gradient, as a user sees it."""
        return [None if p.grad is None else float(p.grad.flatten()[0]) for p in self.weights]


def half(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape, dtype=torch.float16))


def full(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape))


@pytest.fixture
def make() -> SimpleNamespace:
    return SimpleNamespace(room=Room, half=half, full=full)
