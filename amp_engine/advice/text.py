"""How advice looks: a table, what its columns are, what was dropped, what failed, and the recommendation."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from textwrap import indent, wrap
from typing import TYPE_CHECKING

from amp_engine.advice import words
from amp_engine.advice.figures import MOST_DIFFERENCE, NOISES, Comparison, Figures
from amp_engine.advice.recommendation import LEAST_GAIN, why_not
from amp_engine.advice.records import BASE, Dropped, Trial
from amp_engine.page.tables import table
from amp_engine.telemetry.wording import plural

if TYPE_CHECKING:
    from amp_engine.advice.advice import Advice

WIDTH = 100
HEAD = ("level", "losses", "differ by", "ms a step", "speed", "memory", "", "lost", "steps", "skipped", "loss scale")


def rendered(advice: Advice) -> str:
    """All of it; the last line is the recommendation."""
    comparison = advice.comparison
    rows = [HEAD, *(_row(one, comparison) for one in (comparison.base, *comparison.levels))]
    lines = [f"{shlex.join(advice.script)}  ({comparison.machine})", "", table(rows, words=2), ""]
    for note in _notes(advice):
        lines += wrap(note, WIDTH, break_on_hyphens=False)
    for trial in (*advice.levels, advice.again):
        if trial is not None and trial.error is not None:
            which = f"{BASE}, once more" if trial is advice.again else trial.level
            lines += ["", f"{which} failed:", indent(trial.error, "    ")]
    return "\n".join([*lines, "", advice.recommendation.sentence])


def _row(one: Figures, comparison: Comparison) -> tuple[str, ...]:
    is_base = one is comparison.base
    if one.error is not None:
        return (one.level, "failed", *["-"] * (len(HEAD) - 2))
    verdict = "agree" if one.agrees else "differ" if comparison.obstacle is None else "?"
    if not one.is_finite:
        verdict = "not finite"
    return (
        one.level,
        "" if is_base else verdict,
        words.NOTHING if is_base else words.share(one.difference),
        words.milliseconds(one.seconds),
        words.speed(one.speed),
        words.size(one.bytes),
        words.share(one.memory),
        words.share(one.lost) if one.dtype == "float16" else words.NOTHING,
        str(one.steps),
        str(one.skips),
        words.scale(one.loss_scale),
    )


def _notes(advice: Advice) -> Iterator[str]:
    comparison, base = advice.comparison, advice.base
    noise = "could not be measured" if comparison.noise is None else f"is {words.share(comparison.noise)}"
    yield (
        "differ by: mean |loss - O0's| over mean |O0's|, of the second half of the steps.  Losses agree up to "
        f"{words.share(MOST_DIFFERENCE)}, or {NOISES:g} times what O0 differs from itself once its weights are moved "
        f"by up to 2^-11, as rounding to float16 does: that {noise}, so the limit is {words.share(comparison.limit)}."
    )
    yield f"ms a step: median, without {plural(advice.warmup, 'step')} of warm-up; O0's is that of its two runs."
    if comparison.drift is not None:
        busy = "  Something else seems to use this machine: repeat the run when it is idle."
        yield (
            f"O0's first and last run differ by {words.share(comparison.drift)} in speed; smaller differences between "
            f"levels mean nothing.{busy if comparison.drift > LEAST_GAIN else ''}"
        )
    if base.peak_bytes is not None:
        yield "memory: the peak of torch's allocator on all GPUs."
    else:
        yield "memory: parameters, masters, state, gradients and copies, at the end of a backward; no activations."
    if any(one.dtype == "float16" for one in comparison.levels):
        yield "lost: of O0's nonzero weight gradients those that float16 rounds to 0 at the loss scale beside it."
    if base.asked is not None:
        yield f"The script asks for {base.asked}."
    if base.steps < advice.steps:
        yield _ended_early(base, advice.steps)
    for trial in advice.levels:
        if trial.error is None and trial.steps < base.steps:
            yield _ended_early(trial, base.steps)
    for one in comparison.levels:
        if comparison.obstacle is None and one.error is None and 2 * one.skips > one.steps:
            yield f"{one.level} is not recommended: {why_not(one)}."
    yield from _dropped(advice)


def _ended_early(trial: Trial, steps: int) -> str:
    why = "its time was over (--seconds)" if trial.out_of_time else "the script ended"
    return f"{trial.level} ran {trial.steps} of {plural(steps, 'step')}: {why}."


def _dropped(advice: Advice) -> Iterator[str]:
    """What was left out, and at which levels."""
    levels: dict[Dropped, list[str]] = {}
    for trial in (advice.base, *advice.levels):
        for one in trial.dropped:
            levels.setdefault(one, []).append(trial.level)
    for one, where in levels.items():
        yield f"Tried without {one.argument} at {', '.join(where)}: {one.why}."
