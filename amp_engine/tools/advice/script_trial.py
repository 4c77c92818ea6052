"""Begins a trial in the process of a script that uses amp or not."""

from __future__ import annotations

import atexit
import gc
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from amp_engine import amp
from amp_engine.casting.patches import Patches
from amp_engine.errors import AmpGradientWarning
from amp_engine.tools.advice.records import Task
from amp_engine.tools.advice.script_steps import ScriptSteps, models_of, say_refusals
from amp_engine.tools.advice.trial import TrialEngine


def begin(task: Mapping[str, Any]) -> None:
    """Make a TrialEngine the current engine of this process; `task` has the fields of a Task."""
    say_refusals()
    engine = TrialEngine(Task(**task))
    amp.replace_engine(engine)
    PlainScript(engine)
    atexit.register(engine.write)


class PlainScript:
    """Lets an engine initialize a script's model and optimizer after their first step, and scale its losses.

    Leaves scripts alone that call `initialize` themselves, or import apex. Gives up on scripts that have several models
    or optimizers, or use torch.amp.
    """

    def __init__(self, engine: TrialEngine) -> None:
        self._engine = engine
        self._optimizer: Optimizer | None = None  # the one that the engine initialized
        self._optimizer_of_calls: Optimizer | None = None  # the same, but None during the engine's own calls
        self._has_autocast = False
        self._steps = ScriptSteps(self._before_step, self._after_step)
        self._forwards = nn.modules.module.register_module_forward_pre_hook(self._before_forward)
        self._backward, self._clip = torch.autograd.backward, clip_grad.clip_grad_norm_
        self._patches = Patches()
        self._patches.set(torch.autograd, "backward", self._scaled_backward)
        for module in (clip_grad, nn.utils):
            self._patches.set(module, "clip_grad_norm_", self._clip_grad_norm_)

    def end(self) -> None:
        """Remove the hooks and the patches of torch."""
        self._steps.end()
        self._forwards.remove()
        self._patches.undo()

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        self._has_autocast |= any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))

    def _before_step(self, optimizer: Optimizer) -> None:
        self._forwards.remove()

    def _after_step(self, optimizer: Optimizer) -> None:
        if self._optimizer is None and self._engine.asked is None and "apex" not in sys.modules:
            models = models_of(optimizer)
            obstacle = self._obstacle(models)
            if obstacle is not None:
                self._engine.give_up(obstacle)
            self._optimizer = self._optimizer_of_calls = optimizer
            # Writes that masters take rounded would make the losses of a level differ.
            warnings.filterwarnings("error", category=AmpGradientWarning)
            self._engine.initialize_plain(models[0], optimizer)
        elif self._optimizer is not None and optimizer is not self._optimizer:
            names = " and ".join(sorted(type(one).__name__ for one in (self._optimizer, optimizer)))
            self._engine.give_up(f"it steps several optimizers, {names}")

    def _obstacle(self, models: list[nn.Module]) -> str | None:
        gc.collect()  # frees unreachable scalers
        scalers = [one for one in gc.get_objects() if issubclass(type(one), torch.amp.GradScaler)]
        if self._has_autocast or any(scaler.is_enabled() for scaler in scalers):
            return "it uses torch.amp: docs/from_torch_amp.md has what to write in its place"
        if len(models) != 1:
            names = ", ".join(type(model).__name__ for model in models) or "none"
            return f"its optimizer steps parameters of {len(models)} models ({names}), and one is expected"
        return None

    def _scaled_backward(self, tensors: Any, grad_tensors: Any = None, *args: Any, **keywords: Any) -> None:
        is_loss = isinstance(tensors, Tensor) and tensors.numel() == 1 and grad_tensors is None
        with self._inside() as optimizer:
            if optimizer is None or not is_loss:
                self._backward(tensors, grad_tensors, *args, **keywords)
                return
            with self._engine.scale_loss(tensors, optimizer) as scaled_loss:
                self._backward(scaled_loss, None, *args, **keywords)

    def _clip_grad_norm_(self, parameters: Any, max_norm: float, *args: Any, **keywords: Any) -> Tensor:
        with self._inside() as optimizer:
            if optimizer is None:
                return self._clip(parameters, max_norm, *args, **keywords)
            keywords.pop("foreach", None)
            return self._engine.clip_grad_norm_(parameters, max_norm, *args[:2], **keywords)

    @contextmanager
    def _inside(self) -> Iterator[Optimizer | None]:
        """Yield the engine's optimizer; None without one, and in calls that the engine itself makes."""
        optimizer, self._optimizer_of_calls = self._optimizer_of_calls, None
        try:
            yield optimizer
        finally:
            self._optimizer_of_calls = optimizer
