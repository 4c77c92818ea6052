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
from amp_engine.ground.callers import before_what
from amp_engine.optimizers.wrapped import takes_hooks
from amp_engine.tools.advice.records import Task
from amp_engine.tools.advice.script_steps import ScriptSteps, models_of, say_refusals
from amp_engine.tools.advice.trial import TrialEngine

_TYPE_LISTS = (
    "Type models, optimizers = amp.initialize(models, optimizers, opt_level='O5') before its loop, with lists of both"
)
_TORCH_AMP = (
    "it uses torch.amp.  Take autocast and GradScaler out, and type model, optimizer = amp.initialize(model, "
    "optimizer, opt_level='O4') before its loop"
)
_TRAINERS_AMP = (
    "its trainer uses torch.amp.  Leave out bf16=True, fp16=True, mixed_precision or precision, and type "
    "amp.initialize(model, opt_level='O4') before {before}, 'O5' if the model is half"
)


def begin(task: Mapping[str, Any]) -> None:
    """Make a TrialEngine the current engine of this process; `task` has the fields of a Task."""
    say_refusals()
    engine = TrialEngine(Task(**task))
    amp.replace_engine(engine)
    PlainScript(engine)
    atexit.register(engine.write)


class PlainScript:
    """Scales the losses of a script that calls `loss.backward()`, and initializes one without amp after its first step.

    Leaves scripts alone that call `scale_loss` themselves, or import apex. Gives up on scripts without amp that have
    several models or optimizers, or use torch.amp.
    """

    def __init__(self, engine: TrialEngine) -> None:
        self._engine = engine
        self._optimizer: Optimizer | None = None  # the one that the engine initialized
        self._is_inside = False  # True in the engine's own calls
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
            models, before = models_of(optimizer), before_what()
            obstacle = self._obstacle(models, before)
            if obstacle is not None:
                self._engine.give_up(obstacle)
            self._optimizer = optimizer
            # Writes that masters take rounded would make the losses of a level differ.
            warnings.filterwarnings("error", category=AmpGradientWarning)
            self._engine.initialize_plain(models[0], optimizer, before)
        elif self._optimizer is not None and optimizer is not self._optimizer:
            names = " and ".join(sorted(type(one).__name__ for one in (self._optimizer, optimizer)))
            self._engine.give_up(f"it steps several optimizers, {names}.  {_TYPE_LISTS}")

    def _obstacle(self, models: list[nn.Module], before: str) -> str | None:
        gc.collect()  # frees unreachable scalers
        scalers = [one for one in gc.get_objects() if issubclass(type(one), torch.amp.GradScaler)]
        if self._has_autocast or any(scaler.is_enabled() for scaler in scalers):
            return _TRAINERS_AMP.format(before=before) if before else _TORCH_AMP
        if len(models) != 1:
            names = ", ".join(type(model).__name__ for model in models) or "none"
            return f"its optimizer steps parameters of {len(models)} models ({names}).  {_TYPE_LISTS}"
        return None

    def _scaled_backward(self, tensors: Any, grad_tensors: Any = None, *args: Any, **keywords: Any) -> None:
        is_loss = isinstance(tensors, Tensor) and tensors.numel() == 1 and grad_tensors is None
        with self._inside() as is_looked_after:
            if not (is_looked_after and is_loss):
                self._backward(tensors, grad_tensors, *args, **keywords)
                return
            with self._engine.scale_plain(tensors, self._optimizers()) as scaled_loss:
                self._backward(scaled_loss, None, *args, **keywords)

    def _optimizers(self) -> Any:
        """The optimizers for a loss; at the first loss of `initialize(model)` those that exist."""
        if self._optimizer is not None or self._engine.records.optimizers:
            return self._optimizer or "reached"
        stepped = {id(p) for model in self._engine._initialized.models for p in model.parameters()}
        found = [one for one in gc.get_objects() if issubclass(type(one), Optimizer) and takes_hooks(one)]
        return [one for one in found if any(id(p) in stepped for p in one.param_groups[0]["params"])]

    def _clip_grad_norm_(self, parameters: Any, max_norm: float, *args: Any, **keywords: Any) -> Tensor:
        with self._inside() as is_looked_after:
            if not is_looked_after:
                return self._clip(parameters, max_norm, *args, **keywords)
            keywords.pop("foreach", None)
            return self._engine.clip_grad_norm_(parameters, max_norm, *args[:2], **keywords)

    @contextmanager
    def _inside(self) -> Iterator[bool]:
        """Yield True in calls of a script whose losses are scaled here, and not in calls that the engine makes."""
        was_inside, self._is_inside = self._is_inside, True
        is_asked = self._engine.asked is not None and not self._engine.scales_itself and self._engine.policy is not None
        try:
            yield not was_inside and (is_asked or self._optimizer is not None)
        finally:
            self._is_inside = was_inside
