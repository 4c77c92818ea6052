"""Optimizer steps of float64 parameters, which the kernels do not take: the formulas of `amp_C`, in float64.

State may be float32 or float64. Scalars may be floats, or tensors of one element on the device of the tensors. Where
`skips` (bool, shape [], None is False) is true nothing is written. No host sync.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from amp_engine.kernels.formulas import Formula, Row, State

TensorLists = Sequence[Sequence[Tensor]]


@torch.no_grad()
def step_(
    formula: Formula,
    lists: TensorLists,
    copies: Sequence[Tensor] | None = None,
    *,
    step: int | Tensor = 1,
    inv_scale: Tensor | None = None,
    skips: Tensor | None = None,
) -> None:
    """One step of a formula over (gradients, parameters, first states, second states where it has any).

    New parameters are written into `copies` as well. `step` counts from 1.
    """
    count = step if isinstance(step, Tensor) else torch.tensor(step, dtype=torch.float64)
    for i, (grad, param, *state) in enumerate(zip(*lists, strict=True)):
        g = grad.double() if inv_scale is None else grad.double() * inv_scale.double()
        state1, state2 = (*(s.double() for s in state), None)[:2]
        new = formula.update(
            g, State(param.double(), state1, state2), Row(count.to(param.device), None, None, None, None)
        )
        for tensor, value in zip([param, *state], [new.weight, new.state1, new.state2], strict=False):
            assert value is not None
            _write(tensor, value, skips)
        if copies is not None:
            _write(copies[i], new.weight, skips)


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
