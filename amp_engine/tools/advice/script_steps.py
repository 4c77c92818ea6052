"""Watches the steps of a script's optimizers with torch's global hooks, finds their models, and prints refusals."""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from amp_engine.casting.patches import Patches
from amp_engine.errors import AmpError
from amp_engine.ground.messages import wrapped
from amp_engine.optimizers.wrapped import takes_hooks


class ScriptSteps:
    """Calls functions around each step of an optimizer that takes hooks, but not inside of another step."""

    def __init__(self, before: Callable[[Optimizer], None], after: Callable[[Optimizer], None]) -> None:
        self._before, self._after = before, after
        self._process = os.getpid()
        self._depth = 0  # wrappers step an optimizer in their own step, and subclasses call super().step()
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def end(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or os.getpid() != self._process:
            return
        self._depth += 1
        if self._depth == 1 and takes_hooks(optimizer):
            self._before(optimizer)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or os.getpid() != self._process:
            return
        self._depth = max(0, self._depth - 1)
        if self._depth == 0 and takes_hooks(optimizer):
            self._after(optimizer)


def models_of(optimizer: Optimizer) -> list[nn.Module]:
    """The outermost modules of this process that have a parameter in the optimizer's groups."""
    modules = [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]
    inner = {id(child) for module in modules for child in module.children()}
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    outer = [module for module in modules if id(module) not in inner]
    return [module for module in outer if any(id(p) in stepped for p in module.parameters())]


def say_refusals() -> None:
    """From here on an AmpError that ends the script is printed with the script's line, without a traceback."""
    usual = sys.excepthook

    def say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        lines = [
            f"{frame.f_code.co_filename}, line {line}"
            for frame, line in traceback.walk_tb(trace)
            if not frame.f_globals.get("__name__", "").startswith(("torch.", "amp_engine."))
        ]
        if isinstance(error, AmpError) and lines:
            print(wrapped(f"{lines[-1]}: {error}", sys.stderr), file=sys.stderr)
        else:
            usual(kind, error, trace)

    Patches().set(sys, "excepthook", say)
