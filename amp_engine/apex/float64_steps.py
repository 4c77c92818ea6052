"""Optimizer steps of float64 parameters, which the kernels do not take: the formulas of `amp_C`, in float64.

State may be float32 or float64. Scalars may be floats, or tensors of one element on the device of the tensors. Where
`skips` (bool, shape [], None is False) is true nothing is written. No host sync.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

TensorLists = Sequence[Sequence[Tensor]]


@torch.no_grad()
def adam_(
    lists: TensorLists,
    copies: Sequence[Tensor] | None,
    *,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    step: int | Tensor,
    decoupled: bool,
    bias_correction: bool,
    weight_decay: float,
    inv_scale: Tensor | None = None,
    skips: Tensor | None = None,
) -> None:
    """Adam over (gradients, parameters, exp_avg, exp_avg_sq); new parameters also into `copies`."""
    bias1, bias2 = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    for i, (grad, param, exp_avg, exp_avg_sq) in enumerate(zip(*lists, strict=True)):
        g = grad.double() if inv_scale is None else grad.double() * inv_scale.double()
        weight = param.double()
        if not decoupled:
            g = g + weight_decay * weight
        m = beta1 * exp_avg.double() + (1 - beta1) * g
        v = beta2 * exp_avg_sq.double() + (1 - beta2) * g * g
        update = (m / bias1) / ((v / bias2).sqrt() + eps)
        if decoupled:
            update = update + weight_decay * weight
        weight = weight - lr * update
        _write(param, weight, skips)
        _write(exp_avg, m, skips)
        _write(exp_avg_sq, v, skips)
        if copies is not None:
            _write(copies[i], weight, skips)


@torch.no_grad()
def adagrad_(lists: TensorLists, *, lr: float, eps: float, decoupled: bool, weight_decay: float) -> None:
    """Adagrad over (gradients, parameters, sums)."""
    for grad, param, total in zip(*lists, strict=True):
        g, weight = grad.double(), param.double()
        if not decoupled:
            g = g + weight_decay * weight
        h = total.double() + g * g
        update = g / (h.sqrt() + eps)
        if decoupled:
            update = update + weight_decay * weight
        _write(param, weight - lr * update, None)
        _write(total, h, None)


@torch.no_grad()
def novograd_(
    lists: TensorLists,
    denominators: Tensor,
    *,
    lr: float,
    beta1: float,
    beta3: float,
    bias1: float,
    decay_inside_moment: bool,
    weight_decay: float,
) -> None:
    """NovoGrad over (gradients, parameters, exp_avg); `denominators`, one a tensor, are norm / c2 + eps."""
    for grad, param, exp_avg, denominator in zip(*lists, denominators.double().unbind(), strict=True):
        g, weight = grad.double(), param.double()
        if decay_inside_moment:
            m = beta1 * exp_avg.double() + beta3 * (g / denominator + weight_decay * weight)
            update = m / bias1
        else:
            m = beta1 * exp_avg.double() + beta3 * g
            update = m / bias1 / denominator + weight_decay * weight
        _write(param, weight - lr * update, None)
        _write(exp_avg, m, None)


def _write(tensor: Tensor, value: Tensor, skips: Tensor | None) -> None:
    tensor.copy_(value if skips is None else torch.where(skips, tensor.double(), value))
