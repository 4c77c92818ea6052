"""Warnings point at the user's line, and a trainer that runs the loop is recognized."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial, reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from amp_engine import Engine
from amp_engine.errors import AmpGradientWarning, AmpWarning
from amp_engine.ground.callers import before_what, warn


def line_before() -> int:
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno - 1


def within(call: Callable[..., Any], package: str) -> Callable[..., Any]:
    """A function that calls another one in a module of a package."""
    names: dict[str, Any] = {"__name__": f"{package}.inner"}
    exec("def run(function, *args): return function(*args)", names)
    return partial(names["run"], call)


@pytest.mark.parametrize("packages", [(), ("torch",), ("amp_engine", "contextlib"), ("accelerate", "transformers")])
def test_a_warning_names_the_innermost_line_of_the_users_own(packages: tuple[str, ...]) -> None:
    call = reduce(within, packages, warn)
    with pytest.warns(AmpWarning, match="said") as found:
        call("said", AmpWarning)
    assert [(one.filename, one.lineno) for one in found] == [(__file__, line_before())]


def test_a_line_warns_once_as_python_does_by_default() -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        for _ in range(2):
            warn("the same", AmpWarning)
        warn("the same", AmpWarning)
    assert len(found) == 2


@pytest.mark.parametrize(
    ("packages", "before"),
    [
        (("torch", "mine"), ""),
        (("accelerate",), "accelerator.prepare()"),
        (("accelerate", "transformers"), "the Trainer is made"),
        (("torch", "lightning"), "the Trainer is made"),
    ],
)
def test_the_outermost_trainer_is_named(packages: tuple[str, ...], before: str) -> None:
    assert reduce(within, packages, before_what)() == before


def test_a_step_without_a_gradient_is_warned_of_at_the_line_of_the_step() -> None:
    with Engine() as engine:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine.initialize(model, optimizer, opt_level="O2", verbosity=0)
        with engine.scale_loss(model(torch.ones(1, 2)).sum(), optimizer):
            pass
        with pytest.warns(AmpGradientWarning, match="finds no gradient") as found:
            optimizer.step()
        assert [(one.filename, one.lineno) for one in found] == [(__file__, line_before())]


def test_a_module_that_is_run_by_its_name_is_warned_too() -> None:
    """`python -m package.module`: the module is __main__, and its loader refuses that name."""
    lines = (
        "from amp_engine import AmpWarning",
        "from amp_engine.ground.callers import warn",
        "warn('said', AmpWarning)",
    )
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "warns_here.py").write_text("\n".join(lines))
        path = os.pathsep.join([str(Path(__file__).parents[1]), folder])
        done = subprocess.run(
            [sys.executable, "-m", "warns_here"],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONPATH": path},
        )
    assert "warns_here.py:3: AmpWarning: said" in done.stderr
