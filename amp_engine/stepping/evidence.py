"""Evidence from a backward, kept until the host learns of an overflow and explains it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from amp_engine.ground.devices import HostNumbers, is_capturing
from amp_engine.ground.distributed import local_of
from amp_engine.scaling.losses import Scaling
from amp_engine.scaling.outcome import is_number
from amp_engine.stepping import arithmetic
from amp_engine.stepping.backward import Accumulation, Backward
from amp_engine.stepping.events import Events
from amp_engine.stepping.forward_order import Order, forward_order, origin_of_nonfinite, undefined_derivative


class Evidence:
    """Collects evidence at no cost while all is well: on a CPU from the finished checks, on a GPU after a skip.

    Args:
        scaling: knows if a loss that is not finite must be expected.
        events: the events of the engine.

    Attributes:
        is_rehearsal: True while a batch is rehearsed: no step is taken, and nothing is kept.
    """

    def __init__(self, scaling: Scaling, events: Events) -> None:
        self.is_rehearsal = False
        self._scaling = scaling
        self._events = events
        self._count = 0
        # By loss_id. An Order has ids of parameters, and no tensors.
        self._orders: dict[int, Order] = {}
        self._losses: dict[int, HostNumbers] = {}  # losses whose gradients are not checked, on their way from a GPU
        self._told: set[int] = set()
        self._overflowed: set[int] = set()  # losses with a known overflow, until their next backward begins

    def begin(self) -> None:
        """Count from 1 again, and forget earlier models."""
        self._count = 0
        for one in (self._orders, self._losses, self._told, self._overflowed):
            one.clear()

    def enter(self, backward: Backward, loss: Tensor, accumulations: dict[int, Accumulation]) -> None:
        """Before a backward that is checked: note where its loss stopped being finite, if the host may read the loss.

        Args:
            accumulations: those for the same step, by loss_id.
        """
        if self.is_rehearsal:
            return
        self._count = backward.number = self._count + 1
        if (together := accumulations.get(backward.loss_id)) is None:
            together = accumulations[backward.loss_id] = Accumulation()
        together.count += 1
        backward.accumulation = together
        backward.micro_batches = backward.micro_batches[0] or together.count, together.count
        backward.order = self._orders.get(backward.loss_id, backward.order)
        is_here = type(loss) is Tensor and loss.is_cpu and loss.numel() == 1  # saves a call
        if not is_here:
            backward.loss = loss.detach() if is_number(loss) else loss.detach().clone()  # the user may write it
        if is_here or self._may_read(loss):
            backward.value = value = loss.item()
            if not math.isfinite(value):
                backward.origin = origin_of_nonfinite(loss)
                if not together.bad:
                    together.bad, together.loss, together.origin = together.count, value, backward.origin
            elif backward.loss_id in self._overflowed:
                self._overflowed.remove(backward.loss_id)
                backward.undefined, backward.origin = undefined_derivative(loss)
        self._scaling.heard_of_loss(is_finite=True)

    def enter_unseen(self, backward: Backward) -> None:
        """Before the check of gradients whose loss is not known: give them a number."""
        if not self.is_rehearsal:
            self._count = backward.number = self._count + 1
            backward.accumulation.count, backward.micro_batches = 1, (1, 1)

    def enter_unchecked(self, loss: Tensor, loss_id: int) -> None:
        """Before a backward whose gradients are not checked: notify observers of a loss that is not finite."""
        if self.is_rehearsal:
            return
        self._count += 1
        if type(loss) is Tensor and loss.numel() == 1 and (loss.is_cpu or self._may_read_unchecked(loss, loss_id)):
            value = loss.item()
            if not math.isfinite(value):
                for tell in self._events.unchecked.observers if loss_id not in self._told else ():
                    tell(self._count, loss_id, value, origin_of_nonfinite(loss))
                self._told.add(loss_id)
                return
            if self._told:
                self._told.discard(loss_id)
            self._scaling.history.track(loss_id).losses.append((self._count, value))

    def _may_read_unchecked(self, loss: Tensor, loss_id: int) -> bool:
        """True if the host may wait for this loss: the last one that arrived was not finite."""
        sent = self._losses.get(loss_id)
        if sent is not None and not sent.is_known():
            return False
        self._scaling.heard_of_loss(is_finite=sent is None or math.isfinite(sent.read()))
        self._losses[loss_id] = HostNumbers(torch.stack([loss.detach().float()]))
        return self._may_read(loss)

    def keep(self, backward: Backward, loss: Tensor | None, overflowed: bool, is_in_trouble: bool) -> None:
        """After the checks of a backward: keep the order of its parameters, and count elements that are not finite.

        Args:
            loss: its graph has the order of the parameters; None if unknown.
            overflowed: True if the host knows of a gradient that is not finite.
            is_in_trouble: True while steps are being skipped on a GPU.
        """
        if self.is_rehearsal:
            return
        if overflowed:
            self._overflowed.add(backward.loss_id)
        order = self._orders.get(backward.loss_id)
        if loss is not None and (order is None or overflowed or is_in_trouble):
            order = self._orders[backward.loss_id] = forward_order(loss)
        if order is not None:
            backward.order = order
        if overflowed and (found := backward.in_order(backward.nonfinite())):
            grad = found[0][0].grad
            if grad is not None:
                backward.elements = int((~arithmetic.values(local_of(grad)).isfinite()).sum())

    def _may_read(self, loss: Tensor) -> bool:
        """True if the host may read the loss: it is on the CPU, or steps are in trouble and the host may wait."""
        if not is_number(loss):
            return False
        return loss.is_cpu or (self._scaling.expects_nonfinite and not is_capturing(loss.device))
