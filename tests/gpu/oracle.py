"""The steps in float64, one tensor at a time, written from the papers and from torch.optim's documentation.

Each takes the state as float64 tensors of one shape, `step` from 1, and gives (param, state1, state2) after the step.
`norm` is the running norm of NovoGrad, None before the first step; it comes back third.
"""

from __future__ import annotations

import torch
from torch import Tensor

from amp_engine.kernels.formulas import Adagrad, Adam, Lamb, NovoGrad, Sgd

State = tuple[Tensor, Tensor, Tensor]


def adam(p: Tensor, g: Tensor, m: Tensor, v: Tensor, step: int, h: Adam) -> State:
    """Kingma & Ba 2015; decoupled: Loshchilov & Hutter 2019."""
    g = -g if h.maximize else g
    if h.decoupled:
        p = p * (1 - h.lr * h.weight_decay)
    else:
        g = g + h.weight_decay * p
    m = h.beta1 * m + (1 - h.beta1) * g
    v = h.beta2 * v + (1 - h.beta2) * g * g
    c1, c2 = (1 - h.beta1**step, 1 - h.beta2**step) if h.bias_correction else (1.0, 1.0)
    return p - h.lr * (m / c1) / ((v / c2).sqrt() + h.eps), m, v


def sgd(p: Tensor, g: Tensor, buffer: Tensor, unused: Tensor, step: int, h: Sgd) -> State:
    """One step of SGD as torch.optim.SGD documents it."""
    g = -g if h.maximize else g
    if not h.decay_after_momentum:
        g = g + h.weight_decay * p
    if h.momentum:
        buffer = g if step == 1 else h.momentum * buffer + (1 - h.dampening) * g
        g = g + h.momentum * buffer if h.nesterov else buffer
    if h.decay_after_momentum:
        g = g + h.weight_decay * p
    return p - h.lr * g, buffer, unused


def adagrad(p: Tensor, g: Tensor, total: Tensor, unused: Tensor, step: int, h: Adagrad) -> State:
    """Duchi et al. 2011."""
    g = -g if h.maximize else g
    if not h.decoupled:
        g = g + h.weight_decay * p
    total = total + g * g
    update = g / (total.sqrt() + h.eps) + (h.weight_decay * p if h.decoupled else 0.0)
    return p - h.lr / (1 + (step - 1) * h.lr_decay) * update, total, unused


def novograd(p: Tensor, g: Tensor, m: Tensor, norm: Tensor | None, step: int, h: NovoGrad) -> State:
    """Ginsburg et al. 2019, with norms where they have squares."""
    g = -g if h.maximize else g
    now = g.abs().max() if h.infinity_norm else g.norm()
    before = (torch.zeros_like(now) if h.init_zero else now) if step == 1 or norm is None else norm
    if h.infinity_norm:
        norm = h.beta2 * before + (1 - h.beta2) * now
    else:
        norm = (h.beta2 * before**2 + (1 - h.beta2) * now**2).sqrt()
    c1, c2 = (1 - h.beta1**step, (1 - h.beta2**step) ** 0.5) if h.bias_correction else (1.0, 1.0)
    b3 = 1 - h.beta1 if h.grad_averaging else 1.0
    if h.decay_inside_moment:
        m = h.beta1 * m + b3 * (g / (norm / c2 + h.eps) + h.weight_decay * p)
        return p - h.lr / c1 * m, m, norm
    m = h.beta1 * m + b3 * g
    return p - h.lr * ((m / c1) / (norm / c2 + h.eps) + h.weight_decay * p), m, norm


def lamb(p: Tensor, g: Tensor, m: Tensor, v: Tensor, step: int, h: Lamb, clip: float) -> State:
    """You et al. 2020; the gradient is divided by `clip` first."""
    g = (-g if h.maximize else g) / clip
    if not h.decoupled:
        g = g + h.weight_decay * p
    b3 = 1 - h.beta1 if h.grad_averaging else 1.0
    m = h.beta1 * m + b3 * g
    v = h.beta2 * v + (1 - h.beta2) * g * g
    c1, c2 = (1 - h.beta1**step, 1 - h.beta2**step) if h.bias_correction else (1.0, 1.0)
    u = (m / c1) / ((v / c2).sqrt() + h.eps) + (h.weight_decay * p if h.decoupled else 0.0)
    adapts = (h.use_nvlamb or h.weight_decay != 0) and p.norm() > 0 and u.norm() > 0
    return p - h.lr * (p.norm() / u.norm() if adapts else 1.0) * u, m, v
