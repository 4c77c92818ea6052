"""An engine that runs a script at the level of a trial, records it, and ends it after some steps."""

from __future__ import annotations

import atexit
import inspect
import os
import pickle
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from amp_engine import amp
from amp_engine.advice.fitting import fitted
from amp_engine.advice.records import Dropped, Task, Trial
from amp_engine.engine import Engine
from amp_engine.stepping.pending import Pending
from amp_engine.telemetry.magnitudes import MagnitudeCounter
from amp_engine.telemetry.receipt import memory
from amp_engine.telemetry.records import Memory
from amp_engine.telemetry.step_times import Clock, SystemClock
from amp_engine.telemetry.wording import dtype_name, plural

COUNTED_STEPS = 3
"""Of how many of the last steps gradients are counted."""

PERTURBATION = 2.0**-11
"""How far rounding to float16 moves a weight at most, relative to it: half a unit in the last of 11 bits."""

_MEASURED_STEP = 2  # memory is looked at in it, when optimizers have their state, and again in the last
_SIGNATURE = inspect.signature(Engine.initialize)


def begin(task: Mapping[str, Any]) -> None:
    """Have the current engine of this process do a task, given as the fields of a Task."""
    told = Task(**task)
    engine = TrialEngine(told, lambda trial: _write(trial, told.path))
    amp.replace_engine(engine)
    atexit.register(engine.write)


class TrialEngine(Engine):
    """The engine of a trial.

    Args:
        task: level, steps and deadline.
        write: called with the trial, once its last step is done, or when `write` is called before.
        clock: tells the time of steps.
        now: tells the time of the deadline, as `time.monotonic` does.
        exit_now: ends the process at once, where the script caught SystemExit and went on.
    """

    def __init__(
        self,
        task: Task,
        write: Callable[[Trial], None],
        clock: Clock | None = None,
        now: Callable[[], float] = time.monotonic,
        exit_now: Callable[[int], None] = os._exit,
    ) -> None:
        super().__init__()
        self._task, self._write, self._now, self._exit_now = task, write, now, exit_now
        self._seen = _Seen(self, task, clock or SystemClock())

    def initialize(self, *args: Any, **keywords: Any) -> Any:
        """Initialize at the level of the trial, without the arguments that do not fit it."""
        self._leave_if_over()
        if self._seen.first() is None:  # nothing was initialized yet, or that training is over
            self._seen.closing()
        passed = dict(_SIGNATURE.bind(self, *args, **keywords).arguments)
        passed.pop("self")
        arguments, dropped, asked = fitted(passed, self._task.level)
        result = super().initialize(**arguments)
        self._seen.initialized(asked, dropped)
        if self._initialized.optimizers and self._seen.first() is None:
            first = self._initialized.optimizers[0]
            self._seen.first = weakref.ref(first)
            self._seen.handle = first.register_step_post_hook(self._after_step)
        return result

    def scale_loss(self, loss: Tensor, *args: Any, **keywords: Any) -> AbstractContextManager[Tensor]:
        """Record the loss, and scale it."""
        self._leave_if_over()
        backward = super().scale_loss(loss, *args, **keywords)
        self._seen.loss(loss)
        return self._seen.looking_after(backward) if self._seen.looks_next else backward

    def close(self) -> None:
        """Record scales and skips, and close."""
        self._seen.closing()
        super().close()

    def write(self) -> None:
        """Write the trial, unless it was written. Waits for the device."""
        if not self._seen.is_over and os.getpid() == self._seen.process:
            self._seen.is_over = True
            self._write(self._seen.trial())

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._leave_if_over()
        if os.getpid() != self._seen.process:  # in a child that was forked from it
            return
        self._seen.step()
        is_late = self._now() >= self._task.deadline
        if is_late or self._seen.steps >= self._task.steps:
            self._seen.out_of_time = self._seen.steps < self._task.steps
            self.write()
            raise SystemExit(0)

    def _leave_if_over(self) -> None:
        """End the process of a script that caught SystemExit and goes on."""
        if self._seen.is_over and os.getpid() == self._seen.process:
            sys.stdout.flush()
            sys.stderr.flush()
            self._exit_now(0)


class _Seen:
    """The record of a trial. It outlives `close`, and models and optimizers, which the engine holds weakly."""

    def __init__(self, engine: Engine, task: Task, clock: Clock) -> None:
        self.process = os.getpid()
        self.is_over = False
        self.out_of_time = False
        self.first: Callable[[], Optimizer | None] = lambda: None  # whose steps are counted, as long as it lives
        self.handle: RemovableHandle | None = None  # of the hook on it
        self._engine, self._task, self._clock = engine, task, clock
        self._asked: str | None = None
        self._dtype: str | None = None
        self._machine = ""
        self._dropped: list[Dropped] = []
        self._losses: list[list[Tensor]] = [[]]  # by step, the last one is not over
        self._ends: list[Any] = []
        self._own: list[list[tuple[Any, Any]]] = [[]]  # by step: beginning and end of what the trial itself did
        self._skips_before = 0  # the last `close`
        self._pendings: list[Pending] = []
        self._loss_scales: tuple[float, ...] = ()
        self._is_dynamic = False
        self._memory: tuple[Memory, ...] = ()
        self._gradients = MagnitudeCounter()

    @property
    def steps(self) -> int:
        """Number of the steps that are over."""
        return len(self._ends)

    @property
    def looks_next(self) -> bool:
        """True if something is looked at after the next backward."""
        return self._counts_next or self._measures_next

    @property
    def _counts_next(self) -> bool:
        return self._task.perturb and self.steps >= self._task.steps - COUNTED_STEPS

    @property
    def _measures_next(self) -> bool:
        return self.steps + 1 in (_MEASURED_STEP, self._task.steps)

    def initialized(self, asked: str, dropped: list[Dropped]) -> None:
        half = self._engine.policy and self._engine.policy.low_precision
        self._asked, self._dtype = asked, dtype_name(half) if half else None
        self._pendings = [one.pending for one in self._engine._initialized.stepped]
        self._look_at_device()
        self._dropped += [one for one in dropped if one not in self._dropped]

    def loss(self, loss: Tensor) -> None:
        self._losses[-1].append(loss.detach().float().mean())

    @contextmanager
    def looking_after(self, backward: AbstractContextManager[Tensor]) -> Iterator[Tensor]:
        with backward as scaled_loss:
            yield scaled_loss
        with self._doing_own():
            if self._measures_next:
                self._memory = memory.described(self._engine)
                self._look_at_device()
            if self._counts_next:
                params = {id(p): p for one in self._engine._initialized.stepped for p in one.rows.columns.params}
                self._gradients.add(p.grad for p in params.values() if p.grad is not None)

    def step(self) -> None:
        self._ends.append(self._clock.now())
        self._own.append([])
        self._losses.append([])
        if self._task.perturb and self.steps == 1:
            with self._doing_own():
                perturb(self._engine._initialized.models, self._task.seed)

    def closing(self) -> None:
        self.first = lambda: None
        if self.handle is not None:
            self.handle.remove()
        self._skips_before, self._pendings = self._hear(), []

    def trial(self) -> Trial:
        skips = self._hear()
        counted = self._gradients.read()
        on_gpu = torch.cuda.is_initialized()
        peaks = [torch.cuda.max_memory_allocated(i) for i in range(torch.cuda.device_count())] if on_gpu else []
        return Trial(
            level=self._task.level,
            asked=self._asked,
            losses=tuple(tuple(float(loss) for loss in losses) for losses in self._losses[: self.steps]),
            seconds=tuple(self._seconds()),
            skips=skips,
            dtype=self._dtype,
            loss_scales=self._loss_scales,
            dynamic=self._is_dynamic,
            memory=self._memory,
            peak_bytes=sum(peaks) or None,
            gradients=counted if counted.total else None,
            dropped=tuple(self._dropped),
            machine=self._machine,
            out_of_time=self.out_of_time,
        )

    def _hear(self) -> int:
        """Count all skips so far, and keep the scales. Waits for the device."""
        for pending in self._pendings:
            pending.hear(wait=True)
        if self._engine.policy is not None and self._engine.scalers:
            self._loss_scales = tuple(scaler.loss_scale() for scaler in self._engine.scalers)
            self._is_dynamic = any(scaler.dynamic for scaler in self._engine.scalers)
        return self._skips_before + max((pending.skips for pending in self._pendings), default=0)

    def _look_at_device(self) -> None:
        models = self._engine._initialized.models
        device = next((p.device for model in models for p in model.parameters()), None)
        if device is not None:
            self._machine = machine(device)

    @contextmanager
    def _doing_own(self) -> Iterator[None]:
        begin = self._clock.now()
        yield
        self._own[-1].append((begin, self._clock.now()))

    def _seconds(self) -> list[float]:
        def between(begin: Any, end: Any) -> float:
            host, device = self._clock.between(begin, end)
            return host if device is None else device

        pairs = zip(self._ends, self._ends[1:], self._own[1:], strict=False)
        return [between(before, end) - sum(between(*one) for one in own) for before, end, own in pairs]


@torch.no_grad()
def perturb(models: list[nn.Module], seed: int) -> None:
    """Multiply each floating parameter by 1 + 2^-11 * uniform(-1, 1), with random numbers of its own. No host sync."""
    generators: dict[torch.device, torch.Generator] = {}
    for p in {id(p): p for model in models for p in model.parameters() if p.is_floating_point()}.values():
        generator = generators.get(p.device)
        if generator is None:
            generator = generators[p.device] = torch.Generator(p.device).manual_seed(seed + 1)
        p.mul_(1 + PERTURBATION * (2 * torch.rand(p.shape, device=p.device, generator=generator) - 1))


def machine(device: torch.device) -> str:
    """A device in words: "NVIDIA H100, sm_90", "Intel Xeon, AVX512, 2 threads"."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)}, sm_{major}{minor}"
    if device.type != "cpu":
        return str(device.type)
    return f"{_cpu_name()}, {torch.backends.cpu.get_cpu_capability()}, {plural(torch.get_num_threads(), 'thread')}"


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else "CPU"


def _write(trial: Trial, path: str) -> None:
    """Write the file whole or not at all: it may be looked for at any time."""
    with open(f"{path}.part", "wb") as file:
        pickle.dump(trial, file)
    os.replace(f"{path}.part", path)
