"""The section about loss scales: overflows, and the changes of the scale."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from amp_engine.engine import Engine
from amp_engine.scaling.history import Point
from amp_engine.tools.diagnosis.post_mortem import OverflowRecord
from amp_engine.tools.page.page import Block, Section, Sentence
from amp_engine.tools.telemetry.wording import number, percent, plural, scale

_SHOWN = 5  # newest backwards of each cause


@dataclass(frozen=True)
class Overflows:
    """The overflows of one cause of `overflow_report`: their count, and the numbers of the newest backwards."""

    cause: str
    count: int
    backwards: tuple[int, ...]


@dataclass(frozen=True)
class Loss:
    """A loss scaler.

    Attributes:
        loss_id: its number.
        dynamic: True if the scale moves.
        scale: the scale of the next backward.
        backwards: number of checked backwards since `initialize`; 0 if gradients are not checked.
        overflows: number of checked backwards with a gradient that is not finite.
        history: the points where the scale moved or a backward overflowed, thinned to at most 1000.
        causes: this loss's overflows among the newest 1000 of all losses, the most frequent cause first.
        auto: True if the scale follows the largest gradient.
    """

    loss_id: int
    dynamic: bool
    scale: float
    backwards: int
    overflows: int
    history: tuple[Point, ...]
    causes: tuple[Overflows, ...] = ()
    auto: bool = False


def described(engine: Engine) -> tuple[Loss, ...]:
    """Describe each loss scaler. Waits for the device, to read the scale."""
    losses, records = [], engine.overflow_report()
    for loss_id, scaler in enumerate(engine.scalers):
        track = engine._scaling.history.track(loss_id)
        causes = tuple(_causes(record for record in records if record.loss_id == loss_id))
        now, is_auto = scaler.loss_scale(), scaler.auto is not None
        losses.append(
            Loss(loss_id, scaler.dynamic, now, track.backwards, track.overflows, tuple(track.points), causes, is_auto)
        )
    return tuple(losses)


def _causes(records: Iterable[OverflowRecord]) -> Iterator[Overflows]:
    by_cause: dict[str, dict[int, None]] = {}
    for record in records:  # one for each optimizer
        by_cause.setdefault(record.cause, {})[record.backward] = None
    for cause, backwards in sorted(by_cause.items(), key=lambda item: -len(item[1])):
        yield Overflows(cause, len(backwards), tuple(backwards)[-_SHOWN:])


def section(losses: Sequence[Loss]) -> Section:
    """A sentence for each scaler, and the moves of its scale."""
    blocks: list[Block] = []
    for one in losses:
        blocks.append(Sentence(_sentence(one)))
        if one.causes:
            blocks.append(Sentence(f"causes: {', '.join(map(_of_cause, one.causes))}", "soft", indent=1))
        if len(one.history) > 1:
            blocks.append(Sentence(_moves(one.history), indent=1))
    return Section("Loss scale", blocks or [Sentence("No loss is scaled.", "soft")])


def _sentence(one: Loss) -> str:
    kind = "auto" if one.auto else "dynamic" if one.dynamic else "static"
    if one.backwards == 0:
        looked = "no backward was looked at for overflows"
    else:
        share = f" ({percent(one.overflows / one.backwards)})" if one.overflows else ""
        seen = "" if one.dynamic else " that were looked at"
        looked = f"{number(one.overflows)} of {plural(one.backwards, 'backward')}{seen} overflowed{share}"
    return f"loss_id {one.loss_id}: {kind}, now {scale(one.scale)}; {looked}"


def _of_cause(one: Overflows) -> str:
    more = "..., " if one.count > len(one.backwards) else ""
    word = "backward" if one.count == 1 else "backwards"
    return f"{number(one.count)} {one.cause} ({word} {more}{', '.join(map(str, one.backwards))})"


def _moves(points: Sequence[Point]) -> str:
    moves = [f"{p.backward}: {scale(p.scale)}{'!' * (p.overflows > 0)}" for p in points]
    shown = moves if len(moves) <= 12 else [*moves[:4], "...", *moves[-7:]]
    return f"scale after backward (!: overflow)  {', '.join(shown)}"
