"""The fused step of DTensors: it steps this rank's part of each. State stays in DTensors, as checkpoints need it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from amp_engine.ground.distributed import is_placed_like, is_sharded, local_of
from amp_engine.kernels.layout import address_of
from amp_engine.optimizers.fused_step import FusedStep, StepInput

# DTensor -> the result of `to_local`, which makes a new view in each call.
_PARTS: WeakIdKeyDictionary = WeakIdKeyDictionary()


def plan(fused: FusedStep, step: StepInput) -> StepInput | None:
    """Plan the step of this rank's parts; None if only the class's own step can do it.

    Gradients are unscaled. No host sync.
    """
    if fused.rule.reads_sums:
        return None  # it reads sums over whole tensors, which no rank has
    parts = [_part(weight, grad) for weight, grad in zip(step.params, step.gradients, strict=True)]
    weights = [_part_of(weight) for weight in step.params]
    return fused.plan(StepInput(step.params, weights, parts, None, bytes(len(parts))))


def mark_written(weights: Sequence[Tensor]) -> None:
    """Increment the versions of DTensors whose parts were written."""
    torch.autograd.graph.increment_version([weight for weight in weights if is_sharded(weight)])


def _part_of(weight: Tensor) -> Tensor:
    """Return this rank's part of a weight: the same object while its memory is the same, as tables need."""
    if not is_sharded(weight):
        return weight
    part, before = local_of(weight), _PARTS.get(weight)
    if before is not None and (address_of(before), before.shape, before.stride()) == (
        address_of(part),
        part.shape,
        part.stride(),
    ):
        return before
    _PARTS[weight] = part
    return part


def _part(weight: Tensor, grad: Tensor | None) -> Tensor | None:
    """Return this rank's part of a gradient; the whole one, which no plan takes, if it is placed unlike its weight."""
    if grad is None or not is_sharded(grad):
        return grad
    return local_of(grad) if is_placed_like(grad, weight) else grad
