"""One scaled backward, from the entry of `scale_loss` to the step that it decides."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from amp_engine.ground.devices import HostNumbers, moved, number_on
from amp_engine.ground.distributed import has_ranks
from amp_engine.scaling.scaler import LossScaler
from amp_engine.scaling.snapshot import ScaleSnapshot
from amp_engine.stepping.forward_order import Order, Origin
from amp_engine.stepping.reduction import Reduction
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
        value: of the last loss that was backpropagated, if the host read it at the entry; None else.
        loss: that loss, of any shape, where it is not one number on the host; NO_LOSS else.
        checked: what was found, for each optimizer and device.
        order: of parameters in the forward, as `forward_order` tells; of an earlier one where none was taken of this.
        origin: where the forward stopped to be finite, if somebody looked.
        elements: how many were not finite in the gradient of `first_nonfinite`, if somebody looked while it was there.
        skips: whether an overflow skips the step, or is only reported.
        reduction: by which several ranks agreed on the overflow; None where this one decides alone.
        earlier_loss_is_bad: != 0 if an earlier loss of the same window was not finite; looked at for "auto" alone.
        of_replicas: whether all of them have the same gradients once they are reduced.
        found_inf: float32, shape []: != 0 is an overflow.
        overflow: the same on its way to the host, with the scale after it, the one that it had, and the loss if it is
            one number that the host does not know. These two are there after `conclude`. Of an "auto" scale also
            whether gradients were flushed, after the loss, or NaN in its place.
    """

    found_inf: Tensor
    overflow: HostNumbers

    def __init__(self, scaler: LossScaler, loss_id: int, snapshot: ScaleSnapshot) -> None:
        self.scaler = scaler
        self.loss_id = loss_id
        self.snapshot = snapshot
        self.loss = NO_LOSS
        self.value: float | None = None
        self.earlier_loss_is_bad: Tensor | None = None
        self.checked: list[Checked] = []
        self.order: Order = {}
        self.origin: Origin | None = None
        self.elements: int | None = None
        self.skips = True
        self.reduction: Reduction | None = None
        self.of_replicas = False
        self._sends_loss = False
        self.number = 0  # of the scaled backwards of its engine, from 1

    def conclude(self, found_inf: Tensor) -> None:
        """All gradients were checked, and the scaler was updated, which gave `found_inf`. No host sync."""
        # Found by the largest magnitude: finite gradients whose squares overflow are no overflow.
        self.found_inf = found_inf
        numbers = [found_inf, self.scaler.scale, self.snapshot.scale]
        loss = self.loss
        if self.value is None and loss is not NO_LOSS and is_number(loss) and loss.device == found_inf.device:
            # For nothing either of the two would cost as much as all the rest.
            loss = loss if loss.dtype is torch.float32 else loss.float()
            numbers.append(loss if loss.dim() == 0 else loss.view(()))
        self._sends_loss = len(numbers) > 3
        if self.scaler.auto is not None:
            unknown = () if self._sends_loss else (torch.full_like(found_inf, math.nan),)
            numbers += [*unknown, self.scaler.auto.flushed]
        self.overflow = HostNumbers(*numbers)

    def give_loss(self, other: Backward) -> None:
        """Have the last loss of `other` be this one, with what is known of it."""
        other.loss, other.value, other.origin, other.number = self.loss, self.value, self.origin, self.number
        other.earlier_loss_is_bad = self.earlier_loss_is_bad

    def settle(self) -> None:
        """Have `conclude` called, if it waits for what other ranks found."""
        self.scaler.settle()

    @property
    def is_first(self) -> bool:
        """Whether this is the first of the ranks that agreed on the overflow."""
        return self.reduction is None or self.reduction.is_first

    def is_the_same_on_all_ranks(self) -> bool:
        """Whether each rank that agreed found the overflow itself, in the same gradients. Waits for the device."""
        return self.of_replicas and self.reduction is not None and self.reduction.is_unanimous()

    def adjusted_scale(self) -> float:
        """The scale after `conclude`. Waits until the host knows."""
        return self.overflow.read(1)

    def loss_scale(self) -> float:
        """The scale that the loss had. Waits until the host knows. After `conclude`."""
        return self.overflow.read(2)

    def loss_value(self) -> float | None:
        """The loss before scaling, or the sum of several; None if nobody told. Waits until the host knows."""
        if self.value is not None:
            return self.value
        if self._sends_loss:
            return self.overflow.read(3)
        return None if self.loss is NO_LOSS else float(self.loss.float().sum())

    def has_flushed(self) -> bool:
        """Whether all gradients were 0 at an "auto" scale that was too low. Waits until the host knows."""
        return self.overflow.count > 4 and self.overflow.read(4) != 0

    def loss_is_bad(self) -> Tensor | None:
        """!= 0 if a loss of it was not finite before scaling: float32, shape []. None if nobody told. No host sync."""
        device = self.snapshot.scale.device
        if self.value is not None:
            bad = number_on(device, float(not math.isfinite(self.value)))
        elif self.loss is not NO_LOSS and type(self.loss) is Tensor:
            bad = moved((~self.loss.isfinite().all()).float(), device)
        else:
            return self.earlier_loss_is_bad
        return bad if self.earlier_loss_is_bad is None else torch.maximum(bad, self.earlier_loss_is_bad)

    def for_auto_scale(self, groups: Sequence[dist.ProcessGroup]) -> tuple[Tensor | None, Tensor | None]:
        """What an "auto" scale goes by: largest magnitude of the scaled gradients, `loss_is_bad`; over all `groups`.

        float32, shape []; None where nobody looked. One message of 8 bytes a group. No host sync otherwise.
        """
        found = [checked.checks.largest.max() for checked in self.checked if len(checked.checks.largest) > 0]
        device = self.snapshot.scale.device
        bad = self.loss_is_bad()
        if not groups:
            largest = torch.stack([moved(one, device) for one in found]).max() if found else None
            # Ranks that reduce gradients by themselves find the same in them, and not in their losses.
            return largest, None if has_ranks() else bad
        numbers = [moved(one, device) for one in found] or [torch.zeros((), device=device)]
        both = torch.stack([torch.stack(numbers).max(), torch.zeros((), device=device) if bad is None else bad])
        for group in groups:
            dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
        are_all = any(dist.get_world_size(group) == dist.get_world_size() for group in groups)
        return both[0], both[1] if are_all else None

    def first_nonfinite(self) -> tuple[Tensor, bool] | None:
        """The parameter whose gradient the backward found not finite first, and whether there is a NaN in it.

        A backward goes from the last to the first, so the last one in the forward was reached first. In the order of
        the optimizer where the graph tells none. Waits for the device.
        """
        found = self.nonfinite()
        places = [(self.order.get(id(param), (0, 0)), row) for row, (param, _) in enumerate(found)]
        return found[max(places)[1]] if places else None

    def nonfinite(self) -> list[tuple[Tensor, bool]]:
        """The parameters whose gradients are not finite, and whether there is a NaN in each. Waits for the device."""
        # NaN has more bits than inf, so the largest magnitude is NaN if there is one.
        return [
            (param, math.isnan(largest))
            for checked in self.checked
            for param, bad, largest in zip(
                checked.params, checked.checks.nonfinite.tolist(), checked.checks.largest.tolist(), strict=True
            )
            if bad
        ]


def is_number(loss: Tensor) -> bool:
    """Whether `loss` is one number that can be read without a collective or a mode of torch's."""
    return type(loss) is Tensor and loss.numel() == 1
