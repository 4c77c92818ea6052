"""Post-mortems of overflows in compiled models."""

from __future__ import annotations

import pytest
import torch

from tests.compile.conftest import compiler as compiler
from tests.tools.diagnosis.test_post_mortem import LEVELS, Run, closes  # noqa: F401  (a fixture)

# Dynamo makes an instance of a Function of Python's, of which torch warns.
pytestmark = pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning")


@pytest.mark.parametrize("kind", ["linear", "layer norm"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_backward_that_overflows_is_named_by_its_module(level: str, kind: str) -> None:
    run = Run(level, kind, wrap=lambda model: torch.compile(model, backend="aot_eager"))
    record = run.plant("backward")
    assert (record.cause, record.module) == ("backward", "planted.layer")


@pytest.mark.parametrize("bad", ["forward", "data"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_forward_is_not_guessed_at_and_find_overflow_names_it(level: str, bad: str) -> None:
    run = Run(level, "linear", wrap=lambda model: torch.compile(model, backend="aot_eager"))
    record = run.plant(bad)
    assert (record.cause, record.operation) == ("forward", None)
    assert "find_overflow" in str(record)
    found = run.engine.find_overflow(run.backward)
    assert (found.phase, found.module) == (bad, "planted" if bad == "forward" else "")
