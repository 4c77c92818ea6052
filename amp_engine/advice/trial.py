"""An engine that runs a script at another level than its own, records what it sees, and ends it after some steps."""

from __future__ import annotations

import atexit
import inspect
import os
import pickle
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from amp_engine import amp
from amp_engine.advice.fitting import fitted
from amp_engine.advice.records import Dropped, Task, Trial
from amp_engine.engine import Engine
from amp_engine.ground.dtypes import LOW_PRECISION
from amp_engine.levels.policy import Policy
from amp_engine.stepping.pending import Pending
from amp_engine.telemetry.magnitudes import MagnitudeCounter
from amp_engine.telemetry.receipt import memory
from amp_engine.telemetry.records import Memory
from amp_engine.telemetry.step_times import Clock, SystemClock
from amp_engine.telemetry.wording import dtype_name

COUNTED_STEPS = 3
"""Of how many of the last steps gradients are counted."""

PERTURBATION = 2.0**-11
"""How far rounding to float16 moves a weight at most, relative to it: half a unit in the last of 11 bits."""

_MEASURED_STEP = 2  # memory is looked at in it, when optimizers have their state, and again in the last
_SIGNATURE = inspect.signature(Engine.initialize)


def begin(task: Mapping[str, Any]) -> None:
    """Make the current engine one that does `task`, the fields of a Task, in this process."""
    told = Task(**task)
    engine = TrialEngine(told, lambda trial: _write(trial, told.path))
    amp.replace_engine(engine)
    atexit.register(engine.write)


class TrialEngine(Engine):
    """The engine of a trial.

    Args:
        task: what to do.
        write: takes the trial: once its last step is done, or when `write` is called before.
        clock: tells the time of steps.
        now: as `time.monotonic`.
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
        self._seen = _Seen(task, clock or SystemClock())

    def initialize(self, *args: Any, **keywords: Any) -> Any:
        """As Engine's, at the level of the trial, without what does not fit it."""
        self._leave_if_over()
        if self._seen.first() is None:  # nothing was initialized yet, or that training is over
            self._seen.closing(self)
        passed = dict(_SIGNATURE.bind(self, *args, **keywords).arguments)
        passed.pop("self")
        arguments, dropped, asked = fitted(passed, self._task.level)
        result = super().initialize(**arguments)
        self._seen.initialized(self, asked, dropped)
        if self._initialized.optimizers and self._seen.first() is None:
            first = self._initialized.optimizers[0]
            self._seen.first = weakref.ref(first)
            self._seen.handle = first.register_step_post_hook(self._after_step)
        return result

    def scale_loss(self, loss: Tensor, *args: Any, **keywords: Any) -> AbstractContextManager[Tensor]:
        """As Engine's; the loss is written down."""
        self._leave_if_over()
        backward = super().scale_loss(loss, *args, **keywords)
        self._seen.loss(loss)
        return _Backward(backward, lambda: self._seen.after_backward(self)) if self._seen.looks_next else backward

    def close(self) -> None:
        """As Engine's; what goes with it is written down before."""
        self._seen.closing(self)
        super().close()

    def write(self) -> None:
        """Write down what was seen, unless that was done. Waits for the device."""
        if not self._seen.is_over and os.getpid() == self._seen.process:
            self._seen.is_over = True
            self._write(self._seen.trial(self))

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._leave_if_over()
        if os.getpid() != self._seen.process:  # in a child that was forked from it
            return
        self._seen.step(self)
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
    """What a trial has seen by now."""

    def __init__(self, task: Task, clock: Clock) -> None:
        self.process = os.getpid()
        self.is_over = False
        self.out_of_time = False
        self.first: Callable[[], Optimizer | None] = lambda: None  # whose steps are counted, as long as it lives
        self.handle: RemovableHandle | None = None  # of the hook on it
        self._task, self._clock = task, clock
        self._asked: str | None = None
        self._policy: Policy | None = None
        self._dropped: list[Dropped] = []
        self._losses: list[list[Tensor]] = [[]]  # by step, the last one is not over
        self._ends: list[Any] = []
        self._own: list[list[tuple[Any, Any]]] = [[]]  # by step: beginning and end of what the trial itself did
        self._measured = _Measured()
        self._gradients = MagnitudeCounter()

    @property
    def steps(self) -> int:
        """How many are over."""
        return len(self._ends)

    @property
    def looks_next(self) -> bool:
        """Whether something is looked at after the next backward."""
        return self._counts_next or self.steps + 1 in (_MEASURED_STEP, self._task.steps)

    @property
    def _counts_next(self) -> bool:
        return self._task.perturb and self.steps >= self._task.steps - COUNTED_STEPS

    def initialized(self, engine: Engine, asked: str, dropped: list[Dropped]) -> None:
        self._asked, self._policy = asked, engine.policy
        self._measured.begin(engine)
        self._dropped += [one for one in dropped if one not in self._dropped]

    def loss(self, loss: Tensor) -> None:
        self._losses[-1].append(loss.detach().float().mean())

    def after_backward(self, engine: Engine) -> None:
        begin = self._clock.now()
        if self.steps + 1 in (_MEASURED_STEP, self._task.steps):
            self._measured.look(engine)
        if self._counts_next:
            params = {id(p): p for one in engine._initialized.stepped for p in one.rows.columns.params}
            self._gradients.add(p.grad for p in params.values() if p.grad is not None)
        self._own[-1].append((begin, self._clock.now()))

    def step(self, engine: Engine) -> None:
        self._ends.append(self._clock.now())
        self._own.append([])
        self._losses.append([])
        if self._task.perturb and self.steps == 1:
            begin = self._clock.now()
            perturb(engine._initialized.models, self._task.seed)
            self._own[-1].append((begin, self._clock.now()))

    def closing(self, engine: Engine) -> None:
        self.first = lambda: None
        if self.handle is not None:
            self.handle.remove()
        self._measured.keep(engine)
        self._measured.end()

    def trial(self, engine: Engine) -> Trial:
        self._measured.keep(engine)
        counted = self._gradients.read()
        measured, policy = self._measured, self._policy
        on_gpu = torch.cuda.is_initialized()
        peaks = [torch.cuda.max_memory_allocated(i) for i in range(torch.cuda.device_count())] if on_gpu else []
        return Trial(
            self._task.level,
            self._asked,
            tuple(tuple(float(loss) for loss in losses) for losses in self._losses[: self.steps]),
            tuple(self._seconds()),
            measured.skips,
            None if policy is None else _low_precision(policy),
            measured.loss_scales,
            measured.dynamic,
            measured.memory,
            sum(peaks) or None,
            counted if counted.total else None,
            tuple(self._dropped),
            measured.machine,
            self.out_of_time,
        )

    def _seconds(self) -> list[float]:
        def between(begin: Any, end: Any) -> float:
            host, device = self._clock.between(begin, end)
            return host if device is None else device

        pairs = zip(self._ends, self._ends[1:], self._own[1:], strict=False)
        return [between(before, end) - sum(between(*one) for one in own) for before, end, own in pairs]


class _Measured:
    """What an engine knows, kept beyond its `close`, and beyond models and optimizers, which it holds weakly."""

    def __init__(self) -> None:
        self.skips = 0
        self.loss_scales: tuple[float, ...] = ()
        self.dynamic = False
        self.memory: tuple[Memory, ...] = ()
        self.machine = ""
        self._skips_before = 0  # the last `close`
        self._pendings: list[Pending] = []

    def begin(self, engine: Engine) -> None:
        """Something was initialized."""
        self._pendings = [one.pending for one in engine._initialized.stepped]
        self._look_at_device(engine)

    def look(self, engine: Engine) -> None:
        """At memory: the gradients are there now."""
        self.memory = memory.described(engine)
        self._look_at_device(engine)

    def keep(self, engine: Engine) -> None:
        """Skips and scales. Waits for the device."""
        for pending in self._pendings:
            pending.hear(wait=True)
        self.skips = self._skips_before + max((pending.skips for pending in self._pendings), default=0)
        if engine.policy is not None and engine.scalers:
            self.loss_scales = tuple(scaler.loss_scale() for scaler in engine.scalers)
            self.dynamic = any(scaler.dynamic for scaler in engine.scalers)

    def end(self) -> None:
        """All of it is released."""
        self._skips_before, self._pendings = self.skips, []

    def _look_at_device(self, engine: Engine) -> None:
        device = next((p.device for model in engine._initialized.models for p in model.parameters()), None)
        if device is not None:
            self.machine = machine(device)


class _Backward:
    """The context of one `scale_loss`, and something to do after it."""

    def __init__(self, inner: AbstractContextManager[Tensor], after: Callable[[], None]) -> None:
        self._inner, self._after = inner, after

    def __enter__(self) -> Tensor:
        return self._inner.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        result = self._inner.__exit__(kind, error, trace)
        if kind is None:
            self._after()
        return result


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
    threads = torch.get_num_threads()
    counted = f"{threads} thread{'' if threads == 1 else 's'}"
    return f"{_cpu_name()}, {torch.backends.cpu.get_cpu_capability()}, {counted}"


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else "CPU"


def _low_precision(policy: Policy) -> str | None:
    for dtype in (policy.patch_torch_functions_type, policy.cast_model_type):
        if isinstance(dtype, torch.dtype) and dtype in LOW_PRECISION:
            return dtype_name(dtype)
    return None


def _write(trial: Trial, path: str) -> None:
    """Whole or not at all: who runs the script looks for the file while the script may still be running."""
    with open(f"{path}.part", "wb") as file:
        pickle.dump(trial, file)
    os.replace(f"{path}.part", path)
