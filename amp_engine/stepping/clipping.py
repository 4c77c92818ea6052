"""Clipping of gradients by their norm, which the check has taken already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from amp_engine import devices
from amp_engine.errors import AmpStateError
from amp_engine.kernels import is_lazy
from amp_engine.stepping.stepped import SteppedOptimizer


def clip_grad_norm_(
    groups: Sequence[dict[str, Any]],
    stepped: SteppedOptimizer | None,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> Tensor:
    """Clip the gradients of an optimizer. As `Engine.clip_grad_norm_`, which says what is done when.

    Args:
        groups: of the optimizer.
        stepped: what stands for it, or None if it was not initialized.

    Returns:
        The norm before clipping: float32, shape []. No host sync without `error_if_nonfinite`.
    """
    norm = None if stepped is None else stepped.grad_norm(float(norm_type))
    if stepped is None or norm is None:
        params = [p for group in groups for p in group["params"]]
        for p in params:
            if (grad := p.grad) is not None and is_lazy(grad):
                p.grad = grad.clone()  # torch writes no list of these
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)
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
    stepped.clip_grads_with_norm_(norm, float(max_norm))
    return norm
