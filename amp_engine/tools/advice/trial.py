"""An engine that runs a script at the level of a trial, records the trial, and ends the script after some steps."""

from __future__ import annotations

import dataclasses
import inspect
import os
import pickle
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from time import monotonic
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from amp_engine.casting.forward_casts import casts_of
from amp_engine.engine import Engine
from amp_engine.ground.dtypes import cpu_lacks, dtype_name, is_low_precision
from amp_engine.stepping.pending import Pending
from amp_engine.tools.advice.fitting import fitted
from amp_engine.tools.advice.records import OWN, Task, Trial
from amp_engine.tools.telemetry import step_times
from amp_engine.tools.telemetry.magnitudes import MagnitudeCounter
from amp_engine.tools.telemetry.receipt import memory
from amp_engine.tools.telemetry.wording import plural

COUNTED_STEPS = 3
"""Gradients are counted in this many of the last steps."""

PERTURBATION = 2.0**-11
"""The largest relative change of a weight by rounding to float16: half a unit in the last of 11 bits."""

_MEASURED_STEP = 2  # memory is measured in this step, when optimizers have their state, and in the last one
_SIGNATURE = inspect.signature(Engine.initialize)


class TrialEngine(Engine):
    """The engine of a trial. Its record survives `close`, and the end of models and optimizers.

    Args:
        task: level, steps, deadline, and the file for the trial.
    """

    def __init__(self, task: Task) -> None:
        super().__init__()
        self._task = task
        self._process = os.getpid()
        self._is_over = False
        self._first: Callable[[], Optimizer | None] = lambda: None  # weak reference to the optimizer whose steps count
        self._hook: RemovableHandle | None = None  # on its steps
        self._trial = Trial(task.level)
        self._losses: list[list[Tensor]] = [[]]  # by step; the last step is in progress
        self._ends: list[Any] = []
        self._own: list[list[tuple[Any, Any]]] = [[]]  # by step: beginnings and ends of the trial's own work
        self._skips_before = 0  # skips before the last `close`
        self._pendings: list[Pending] = []
        self._gradients = MagnitudeCounter()
        self.scales_itself = False  # True once the script has called `scale_loss`
        self._memory = lambda: memory.described(self)

    def initialize(self, *args: Any, **keywords: Any) -> Any:
        """Initialize at the level of the trial, without the arguments that do not fit it."""
        self._leave_if_over()
        if self._first() is None:  # no training yet, or the last one is over
            self._let_go()
        passed = dict(_SIGNATURE.bind(self, *args, **keywords).arguments)
        passed.pop("self")
        arguments, dropped, asked = fitted(passed, self._task.level)
        result = super().initialize(**arguments)
        half = self.policy and self.policy.low_precision
        new = (one for one in dropped if one not in self._trial.dropped)
        self._note(asked=asked, dtype=dtype_name(half) if half else None, dropped=(*self._trial.dropped, *new))
        self._look_at_device(self._initialized.models)
        self._follow(self.records.optimizers[:1])
        return result

    def _follow(self, optimizers: Sequence[Optimizer]) -> None:
        """Count the steps of the first optimizer from here on, unless one is followed."""
        self._pendings = [one.pending for one in self.records.all]
        if optimizers and self._first() is None:
            self._first = weakref.ref(optimizers[0])
            self._hook = optimizers[0].register_step_post_hook(self._after_step)

    @property
    def asked(self) -> str | None:
        """The level that the script asked for; None if it has not called `initialize`."""
        return self._trial.asked

    def initialize_plain(self, model: nn.Module, optimizer: Optimizer, before: str = "") -> None:
        """Initialize for a script that does not call `initialize`; for its own run, change nothing.

        Args:
            before: what its trainer calls or makes first, in words.
        """
        half = next((p.dtype for group in optimizer.param_groups for p in group["params"] if is_low_precision(p)), None)
        came = dtype_name(half) if half else None
        if self._task.level == OWN:
            super().initialize(model, optimizer, enabled=False, verbosity=0)
            self._note(dtype=came)
            self._memory = lambda: memory.of_plain(model, optimizer)
            self._look_at_device([model], half)
            self._follow([optimizer])
        else:
            self.initialize(model, optimizer, verbosity=0)
        self._note(asked=None, came=came, before=before)

    def give_up(self, obstacle: str) -> NoReturn:
        """Record why the script cannot be tried at other levels, and end it."""
        self._leave_if_over()
        self._note(obstacle=obstacle)
        self.write()
        raise SystemExit(0)

    def scale_loss(self, loss: Tensor, *args: Any, **keywords: Any) -> AbstractContextManager[Tensor]:
        """Record the loss, and scale it as `Engine.scale_loss` does."""
        self.scales_itself = True
        return self.scale_plain(loss, *args, **keywords)

    def scale_plain(self, loss: Tensor, *args: Any, **keywords: Any) -> AbstractContextManager[Tensor]:
        """`scale_loss` for a script that calls `loss.backward()`."""
        self._leave_if_over()
        backward = super().scale_loss(loss, *args, **keywords)
        self._follow(self.records.optimizers[:1])
        self._losses[-1].append(loss.detach().float().mean())
        return self._looking_after(backward) if self._counts_next or self._measures_next else backward

    def close(self) -> None:
        """Record scales and skips, and close."""
        self._let_go()
        super().close()

    def write(self) -> None:
        """Write the trial, unless it is already written. Waits for the device."""
        if self._is_over or os.getpid() != self._process:
            return
        self._is_over = True
        counted = self._gradients.read()
        on_gpu = torch.cuda.is_initialized()
        peaks = [torch.cuda.max_memory_allocated(i) for i in range(torch.cuda.device_count())] if on_gpu else []
        casts = [one for model in self._initialized.models if (one := casts_of(model)) is not None]
        self._note(
            inputs=tuple(said for one in casts for said in one.of_model.said.values()),
            losses=tuple(tuple(float(loss) for loss in losses) for losses in self._losses[: self._steps]),
            seconds=tuple(self._seconds()),
            skips=self._hear(),
            peak_bytes=sum(peaks) or None,
            gradients=counted if counted.total else None,
        )
        _write(self._trial, self._task.path)

    @property
    def _steps(self) -> int:
        """Number of completed steps."""
        return len(self._ends)

    @property
    def _counts_next(self) -> bool:
        return self._task.perturb and self._steps >= self._task.steps - COUNTED_STEPS

    @property
    def _measures_next(self) -> bool:
        return self._steps + 1 in (_MEASURED_STEP, self._task.steps)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._leave_if_over()
        if os.getpid() != self._process:  # in a forked child
            return
        self._ends.append(step_times.now())
        self._own.append([])
        self._losses.append([])
        if self._task.perturb and self._steps == 1:
            with self._doing_own():
                perturb(self._initialized.models, self._task.seed)
        is_late = monotonic() >= self._task.deadline
        if is_late or self._steps >= self._task.steps:
            self._note(out_of_time=self._steps < self._task.steps)
            self.write()
            raise SystemExit(0)

    def _leave_if_over(self) -> None:
        """End the process of a script that caught SystemExit and continues."""
        if self._is_over and os.getpid() == self._process:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    @contextmanager
    def _looking_after(self, backward: AbstractContextManager[Tensor]) -> Iterator[Tensor]:
        with backward as scaled_loss:
            yield scaled_loss
        with self._doing_own():
            if self._measures_next:
                self._note(memory=self._memory())
                self._look_at_device(self._initialized.models)
            if self._counts_next:
                for p in self._initialized.stepped_params():
                    if p.grad is not None:
                        self._gradients.add(p.grad)

    def _let_go(self) -> None:
        self._first = lambda: None
        if self._hook is not None:
            self._hook.remove()
        self._skips_before, self._pendings = self._hear(), []

    def _hear(self) -> int:
        """Count all skips so far, and keep the scales. Waits for the device."""
        for pending in self._pendings:
            pending.hear(wait=True)
        if self.policy is not None and self.scalers:
            scales = tuple(scaler.loss_scale() for scaler in self.scalers)
            self._note(loss_scales=scales, dynamic=any(scaler.dynamic for scaler in self.scalers))
        return self._skips_before + max((pending.skips for pending in self._pendings), default=0)

    def _look_at_device(self, models: Sequence[nn.Module], half: torch.dtype | None = None) -> None:
        device = next((p.device for model in models for p in model.parameters()), None)
        if device is not None:
            half = half or (self.policy.low_precision if self.policy is not None else None)
            lacks = cpu_lacks(half) if half and device.type == "cpu" else None
            self._note(machine=machine(device), lacks=lacks)

    def _note(self, **found: Any) -> None:
        self._trial = dataclasses.replace(self._trial, **found)

    @contextmanager
    def _doing_own(self) -> Iterator[None]:
        begin = step_times.now()
        yield
        self._own[-1].append((begin, step_times.now()))

    def _seconds(self) -> list[float]:
        elapsed, pairs = step_times.elapsed, zip(self._ends, self._ends[1:], self._own[1:], strict=False)
        return [elapsed(before, end) - sum(elapsed(*one) for one in own) for before, end, own in pairs]


@torch.no_grad()
def perturb(models: list[nn.Module], seed: int) -> None:
    """Multiply each floating parameter by 1 + 2^-11 * uniform(-1, 1), from its own generators. No host sync."""
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
    """Write the file atomically, because another process polls for it."""
    with open(f"{path}.part", "wb") as file:
        pickle.dump(trial, file)
    os.replace(f"{path}.part", path)
