"""The fused step of DTensors: of what this rank has of each, its state staying DTensors, as checkpoints need it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from amp_engine.ground.distributed import is_sharded, local_of
from amp_engine.optimizers.fused_step import FusedStep, StepInput

# DTensor -> what `to_local` gave, which makes a view anew in each call.
_PARTS: WeakIdKeyDictionary = WeakIdKeyDictionary()


def plan(fused: FusedStep, step: StepInput) -> StepInput | None:
    """The step of this rank's parts, or None if the class's own step has to. Gradients are unscaled. No host sync."""
    if fused.rule.reads_sums:
        return None  # of whole tensors, which no rank has
    parts = [_part(weight, grad) for weight, grad in zip(step.params, step.gradients, strict=True)]
    weights = [_part_of(weight) for weight in step.params]
    return fused.plan(StepInput(step.params, weights, parts, None, [False] * len(parts)))


def mark_written(weights: Sequence[Tensor]) -> None:
    """Have DTensors show by their versions that their parts were written."""
    torch.autograd.graph.increment_version([weight for weight in weights if is_sharded(weight)])


def _part_of(weight: Tensor) -> Tensor:
    """What this rank has of a weight: the same object as long as it has the same memory, as tables ask."""
    if not is_sharded(weight):
        return weight
    part, before = local_of(weight), _PARTS.get(weight)
    if before is not None and (before.data_ptr(), before.shape, before.stride()) == (
        part.data_ptr(),
        part.shape,
        part.stride(),
    ):
        return before
    _PARTS[weight] = part
    return part


def _part(weight: Tensor, grad: Tensor | None) -> Tensor | None:
    """What this rank has of a gradient; all of it, which no plan takes, where it is not divided as the weight is."""
    if grad is None or not is_sharded(grad):
        return grad
    return local_of(grad) if getattr(grad, "placements", 0) == getattr(weight, "placements", 1) else grad
