"""The figures for the comparison of levels: pure functions of trials."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from amp_engine.levels.scale_rule import DynamicLossScale
from amp_engine.tools.advice.records import Trial

MOST_DIFFERENCE = 0.02
"""A level's losses agree with O0's up to this difference, even if the noise is small."""

NOISES = 2.0
"""Losses also agree up to this many times the difference that a rounding-sized perturbation makes in O0's losses."""

MOST_NOISE = 0.10
"""If O0's two runs differ more, a level that does not train could seem to agree."""

SAME_BEGINNING = 1e-3
"""The first losses of two runs with equal weights count as the same up to this, relative to the mean loss."""

LEAST_STEPS = 3


@dataclass(frozen=True)
class Figures:
    """A level compared with O0.

    Attributes:
        level: its name.
        dtype: its low-precision type; None at O0.
        error: the end of the script's output if it failed.
        steps, skips: numbers of steps, and of skipped steps.
        is_finite: True if all losses were finite.
        difference: difference of the losses from O0's, by `loss_difference`; None if no steps can be compared.
        agrees: True if the difference is within the limit.
        seconds: the median of a step after the warm-up; None if there was none.
        speed: O0's seconds over `seconds`.
        bytes: the memory that it takes.
        memory: `bytes` as a share of O0's.
        lost: share, 0 to 1, of O0's nonzero weight gradients that float16 rounds to 0 at `loss_scale`; 0 in bfloat16
            and FP32, None if they were not counted.
        lost_dynamic: `lost` at the initial scale of "dynamic".
        loss_scale: the lowest loss scale at the end; None if no loss is scaled.
        dynamic: True if the loss scale moves.
        inputs: sentences without their ends, for inputs whose cast lost what they say.
    """

    level: str
    dtype: str | None = None
    error: str | None = None
    steps: int = 0
    skips: int = 0
    is_finite: bool = True
    difference: float | None = None
    agrees: bool = False
    seconds: float | None = None
    speed: float | None = None
    bytes: int | None = None
    memory: float | None = None
    lost: float | None = None
    lost_dynamic: float | None = None
    loss_scale: float | None = None
    dynamic: bool = False
    inputs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """The figures of all levels.

    Attributes:
        machine: the device of the trials, in words.
        base: O0.
        levels: the other levels.
        noise: difference of O0's losses in its two runs, the second with perturbed weights; None if that run failed.
        limit: the largest difference at which losses agree.
        drift: share by which a step of O0 took longer in the slower of its two runs; None if there is one run.
        obstacle: the reason why losses cannot be compared, as a sentence; then no level agrees. None if they can.
    """

    machine: str
    base: Figures
    levels: tuple[Figures, ...] = ()
    noise: float | None = None
    limit: float = MOST_DIFFERENCE
    drift: float | None = None
    obstacle: str | None = None


def compared(base: Trial, levels: Sequence[Trial], again: Trial | None, warmup: int) -> Comparison:
    """Compare trials with those at O0.

    Args:
        base: the first run at O0.
        levels: the runs at other levels.
        again: the second run at O0, with perturbed weights, after the others.
        warmup: times leave out this many of the first steps.

    O0's time is the median over the steps of its first and its last run, so that a temporary slowdown of the machine
    affects O0 too.
    """
    gradients = None
    noise = drift = None
    runs = [base.timed(warmup)]
    if again is not None and again.error is None:
        gradients = again.gradients
        noise = loss_difference(again, base)
        runs.append(again.timed(warmup))
        if all(runs):
            medians = [statistics.median(run) for run in runs]
            drift = max(medians) / min(medians) - 1 if min(medians) > 0 else None
    seconds = statistics.median([*runs[0], *runs[-1]]) if all(runs) else None
    obstacle = obstacle_to_comparison(base, again)
    limit = MOST_DIFFERENCE if noise is None or not math.isfinite(noise) else max(MOST_DIFFERENCE, NOISES * noise)

    def figures(trial: Trial) -> Figures:
        own = statistics.median(timed) if (timed := trial.timed(warmup)) else None
        own = seconds if trial is base else own
        difference = 0.0 if trial is base else loss_difference(trial, base)
        is_half = trial.dtype == "float16"
        scale = min(trial.loss_scales, default=1.0)

        def lost(at: float) -> float | None:
            if not is_half:
                return 0.0
            return None if gradients is None else gradients.lost(torch.float16, at)

        return Figures(
            level=trial.level,
            dtype=trial.dtype,
            error=trial.error,
            steps=trial.steps,
            skips=trial.skips,
            is_finite=all(math.isfinite(loss) for losses in trial.losses for loss in losses),
            difference=difference,
            agrees=difference is not None and difference <= limit and (obstacle is None or trial is base),
            seconds=own,
            speed=seconds / own if seconds is not None and own else None,
            bytes=trial.bytes,
            memory=trial.bytes / base.bytes if trial.bytes is not None and base.bytes else None,
            lost=lost(scale),
            lost_dynamic=lost(DynamicLossScale().init_scale),
            loss_scale=scale if trial.dynamic or scale != 1.0 else None,
            dynamic=trial.dynamic,
            inputs=trial.inputs,
        )

    return Comparison(base.machine, figures(base), tuple(map(figures, levels)), noise, limit, drift, obstacle)


def obstacle_to_comparison(base: Trial, again: Trial | None) -> str | None:
    """The reason why other levels cannot be compared with two runs at O0, as a sentence; None if they can.

    Args:
        base, again: as in `compared`. They have the same weights until the second step.
    """
    losses = [loss for step in base.losses for loss in step]
    if not all(map(math.isfinite, losses)):
        return "O0's own losses are not finite: see that the script trains without mixed precision first"
    if base.steps < LEAST_STEPS:
        return f"O0 ran {base.steps} of at least {LEAST_STEPS} steps: have the script train for longer"
    if len(set(base.losses)) == 1:
        return f"O0's loss is {_in_words(base.losses[0])} in each step, so that it says nothing of training"
    if again is None:
        return None
    if again.error is not None:
        return (
            f"O0 failed when it was run again: {again.error.splitlines()[-1] if again.error else 'nothing was printed'}"
        )
    if again.steps < base.steps and not again.out_of_time:
        return f"O0 ran {base.steps} steps, and {again.steps} when it was run again.  {_RESUMES}"
    if not all(math.isfinite(loss) for step in again.losses for loss in step):
        return "O0's losses are finite, and not all of them when it is run again with weights moved by a rounding error"
    mean = sum(map(abs, losses)) / len(losses)
    first = [abs(a - b) for a, b in zip(base.losses[0], again.losses[0], strict=False)]
    if any(one > SAME_BEGINNING * mean for one in first):
        return (
            f"O0's first loss is {_in_words(base.losses[0])}, and {_in_words(again.losses[0])} when it is run again "
            f"with the same seeds.  {_RESUMES}, and seed every generator that it draws random numbers from"
        )
    noise = loss_difference(again, base)
    if noise is None:
        return "O0's two runs have no steps in common: give them more --seconds"
    if noise > MOST_NOISE:
        return (
            f"O0's losses differ by {100 * noise:.3g} % from its own when it is run again, with weights moved by a "
            "rounding error: see that it trains steadily, with a lower learning rate, say, or try more --steps"
        )
    return None


_RESUMES = "Does the script go on from a checkpoint that it has written?  Have it start anew each time"


def _in_words(losses: Sequence[float]) -> str:
    return ", ".join(f"{loss:.6g}" for loss in losses) or "missing"


def loss_difference(trial: Trial, base: Trial) -> float | None:
    """mean |loss - base's| / mean |base's|, over the second half of the steps that both trials have.

    Relative to the mean, not step by step, so that a loss near 0 does not dominate. Uses the second half, because all
    levels begin with the same weights. Compares several losses of a step one by one, because their sum may cancel.

    A skipped step leaves the weights one step behind, which is no effect of rounding. So a trial that skipped k more
    steps than the base is also compared with the base's losses k steps earlier, and the smaller difference counts. inf
    if a loss is not finite, None without a step to compare.
    """
    behind = max(0, trial.skips - base.skips)
    found = [_shifted(trial, base, shift) for shift in {0, behind}]
    return min((one for one in found if one is not None), default=None)


def _shifted(trial: Trial, base: Trial, behind: int) -> float | None:
    n = min(trial.steps, base.steps + behind)
    first = max(n // 2, behind)
    pairs = [
        (ours, theirs)
        for step in range(first, n)
        for ours, theirs in zip(trial.losses[step], base.losses[step - behind], strict=False)
    ]
    if not pairs:
        return None
    difference = sum(abs(ours - theirs) for ours, theirs in pairs)
    size = sum(abs(theirs) for _, theirs in pairs)
    if not math.isfinite(difference + size):
        return math.inf
    return difference / size if size else (0.0 if difference == 0 else math.inf)
