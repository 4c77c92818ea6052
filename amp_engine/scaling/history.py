"""Each loss over its backwards, its scale, and which of them overflowed: what the host has learned anyway."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from amp_engine.scaling.outcome import Outcome

LIMIT = 1000
"""How many points a track keeps before it is thinned."""

KEPT_LOSSES = 64

_LET_WAIT = 64  # if more backwards wait for their flags, these are asked for


@dataclass(frozen=True)
class Point:
    """A backward after which the scale was another one, or that overflowed.

    Attributes:
        backward: its number in its engine, from 1, or among those of its loss if it has none; 0 is the beginning.
        scale: the scale after it.
        overflows: of this backward, and of thinned-out ones before it.
    """

    backward: int
    scale: float
    overflows: int = 0


class Track:
    """One loss and its scale.

    Args:
        scale: of the first backward; None if it is not known.

    Attributes:
        scale: after the last backward that the host knows of.
        backwards: how many it knows of, and
        overflows: how many of them overflowed. Both count all, whatever was thinned out of `points`.
        points: at most `LIMIT`, oldest first.
        losses: the last finite ones that the host was told, and no overflow came of, one for each step, in the order in
            which it was told, with the numbers of their backwards in their engine.
    """

    def __init__(self, scale: float | None = None) -> None:
        self.scale = scale
        self.backwards = 0
        self.overflows = 0
        self.points = [] if scale is None else [Point(0, scale)]
        self.losses: deque[tuple[int, float]] = deque(maxlen=KEPT_LOSSES)

    def add(
        self, overflowed: bool, scale: float, number: int = 0, loss: float | None = None, follows: int | None = None
    ) -> None:
        """One more backward, after which the scale is `scale`; the others are as in `ScaleHistory.note`."""
        self.backwards += 1
        if loss is not None and not overflowed and math.isfinite(loss):
            losses = self.losses
            if losses:
                last = losses[-1][0]
                # Of a delayed backward each optimizer closes its own window, which is noted under the same number.
                if last == follows or last == number != 0:
                    losses.pop()
            losses.append((number, loss))
        if scale == self.scale and not overflowed:  # nearly all of them
            return
        self.scale = scale
        self.overflows += overflowed
        self.points.append(Point(number or self.backwards, scale, int(overflowed)))
        if len(self.points) > LIMIT:
            self._thin()

    def _thin(self) -> None:
        """Keep the first point, the last, and every second in between; overflows of the others go to the next kept."""
        first, *rest = self.points
        newest_first = zip(rest[-1::-2], rest[-2::-2], strict=False)
        merged = [Point(p.backward, p.scale, p.overflows + before.overflows) for p, before in newest_first]
        self.points = [first, *rest[: len(rest) % 2], *reversed(merged)]


class ScaleHistory:
    """The tracks of all losses of an engine, from one `initialize` to the next."""

    def __init__(self) -> None:
        self._tracks: defaultdict[int, Track] = defaultdict(Track)
        # As `note` is given them, oldest first.
        self._waiting: deque[tuple[int, Outcome, int, int | None]] = deque()

    def begin(self, scales: Sequence[float]) -> None:
        """Start anew, with the first scale of each loss."""
        self._waiting.clear()
        self._tracks.clear()
        self._tracks.update((loss_id, Track(scale)) for loss_id, scale in enumerate(scales))

    def note(self, loss_id: int, outcome: Outcome, number: int = 0, follows: int | None = None) -> None:
        """A backward is concluded. Its outcome counts once the host knows it; nothing is asked of a device for that.

        A captured one is left out: it is run by replays, of which the host hears nothing.

        Args:
            number: of the backward in its engine; 0 if it has none.
            follows: the number of the backward before it that is for the same step.
        """
        if outcome.has_arrived and not self._waiting:
            self._add(loss_id, outcome, number, follows)
            return
        if outcome.is_captured:
            return
        waiting = self._waiting
        waiting.append((loss_id, outcome, number, follows))
        while waiting and waiting[0][1].has_arrived:
            self._add(*waiting.popleft())
        if len(waiting) > _LET_WAIT:
            self.hear(wait=False)

    def hear(self, wait: bool) -> None:
        """Note what has arrived by now, or all of it."""
        while self._waiting and (wait or self._waiting[0][1].is_known()):
            self._add(*self._waiting.popleft())

    def track(self, loss_id: int) -> Track:
        """Of one loss, as far as was heard."""
        return self._tracks[loss_id]

    def losses_before(self, loss_id: int, number: int) -> list[float]:
        """What `Track.losses` has of backwards before `number`, if it is not 0, as far as is known. Does not wait."""
        self.hear(wait=False)
        losses = tuple(self._tracks[loss_id].losses)  # at once: another thread may add to them
        return [loss for earlier, loss in losses if earlier < number or number == 0]

    def _add(self, loss_id: int, outcome: Outcome, number: int, follows: int | None) -> None:
        self._tracks[loss_id].add(outcome.overflowed(), outcome.next_scale(), number, outcome.number(), follows)
