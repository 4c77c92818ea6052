"""`amp.step_times()`: where the time of iterations goes, measured at the doors that amp has anyway."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from amp_engine.engine import Engine
from amp_engine.errors import AmpStateError
from amp_engine.telemetry.records import Phase, Times

BACKWARD, SCALE_LOSS, STEP, OTHER = "backward", "scale_loss", "step", "other"
_WHAT = {
    BACKWARD: "the bodies of scale_loss",
    SCALE_LOSS: "amp's: entries and exits of scale_loss, where gradients are unscaled and checked",
    STEP: "optimizer.step(), amp's part and the update itself",
    OTHER: "forward, data, zero_grad and all else",
}


class Clock(Protocol):
    """Tells the time on the host, and on a GPU."""

    def now(self) -> Any:
        """A mark of this moment."""

    def between(self, start: Any, end: Any) -> tuple[float, float | None]:
        """Seconds on the host, and on the device: None where that is none. May wait for the device."""


class SystemClock:
    """time.perf_counter, and CUDA events on the current stream of the current device, once a GPU is in use."""

    def now(self) -> tuple[float, torch.cuda.Event | None]:
        """A mark of this moment; on a GPU of when its stream gets here. No host sync."""
        event = None
        if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        return time.perf_counter(), event

    def between(self, start: Any, end: Any) -> tuple[float, float | None]:
        """Seconds on the host, and on the GPU or None. Waits for the later event."""
        device = None
        if start[1] is not None and end[1] is not None:
            end[1].synchronize()
            device = start[1].elapsed_time(end[1]) / 1000.0  # milliseconds
        return end[0] - start[0], device


class StepTimes:
    """What iterations inside of `with amp.step_times() as times:` spent where: what part of them is amp's.

    Seconds on the host, and on the GPU of the current device: in the bodies of `scale_loss`, its entries and exits, and
    `optimizer.step()`. `str(times)` is a table, `amp.receipt(times=times)` has it. Outside of the `with` nothing is
    measured: hooks are on the optimizers, and a clock is around each `scale_loss`, only inside. That costs some
    microseconds an iteration. Waits for the device at the end, and nowhere else.

    Args:
        engine: whose `scale_loss` and optimizers; those that are initialized inside of it are not seen.
        clock: tells the time.

    Raises AmpStateError where one is measuring already.
    """

    def __init__(self, engine: Engine, clock: Clock | None = None) -> None:
        self._engine = engine
        self._clock: Clock = clock or SystemClock()
        self._marks: list[tuple[str, Any, Any]] = []
        self._handles: list[RemovableHandle] = []
        self._opened: dict[int, Any] = {}  # by id of an optimizer in its step
        self._start: Any = None
        self._times = Times(0, ())

    def __enter__(self) -> StepTimes:
        backwards = self._engine.backwards
        if backwards.around is not None:
            raise AmpStateError("amp.step_times() is measuring already.  Leave its `with` before the next one.")
        self._marks.clear()
        for optimizer in self._engine._initialized.optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._before_step))
            self._handles.append(optimizer.register_step_post_hook(self._after_step))
        backwards.around = self._around
        self._start = self._clock.now()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end = self._clock.now()
        self._engine.backwards.around = None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._opened.clear()
        self._times = self._summed(end)
        self._marks.clear()

    def measured(self) -> Times:
        """Seconds by phase, of the last `with`; empty before its end."""
        return self._times

    def __str__(self) -> str:
        if not self._times.phases:
            return "Nothing is measured yet.  Leave `with amp.step_times() as times:` first."
        lines = [
            f"{phase.name:<10}  {100 * self._times.share(phase):5.1f} %  {phase.host_seconds:10.4f} s  {phase.what}"
            for phase in self._times.phases
        ]
        return "\n".join([f"{self._times.steps} steps", *lines])

    def __repr__(self) -> str:
        return str(self)

    def _summed(self, end: Any) -> Times:
        sums: dict[str, list[float]] = {name: [0.0, 0.0] for name in (SCALE_LOSS, BACKWARD, STEP)}
        total, on_device = self._clock.between(self._start, end)
        for name, begin, finish in self._marks:
            host, device = self._clock.between(begin, finish)
            sums[name][0] += host
            sums[name][1] += device or 0.0
        host_rest = total - sum(host for host, _ in sums.values())
        device_rest = None if on_device is None else on_device - sum(device for _, device in sums.values())
        phases = [Phase(n, _WHAT[n], host, None if on_device is None else device) for n, (host, device) in sums.items()]
        steps = sum(name == STEP for name, _, _ in self._marks)
        return Times(steps, (*phases, Phase(OTHER, _WHAT[OTHER], host_rest, device_rest)))

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._engine.backwards.evidence.is_rehearsal:
            self._opened[id(optimizer)] = self._clock.now()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        start = self._opened.pop(id(optimizer), None)
        if start is not None:
            self._marks.append((STEP, start, self._clock.now()))

    def _around(self, backward: AbstractContextManager[Tensor]) -> AbstractContextManager[Tensor]:
        return _Around(backward, self._clock, self._marks)


class _Around:
    """The body of one `scale_loss`, with marks before and after its entry, its body and its exit."""

    def __init__(self, inner: AbstractContextManager[Tensor], clock: Clock, marks: list[tuple[str, Any, Any]]) -> None:
        self._inner, self._clock, self._marks = inner, clock, marks
        self._entered: Any = None

    def __enter__(self) -> Tensor:
        start = self._clock.now()
        loss = self._inner.__enter__()
        self._entered = self._clock.now()
        self._marks.append((SCALE_LOSS, start, self._entered))
        return loss

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        left = self._clock.now()
        self._marks.append((BACKWARD, self._entered, left))
        self._inner.__exit__(kind, error, trace)
        self._marks.append((SCALE_LOSS, left, self._clock.now()))
