"""One scaled backward, from the entry of `scale_loss` to the step that it decides."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from amp_engine.ground.devices import moved, number_on
from amp_engine.ground.distributed import has_ranks
from amp_engine.scaling.outcome import Outcome
from amp_engine.scaling.scaler import LossScaler
from amp_engine.scaling.snapshot import ScaleSnapshot
from amp_engine.stepping.forward_order import Order, Origin
from amp_engine.stepping.reduction import Reduction
from amp_engine.stepping.slots import Checked


class Backward:
    """What a loss is scaled by, what was found in its gradients, and what that means for the next step.

    One for all optimizers of a `scale_loss`.

    Args:
        scaler: hears of an overflow.
        loss_id: its number.
        snapshot: the scale, as it was at the entry.

    Attributes:
        value: of the last loss that was backpropagated, if the host read it at the entry; None else.
        loss: that loss, of any shape, where it is not one number on the host; None else.
        checked: what was found, for each optimizer and device.
        order: of parameters in the forward, as `forward_order` tells; of an earlier one where none was taken of this.
        origin: where the forward stopped to be finite, if somebody looked.
        elements: how many were not finite in the gradient of `first_nonfinite`, if somebody looked while it was there.
        skips: whether an overflow skips the step, or is only reported.
        reduction: by which several ranks agreed on the overflow; None where this one decides alone.
        earlier_loss_is_bad: != 0 if an earlier loss of the same window was not finite; looked at for "auto" alone.
        of_replicas: whether all of them have the same gradients once they are reduced.
        outcome: what it came to; after `conclude`.
    """

    outcome: Outcome

    def __init__(self, scaler: LossScaler, loss_id: int, snapshot: ScaleSnapshot) -> None:
        self.scaler = scaler
        self.loss_id = loss_id
        self.snapshot = snapshot
        self.loss: Tensor | None = None
        self.value: float | None = None
        self.earlier_loss_is_bad: Tensor | None = None
        self.checked: list[Checked] = []
        self.order: Order = {}
        self.origin: Origin | None = None
        self.elements: int | None = None
        self.skips = True
        self.reduction: Reduction | None = None
        self.of_replicas = False
        self.number = 0  # of the scaled backwards of its engine, from 1

    def conclude(self, found_inf: Tensor) -> None:
        """All gradients were checked, and the scaler was updated, which gave `found_inf`. No host sync."""
        # Found by the largest magnitude: finite gradients whose squares overflow are no overflow.
        auto = self.scaler.auto
        self.outcome = Outcome(
            found_inf,
            self.scaler.scale,
            self.snapshot.scale,
            value=self.value,
            loss=self.loss,
            flushed=None if auto is None else auto.flushed,
            skips=self.skips,
            is_agreed=self.reduction is not None,
        )

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

    def loss_is_bad(self) -> Tensor | None:
        """!= 0 if a loss of it was not finite before scaling: float32, shape []. None if nobody told. No host sync."""
        device = self.snapshot.scale.device
        if self.value is not None:
            bad = number_on(device, float(not math.isfinite(self.value)))
        elif type(self.loss) is Tensor:
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
