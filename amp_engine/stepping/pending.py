"""Decides whether the next step is skipped, and reports past skips."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from amp_engine.stepping.backward import Accumulation, Backward
from amp_engine.stepping.events import Events
from amp_engine.stepping.last_step import LastStep

SKIPS_BEFORE_DIAGNOSIS = 8


class Take(NamedTuple):
    """The step is taken, unless one of `flags` is != 0.

    Attributes:
        flags: float32, shape [] each; the step reads them on the device. Empty if the host decided.
    """

    flags: Sequence[Tensor] = ()


class Skip(NamedTuple):
    """The step is skipped."""


class Pending:
    """The backwards that are pending for the next step of one optimizer, and those of steps that the device decided.

    Args:
        events: notify observers of skipped steps, and of backwards that are reported without a skip.
    """

    def __init__(self, events: Events) -> None:
        self.backwards: list[Backward] = []  # for the next step
        self.accumulations: dict[int, Accumulation] = {}  # for the next step, by loss_id
        # Sums of squares that the check found in this optimizer's gradients, of each backward since the last step.
        self._squares: list[list[Tensor] | None] = []
        self.skips_in_a_row = 0
        self.steps = 0  # count of concluded steps
        self.skips = 0  # count of skipped steps, as far as the host knows
        self._last: LastStep | tuple[list[Backward], list[Tensor] | None] = LastStep()
        # Backwards of steps that the device decided, and whose decision the host does not know yet, oldest first.
        self._undecided: deque[list[Backward]] = deque()
        self._skipped = False
        # loss_id -> number of last backwards in a row with finite gradients of a loss that is not finite.
        self._bad_losses: dict[int, int] = {}
        self._events = events

    @property
    def last(self) -> LastStep:
        """The last step. Made at the first read: few loops read it, and making it costs a percent of a tiny step."""
        last = self._last
        if isinstance(last, tuple):
            backwards, squares = last
            of_loss = [one for backward in backwards for one in backward.of_written or [backward]][-1:]
            self._last = last = LastStep(
                [backward.outcome for backward in backwards], squares, of_loss[0].outcome if of_loss else None
            )
        return last

    @property
    def skipped(self) -> bool:
        """True if the last step was skipped. Waits for the device if that decided."""
        self.hear(wait=True)
        return self._skipped

    @property
    def taken(self) -> int:
        """Count of steps that were taken, as far as the host knows."""
        return self.steps - self.skips - self.unheard

    @property
    def unheard(self) -> int:
        """Count of steps that the device decided and the host does not know yet."""
        return len(self._undecided)

    def overflowed(self) -> bool:
        """True if the next step will be skipped by us. Waits for the device if that decided."""
        self._settle()
        return any(backward.skips and backward.outcome.overflowed() for backward in self.backwards)

    def add(self, backward: Backward, squares: list[Tensor] | None = None) -> None:
        """Keep a backward for the next step; drop earlier ones without overflow or flush, to bound memory.

        Args:
            squares: sums of squares of this optimizer's gradients, still scaled; None if not computed.
        """
        self._settle()
        self._squares = [*self._squares[:1], squares]  # two entries suffice: they are read only if there is one
        self.backwards = [
            b for b in self.backwards if not b.outcome.is_known() or b.outcome.overflowed() or b.outcome.has_flushed()
        ]
        self.backwards.append(backward)

    def decide(self, on_device: bool) -> Skip | Take:
        """Decide whether the step that begins is skipped or taken. Changes nothing: see `conclude`.

        Args:
            on_device: True if the step can read flags on the device. The host then never waits: it decides if it
                already knows, and else learns the result later. If False, waits for the device.
        """
        self._settle()
        if on_device and not _are_known(self.backwards):
            return Take([backward.outcome.flag for backward in self.backwards if backward.skips])
        is_skipped = False
        for backward in self.backwards:  # waits for all, so that `conclude` can report them
            is_skipped |= backward.outcome.overflowed() and backward.skips
        return Skip() if is_skipped else Take()

    def conclude(self) -> None:
        """Forget the backwards that decided the step, and report what the host knows of it and of earlier ones.

        Until then they decide the next step, too: call it only where no gradient is left that may not be finite.
        """
        self.steps += 1
        backwards, self.backwards, self.accumulations = self.backwards, [], {}
        squares, self._squares = self._squares, []
        self._last = backwards, squares[0] if len(squares) == 1 else None
        self._undecided.append([backward for backward in backwards if not backward.outcome.is_captured])
        self.hear(wait=False)

    def _settle(self) -> None:
        """Get the findings of other ranks for all kept backwards."""
        for backward in self.backwards:
            for one in (*backward.of_written, backward):
                one.scaler.settle()

    def forget_backwards(self) -> None:
        """Discard what is known of gradients that are gone, or that are checked anew."""
        self.backwards, self._squares = [], []

    def checked_again_by(self, backward: Backward) -> None:
        """Note that `backward` is a check of the same gradients, after other code wrote them."""
        backward.number = self.backwards[-1].number
        backward.of_written = [of for one in self.backwards if one.skips for of in one.of_written or [one]]

    def forget(self) -> None:
        """Discard the backwards since the last step."""
        self.backwards, self._squares, self.accumulations = [], [], {}

    def taken_unseen(self) -> None:
        """Record a step that was taken, whatever the backwards for it were."""
        self.forget()
        self.steps += 1
        self._skipped = False
        self._last = LastStep()

    def hear(self, wait: bool) -> None:
        """Report the steps that the device decided, as far as the host knows; with `wait` all of them."""
        while self._undecided and (wait or _are_known(self._undecided[0])):
            self._conclude(self._undecided.popleft())

    def _conclude(self, backwards: Sequence[Backward]) -> None:
        """Record and report the result of the step of `backwards`."""
        skipping = []
        for backward in backwards:
            if not backward.outcome.overflowed():
                if backward.outcome.has_flushed():
                    self._report(backward)
                else:
                    self._heed_loss(backward)
                continue
            if backward.skips:
                skipping += [one for one in backward.of_written if one.outcome.overflowed()] or [backward]
            else:
                self._report(backward)
        self._skipped = bool(skipping)
        self.skips_in_a_row = self.skips_in_a_row + 1 if skipping else 0
        if skipping:
            self.skips += 1
            for tell in self._events.skipped.observers:
                tell(self.skips_in_a_row, skipping)

    def _heed_loss(self, backward: Backward) -> None:
        """Report a loss that is not finite though all gradients are."""
        loss = backward.outcome.number()
        if loss is None or math.isfinite(loss):
            self._bad_losses.pop(backward.loss_id, None)
            return
        in_a_row = self._bad_losses[backward.loss_id] = self._bad_losses.get(backward.loss_id, 0) + 1
        if not backward.is_reported:  # another optimizer of this loss may have reported it
            backward.is_reported = True
            self._report(backward, in_a_row)

    def _report(self, backward: Backward, in_a_row: int = 1) -> None:
        for tell in self._events.reported.observers:
            tell(backward, in_a_row)


def _are_known(backwards: Sequence[Backward]) -> bool:
    """True if the host knows for each backward whether it overflowed. Does not wait."""
    for backward in backwards:  # noqa: SIM110 - a generator takes twice the time, once a step
        if not backward.outcome.is_known():
            return False
    return True
