"""Audits the optimizers of a script that runs in this process, by torch's hooks for the steps of any optimizer."""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from amp_engine import amp
from amp_engine.optimizers.wrapped import takes_hooks


def begin(told: Mapping[str, Any]) -> None:
    """Audit from now on. `told` has steps, every, and a folder, in which the result is written when Python ends."""
    ScriptAudit(told["steps"], told["every"], Path(told["folder"]))


class ScriptAudit:
    """Follows each optimizer from its first step on, and ends the script after some steps of the first one.

    Args:
        steps: the script is ended after so many steps of the first optimizer.
        every: each how-manieth step is audited.
        folder: audit.txt and audit.json are written there, also if the script ends earlier or raises.
    """

    def __init__(self, steps: int, every: int, folder: Path) -> None:
        self._steps, self._folder = steps, folder
        self._process = os.getpid()
        self._audit = amp.audit_updates([], every)
        self._audit.__enter__()
        self._first: Optimizer | None = None
        self._done = 0
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        atexit.register(self.write)

    def write(self) -> None:
        """Write the result. Waits for the device."""
        if os.getpid() == self._process and self._first is not None:
            self._audit.save(self._folder / "audit.json")
            self._audit.save(self._folder / "audit.txt")

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or os.getpid() != self._process:
            return
        # One that is stepped in the step of another belongs to that one.
        if self._audit.is_stepping or self._audit.follows(optimizer) or not takes_hooks(optimizer):
            return
        self._first = self._first or optimizer
        self._audit.follow(optimizer, _models_of(optimizer))

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer is self._first and not self._audit.is_stepping and os.getpid() == self._process:
            self._done += 1
            if self._done >= self._steps:
                raise SystemExit(0)


def _models_of(optimizer: Optimizer) -> list[nn.Module]:
    """The outermost modules of this process that have a parameter in the optimizer's groups."""
    modules = [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]
    inner = {id(child) for module in modules for child in module.children()}
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    outer = [module for module in modules if id(module) not in inner]
    return [module for module in outer if any(id(p) in stepped for p in module.parameters())]
