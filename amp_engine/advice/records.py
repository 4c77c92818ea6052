"""The task and the result of a trial, as frozen records of plain types."""

from __future__ import annotations

from dataclasses import dataclass

from amp_engine.telemetry.magnitudes import Magnitudes
from amp_engine.telemetry.records import Memory

BASE = "O0"
"""The level that the others are compared with."""


@dataclass(frozen=True)
class Task:
    """The task of a trial.

    Attributes:
        level: "O0" to "O5", in place of the script's own; or a recipe, emulated in the first backward at O0.
        steps: the script is ended after so many steps of its first optimizer.
        deadline: by `time.monotonic()`; the first step that ends later is the last one.
        seed: of random, numpy and torch, before the script; and of the perturbation.
        perturb: multiply the weights by 1 + 2^-11 * uniform(-1, 1) after the first step, and count gradients.
        path: of the file that the trial is written to.
        gradient_path: of the file of O0's first gradient, which recipes are compared with; empty without recipes.
    """

    level: str
    steps: int
    deadline: float
    seed: int = 0
    perturb: bool = False
    path: str = ""
    gradient_path: str = ""


@dataclass(frozen=True)
class Dropped:
    """An argument of the script's `initialize` that a trial left out.

    Attributes:
        argument: as it is typed: "loss_scale=128.0".
        why: the reason, as the end of a sentence.
    """

    argument: str
    why: str


@dataclass(frozen=True)
class Trial:
    """A few steps of a script at one level.

    Attributes:
        level: that it ran at.
        asked: the level that the script asked for; None if it never called `initialize`.
        losses: for each step, the value of each loss that was passed to `scale_loss` for it, in their order.
        seconds: of each step but the first: from the end of the step before to its own end, without what the trial
            itself did meanwhile. On a GPU between CUDA events.
        skips: number of the skipped steps of the optimizer that skipped most.
        dtype: the low-precision type of the level; None at O0.
        loss_scales: at the end, by loss_id.
        dynamic: True if the scales move.
        memory: by class, at the end of the last backward that was looked at.
        peak_bytes: the peak of torch's allocator on all GPUs; None without a GPU.
        gradients: magnitudes of the weights' gradients after the backwards of the last steps; None if not counted.
        gradient_error: at a recipe ||a - b|| / ||b|| of the first backward's gradient, b at O0; None at levels.
        dropped: arguments that were left out of the script's `initialize`.
        machine: the device that it ran on, in words.
        lacks: the instructions for `dtype` that the device, a CPU, has not, so that it emulates them; None elsewhere.
        out_of_time: True if it was ended before its last step, since its time was over.
        error: the end of what the script printed, if it failed; None if it did not.
        obstacle: the reason why a script without `initialize` cannot be tried, in words; None if it can.
    """

    level: str
    asked: str | None = None
    losses: tuple[tuple[float, ...], ...] = ()
    seconds: tuple[float, ...] = ()
    skips: int = 0
    dtype: str | None = None
    loss_scales: tuple[float, ...] = ()
    dynamic: bool = False
    memory: tuple[Memory, ...] = ()
    peak_bytes: int | None = None
    gradients: Magnitudes | None = None
    gradient_error: float | None = None
    dropped: tuple[Dropped, ...] = ()
    machine: str = ""
    lacks: str | None = None
    out_of_time: bool = False
    error: str | None = None
    obstacle: str | None = None

    @property
    def steps(self) -> int:
        """Number of the steps that were done."""
        return len(self.losses)

    @property
    def bytes(self) -> int | None:
        """The peak on GPUs, elsewhere the sum over the classes; None if memory was not looked at."""
        if self.peak_bytes is not None:
            return self.peak_bytes
        return sum(one.bytes for one in self.memory) if self.memory else None

    def timed(self, warmup: int) -> tuple[float, ...]:
        """The seconds of the steps after the first `warmup`; the first step has none."""
        return self.seconds[max(0, warmup - 1) :]
