"""Scales losses for `torch.autograd.grad`, outside of a `scale_loss`, and unscales their gradients.

For gradient penalties and other gradients of gradients. Without a scale, half gradients in between underflow. If they
overflow, only a lower scale helps, so the scaler records the overflow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from amp_engine import kernels
from amp_engine.errors import AmpStateError, AmpTypeError
from amp_engine.ground.devices import moved
from amp_engine.ground.distributed import local_of
from amp_engine.kernels.layout import is_dense, is_lazy
from amp_engine.scaling.losses import Scaling
from amp_engine.scaling.scaler import LossScaler
from amp_engine.scaling.snapshot import ScaleSnapshot

Gradients = TypeVar(
    "Gradients", Tensor, tuple[Tensor, ...], tuple[Tensor | None, ...], list[Tensor], list[Tensor | None]
)
"""One gradient, or several as `torch.autograd.grad` gives them: None with `allow_unused=True`."""


def scaled(scaling: Scaling, loss: Tensor, loss_id: int) -> Tensor:
    """Return `loss.float() * scale`, with a graph; `unscaled` divides by the same scale. No host sync."""
    scaler = scaling.scaler(loss_id)
    scaler.to(loss.device)
    snapshot = scaling.latched[loss_id] = scaler.snapshot()
    return loss.float() if scaler.is_identity else loss.float() * snapshot.scale


def unscaled(scaling: Scaling, gradients: Gradients, loss_id: int) -> Gradients:
    """Divide gradients of a result of `scaled` by its scale, in FP32 at least, and record if one is not finite.

    Raises AmpStateError if the scale is not known: `scaled` was never called, or the scaler was updated since.
    """
    scaler, snapshot = scaling.scaler(loss_id), scaling.latched.get(loss_id)
    scaler.settle()
    if snapshot is None or not snapshot.is_still(scaler.scale):
        raise AmpStateError(
            f"unscale() divides gradients of amp.scale(loss) by its scale, but amp.scale() was not called for loss_id="
            f"{loss_id} since its last scale_loss was left.  Call scaled_loss = amp.scale(loss), gradients = "
            "torch.autograd.grad(scaled_loss, ...), amp.unscale(gradients), and leave scale_loss after that."
        )
    is_one = isinstance(gradients, Tensor)
    given: list[Any] = list(gradients) if isinstance(gradients, (tuple, list)) else [gradients]
    for one in given:
        if not isinstance(one, Tensor) or not (one.is_floating_point() or one.is_complex()):
            if one is None and one is not gradients:
                continue
            what = f"a tensor of {one.dtype}" if isinstance(one, Tensor) else f"a {type(one).__name__}"
            raise AmpTypeError(
                f"unscale() takes floating or complex tensors: one, or a tuple or list of them as "
                f"torch.autograd.grad gives, not {what}."
            )
    made: list[Any] = [one if one is None else _unscaled(one, snapshot) for one in given]
    if not scaler.is_identity:
        _record(scaler, [local_of(one.detach()) for one in made if one is not None])
    return made[0] if is_one else made if isinstance(gradients, list) else tuple(made)  # type: ignore[return-value]


def _unscaled(gradient: Tensor, snapshot: ScaleSnapshot) -> Tensor:
    wide = gradient if gradient.dtype == torch.float64 or gradient.is_complex() else gradient.float()
    return wide if snapshot.is_identity else wide * moved(snapshot.inv_scale, wide.device)


def _record(scaler: LossScaler, gradients: Sequence[Tensor]) -> None:
    """Record an overflow of `gradients` for the scaler's next update, as later code may hide it, such as a clamp."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for one in gradients:
        if type(one) is Tensor and one.dtype == torch.float32 and is_dense(one) and not is_lazy(one):
            by_device.setdefault(one.device, []).append(one)
        else:
            values = one.coalesce().values() if one.is_sparse else one
            scaler.record_(~values.isfinite())
    for tensors in by_device.values():
        scaler.record_(kernels.check(tensors).nonfinite)
