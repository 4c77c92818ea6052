"""Loading, starting anew and closing, as the reference does them."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.fuzz.models import KeepsState
from tests.fuzz.reference import Reference


@torch.no_grad()
def load(ref: Reference, exact: dict[str, Tensor], buffers: list[list[Tensor]]) -> None:
    """A checkpoint of the models, whose masters take the unrounded values."""
    for name, value in exact.items():
        for tensor in (ref.params[name], ref.masters.get(name, ref.params[name])):
            tensor.copy_(value)
    for model, values in zip(ref.models, buffers, strict=True):
        for buffer, value in zip(model.buffers(), values, strict=True):
            buffer.copy_(value)
    ref.moved.clear()
    ref.written.clear()
    ref.relaid.clear()


def resume(ref: Reference) -> None:
    """Resume from a checkpoint of now, without gradients."""
    for o in range(len(ref.groups)):
        ref.settle(o)
        ref.write_back(o)
        ref.overflowed[o] = ref.skipped[o] = False
        ref.passed[o], ref.looked[o] = None, []
    for p in (*ref.params.values(), *ref.masters.values()):
        p.grad = None
    for scaler in ref.scalers:
        scaler.overflowed = False
    ref.fresh = set(range(len(ref.groups)))
    ref.hooks = [[] for _ in ref.groups]
    for optimizer in ref.optimizers:
        if isinstance(optimizer, KeepsState):
            optimizer.renew()


@torch.no_grad()
def close(ref: Reference) -> None:
    """Everything in FP32 again, with the masters' values; unscaled gradients only."""
    for o in range(len(ref.groups)):
        ref.settle(o)
    for name, p in ref.params.items():
        value, p.grad = ref.entry(name).float(), None
        p.data = value.clone()
    for buffer in (buffer for model in ref.models for buffer in model.buffers()):
        buffer.data = buffer.float() if buffer.is_floating_point() else buffer
