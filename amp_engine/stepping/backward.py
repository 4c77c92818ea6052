"""One scaled backward, from the entry of `scale_loss` to the step that it decides."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from amp_engine.devices import HostNumbers
from amp_engine.scaler import LossScaler, ScaleSnapshot
from amp_engine.stepping.slots import Checked

NO_LOSS = torch.zeros((), device="cpu")


class Backward:
    """What a loss is scaled by, what was found in its gradients, and what that means for the next step.

    One for all optimizers of a `scale_loss`.

    Args:
        scaler: hears of an overflow.
        loss_id: its number.
        snapshot: the scale, as it was at the entry.

    Attributes:
        loss: the last one that was backpropagated; any shape.
        checked: what was found, for each optimizer and device.
        order: of parameters in the forward, by id, larger for later ones; empty unless a diagnosis is near.
        skips: whether an overflow skips the step, or is only reported.
        found_inf: float32, shape []: != 0 is an overflow.
        overflow: the same on its way to the host, with the scale after it. These two are there after `conclude`.
    """

    found_inf: Tensor
    overflow: HostNumbers

    def __init__(self, scaler: LossScaler, loss_id: int, snapshot: ScaleSnapshot, loss: Tensor = NO_LOSS) -> None:
        self.scaler = scaler
        self.loss_id = loss_id
        self.snapshot = snapshot
        self.loss = loss
        self.checked: list[Checked] = []
        self.order: Mapping[int, int] = {}
        self.skips = True

    def conclude(self, found_inf: Tensor) -> None:
        """All gradients were checked, and the scaler was updated, which gave `found_inf`. No host sync."""
        # Found by the largest magnitude: finite gradients whose squares overflow are no overflow.
        self.found_inf = found_inf
        self.overflow = HostNumbers(found_inf, self.scaler.scale)

    def settle(self) -> None:
        """Have `conclude` called, if it waits for what other ranks found."""
        self.scaler.settle()

    def adjusted_scale(self) -> float:
        """The scale after `conclude`. Waits until the host knows."""
        return self.overflow.read(1)
