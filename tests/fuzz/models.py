"""Tiny models that amp_engine and the plain reference both run, and the optimizers of both.

Every model is plain PyTorch. `half` is the reference's: its linear layers then cast by hand what O1 and O4 cast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_engine.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD
from tests.optimizers import formulas


class Plain(nn.Module):
    """Shared by the models: parts that can be run alone, and casts by hand."""

    half: torch.dtype | None = None
    shape: tuple[int, ...] = (3, 4)

    def cast(self, tensor: Tensor) -> Tensor:
        return tensor if self.half is None else tensor.to(self.half)

    def linear(self, x: Tensor, layer: nn.Linear) -> Tensor:
        if self.half is None:
            return layer(x)
        return F.linear(self.cast(x), self.cast(layer.weight), None if layer.bias is None else self.cast(layer.bias))


class Mlp(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, whole: bool = True) -> Tensor:
        h = F.relu(self.linear(x, self.a))
        return self.linear(h, self.b) if whole else h


class Vector(Plain):
    """A weight that no listed function sees, and one that is used before it."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 5, bias=False)
        self.w = nn.Parameter(torch.zeros(5))

    def forward(self, x: Tensor, whole: bool = True) -> Tensor:
        h = self.linear(x, self.a)
        return h * self.w if whole else h


class Normed(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Linear(6, 2)

    def forward(self, x: Tensor, whole: bool = True) -> Tensor:
        h = F.relu(self.norm(self.linear(x, self.a)))
        return self.linear(h, self.b) if whole else h


class Conv(Plain):
    shape = (2, 2, 4, 4)

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 3, 3, bias=False), nn.Linear(12, 2)

    def forward(self, x: Tensor, whole: bool = True) -> Tensor:
        h = self.a(x) if self.half is None else F.conv2d(self.cast(x), self.cast(self.a.weight))
        return self.linear(h.flatten(1), self.b) if whole else h


MODELS: dict[str, type[Plain]] = {"mlp": Mlp, "vector": Vector, "normed": Normed, "conv": Conv}


def make_model(kind: str, seed: int) -> Plain:
    """A model whose weights are multiples of 1/16: halves hold them exactly."""
    model, random = MODELS[kind](), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randint(-12, 13, param.shape, generator=random) / 16)
    return model


def batch(model: Plain, seed: int) -> Tensor:
    return torch.randint(-4, 5, model.shape, generator=torch.Generator().manual_seed(seed)) / 4


def loss_of(output: Tensor, seed: int) -> Tensor:
    """Quadratic, so that gradients follow the weights; small, so that most do not overflow."""
    factors = torch.randint(-2, 3, output.shape, generator=torch.Generator().manual_seed(seed + 1)) / 256
    wide = output.float()
    return (wide * wide * factors + wide * factors).sum()


# --- optimizers -----------------------------------------------------------------------------------


class WritesData(Optimizer):
    """SGD as most third-party optimizers are written: through `.data`, which moves no version."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["count"] = self.state[p].get("count", 0) + 1
                    p.data.add_(p.grad.data, alpha=-group["lr"])


class ByFormula(Optimizer):
    """A formula of tests/optimizers/formulas.py as an optimizer of torch."""

    def __init__(self, params: Any, name: str, **settings: Any) -> None:
        self.formula = formulas.FORMULAS[name]
        super().__init__(params, settings)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = sum(float(g.double().square().sum()) for g in grads) ** 0.5
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["step"] = state.get("step", torch.tensor(0.0)) + 1
                    p.copy_(self.formula(p, p.grad, state, int(state["step"]), {**group, "norm": norm}))


_ADAM = {"bias_correction": True, "betas": (0.9, 0.999), "adam_w_mode": True, "grad_averaging": True}
_LAMB = {**_ADAM, "lr": 1 / 64, "eps": 1e-6, "weight_decay": 0.01, "max_grad_norm": 1.0, "use_nvlamb": False}
_NOVO = {
    **{"lr": 1 / 64, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01},
    **{"grad_averaging": True, "norm_type": 2, "init_zero": False, "reg_inside_moment": False},
}
_ADAGRAD = {"lr": 1 / 64, "eps": 1e-10, "weight_decay": 0.01, "adagrad_w_mode": False}

Make = Callable[[Any], Optimizer]

# Name -> (what amp_engine steps, what the reference steps, whether their bits agree).
OPTIMIZERS: dict[str, tuple[Make, Make, bool]] = {
    "sgd": (*[lambda p: torch.optim.SGD(p, lr=1 / 8)] * 2, True),
    "momentum": (*[lambda p: torch.optim.SGD(p, lr=1 / 8, momentum=0.5, weight_decay=1 / 64)] * 2, True),
    "adam": (*[lambda p: torch.optim.Adam(p, lr=1 / 64, foreach=None)] * 2, False),
    "adamw": (*[lambda p: torch.optim.AdamW(p, lr=1 / 64)] * 2, False),
    "rmsprop": (*[lambda p: torch.optim.RMSprop(p, lr=1 / 64, momentum=0.5)] * 2, True),
    "writes data": (*[lambda p: WritesData(p, lr=1 / 8)] * 2, True),
    "fused sgd": (
        lambda p: FusedSGD(p, lr=1 / 8, momentum=0.5, weight_decay=1 / 64),
        lambda p: torch.optim.SGD(p, lr=1 / 8, momentum=0.5, weight_decay=1 / 64),
        True,
    ),
    "fused adam": (
        lambda p: FusedAdam(p, lr=1 / 64, weight_decay=0.01),
        lambda p: torch.optim.AdamW(p, lr=1 / 64, weight_decay=0.01),
        False,
    ),
    "fused lamb": (lambda p: FusedLAMB(p, lr=1 / 64), lambda p: ByFormula(p, "FusedLAMB", **_LAMB), False),
    "fused novograd": (
        lambda p: FusedNovoGrad(p, lr=1 / 64, weight_decay=0.01, betas=(0.9, 0.999)),
        lambda p: ByFormula(p, "FusedNovoGrad", **_NOVO),
        False,
    ),
    "fused adagrad": (
        lambda p: FusedAdagrad(p, lr=1 / 64, weight_decay=0.01),
        lambda p: ByFormula(p, "FusedAdagrad", **_ADAGRAD),
        False,
    ),
}
