"""The plain PyTorch truth of every operation. None of them waits for the device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from amp_engine.dtypes import is_low_precision


@torch.no_grad()
def nonfinite(tensors: Sequence[Tensor]) -> Tensor:
    """Which of `tensors` hold an inf or a NaN.

    Args:
        tensors: n dense floating tensors of any shapes and floating types, all on one device.

    Returns:
        bool tensor of shape [n] on that device. The largest magnitude decides: a *finite* tensor whose
        squares overflow is not reported.
    """
    if not tensors:
        return torch.zeros(0, dtype=torch.bool)
    flags = torch.zeros(len(tensors), dtype=torch.bool, device=tensors[0].device)
    filled = [i for i, t in enumerate(tensors) if t.numel()]  # an empty tensor has no maximum
    if filled:
        largest = torch._foreach_norm([tensors[i] for i in filled], math.inf)
        bad = torch.stack([~torch.isfinite(t) for t in largest])
        if len(filled) == len(tensors):
            return bad
        flags[filled] = bad
    return flags


@torch.no_grad()
def unscaled(tensors: Sequence[Tensor], inv_scale: Tensor) -> list[Tensor]:
    """`[t.float() * inv_scale for t in tensors]`: float32, shapes and strides as given.

    Args:
        inv_scale: float32, shape [], on the device of `tensors`.
    """
    copies = [t.to(torch.float32, copy=True) for t in tensors]
    if copies:
        torch._foreach_mul_(copies, inv_scale)
    return copies


@torch.no_grad()
def unscale_(tensors: Sequence[Tensor], inv_scale: Tensor) -> None:
    """`t *= inv_scale` for each t, rounded once to the type of t.

    Args:
        inv_scale: float32, shape [], on the device of `tensors`.
    """
    wide = [t for t in tensors if not is_low_precision(t)]
    if wide:
        torch._foreach_mul_(wide, inv_scale)
    for t in tensors:
        # A 0-d factor takes the type of the tensor it multiplies, and 1/scale may be below half's range.
        if is_low_precision(t):
            t.copy_(t.float() * inv_scale)


@torch.no_grad()
def accumulate_(totals: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """`total += tensor` pairwise, in the type of `totals`."""
    if totals:
        torch._foreach_add_(list(totals), list(tensors))


@torch.no_grad()
def cast_copy_(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """`output[...] = input` pairwise, rounded to nearest even into the type of each output."""
    if outputs:
        torch._foreach_copy_(list(outputs), list(inputs))


@torch.no_grad()
def update_scale_(
    scale: Tensor,
    growth_tracker: Tensor,
    found_inf: Tensor,
    *,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    min_scale: float,
    max_scale: float,
) -> None:
    """Adjust a dynamic loss scale after one backward, in place.

        if found_inf != 0:
            scale, growth_tracker = max(min_scale, scale * backoff_factor), 0
        else:
            growth_tracker += 1
            if growth_tracker >= growth_interval:
                scale, growth_tracker = min(max_scale, scale * growth_factor), 0

    Args:
        scale: float32, shape [].
        growth_tracker: int32, shape []: clean backwards since the scale last moved.
        found_inf: float32, shape []. Tested `!= 0`, since it may be a sum over devices or ranks.
    """
    bad = found_inf != 0
    clean = torch.where(bad, 0, growth_tracker + 1)
    grows = clean >= growth_interval
    backed_off = (scale * backoff_factor).clamp(min=min_scale)
    grown = (scale * growth_factor).clamp(max=max_scale)
    scale.copy_(torch.where(bad, backed_off, torch.where(grows, grown, scale)))
    growth_tracker.copy_(torch.where(grows, 0, clean))
