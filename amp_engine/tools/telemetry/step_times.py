"""`amp.step_times()`: measures the time of iterations by phase, at `scale_loss` and at steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from amp_engine.engine import Engine
from amp_engine.errors import AmpStateError
from amp_engine.tools.page.page import Block, Page, Paged, Sentence, Table
from amp_engine.tools.telemetry.wording import percent, plural

BACKWARD, SCALE_LOSS, STEP, OTHER = "backward", "scale_loss", "step", "other"
_WHAT = {
    SCALE_LOSS: "amp's: entries and exits of scale_loss, where gradients are unscaled and checked",
    BACKWARD: "the bodies of scale_loss",
    STEP: "optimizer.step(), amp's part and the update itself",
    OTHER: "forward, data, zero_grad and all else",
}


@dataclass(frozen=True)
class Phase:
    """A part of the iterations that `amp.step_times()` measured.

    Attributes:
        name: "backward", "scale_loss", "step" or "other".
        what: its contents, in words.
        host_seconds: seconds on the host.
        device_seconds: seconds between the CUDA events around it; None without a GPU.
    """

    name: str
    what: str
    host_seconds: float
    device_seconds: float | None


@dataclass(frozen=True)
class Times:
    """The time of iterations, by phase.

    Attributes:
        steps: number of calls of `optimizer.step()`.
        phases: the phases, which add up to the whole time.
    """

    steps: int
    phases: tuple[Phase, ...]

    def share(self, phase: Phase) -> float:
        """The share of a phase, 0 to 1, in the device's time if it was measured, else in the host's."""
        on_device = all(p.device_seconds is not None for p in self.phases)
        seconds = [(p.device_seconds or 0.0) if on_device else p.host_seconds for p in self.phases]
        return seconds[self.phases.index(phase)] / total if (total := sum(seconds)) > 0 else 0.0


def now() -> tuple[float, torch.cuda.Event | None]:
    """The time on the host, and an event on the current stream if a GPU is in use. No host sync."""
    event = None
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        event = torch.cuda.Event(enable_timing=True)
        event.record()
    return time.perf_counter(), event


def seconds_between(start: Any, end: Any) -> tuple[float, float | None]:
    """Seconds on the host, and on the GPU (None without events). Waits for the later event."""
    device = None
    if start[1] is not None and end[1] is not None:
        end[1].synchronize()
        device = start[1].elapsed_time(end[1]) / 1000.0  # milliseconds
    return end[0] - start[0], device


def elapsed(start: Any, end: Any) -> float:
    """Seconds on the GPU where there is one, else on the host. Waits for the later event."""
    host, device = seconds_between(start, end)
    return host if device is None else device


class StepTimes(Paged):
    """Measures how much of the iterations inside of `with amp.step_times() as times:` is spent in amp.

    Measures seconds on the host, and on the current GPU: in the bodies of `scale_loss`, in its entries and exits, and
    in `optimizer.step()`. `str(times)` is a table; `amp.receipt(times=times)` includes it. The hooks on optimizers and
    the clocks around `scale_loss` exist only inside of the `with`, and cost some microseconds an iteration. Optimizers
    that are initialized inside are not measured. Waits for the device only at the end.

    Raises AmpStateError if another StepTimes is measuring already.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._marks: list[tuple[str, Any, Any]] = []
        self._moments: dict[int, Any] = {}  # the last one, by id of a `scale_loss` context or optimizer
        self._undo: list[Callable[[], None]] = []
        self._start: Any = None
        self._times = Times(0, ())

    def __enter__(self) -> StepTimes:
        events = self._engine.records.events
        if events.entering.observers:
            raise AmpStateError("amp.step_times() is measuring already.  Leave its `with` before the next one.")
        self._marks.clear()
        for optimizer in self._engine.records.optimizers:
            self._undo.append(optimizer.register_step_pre_hook(self._before_step).remove)
            after = optimizer.register_step_post_hook(lambda optimizer, args, kwargs: self._end(STEP, optimizer))
            self._undo.append(after.remove)
        self._undo += [
            events.entering.subscribe(self._begin),
            events.entered.subscribe(lambda context, backward, loss: self._mark(SCALE_LOSS, context)),
            events.leaving.subscribe(lambda context: self._mark(BACKWARD, context)),
            events.left.subscribe(lambda context: self._end(SCALE_LOSS, context)),
        ]
        self._start = now()
        return self

    def __exit__(self, *error: object) -> None:
        end = now()
        for undo in self._undo:
            undo()
        self._undo.clear()  # they refer to this object
        self._moments.clear()
        self._times = self._summed(end)
        self._marks.clear()

    def measured(self) -> Times:
        """Seconds by phase of the last `with`; empty before its end."""
        return self._times

    def _page(self) -> Page:
        if not self._times.phases:
            return Page.of(Sentence("Nothing is measured yet.  Leave `with amp.step_times() as times:` first."))
        return Page.of(*blocks(self._times))

    def _summed(self, end: Any) -> Times:
        hosts, devices = dict.fromkeys(_WHAT, 0.0), dict.fromkeys(_WHAT, 0.0)
        total, on_device = seconds_between(self._start, end)
        for name, begin, finish in self._marks:
            host, device = seconds_between(begin, finish)
            hosts[name] += host
            devices[name] += device or 0.0
        hosts[OTHER] = total - sum(hosts.values())
        devices[OTHER] = (on_device or 0.0) - sum(devices.values())
        phases = [Phase(n, what, hosts[n], None if on_device is None else devices[n]) for n, what in _WHAT.items()]
        return Times(sum(name == STEP for name, _, _ in self._marks), tuple(phases))

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._engine.records.is_rehearsal:
            self._begin(optimizer)

    def _begin(self, one: object) -> None:
        self._moments[id(one)] = now()

    def _mark(self, phase: str, one: object) -> None:
        """End a phase, and begin the next one; ignores a phase that began outside of the `with`."""
        start = self._moments.get(id(one))
        if start is not None:
            self._begin(one)
            self._marks.append((phase, start, self._moments[id(one)]))

    def _end(self, phase: str, one: object) -> None:
        self._mark(phase, one)
        self._moments.pop(id(one), None)


def blocks(times: Times) -> Sequence[Block]:
    """A row for each phase: its share, and its seconds on each clock."""
    clocks = ["host", "device"] if all(p.device_seconds is not None for p in times.phases) else ["host"]
    rows = [
        (p.name, percent(times.share(p)), *[f"{getattr(p, f'{clock}_seconds'):.3g} s" for clock in clocks], p.what)
        for p in times.phases
    ]
    table = Table(rows, ("part", "share", *clocks, "what"), numbers=range(1, 2 + len(clocks)))
    return Sentence(f"Of {plural(times.steps, 'step')}:"), table


def step_times(engine: Engine) -> StepTimes:  # noqa: D103
    return StepTimes(engine)


step_times.__doc__ = StepTimes.__doc__
