"""The truth that levels and kernels are held against: training in float64 and the slow overflow rule.

Nothing here imports `amp_engine` or `torch.optim`; the formulas are written out once more, on purpose.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Sgd:
    """v = momentum * v + g (v = g at first);  p -= lr * v, with g += weight_decay * p before."""

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0

    def update_(self, param: Tensor, grad: Tensor, state: dict[str, Tensor | int]) -> None:
        grad = grad + self.weight_decay * param
        if self.momentum:
            if "velocity" not in state:
                state["velocity"] = grad.clone()
            else:
                state["velocity"] = self.momentum * state["velocity"] + grad
            grad = state["velocity"]
        param -= self.lr * grad


@dataclass(frozen=True)
class AdamW:
    """Decoupled weight decay: https://arxiv.org/abs/1711.05101, algorithm 2, with a constant schedule."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2

    def update_(self, param: Tensor, grad: Tensor, state: dict[str, Tensor | int]) -> None:
        beta1, beta2 = self.betas
        t = state["step"] = state.get("step", 0) + 1
        m = state["m"] = beta1 * state.get("m", torch.zeros_like(param)) + (1 - beta1) * grad
        v = state["v"] = beta2 * state.get("v", torch.zeros_like(param)) + (1 - beta2) * grad**2
        param *= 1 - self.lr * self.weight_decay
        param -= self.lr * (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + self.eps)


def to_float64(value: object) -> object:
    """Floating tensors (alone or in a tuple) as float64; anything else as it is."""
    if isinstance(value, tuple):
        return tuple(to_float64(item) for item in value)
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.double()
    return value


@dataclass
class Float64Training:
    """The training that has no rounding worth the name: model, data, gradients, state and update in float64.

    Args:
        model: copied, then widened; the one passed in is left alone.
        rule: `Sgd` or `AdamW`.
        loss: `loss(model, batch) -> scalar`.
    """

    model: nn.Module
    rule: Sgd | AdamW
    loss: Callable[[nn.Module, object], Tensor]
    state: dict[str, dict[str, Tensor | int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model = copy.deepcopy(self.model).double()

    def step(self, *batches: object) -> list[float]:
        """Take one update with the gradients of all `batches` summed; return their losses."""
        self.model.zero_grad()
        losses = []
        for batch in batches:
            loss = self.loss(self.model, to_float64(batch))
            loss.backward()
            losses.append(loss.item())
        with torch.no_grad():
            for name, param in self.model.named_parameters():
                if param.grad is not None:
                    self.rule.update_(param, param.grad, self.state.setdefault(name, {}))
        return losses

    def parameters(self) -> dict[str, Tensor]:
        return {name: param.detach() for name, param in self.model.named_parameters()}


def relative_error(values: Iterable[Tensor], truth: Iterable[Tensor]) -> float:
    """|values - truth| / |truth|, both taken over all tensors together, in float64."""
    difference = squares = 0.0
    for value, true_value in zip(values, truth, strict=True):
        difference += (value.detach().double() - true_value).square().sum().item()
        squares += true_value.square().sum().item()
    return (difference / squares) ** 0.5


@dataclass(frozen=True)
class Scale:
    """The state of a dynamic loss scaler: the scale and how many backwards in a row were clean."""

    loss_scale: float
    unskipped: int


def scale_rule(
    outcomes: str,
    start: Scale = Scale(2.0**16, 0),  # noqa: B008 - frozen
    *,
    window: int = 2000,
    floor: float = 2.0**-24,
    ceiling: float = 2.0**24,
) -> Iterator[Scale]:
    """The slow overflow rule: what a dynamic scaler holds after each backward.

    Args:
        outcomes: one letter per backward, `c` for clean and `o` for overflow.
        start: what it held before the first of them.
    """
    loss_scale, unskipped = start.loss_scale, start.unskipped
    for outcome in outcomes:
        if outcome == "o":
            loss_scale, unskipped = max(loss_scale / 2, floor), 0
        elif outcome == "c":
            unskipped += 1
            if unskipped == window:
                loss_scale, unskipped = min(loss_scale * 2, ceiling), 0
        else:
            raise ValueError(f"outcome {outcome!r}: one of 'c' (clean), 'o' (overflow)")
        yield Scale(loss_scale, unskipped)
