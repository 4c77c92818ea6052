"""Optimizer steps of float64 parameters, which the kernels do not take: the formulas of `amp_C`, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from amp_engine.kernels.formulas import Adagrad, Adam, NovoGrad


@torch.no_grad()
def step_(
    formula: Adam | Adagrad | NovoGrad,
    lists: Sequence[Sequence[Tensor]],
    copies: Sequence[Tensor] | None,
    *,
    step: int | Tensor,
    norms: Tensor | None,
    inv_scale: Tensor | None,
    skips: Tensor | None,
) -> None:
    """Do one step of a formula over (gradients, parameters, first states, second states if it has any). No host sync.

    Args:
        lists: float64 or float32.
        copies: the new parameters are written here too.
        step: the number of this step, from 1; an int, or one element on the device of the tensors.
        norms: float64, shape [n]: NovoGrad's norms, which already include these gradients and the bias correction.
        inv_scale: one element; None is 1.
        skips: bool, shape []; nothing is written where it is true. None is False.
    """
    for i, (grad, param, *states) in enumerate(zip(*lists, strict=True)):
        g = grad.double() if inv_scale is None else grad.double() * inv_scale.double()
        weight, old = param.double(), [state.double() for state in states]
        if isinstance(formula, Adam):
            number = step.double().view(()) if isinstance(step, Tensor) else step
            new = _adam(formula, g, weight, old[0], old[1], number)
        elif isinstance(formula, Adagrad):
            new = _adagrad(formula, g, weight, old[0])
        else:
            assert norms is not None
            new = _novograd(formula, g, weight, old[0], norms[i])
        for tensor, value in zip([param, *states], new, strict=True):
            _write(tensor, value, skips)
        if copies is not None:
            _write(copies[i], new[0], skips)


def _adam(h: Adam, g: Tensor, p: Tensor, m: Tensor, v: Tensor, step: float | Tensor) -> tuple[Tensor, ...]:
    if h.decoupled:
        p = p * (1 - h.lr * h.weight_decay)
    else:
        g = g + h.weight_decay * p
    m = h.beta1 * m + (1 - h.beta1) * g
    v = h.beta2 * v + (1 - h.beta2) * g * g
    bias1, bias2 = (1 - h.beta1**step, 1 - h.beta2**step) if h.bias_correction else (1.0, 1.0)
    return p - h.lr / bias1 * m / ((v / bias2).sqrt() + h.eps), m, v


def _adagrad(h: Adagrad, g: Tensor, p: Tensor, total: Tensor) -> tuple[Tensor, ...]:
    if not h.decoupled:
        g = g + h.weight_decay * p
    total = total + g * g
    update = g / (total.sqrt() + h.eps)
    return p - h.lr * (update + h.weight_decay * p if h.decoupled else update), total


def _novograd(h: NovoGrad, g: Tensor, p: Tensor, m: Tensor, norm: Tensor) -> tuple[Tensor, ...]:
    beta3, denominator = 1 - h.beta1 if h.grad_averaging else 1.0, norm + h.eps
    if h.decay_inside_moment:
        m = h.beta1 * m + beta3 * (g / denominator + h.weight_decay * p)
        return p - h.lr * m, m
    m = h.beta1 * m + beta3 * g
    return p - h.lr * (m / denominator + h.weight_decay * p), m


def _write(tensor: Tensor, value: Tensor, skips: Tensor | None) -> None:
    tensor.copy_(value if skips is None else torch.where(skips, tensor.double(), value))
