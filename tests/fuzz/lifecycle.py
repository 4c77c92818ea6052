"""Loading, starting anew and closing, as the reference does them."""

from __future__ import annotations

import torch
from torch import Tensor

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


@torch.no_grad()
def resume(ref: Reference) -> None:
    """Resume from a checkpoint of now, without gradients."""
    for o in range(len(ref.groups)):
        ref.scan(o)
        ref.refresh(o)
        for name in [name for name in ref.names(o) if name in ref.masters]:
            ref.masters[name].data = ref.exact(name).clone()
        ref.write_back(o)
        ref.forget(o)
        ref.skipped[o] = ref.left[o] = False
    for name in [name for name in ref.masters if not ref.is_owned(name)]:  # the checkpoint gives new models theirs
        ref.masters[name].data = ref.exact(name).clone()
        ref.params[name].copy_(ref.masters[name])
        ref.moved.discard(name)
        ref.written.discard(name)
    for p in ref.params.values():
        p.grad = None
    for scaler in ref.scalers:
        scaler.overflowed = False
    ref.deferred.clear()
    ref.hooks = [[] for _ in ref.groups]


@torch.no_grad()
def close(ref: Reference) -> None:
    """Everything in FP32 again, with the masters' values; unscaled gradients only."""
    for o in range(len(ref.groups)):
        ref.scan(o)
        ref.refresh(o)
    for name, p in ref.params.items():
        value, p.grad = ref.exact(name), None
        p.data = value.clone()
    for buffer in (buffer for model in ref.models for buffer in model.buffers()):
        buffer.data = buffer.float() if buffer.is_floating_point() else buffer
