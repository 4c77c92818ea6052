"""The five optimizers written out once more, one tensor at a time, in any precision.

In float64 they are the truth, in float32 the plain PyTorch expression whose error ours may be twice. Nothing here
imports `amp_engine` or `torch.optim`. Settings have apex's names; `t` counts a tensor's own steps from 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Settings = dict[str, Any]
State = dict[str, Tensor]
Update = Callable[[Tensor, Tensor, State, int, Settings], Tensor]


def sgd(p: Tensor, g: Tensor, state: State, t: int, given: Settings) -> Tensor:
    """m = g at first, then momentum m + (1 - dampening) g;  p -= lr (m, or g + momentum m)."""
    momentum, decay = given["momentum"], given["weight_decay"]
    if not given["wd_after_momentum"]:
        g = g + decay * p
    if momentum:
        m = g if t == 1 else momentum * state["momentum_buffer"] + (1 - given["dampening"]) * g
        state["momentum_buffer"] = m.clone()
        g = g + momentum * m if given["nesterov"] else m
    if given["wd_after_momentum"]:
        g = g + decay * p
    return p - given["lr"] * g


def _moments(p: Tensor, g: Tensor, state: State, t: int, given: Settings, entering: float) -> tuple[Tensor, Tensor]:
    """Return both moments of Adam, divided by 1 - beta^t; the gradient enters the first one times `entering`."""
    beta1, beta2 = given["betas"]
    m = state["exp_avg"] = beta1 * state.get("exp_avg", torch.zeros_like(p)) + entering * g
    v = state["exp_avg_sq"] = beta2 * state.get("exp_avg_sq", torch.zeros_like(p)) + (1 - beta2) * g * g
    if given["bias_correction"]:
        return m / (1 - beta1**t), v / (1 - beta2**t)
    return m, v


def adam(p: Tensor, g: Tensor, state: State, t: int, given: Settings) -> Tensor:
    """Kingma & Ba 2015, algorithm 1; decoupled: Loshchilov & Hutter 2019, algorithm 2."""
    decay = given["weight_decay"]
    if not given["adam_w_mode"]:
        g = g + decay * p
    m, v = _moments(p, g, state, t, given, entering=1 - given["betas"][0])
    if given["adam_w_mode"]:
        p = p * (1 - given["lr"] * decay)
    return p - given["lr"] * m / (v.sqrt() + given["eps"])


def adagrad(p: Tensor, g: Tensor, state: State, t: int, given: Settings) -> Tensor:
    """h += g g;  p -= lr g / (sqrt(h) + eps)."""
    decay = given["weight_decay"]
    if not given["adagrad_w_mode"]:
        g = g + decay * p
    h = state["sum"] = state.get("sum", torch.zeros_like(p)) + g * g
    step = g / (h.sqrt() + given["eps"])
    return p - given["lr"] * (step + decay * p if given["adagrad_w_mode"] else step)


def novograd(p: Tensor, g: Tensor, state: State, t: int, given: Settings) -> Tensor:
    """Ginsburg et al. 2019, algorithm 1, with the second moment kept as a norm."""
    (beta1, beta2), decay = given["betas"], given["weight_decay"]
    infinity = given["norm_type"] in (0, math.inf)
    norm = g.abs().max() if infinity else g.square().sum().sqrt()
    if t == 1 and not given["init_zero"]:
        blended = norm
    else:
        old = state.get("exp_avg_sq", torch.zeros_like(norm))
        blended = (
            beta2 * old + (1 - beta2) * norm
            if infinity
            else (beta2 * old.square() + (1 - beta2) * norm.square()).sqrt()
        )
    state["exp_avg_sq"] = blended
    c1, c2 = (1 - beta1**t, math.sqrt(1 - beta2**t)) if given["bias_correction"] else (1.0, 1.0)
    entering = 1 - beta1 if given["grad_averaging"] else 1.0
    old_m = state.get("exp_avg", torch.zeros_like(p))
    denominator = blended / c2 + given["eps"]
    if given["reg_inside_moment"]:
        m = state["exp_avg"] = beta1 * old_m + entering * (g / denominator + decay * p)
        return p - given["lr"] * m / c1
    m = state["exp_avg"] = beta1 * old_m + entering * g
    return p - given["lr"] * (m / c1 / denominator + decay * p)


def lamb(p: Tensor, g: Tensor, state: State, t: int, given: Settings) -> Tensor:
    """You et al. 2020, algorithm 2; `given["norm"]` is the norm of all gradients of the optimizer."""
    decay = given["weight_decay"]
    if given["max_grad_norm"]:
        g = g / max(1.0, given["norm"] / given["max_grad_norm"])
    if not given["adam_w_mode"]:
        g = g + decay * p
    entering = 1 - given["betas"][0] if given["grad_averaging"] else 1.0
    m, v = _moments(p, g, state, t, given, entering)
    step = m / (v.sqrt() + given["eps"])
    if given["adam_w_mode"]:
        step = step + decay * p
    ratio: Tensor | float = 1.0
    if given["use_nvlamb"] or decay:
        weight_norm, step_norm = p.square().sum().sqrt(), step.square().sum().sqrt()
        if weight_norm and step_norm:
            ratio = weight_norm / step_norm
    return p - given["lr"] * ratio * step


FORMULAS: dict[str, Update] = {
    "FusedSGD": sgd,
    "FusedAdam": adam,
    "FusedLAMB": lamb,
    "FusedNovoGrad": novograd,
    "FusedAdagrad": adagrad,
}


class Formula:
    """Steps its own copies of parameters by one of the formulas.

    Args:
        name: of `FORMULAS`.
        groups: (tensors, every setting of the group) each.
        dtype: what everything is computed in.
    """

    def __init__(self, name: str, groups: Sequence[tuple[Sequence[Tensor], Settings]], dtype: torch.dtype) -> None:
        self.update = FORMULAS[name]
        self.dtype = dtype
        self.params: list[Tensor] = []
        self.settings: list[Settings] = []
        for tensors, settings in groups:
            self.params += [tensor.detach().to(dtype, copy=True) for tensor in tensors]
            self.settings += [dict(settings)] * len(tensors)
        self.states: list[State] = [{} for _ in self.params]
        self.steps = [0] * len(self.params)

    def set(self, **settings: Any) -> None:
        """Other settings, for all groups alike."""
        self.settings = [given | settings for given in self.settings]

    def step(self, grads: Sequence[Tensor | None]) -> None:
        wide = [None if grad is None else grad.detach().to(self.dtype) for grad in grads]
        norm = math.sqrt(sum(grad.square().sum().item() for grad in wide if grad is not None))
        for index, (grad, given) in enumerate(zip(wide, self.settings, strict=True)):
            if grad is None or not grad.numel():
                continue
            self.steps[index] += 1
            self.params[index] = self.update(
                self.params[index], grad, self.states[index], self.steps[index], given | {"norm": norm}
            )
