"""Optimizer steps of float64 parameters, which the kernels do not take: the formulas of `amp_C`, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from amp_engine.kernels import Checks
from amp_engine.kernels.formulas import Formula, Row, State


@torch.no_grad()
def step_(
    formula: Formula,
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
        norms: float64, shape [n]: NovoGrad's norms, which already include these gradients.
        inv_scale: one element; None is 1.
        skips: bool, shape []; nothing is written where it is true. None is False.
    """
    count = step if isinstance(step, Tensor) else torch.tensor(step, dtype=torch.float64)
    for i, (grad, param, *state) in enumerate(zip(*lists, strict=True)):
        g = grad.double() if inv_scale is None else grad.double() * inv_scale.double()
        state1, state2 = (*(s.double() for s in state), None)[:2]
        norm = None if norms is None else norms[i]
        nothing = torch.zeros((), dtype=torch.float64, device=param.device)
        row = Row(count.to(param.device), None, norm, Checks(nothing, nothing, nothing), None)
        new = formula.update(g, State(param.double(), state1, state2, norm), row)
        for tensor, value in zip([param, *state], [new.weight, new.state1, new.state2], strict=False):
            assert value is not None
            _write(tensor, value, skips)
        if copies is not None:
            _write(copies[i], new.weight, skips)


def _write(tensor: Tensor, value: Tensor, skips: Tensor | None) -> None:
    tensor.copy_(value if skips is None else torch.where(skips, tensor.double(), value))
