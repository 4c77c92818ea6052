"""Clipping of gradients by their norm, which the check has computed already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from amp_engine.errors import AmpStateError
from amp_engine.ground import devices
from amp_engine.kernels import is_lazy
from amp_engine.stepping.reduction import norm_over
from amp_engine.stepping.stepper import Stepper


def clip_grad_norm_(
    groups: Sequence[dict[str, Any]],
    stepped: Stepper | None,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> Tensor:
    """Clip the gradients of an optimizer, for `Engine.clip_grad_norm_`, which documents the cases.

    Args:
        groups: the groups of the optimizer.
        stepped: the Stepper of the optimizer, or None if it was not initialized.

    Returns:
        The norm before clipping: float32, shape []. No host sync without `error_if_nonfinite`.
    """
    if stepped is not None and stepped.ranks.in_flat_shards:
        raise AmpStateError(
            "amp.clip_grad_norm_() sees one rank's shards of a FullyShardedDataParallel, so that each rank would clip "
            f"by a norm of its own.  Call model.clip_grad_norm_({max_norm}) of the wrapper, at the same place."
        )
    taken = None if stepped is None else stepped.grad_norm(float(norm_type))
    parts = None if stepped is None else stepped.ranks.of_parts()
    params = [] if taken is not None else _with_readable_gradients(groups)
    if stepped is None or (taken is None and parts is None):
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)
    norm = _total_norm(params, norm_type) if taken is None else taken
    if parts is not None:
        norm = norm_over(parts, norm, float(norm_type))
    if error_if_nonfinite and devices.is_capturing(norm.device):
        raise AmpStateError(
            "amp.clip_grad_norm_(..., error_if_nonfinite=True) is captured in a CUDA graph, where nothing may wait for "
            "the norm.  Leave out error_if_nonfinite: the step is skipped on the GPU where the norm is not finite."
        )
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise AmpStateError(
            f"The norm of order {norm_type} of the gradients is {float(norm)}, so they cannot be clipped.  Leave "
            "out error_if_nonfinite=True to have the step skipped instead."
        )
    if taken is not None:
        stepped.clip_grads_with_norm_(norm, float(max_norm))
    else:
        torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm)
    return norm


def _with_readable_gradients(groups: Sequence[dict[str, Any]]) -> list[nn.Parameter]:
    """Return the parameters of `groups`; lazy gradients, which torch cannot write in a list, become clones."""
    params = [p for group in groups for p in group["params"]]
    for p in params:
        if (grad := p.grad) is not None and is_lazy(grad):
            p.grad = grad.clone()
    return params


def _total_norm(params: Sequence[nn.Parameter], norm_type: float) -> Tensor:
    norm = torch.nn.utils.get_total_norm([p.grad for p in params if p.grad is not None], norm_type)
    return norm.to(params[0].device) if params else norm  # without gradients the norm is on the CPU
