"""Begins a trial in the process of a script, with or without amp."""

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
from amp_engine.advice.records import Task
from amp_engine.advice.script_steps import ScriptSteps, models_of
from amp_engine.advice.trial import TrialEngine
from amp_engine.casting.patches import Patches
from amp_engine.errors import AmpGradientWarning


def begin(task: Mapping[str, Any]) -> None:
    """Have the current engine of this process do a task, given as the fields of a Task."""
    engine = TrialEngine(Task(**task))
    amp.replace_engine(engine)
    PlainScript(engine)
    atexit.register(engine.write)


class PlainScript:
    """Has an engine initialize the model and the optimizer of a script after their first step, and scale its losses.

    A script that calls `initialize` itself, or imports apex, is left alone. The engine gives up one that has several
    models or optimizers, or uses torch.amp.
    """

    def __init__(self, engine: TrialEngine) -> None:
        self._engine = engine
        self._optimizer: Optimizer | None = None  # that the engine was given
        self._optimizer_of_calls: Optimizer | None = None  # None in calls of the engine itself as well
        self._has_autocast = False
        self._steps = ScriptSteps(self._before_step, self._after_step)
        self._forwards = nn.modules.module.register_module_forward_pre_hook(self._before_forward)
        self._backward, self._clip = torch.autograd.backward, clip_grad.clip_grad_norm_
        self._patches = Patches()
        self._patches.set(torch.autograd, "backward", self._scaled_backward)
        for module in (clip_grad, nn.utils):
            self._patches.set(module, "clip_grad_norm_", self._clip_grad_norm_)

    def end(self) -> None:
        """Leave torch as it was."""
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
            # What a level does not see of gradients would make its losses differ for no reason of its own.
            warnings.filterwarnings("error", category=AmpGradientWarning)
            self._engine.initialize_plain(models[0], optimizer)
        elif self._optimizer is not None and optimizer is not self._optimizer:
            names = " and ".join(sorted(type(one).__name__ for one in (self._optimizer, optimizer)))
            self._engine.give_up(f"it steps several optimizers, {names}")

    def _obstacle(self, models: list[nn.Module]) -> str | None:
        gc.collect()  # of a scaler that is gone nothing is told
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
        """Give the optimizer that the engine has; None without one, and in calls that the engine itself makes."""
        optimizer, self._optimizer_of_calls = self._optimizer_of_calls, None
        try:
            yield optimizer
        finally:
            self._optimizer_of_calls = optimizer
