"""The history of each loss, of its scale and its overflows, from numbers that reach the host anyway."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from amp_engine.scaling.outcome import Outcome

LIMIT = 1000
"""Number of points that a track keeps before it is thinned."""

KEPT_LOSSES = 64

_LET_WAIT = 16  # number of outcomes above which `note` adds those that have arrived


@dataclass(frozen=True)
class Point:
    """A backward that changed the scale or overflowed.

    Attributes:
        backward: its number in its engine, from 1, or if it has none among its loss's backwards; 0: the beginning.
        scale: the scale after the backward.
        overflows: number of overflows, of this backward and of backwards before it that were thinned out.
    """

    backward: int
    scale: float
    overflows: int = 0


class Loss(NamedTuple):
    """A finite loss without overflow.

    Attributes:
        number: of its backward in its engine.
        value: the loss.
        of: tells losses apart that share a `loss_id`, as those of a GAN may.
    """

    number: int
    value: float
    of: tuple[int, ...] = ()


class Track:
    """One loss and its scale.

    Args:
        scale: the scale of the first backward; None: not known.

    Attributes:
        scale: the scale after the last backward that the host knows of.
        backwards: number of backwards that the host knows of, with those that were thinned out of `points`.
        overflows: number of these backwards that overflowed.
        points: at most `LIMIT`, oldest first.
        losses: the last ones that reached the host, one for each step, in order of arrival.
    """

    def __init__(self, scale: float | None = None) -> None:
        self.scale = scale
        self.backwards = 0
        self.overflows = 0
        self.points = [] if scale is None else [Point(0, scale)]
        self.losses: deque[Loss] = deque(maxlen=KEPT_LOSSES)

    def add(
        self,
        overflowed: bool,
        scale: float,
        number: int = 0,
        loss: float | None = None,
        follows: int | None = None,
        of: tuple[int, ...] = (),
    ) -> None:
        """Add a backward, after which the scale is `scale`; the other arguments are those of `ScaleHistory.note`."""
        self.backwards += 1
        if loss is not None and not overflowed and math.isfinite(loss):
            losses = self.losses
            if losses:
                last = losses[-1].number
                # The optimizers of a delayed backward are closed one by one, and each notes it under the same number.
                if last == follows or last == number != 0:
                    losses.pop()
            losses.append(Loss(number, loss, of))
        if scale == self.scale and not overflowed:  # nearly all backwards
            return
        self.scale = scale
        self.overflows += overflowed
        self.points.append(Point(number or self.backwards, scale, int(overflowed)))
        if len(self.points) > LIMIT:
            self._thin()

    def _thin(self) -> None:
        """Keep the first point, the last, and every second in between; add overflows of others to the next one kept."""
        first, *rest = self.points
        newest_first = zip(rest[-1::-2], rest[-2::-2], strict=False)
        merged = [Point(p.backward, p.scale, p.overflows + before.overflows) for p, before in newest_first]
        self.points = [first, *rest[: len(rest) % 2], *reversed(merged)]


class ScaleHistory:
    """The tracks of all losses of an engine, from one `initialize` to the next."""

    def __init__(self) -> None:
        self._tracks: defaultdict[int, Track] = defaultdict(Track)
        # Arguments of `note`, oldest first.
        self._waiting: deque[tuple[int, Outcome, int, int | None, tuple[int, ...]]] = deque()

    def begin(self, scales: Sequence[float]) -> None:
        """Discard the history, and start with the first scale of each loss."""
        self._waiting.clear()
        self._tracks.clear()
        self._tracks.update((loss_id, Track(scale)) for loss_id, scale in enumerate(scales))

    def note(
        self, loss_id: int, outcome: Outcome, number: int = 0, follows: int | None = None, of: tuple[int, ...] = ()
    ) -> None:
        """Keep a concluded backward, added when the history is read, or many or large ones are kept. Does not wait.

        Ignores a captured backward, as the host does not see the replays that run it.

        Args:
            number: the number of the backward in its engine; 0 if it has none.
            follows: the number of the backward before it that is for the same step.
            of: see Loss.
        """
        if outcome.is_captured:
            return
        self._waiting.append((loss_id, outcome, number, follows, of))
        if len(self._waiting) > _LET_WAIT or outcome.keeps_loss:
            self.hear(wait=False)

    def hear(self, wait: bool) -> None:
        """Add the outcomes that have arrived; with `wait`, wait for all and add them."""
        waiting = self._waiting
        with suppress(IndexError):  # another thread has added the last one
            while waiting and (wait or waiting[0][1].is_known()):
                self._add(*waiting.popleft())

    def track(self, loss_id: int) -> Track:
        """Return the track of one loss, with the outcomes that have arrived so far. Does not wait."""
        self.hear(wait=False)
        return self._tracks[loss_id]

    def losses_before(self, loss_id: int, number: int, of: tuple[int, ...] = ()) -> list[float]:
        """Return the known losses `of` backwards before `number`, or of all if it is 0. Does not wait."""
        losses = tuple(self.track(loss_id).losses)  # a copy, as another thread may add losses
        return [one.value for one in losses if one.of == of and (one.number < number or number == 0)]

    def _add(self, loss_id: int, outcome: Outcome, number: int, follows: int | None, of: tuple[int, ...]) -> None:
        self._tracks[loss_id].add(outcome.overflowed(), outcome.next_scale(), number, outcome.number(), follows, of)
