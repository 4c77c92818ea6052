"""`amp.scalars()` and what writes them: known without waiting, by names that do not change."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from amp_engine import Engine, amp
from amp_engine.errors import AmpStateError
from amp_engine.tools.callbacks import TensorBoardScalars, WandbScalars
from amp_engine.tools.telemetry.scalars import scalars
from tests.models import MLP
from tests.support import LEVELS, started, train


class Writer:
    def __init__(self) -> None:
        self.lines: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.lines.append((tag, scalar_value, global_step))


class Run:
    def __init__(self) -> None:
        self.lines: list[tuple[dict[str, float], int]] = []

    def log(self, data: dict[str, float], *, step: int) -> None:
        self.lines.append((data, step))


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


def test_tensorboard_gets_each_by_itself() -> None:
    amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
    writer = Writer()
    TensorBoardScalars(writer)(7)
    assert writer.lines == [(name, value, 7) for name, value in amp.scalars().items()]


def test_weights_and_biases_gets_all_in_one_call() -> None:
    with Engine() as engine:
        engine.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
        run = Run()
        WandbScalars(run, engine)(3)
        assert run.lines == [(scalars(engine), 3)]


def test_nothing_is_written_where_amp_does_nothing() -> None:
    amp.initialize(nn.Linear(1, 1), enabled=False)
    writer, run = Writer(), Run()
    TensorBoardScalars(writer)(0)
    WandbScalars(run)(0)
    assert writer.lines == run.lines == []


@pytest.mark.filterwarnings("ignore")  # of TensorBoard's own packages
def test_the_writer_of_torch_takes_them(tmp_path: Any) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
    with SummaryWriter(tmp_path) as writer:
        TensorBoardScalars(writer)(5)
    written = EventAccumulator(str(tmp_path))
    written.Reload()
    (event,) = written.Scalars("amp/loss_scale")
    assert (event.step, event.value) == (5, amp.scalars()["amp/loss_scale"])
