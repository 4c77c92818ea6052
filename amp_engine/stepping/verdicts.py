"""Whether a step is skipped: what backwards decided, what the host knows of it by now, and what was said."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from torch import Tensor

from amp_engine.stepping.backward import Verdict


class Verdicts:
    """Of the next step of one optimizer, and of those steps that the device decided.

    Args:
        on_skip: told, for each step that was skipped, how many were in a row, and by which verdicts.
        on_report: told a verdict of an overflow that did not skip.
    """

    def __init__(self, on_skip: Callable[[int, Sequence[Verdict]], None], on_report: Callable[[Verdict], None]) -> None:
        self.pending: list[Verdict] = []  # of the next step
        self.caller_skips = False  # whether somebody's own `scale_loss` took it on itself to skip the next step
        self.skips_in_a_row = 0
        # Of steps that the device decided: what the host has not been told yet, oldest first.
        self._undecided: deque[list[Verdict]] = deque()
        self._skipped = False
        self._on_skip = on_skip
        self._on_report = on_report

    @property
    def skipped(self) -> bool:
        """Whether the last step was skipped. Waits for the device if that decided."""
        self.hear(wait=True)
        return self._skipped

    @property
    def skips_next(self) -> bool:
        """Whether the next step will be skipped, by us or by the caller. Waits for the device if that decided."""
        return self.caller_skips or self.overflowed()

    def overflowed(self) -> bool:
        """Whether the next step will be skipped by us. Waits for the device if that decided."""
        return any(verdict.skips and verdict.overflow.read() != 0 for verdict in self.pending)

    def are_known(self) -> bool:
        """Whether the host knows by now what the next step is to do."""
        return all(verdict.overflow.is_known() for verdict in self.pending)

    def add(self, verdict: Verdict) -> None:
        """Keep a verdict for the next step, and no more than that needs, however many backwards it takes."""
        self.pending = [v for v in self.pending if not (v.overflow.is_known() and v.overflow.read() == 0)]
        self.pending.append(verdict)

    def decide(self) -> bool:
        """Whether the step that begins is skipped. Waits for the device if a backward was checked there."""
        self.hear(wait=True)
        verdicts, self.pending = self.pending, []
        self._conclude(verdicts)
        return self._skipped

    def leave_to_device(self) -> list[Tensor]:
        """The flags that the step which begins reads itself; the host is told when they have arrived."""
        flags = [verdict.found_inf for verdict in self.pending if verdict.skips]
        self._undecided.append([verdict for verdict in self.pending if not verdict.overflow.is_captured])
        self.pending = []
        return flags

    def skipped_by_caller(self) -> None:
        """The step was skipped without us, and all that was decided about it is past."""
        self.hear(wait=True)
        self.caller_skips = False
        self.pending = []
        self._skipped = True
        self.skips_in_a_row += 1

    def hear(self, wait: bool) -> None:
        """Report steps that the device decided, as far as the host knows of them by now, or all of them."""
        while self._undecided and (wait or all(v.overflow.is_known() for v in self._undecided[0])):
            self._conclude(self._undecided.popleft())

    def _conclude(self, verdicts: Sequence[Verdict]) -> None:
        """Say, and remember, what `verdicts` meant for their step."""
        overflowed = [verdict for verdict in verdicts if verdict.overflow.read() != 0]
        skipping = [verdict for verdict in overflowed if verdict.skips]
        for verdict in overflowed:
            if not verdict.skips:
                self._on_report(verdict)
        self._skipped = bool(skipping)
        self.skips_in_a_row = self.skips_in_a_row + 1 if skipping else 0
        if skipping:
            self._on_skip(self.skips_in_a_row, skipping)
