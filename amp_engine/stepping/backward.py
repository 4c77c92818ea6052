"""One scaled backward, from the entry of `scale_loss` to the step that it decides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from amp_engine import kernels
from amp_engine.ground.devices import moved, number_on
from amp_engine.ground.distributed import has_ranks
from amp_engine.scaling.outcome import Outcome, travels
from amp_engine.scaling.scaler import LossScaler, ScaleUpdate
from amp_engine.scaling.snapshot import ScaleSnapshot
from amp_engine.stepping.reduction import Reduction


class Checked(NamedTuple):
    """The result of one check of a list of gradients.

    Attributes:
        params: n; the model's parameters.
        arrived: n; 0 where no gradient was checked.
        checks: checks of the gradients as they arrived, still scaled; 0 where none arrived.
    """

    params: Sequence[nn.Parameter]
    arrived: bytes
    checks: kernels.Checks


@dataclass(eq=False)
class Accumulation:
    """The backwards of one loss for one step: its micro-batches.

    Attributes:
        count: number of these backwards.
        bad: the number, from 1, of the first backward whose loss on the host was not finite; 0 without any.
        loss: the loss of that backward.
    """

    count: int = 0
    bad: int = 0
    loss: float = 0.0


class Backward:
    """The scale of a loss, the checks of its gradients, and their outcome for the next step.

    All optimizers of a `scale_loss` share one Backward.

    Args:
        scaler: records an overflow.
        snapshot: the scale, as it was at the entry.

    Attributes:
        value: the last loss that was backpropagated, if it is one number on the host; else None.
        loss: that loss, of any shape, if `value` is None; else None.
        checked: the checks, one for each optimizer and device.
        skips: True if an overflow skips the step; False if it is only reported.
        reduction: lets several ranks agree on the overflow; None if this rank decides alone.
        earlier_loss_is_bad: != 0 if an earlier loss of the same step was not finite; set only for "auto".
        may_update: True if the check of all gradients may also update the scale, since nothing comes in between.
        refuses_graph: True if the check raises AmpStateError for gradients with a graph, where it unscales them.
        update: the update of the scale that the check did; None if it did not.
        accumulation: the backwards of its loss for the same step.
        micro_batches: the numbers of the first and last backward of `accumulation` that are checked together.
        of_replicas: True if all ranks have the same gradients once they are reduced.
        outcome: the outcome; set by `conclude`.
        of_written: the backwards whose gradients this check saw again, after other code wrote them: reports of an
            overflow name these.
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
        self.skips = True
        self.reduction: Reduction | None = None
        self.may_update = False
        self.refuses_graph = False
        self.update: ScaleUpdate | None = None
        self.is_reported = False  # True once its loss was reported as not finite, though its gradients are finite
        self.of_replicas = False
        self.of_written: list[Backward] = []
        self.accumulation = Accumulation()
        self.micro_batches = 0, 0
        self.of: tuple[int, ...] = ()  # the ids of the records that list its optimizers
        self.number = 0  # among the scaled backwards of its engine, from 1

    def has_bad_loss(self) -> bool:
        """True if the host knows that the loss is not finite."""
        return self.value is not None and not math.isfinite(self.value)

    def loss_to_send(self) -> Tensor | None:
        """Return the last loss, float32 of shape [], if it is to be sent to the host; else None. No host sync."""
        loss = self.loss
        if self.value is not None or loss is None or not travels(loss, self.snapshot.scale.device):
            return None
        return loss.float().view(()).resolve_neg()

    def has_overflowed(self) -> bool | None:
        """True if this rank has found a gradient that is not finite; None if only its GPU knows. No host sync."""
        flag = self.scaler.found_inf
        if not flag.is_cpu:
            return None
        return flag.item() != 0 if self.update is None else self.update.outcome.tolist()[0] != 0

    def conclude(self, outcome: Tensor) -> None:
        """Set the outcome, after all checks, from the numbers that the update of the scaler gave. No host sync."""
        # The largest magnitude decides: finite gradients whose squares overflow are no overflow.
        self.outcome = Outcome(
            outcome,
            value=self.value,
            loss=self.loss,
            skips=self.skips,
            is_agreed=self.reduction is not None,
        )

    def loss_to_tell(self) -> Tensor | float | None:
        """Return the loss to send to other ranks: the first that is not finite, or else the last. No host sync."""
        if self.accumulation.bad:
            return self.accumulation.loss
        return self.loss_to_send() if self.value is None else self.value

    @property
    def is_first(self) -> bool:
        """True if this rank is rank 0 of the groups that agreed on the overflow, or decided alone."""
        return self.reduction is None or self.reduction.is_first

    def is_the_same_on_all_ranks(self) -> bool:
        """True if each rank that agreed found the overflow itself, in the same gradients. Waits for the device."""
        return self.of_replicas and self.reduction is not None and self.reduction.is_unanimous()

    def loss_is_bad(self) -> Tensor | None:
        """Return float32 of shape [], != 0 if a loss was not finite before scaling; None if unknown. No host sync."""
        device = self.snapshot.scale.device
        if self.value is not None:
            bad = number_on(device, float(not math.isfinite(self.value)))
        elif type(self.loss) is Tensor:
            bad = moved((~self.loss.isfinite().all()).float(), device)
        else:
            return self.earlier_loss_is_bad
        return bad if self.earlier_loss_is_bad is None else torch.maximum(bad, self.earlier_loss_is_bad)

    def for_auto_scale(self, groups: Sequence[dist.ProcessGroup]) -> tuple[Tensor | None, Tensor | None]:
        """Return the inputs of an "auto" scale, over all `groups`: the largest scaled gradient, and `loss_is_bad`.

        Both are float32, shape []; None if unknown. One all-reduce of 8 bytes for each group; else no host sync.
        """
        found = [checked.checks.largest.max() for checked in self.checked if len(checked.checks.largest) > 0]
        device = self.snapshot.scale.device
        bad = self.loss_is_bad()
        if not groups:
            largest = torch.stack([moved(one, device) for one in found]).max() if found else None
            # Ranks that reduce gradients by themselves have the same gradients, but different losses.
            return largest, None if has_ranks() else bad
        numbers = [moved(one, device) for one in found] or [torch.zeros((), dtype=torch.float32, device=device)]
        both = torch.stack([torch.stack(numbers).max(), torch.zeros_like(numbers[0]) if bad is None else bad])
        for group in groups:
            dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
        are_all = any(dist.get_world_size(group) == dist.get_world_size() for group in groups)
        return both[0], both[1] if are_all else None

    def nonfinite(self) -> list[tuple[Tensor, bool]]:
        """Return the parameters whose gradients are not finite, each with True if it holds a NaN.

        Waits for the device.
        """
        # As bits NaN is larger than inf, so the largest magnitude is NaN if there is one.
        return [
            (param, math.isnan(largest))
            for checked in self.checked
            for param, bad, largest in zip(
                checked.params, checked.checks.nonfinite.tolist(), checked.checks.largest.tolist(), strict=True
            )
            if bad
        ]
