"""Counts what one iteration runs of amp_engine's Python: its calls, functions, classes, files, conditional lines.

    python -m tests.breakages.trace_step [O2]

The iteration is the fifth one of a two-layer model with AdamW: `scale_loss` from entry to exit, without the backward
inside it, then `optimizer.step()`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

import amp_engine
from amp_engine import amp, kernels

PACKAGE = str(Path(amp_engine.__file__).parent)


class Trace:
    """Counts of what ran while it was on."""

    def __init__(self) -> None:
        self.calls = self.conditional_lines = self.changes_of_file = 0
        self.functions: set[CodeType] = set()
        self.classes: set[type] = set()
        self.files: set[str] = set()
        self._file = ""
        self._conditions: dict[str, set[int]] = {}

    @contextmanager
    def on(self) -> Iterator[None]:
        sys.settrace(self._event)
        try:
            yield
        finally:
            sys.settrace(None)

    def _event(self, frame: FrameType, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(PACKAGE):
            return None
        if event == "call":
            self.calls += 1
            self.functions.add(frame.f_code)
            self.files.add(file)
            if "self" in frame.f_locals:
                self.classes.add(type(frame.f_locals["self"]))
            self.changes_of_file += self._file not in ("", file)
            self._file = file
        elif event == "line":
            self.conditional_lines += frame.f_lineno in self._conditions_of(file)
        return self._event

    def _conditions_of(self, file: str) -> set[int]:
        if file not in self._conditions:
            self._conditions[file] = condition_lines(Path(file).read_text())
        return self._conditions[file]

    def __str__(self) -> str:
        return (
            f"{self.calls} calls, {len(self.functions)} functions, {len(self.classes)} classes, "
            f"{len(self.files)} files, {self.changes_of_file} changes of file, "
            f"{self.conditional_lines} conditional lines"
        )


def condition_lines(source: str) -> set[int]:
    """The lines on which a condition stands."""
    conditional = (ast.If, ast.IfExp, ast.While, ast.BoolOp)
    return {node.lineno for node in ast.walk(ast.parse(source)) if isinstance(node, conditional)}


def trace(level: str, iteration: int = 5) -> Trace:
    """Return the trace of that iteration at a level."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    found = Trace()
    for _ in range(iteration):
        found = Trace()
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8)).float().square().mean()
        with found.on():
            scaling = amp.scale_loss(loss, optimizer)
            scaled_loss = scaling.__enter__()
        scaled_loss.backward()
        with found.on():
            scaling.__exit__(None, None, None)
            optimizer.step()
    amp.close()
    return found


if __name__ == "__main__":
    print("compiled kernels" if kernels.has_native(torch.device("cpu")) else "no compiled kernels")
    for level in sys.argv[1:] or ["O1", "O2"]:
        print(f"{level}: {trace(level)}")
