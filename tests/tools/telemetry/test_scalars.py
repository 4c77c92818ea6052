"""`amp.scalars()`: known without waiting, by names that do not change."""

from __future__ import annotations

import pytest
from torch import nn

from amp_engine import Engine, amp
from amp_engine.errors import AmpStateError
from amp_engine.tools.telemetry.scalars import scalars
from tests.models import MLP
from tests.support import LEVELS, started, train


def test_they_follow_skips_and_the_scale() -> None:
    with Engine() as engine:
        model, optimizer = started("O2", task=MLP, engine=engine)
        first = engine.scalers[0].loss_scale()
        assert scalars(engine) == {
            "amp/loss_scale": first,
            "amp/skipped_steps": 0.0,
            "amp/skips_in_a_row": 0.0,
            "amp/overflow_share": 0.0,
        }
        train(MLP, model, optimizer, "cocoo", engine=engine)
        assert scalars(engine) == {
            "amp/loss_scale": first / 8,
            "amp/skipped_steps": 3.0,
            "amp/skips_in_a_row": 2.0,
            "amp/overflow_share": 3 / 5,
        }
        train(MLP, model, optimizer, "c", engine=engine)
        assert scalars(engine)["amp/skips_in_a_row"] == 0.0


def test_several_losses_have_a_scale_each() -> None:
    with Engine() as engine:
        engine.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0, num_losses=2)
        engine.scalers[1]._loss_scale = 4.0
        found = scalars(engine)
        assert "amp/loss_scale" not in found
        assert (found["amp/loss_scale/0"], found["amp/loss_scale/1"]) == (engine.scalers[0].loss_scale(), 4.0)


@pytest.mark.parametrize("level", LEVELS)
def test_every_level_has_them(level: str) -> None:
    with Engine() as engine:
        model, optimizer = started(level, task=MLP, engine=engine)
        train(MLP, model, optimizer, "cc", engine=engine)
        found = scalars(engine)
        assert found["amp/loss_scale"] == engine.scalers[0].loss_scale()
        assert all(type(value) is float for value in found.values())


def test_they_are_refused_without_a_run_and_empty_where_amp_does_nothing() -> None:
    with pytest.raises(AmpStateError, match=r"amp\.initialize\("):
        amp.scalars()
    amp.initialize(nn.Linear(1, 1), enabled=False)
    assert amp.scalars() == {}
