"""The record of a script's trials, their figures and the recommendation, with its page and JSON."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from amp_engine.tools.advice.figures import MOST_DIFFERENCE, NOISES, Comparison, Figures, compared
from amp_engine.tools.advice.recommendation import LEAST_GAIN, Recommendation, recommend, why_not
from amp_engine.tools.advice.records import BASE, OWN, Dropped, Trial
from amp_engine.tools.page.page import Page, Paged, Section, Sentence, Table, Verbatim
from amp_engine.tools.telemetry import wording
from amp_engine.tools.telemetry.wording import plural

FORMAT = 1
"""The format number of the JSON; changes when a field changes its meaning."""

_HEAD = ("level", "losses", "differ by", "ms a step", "speed", "memory", "", "lost", "steps", "skipped", "loss scale")


@dataclass(frozen=True, repr=False)
class Advice(Paged):
    """A few steps of a script at each level, and the recommended level.

    Attributes:
        script: the script with its arguments, as typed after `python`.
        steps: number of steps requested for each level.
        warmup: times leave out this many of the first steps.
        base: the first run at O0.
        levels: the runs at other levels, in the requested order.
        again: the second run at O0, after the others, with perturbed weights.
    """

    script: tuple[str, ...]
    steps: int
    warmup: int
    base: Trial
    levels: tuple[Trial, ...]
    again: Trial | None

    @functools.cached_property
    def comparison(self) -> Comparison:
        """The figures of all levels."""
        return compared(self.base, self.levels, self.again, self.warmup)

    @functools.cached_property
    def recommendation(self) -> Recommendation:
        """The recommended level, and the reason."""
        return recommend(self.comparison)

    @property
    def level(self) -> str | None:
        """The recommended level; None if levels cannot be compared, for the reason in `recommendation.sentence`."""
        return self.recommendation.level

    def to_json(self) -> str:
        """All records as JSON; numbers that are not finite are the strings "nan", "inf" and "-inf"."""
        fields = {"format": FORMAT, **dataclasses.asdict(self)}
        fields["comparison"] = dataclasses.asdict(self.comparison)
        fields["recommendation"] = dataclasses.asdict(self.recommendation)
        return json.dumps(_plain(fields), indent=1, allow_nan=False)

    def _page(self) -> Page:
        comparison = self.comparison
        rows = [_row(one, comparison) for one in (comparison.base, *comparison.levels)]
        tried = [*((one.level, one) for one in self.levels), (f"{BASE}, once more", self.again)]
        failed = [(name, one.error) for name, one in tried if one is not None and one.error is not None]
        return Page(
            "",
            [
                Section("", [Verbatim(f"{shlex.join(self.script)}  ({comparison.machine})")]),
                Section("", [Table(rows, _HEAD, numbers=range(2, len(_HEAD)))]),
                Section("", [Sentence(note) for note in _notes(self)]),
                *(Section(f"{name} failed:", [Verbatim(error, indent=1)]) for name, error in failed),
                Section("", [Sentence(self.recommendation.sentence)]),
            ],
        )


def _row(one: Figures, comparison: Comparison) -> tuple[str, ...]:
    is_base = one is comparison.base
    if one.error is not None:
        return (one.level, "failed", *[wording.NOTHING] * (len(_HEAD) - 2))
    verdict = "agree" if one.agrees else "differ" if comparison.obstacle is None else "?"
    if not one.is_finite:
        verdict = "not finite"
    return (
        one.level,
        "" if is_base else verdict,
        wording.NOTHING if is_base else wording.share(one.difference),
        wording.milliseconds(one.seconds),
        wording.NOTHING if one.speed is None else f"{one.speed:.2f}x",
        wording.size(one.bytes),
        wording.share(one.memory),
        wording.share(one.lost) if one.dtype == "float16" else wording.NOTHING,
        str(one.steps),
        str(one.skips),
        wording.scale(one.loss_scale),
    )


def _notes(advice: Advice) -> Iterator[str]:
    comparison, base = advice.comparison, advice.base
    noise = "could not be measured" if comparison.noise is None else f"is {wording.share(comparison.noise)}"
    yield (
        "differ by: mean |loss - O0's| over mean |O0's|, of the second half of the steps.  Losses agree if they "
        f"differ by at most {wording.share(MOST_DIFFERENCE)}, or {NOISES:g} times what O0's own do once its weights "
        f"are moved by up to 2^-11, as rounding to float16 does: that {noise}, so the limit is "
        f"{wording.share(comparison.limit)}."
    )
    yield f"ms a step: median, without {plural(advice.warmup, 'step')} of warm-up; O0's is that of its two runs."
    if comparison.drift is not None:
        busy = "  Something else seems to use this machine: repeat the run when it is idle."
        yield (
            f"O0's first and last run differ by {wording.share(comparison.drift)} in speed; smaller differences "
            f"between levels mean nothing.{busy if comparison.drift > LEAST_GAIN else ''}"
        )
    if base.peak_bytes is not None:
        yield "memory: the peak of torch's allocator on all GPUs."
    else:
        yield "memory: parameters, masters, state, gradients and copies, at the end of a backward; no activations."
    if any(one.dtype == "float16" for one in comparison.levels):
        yield "lost: the share of O0's nonzero weight gradients that float16 rounds to 0, at the loss scale of its row."
    if base.asked is not None:
        yield f"The script asks for {base.asked}."
    else:
        yield (
            "The script has no amp.  It was tried with amp.initialize(model, optimizer, opt_level=...) after its first "
            f"step, which is not counted.  {_what_to_type(base.before)}"
        )
    if base.came is not None:
        yield (
            f"Its weights are {base.came}: `{OWN}` is its own run, without FP32 masters.  O1 and O4 refuse such "
            "weights and are not tried.  python -m amp_engine audit says what rounding erases of its steps."
        )
    if base.steps < advice.steps:
        yield _ended_early(base, advice.steps)
    for trial in advice.levels:
        if trial.error is None and trial.steps < base.steps:
            yield _ended_early(trial, base.steps)
    for one in comparison.levels:
        if comparison.obstacle is None and one.error is None and 2 * one.skips > one.steps:
            yield f"{one.level} is not recommended: {why_not(one)}."
    yield from _dropped(advice)
    yield from _emulated(advice)
    differing = [one.level for one in comparison.levels if one.difference is not None and not one.agrees]
    if comparison.obstacle is None and differing:
        yield (
            f'Losses differ at {", ".join(differing)}: amp.find_fp32_modules(model, step_fn, "{differing[0]}") names '
            "the modules to keep in FP32."
        )


def _what_to_type(before: str) -> str:
    if before:
        return (
            f"To train at O4 or O5 type amp.initialize(model, opt_level=...) before {before}; O1 and O2 scale losses, "
            "for which amp_engine.integrations has adapters."
        )
    return (
        "To train at O4 or O5 type this line before the loop; at O1 and O2 also `with amp.scale_loss(loss, optimizer) "
        "as scaled_loss: scaled_loss.backward()` and amp.clip_grad_norm_(optimizer, ...)."
    )


def _emulated(advice: Advice) -> Iterator[str]:
    """A sentence for each type that the CPU emulates, with the levels that are slower than O0."""
    found: dict[tuple[str | None, str], list[Figures]] = {}
    for trial, one in zip(advice.levels, advice.comparison.levels, strict=True):
        if trial.lacks is not None and one.speed is not None and one.speed < 1:
            found.setdefault((one.dtype, trial.lacks), []).append(one)
    for (dtype, lacks), slower in found.items():
        times = ", ".join(f"{1 / (one.speed or 1.0):.1f} times at {one.level}" for one in slower)
        yield (
            f"This CPU emulates {dtype}, as it has no {lacks}.  So a step takes longer than O0's: {times}.  A GPU may "
            "reverse this; run it there."
        )


def _ended_early(trial: Trial, steps: int) -> str:
    why = "its time was over (--seconds)" if trial.out_of_time else "the script ended"
    return f"{trial.level} ran {trial.steps} of {plural(steps, 'step')}: {why}."


def _dropped(advice: Advice) -> Iterator[str]:
    """A sentence for each argument that was left out, with the levels."""
    levels: dict[Dropped, list[str]] = {}
    for trial in (advice.base, *advice.levels):
        for one in trial.dropped:
            levels.setdefault(one, []).append(trial.level)
    for one, where in levels.items():
        yield f"Tried without {one.argument} at {', '.join(where)}: {one.why}."


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
