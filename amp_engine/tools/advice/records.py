"""The task and the result of a trial, as frozen records of plain types."""

from __future__ import annotations

from dataclasses import dataclass

from amp_engine.tools.telemetry.magnitudes import Magnitudes
from amp_engine.tools.telemetry.receipt.memory import Memory

BASE = "O0"
"""The reference of the other levels."""

OWN = "as it is"
"""In place of a level: the run of a script without amp whose weights are half, as the script makes it."""


@dataclass(frozen=True)
class Task:
    """The task of a trial.

    Attributes:
        level: "O0" to "O5", instead of the script's own; or `OWN`.
        steps: the script ends after this many steps of its first optimizer.
        deadline: time by `time.monotonic()`; the first step that ends later is the last step.
        seed: seed of random, numpy and torch, before the script; and of the perturbation.
        perturb: True to multiply the weights by 1 + 2^-11 * uniform(-1, 1) after the first step and count gradients.
        path: path of the file for the trial.
    """

    level: str
    steps: int
    deadline: float
    seed: int = 0
    perturb: bool = False
    path: str = ""


@dataclass(frozen=True)
class Dropped:
    """An argument of the script's `initialize` that a trial left out.

    Attributes:
        argument: the argument as typed: "loss_scale=128.0".
        why: the reason, as the end of a sentence.
    """

    argument: str
    why: str


@dataclass(frozen=True)
class Trial:
    """A few steps of a script at one level.

    Attributes:
        level: the level of the trial.
        asked: the level that the script asked for; None if it never called `initialize`.
        losses: for each step, the value of each loss that was passed to `scale_loss` for it, in their order.
        seconds: seconds of each step but the first, from the end of the step before to its own end, without the trial's
            own work. On a GPU between CUDA events.
        skips: number of skipped steps of the optimizer that skipped most.
        dtype: the low-precision type of the level; None at O0.
        loss_scales: the loss scales at the end, by loss_id.
        dynamic: True if the scales move.
        memory: memory by class, at the end of the last backward in which it was measured.
        peak_bytes: the peak of torch's allocator on all GPUs; None without a GPU.
        gradients: magnitudes of the weights' gradients after the backwards of the last steps; None if not counted.
        dropped: arguments that were left out of the script's `initialize`.
        inputs: sentences without their ends, for inputs of the model whose cast lost what they say.
        machine: the device of the trial, in words.
        lacks: the instructions for `dtype` that a CPU lacks and so emulates; None if it lacks none, or on a GPU.
        out_of_time: True if the trial was ended before its last step because of the deadline.
        error: exit status and number of steps, and the end of the script's output, if the script failed; else None.
        obstacle: the reason why a script without `initialize` cannot be tried, in words; None if it can.
        came: the type of half weights that a script without amp steps; None if they are FP32.
        before: what the trainer of a script without amp calls or makes first, in words; "" without a trainer.
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
    dropped: tuple[Dropped, ...] = ()
    inputs: tuple[str, ...] = ()
    machine: str = ""
    lacks: str | None = None
    out_of_time: bool = False
    error: str | None = None
    obstacle: str | None = None
    came: str | None = None
    before: str = ""

    @property
    def steps(self) -> int:
        """Number of steps that the trial completed."""
        return len(self.losses)

    @property
    def bytes(self) -> int | None:
        """The peak on GPUs, elsewhere the sum over the classes; None if memory was not measured."""
        if self.peak_bytes is not None:
            return self.peak_bytes
        return sum(one.bytes for one in self.memory) if self.memory else None

    def timed(self, warmup: int) -> tuple[float, ...]:
        """The seconds of the steps after the first `warmup`; the first step has none."""
        return self.seconds[max(0, warmup - 1) :]
