"""Notifications of what happens to a loss, its gradients and a step. Nothing that an observer does changes the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, ParamSpec

from torch import Tensor

from amp_engine.stepping.backward import Backward
from amp_engine.stepping.rows import Rows

P = ParamSpec("P")


class Event(Generic[P]):
    """One kind of notification: `for tell in event.observers: tell(...)`, which is free without observers.

    Attributes:
        observers: in the order in which they subscribed.
    """

    def __init__(self) -> None:
        self.observers: tuple[Callable[P, None], ...] = ()

    def subscribe(self, observer: Callable[P, None]) -> Callable[[], None]:
        """Have `observer` called each time. Returns a function that unsubscribes it."""
        self.observers = (*self.observers, observer)
        return lambda: self._unsubscribe(observer)

    def _unsubscribe(self, observer: Callable[P, None]) -> None:
        self.observers = tuple(one for one in self.observers if one != observer)


@dataclass(frozen=True)
class Events:
    """The events that observers can subscribe to.

    Attributes:
        entering: gives the context of a `scale_loss` before its entry; if the entry raises, no other event follows.
        entered: gives the context, its Backward and its loss, before the body runs.
        leaving: gives the context, after its body has ended or raised.
        checked: gives a Backward right after the check of its gradients.
        closed: gives the rows of the optimizers and their Backward, while gradients are as the step will find them.
            The Backward is None at the exit of a `scale_loss` at a scale of 1.
        left: gives the context, after its whole exit.
        unchecked: gives the Backward of a loss that is not finite and whose gradients are not checked, its value, the
            number of such losses in a row, and the loss before its backward; None in its place if it came from a GPU.
        skipped: gives the number of steps skipped in a row, and the backwards that made the last one skip.
        reported: gives a backward whose overflow did not skip, or that left gradients of 0 at a scale too low, or whose
            loss was not finite though its gradients were; and the number of such losses in a row, else 1.
    """

    entering: Event[[object]] = field(default_factory=Event)
    entered: Event[[object, Backward, Tensor]] = field(default_factory=Event)
    leaving: Event[[object]] = field(default_factory=Event)
    checked: Event[[Backward]] = field(default_factory=Event)
    closed: Event[[Sequence[Rows], Backward | None]] = field(default_factory=Event)
    left: Event[[object]] = field(default_factory=Event)
    unchecked: Event[[Backward, float, int, Tensor | None]] = field(default_factory=Event)
    skipped: Event[[int, Sequence[Backward]]] = field(default_factory=Event)
    reported: Event[[Backward, int]] = field(default_factory=Event)
