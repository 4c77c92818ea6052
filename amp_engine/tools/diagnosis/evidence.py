"""Looks at losses and gradients from the first overflow on, to name what makes the next one."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from amp_engine.ground.devices import is_capturing
from amp_engine.ground.distributed import local_of
from amp_engine.scaling.outcome import is_number
from amp_engine.stepping import arithmetic
from amp_engine.stepping.backward import Accumulation, Backward
from amp_engine.stepping.events import Events
from amp_engine.tools.diagnosis.forward_order import (
    CHECKPOINTED,
    Order,
    Origin,
    forward_order,
    origin_of_nonfinite,
    undefined_derivative,
)


@dataclass
class Seen:
    """Findings about one backward, for its explanation.

    Attributes:
        order: the order of parameters in the forward, as `forward_order` gives it, maybe of an earlier forward.
        origin: the place where the forward stopped being finite; None if it was not looked for, or not found.
        undefined: the derivative that is not finite, after an overflow of the same loss; None if none was found.
        elements: count of elements that are not finite in the first gradient `in_order`; None if not counted.
        loss: a weak reference to the loss, whose graph tells the order.
        is_traced: False if nobody looked at the backward.
    """

    order: Order = field(default_factory=dict)
    origin: Origin | None = None
    undefined: str | None = None
    elements: int | None = None
    loss: weakref.ref[Tensor] | None = None
    is_traced: bool = True

    def in_order(self, nonfinite: Sequence[tuple[Tensor, bool]]) -> list[tuple[Tensor, bool]]:
        """Return parameters, as `Backward.nonfinite` gives them, in the order of the backward.

        A backward reverses the forward, so the parameter that the forward used last comes first. Without an order from
        the graph, the reversed order of the optimizer is used. Parameters that are not in the graph count as used in
        its last checkpointed part, if it has one.
        """
        hidden = self.order.get(CHECKPOINTED, (0, 0))
        places = [(self.order.get(id(param), hidden), row) for row, (param, _) in enumerate(nonfinite)]
        return [nonfinite[row] for _, row in sorted(places, reverse=True)]


@dataclass(frozen=True)
class BadLoss:
    """The first micro-batch of a step whose loss was not finite: its number from 1, that loss, and its origin."""

    micro_batch: int
    loss: float
    origin: Origin | None = None


class Evidence:
    """Listens to the events of an engine, from the first overflow that is asked for until `end`.

    Waits for a GPU only to read a loss after one that was not finite.

    Args:
        events: those of the engine.
    """

    def __init__(self, events: Events) -> None:
        self._seen: weakref.WeakKeyDictionary[Backward, Seen] = weakref.WeakKeyDictionary()
        self._bad: weakref.WeakKeyDictionary[Accumulation, BadLoss] = weakref.WeakKeyDictionary()
        self._orders: dict[int, Order] = {}  # by loss_id; an Order has ids of parameters, and no tensors
        # Losses with an overflow, and losses of which one was not finite, until their next backward begins.
        self._overflowed: set[int] = set()
        self._expected: set[int] = set()
        self._events = events
        self._unsubscribe: list[Callable[[], None]] = []

    def begin(self) -> None:
        """Listen, unless that has begun."""
        if not self._unsubscribe:
            events = self._events
            self._unsubscribe = [events.entered.subscribe(self._entered), events.checked.subscribe(self._checked)]

    def end(self) -> None:
        """Listen no more."""
        for unsubscribe in self._unsubscribe:
            unsubscribe()

    def of(self, backward: Backward) -> Seen:
        """Return what was seen of a backward that overflowed. The first call begins to listen."""
        self.begin()
        return self._seen.get(backward) or Seen(is_traced=False)

    def look(self, backward: Backward, loss: Tensor) -> None:
        """Find the origin of a loss that is not finite, before its backward."""
        if backward not in self._seen:
            self._seen[backward] = Seen(origin=origin_of_nonfinite(loss))

    def bad_loss(self, backward: Backward) -> BadLoss | None:
        """Return the first loss that was not finite in the micro-batches of a backward; None if none is known."""
        together = backward.accumulation
        return self._bad.get(together) or (BadLoss(together.bad, together.loss) if together.bad else None)

    def expect(self, loss_id: int, is_finite: bool) -> None:
        """Look closely at the next backward of this loss, whose gradients or, if not `is_finite`, itself were bad."""
        (self._overflowed if is_finite else self._expected).add(loss_id)

    def _entered(self, context: object, backward: Backward, loss: Tensor) -> None:
        loss_id = backward.loss_id
        overflowed, is_expected = loss_id in self._overflowed, loss_id in self._expected
        self._overflowed.discard(loss_id)
        self._expected.discard(loss_id)
        if overflowed or loss_id not in self._orders:
            self._orders[loss_id] = forward_order(loss)
        seen = self._seen[backward] = Seen(self._orders[loss_id], loss=weakref.ref(loss))
        if not is_number(loss) or not (loss.is_cpu or (is_expected and not is_capturing(loss.device))):
            return
        value = loss.item()
        if not math.isfinite(value):
            seen.origin = origin_of_nonfinite(loss)
            self._bad.setdefault(backward.accumulation, BadLoss(backward.accumulation.count, value, seen.origin))
        elif overflowed:
            seen.undefined, seen.origin = undefined_derivative(loss)

    def _checked(self, backward: Backward) -> None:
        """Read the order again if the host knows of an overflow: this forward may have been another one."""
        if not backward.has_overflowed():
            return
        self._overflowed.add(backward.loss_id)
        seen = self._seen.setdefault(backward, Seen(self._orders.get(backward.loss_id, {})))
        if seen.loss is not None and (loss := seen.loss()) is not None:
            seen.order = self._orders[backward.loss_id] = forward_order(loss)
        if found := seen.in_order(backward.nonfinite()):
            grad = found[0][0].grad
            if grad is not None:
                seen.elements = int((~arithmetic.values(local_of(grad)).isfinite()).sum())
