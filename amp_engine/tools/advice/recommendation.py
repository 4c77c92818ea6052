"""Recommends a level from figures: a pure function."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from amp_engine.tools.advice.figures import Comparison, Figures
from amp_engine.tools.advice.records import BASE, OWN
from amp_engine.tools.telemetry import wording

LEAST_GAIN = 0.05
"""A level is preferred for speed if it is faster than O0 by at least this, or by O0's drift if that is larger."""

MOST_DRIFT = 0.5
"""If O0's two runs differ more in speed, speeds are no reason to stay at O0."""

TIE = 0.03
"""Speeds, or sizes if memory decides, that differ by less count as equal."""

LEAST_SAVING = 0.10
"""A level is preferred for memory if it takes at least this much less than O0, and is not slower than `SLOWEST`."""

SLOWEST = 1 / 1.5
"""Least share of O0's speed of a level that is preferred for memory: a step may take 1.5 times as long."""

MOST_LOST = 0.01
"""A level may round this share of the nonzero weight gradients to 0."""

SIMPLEST_FIRST = ("O0", "O4", "O1", "O5", "O2", "O3")
"""Levels with fewer moving parts first: without a loss scale before with one, an FP32 model before a cast one, with
masters before without."""


@dataclass(frozen=True)
class Recommendation:
    """A level, or None if levels cannot be compared, and a sentence with the reason."""

    level: str | None
    sentence: str


def recommend(comparison: Comparison) -> Recommendation:
    """Take the fastest level that trains as O0 does; else the level that takes least memory; else O0.

    A level trains as O0 does if it ran, its losses are finite and agree with O0's, it skipped at most half of its
    steps, it loses at most 1% of gradient values, and it has FP32 weights or masters. For speed it must be at least
    5% faster than O0, and faster by more than the difference of O0's two runs. Among levels within 3% of the
    fastest, it takes the smallest, then the simplest. If none is fast enough, it takes the smallest level, if that
    takes at least 10% less memory and at most 1.5 times as long as O0. It recommends None if O0's losses or speeds
    do not allow a comparison.
    """
    base, machine = comparison.base, comparison.machine
    if comparison.obstacle is not None:
        return Recommendation(None, f"The levels cannot be compared, and none is recommended: {comparison.obstacle}.")
    fit = [one for one in comparison.levels if why_not(one) is None]
    gain = max(LEAST_GAIN, comparison.drift or 0.0)
    fast = [one for one in fit if one.speed is not None and one.speed >= 1 + gain]
    small = [one for one in fit if one.memory is not None and one.memory <= 1 - LEAST_SAVING]
    small = [one for one in small if one.speed is None or one.speed >= SLOWEST]
    if fast:
        best = max(one.speed or 0.0 for one in fast)
        level = _lighter([one for one in fast if (one.speed or 0.0) >= best / (1 + TIE)])
        reason = f"{_time(level, base)}, {_memory(level)}"
    elif small:
        least = min(one.memory or 0.0 for one in small)
        level = max(
            (one for one in small if (one.memory or 0.0) <= least * (1 + TIE)),
            key=lambda one: (one.speed or 0.0, -SIMPLEST_FIRST.index(one.level)),
        )
        reason = f"for memory, {_memory(level)} ({wording.size(level.bytes)} for {wording.size(base.bytes)}); "
        reason += f"it is not taken for speed: {_time(level, base)}"
    elif fit and (comparison.drift or 0.0) > MOST_DRIFT:
        names = ", ".join(one.level for one in fit)
        return Recommendation(
            None,
            f"Speeds cannot be compared, and none is recommended: O0's own two runs differ by "
            f"{wording.share(comparison.drift)}.  Run it again while the machine does nothing else.  Losses agree with "
            f"O0's at {names}.",
        )
    else:
        verb = "Take" if any(one.level == OWN for one in comparison.levels) else "Stay at"
        return Recommendation(BASE, f"{verb} O0 on this machine ({machine}): {_why_stay(comparison, fit)}.")
    sentence = f"Take {level.level} on this machine ({machine}): {reason}; its losses differ from O0's by "
    sentence += (
        f"{wording.share(level.difference)}, of {wording.share(comparison.limit)} that are allowed{_lost(level)}."
    )
    return Recommendation(level.level, " ".join([sentence, *_scale_advice(comparison.levels)]))


def why_not(level: Figures) -> str | None:
    """The reason why a level is not recommended, regardless of its savings, or None."""
    if level.error is not None:
        return "it failed"
    if level.steps == 0 or level.difference is None:
        return "it had no steps to compare"
    if not level.is_finite:
        return "its losses are not finite"
    if 2 * level.skips > level.steps:
        return f"it skipped {level.skips} of {level.steps} steps"
    if not level.agrees:
        cause = f"; {level.inputs[0]}, see cast_inputs of amp.initialize" if level.inputs else ""
        return f"its losses differ by {wording.share(level.difference)}{cause}"
    if level.lost is not None and level.lost > MOST_LOST:
        return f"it loses {wording.share(level.lost)} of gradient values"
    if level.level in (OWN, "O3"):
        return f"it steps {level.dtype} weights without FP32 masters, and a few steps do not show what that loses"
    return None


def _lighter(levels: Sequence[Figures]) -> Figures:
    """Take the level with least memory; among levels within 1% of it, the simplest."""
    known = [one.memory for one in levels if one.memory is not None]
    if len(known) == len(levels):
        levels = [one for one in levels if (one.memory or 0.0) <= min(known) * 1.01]
    return min(levels, key=lambda one: SIMPLEST_FIRST.index(one.level))


def _why_stay(comparison: Comparison, fit: Sequence[Figures]) -> str:
    if not comparison.levels:
        return "no other level was tried"
    against = ", ".join(f"{one.level} ({why})" for one in comparison.levels if (why := why_not(one)) is not None)
    advice = "".join(f".  {one.removesuffix('.')}" for one in _scale_advice(comparison.levels))
    if not fit:
        return f"no other level trains as it does: {against}{advice}"
    by = "5 % or more"
    if comparison.drift is not None and comparison.drift > LEAST_GAIN:
        by = f"more than the {wording.share(comparison.drift)} that O0's own two runs differ by"
    parts = [
        f"no level that trains as it does is faster by {by}, or takes 10 % less memory at a step of at most 1.5 times "
        "its time"
    ]
    best = max((one for one in fit if one.speed is not None), key=lambda one: one.speed or 0.0, default=None)
    if best is not None:
        parts.append(f"the fastest is {best.level}, {_speed(best)}, {_memory(best)}")
    smallest = min((one for one in fit if one.memory is not None), key=lambda one: one.memory or 0.0, default=None)
    if smallest is not None and (smallest.memory or 0.0) <= 1 - LEAST_SAVING:
        parts.append(f"the smallest is {smallest.level}, {_speed(smallest)}, {_memory(smallest)}")
    if against:
        parts.append(f"left out: {against}")
    return "; ".join(parts) + advice


def _time(level: Figures, base: Figures) -> str:
    if level.speed is None:
        return "its time was not measured"
    return (
        f"a step takes {wording.milliseconds(level.seconds)} ms where O0 takes {wording.milliseconds(base.seconds)}, "
        f"{_speed(level)}"
    )


def _speed(level: Figures) -> str:
    return f"{level.speed or 0.0:.2f} times as fast"


def _memory(level: Figures) -> str:
    if level.memory is None:
        return "and memory was not measured"
    return f"with {wording.share(level.memory)} of O0's memory"


def _lost(level: Figures) -> str:
    if level.dtype != "float16":
        return ""
    if level.lost is None:
        return ", and gradients were not counted"
    at = "without a loss scale" if level.loss_scale is None else f"at a loss scale of {wording.scale(level.loss_scale)}"
    return f", and float16 rounds {wording.share(level.lost)} of gradient values to 0 {at}"


def _scale_advice(levels: Iterable[Figures]) -> Iterable[str]:
    for one in levels:
        loses = one.lost is not None and one.lost > MOST_LOST and one.error is None
        if loses and one.loss_scale is not None and not one.dynamic and (one.lost_dynamic or 0.0) <= MOST_LOST:
            begin = wording.share(one.lost_dynamic)
            yield (
                f'Try {one.level} with loss_scale="dynamic": at its static {wording.scale(one.loss_scale)} it loses '
                f"{wording.share(one.lost)} of gradient values; where dynamic scales begin, {begin}."
            )
