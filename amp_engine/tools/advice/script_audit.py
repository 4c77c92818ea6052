"""Audits the optimizers of a script that runs in this process."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from amp_engine import amp
from amp_engine.stepping.step import step_last
from amp_engine.tools.advice.script_steps import ScriptSteps, models_of, say_refusals
from amp_engine.tools.telemetry.wording import plural


def begin(told: Mapping[str, Any]) -> None:
    """Start the audit. `told` has steps, every, and the folder in which the result is written when Python ends."""
    say_refusals()
    ScriptAudit(told["steps"], told["every"], Path(told["folder"]))


class ScriptAudit:
    """Audits each optimizer from its first step on, and ends the script after some steps of the first optimizer.

    Args:
        steps: the script ends after this many steps of the first optimizer.
        every: audit every n-th step.
        folder: audit.txt and audit.json are written there, also if the script ends earlier or raises.
    """

    def __init__(self, steps: int, every: int, folder: Path) -> None:
        self._steps, self._folder = steps, folder
        self._process = os.getpid()
        self._audit = amp.audit_updates([], every)
        self._audit.__enter__()
        self._first: Optimizer | None = None
        self._done = 0
        self._hooks = ScriptSteps(self._before_step, self._after_step)
        atexit.register(self.write)

    def write(self) -> None:
        """Write the result. Waits for the device."""
        if os.getpid() == self._process and self._first is not None:
            self._audit.save(self._folder / "audit.json")
            self._audit.save(self._folder / "audit.txt")

    def _before_step(self, optimizer: Optimizer) -> None:
        if not self._audit.follows(optimizer):
            self._first = self._first or optimizer
            self._audit.follow(optimizer, models_of(optimizer))
            step_last(optimizer)  # in this step too the audit's hook comes before amp's, which takes the step

    def _after_step(self, optimizer: Optimizer) -> None:
        if optimizer is self._first:
            self._done += 1
            if self._done >= self._steps:
                print(
                    f"The script is stopped after {plural(self._steps, 'step')}; --steps audits more.", file=sys.stderr
                )
                raise SystemExit(0)
