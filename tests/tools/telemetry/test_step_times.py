"""`amp.step_times()`: what is put where, on a clock that the tests wind, and that nothing of it stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from amp_engine import Engine, amp
from amp_engine.errors import AmpStateError
from amp_engine.tools.telemetry import step_times
from amp_engine.tools.telemetry.step_times import StepTimes
from tests.models import MLP
from tests.support import LEVELS, left_alone, started, train


class Clock:
    """Moves by one with each look, and by what a test adds; a device is ten times as slow."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, has_device: bool = False) -> None:
        self.time, self.has_device = 0.0, has_device
        monkeypatch.setattr(step_times, "now", self.now)
        monkeypatch.setattr(step_times, "seconds_between", self.between)

    def now(self) -> float:
        self.time += 1
        return self.time

    def between(self, start: Any, end: Any) -> tuple[float, float | None]:
        return end - start, 10 * (end - start) if self.has_device else None


def seconds(times: StepTimes) -> dict[str, float]:
    return {phase.name: phase.host_seconds for phase in times.measured().phases}


@pytest.mark.parametrize("level", LEVELS)
def test_each_part_of_an_iteration_is_in_its_place(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine() as engine:
        model, optimizer = started(level, task=MLP, engine=engine)
        clock = Clock(monkeypatch)
        with StepTimes(engine) as times:
            clock.time += 100  # forward
            with engine.scale_loss(MLP.loss(model, MLP.batch(0)), optimizer) as scaled:
                clock.time += 50
                scaled.backward()
            optimizer.step()
        # Eight looks at the clock, a second apart: the start, four of scale_loss, two of the step, the end.
        assert seconds(times) == {"scale_loss": 2.0, "backward": 51.0, "step": 1.0, "other": 100.0 + 3.0}
        measured = times.measured()
        assert measured.steps == 1
        assert sum(map(measured.share, measured.phases)) == pytest.approx(1.0)


def test_the_device_counts_where_it_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine() as engine:
        model, optimizer = started("O2", task=MLP, engine=engine)
        Clock(monkeypatch, has_device=True)
        with StepTimes(engine) as times:
            train(MLP, model, optimizer, "cc", engine=engine)
        for phase in times.measured().phases:
            assert phase.device_seconds == pytest.approx(10 * phase.host_seconds)
        assert times.measured().steps == 2


def observers(engine: Engine) -> list[Any]:
    return [event.observers for event in vars(engine.records.events).values()]


def test_nothing_stays_and_the_run_is_the_same() -> None:
    losses = []
    for is_timed in (False, True):
        with Engine() as engine:
            model, optimizer = started("O2", task=MLP, engine=engine)
            train(MLP, model, optimizer, "o", engine=engine)  # from which on overflows are traced
            before, hooks = observers(engine), list(optimizer._optimizer_step_post_hooks)
            with left_alone(model, optimizer), StepTimes(engine):
                pass
            if is_timed:
                with StepTimes(engine):
                    losses.append(train(MLP, model, optimizer, "coc", engine=engine))
            else:
                losses.append(train(MLP, model, optimizer, "coc", engine=engine))
            assert observers(engine) == before
            assert list(optimizer._optimizer_step_post_hooks) == hooks
    assert losses[0] == losses[1]


def test_an_error_in_the_body_leaves_nothing_either() -> None:
    with Engine() as engine:
        _, optimizer = started("O2", task=MLP, engine=engine)
        hooks = [*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks]
        with pytest.raises(KeyError), StepTimes(engine):
            raise KeyError
        assert not engine.records.events.entering.observers
        assert [*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks] == hooks


def test_two_at_once_are_refused() -> None:
    amp.initialize(torch.nn.Linear(1, 1), opt_level="O1", verbosity=0)
    with amp.step_times(), pytest.raises(AmpStateError, match="measuring already"), amp.step_times():
        pass


def test_it_reads_as_a_table() -> None:
    amp.initialize(torch.nn.Linear(1, 1), opt_level="O1", verbosity=0)
    times = amp.step_times()
    assert "Leave" in repr(times)
    with times:
        pass
    first, _, rule, *rows = str(times).splitlines()
    assert (first, set(rule)) == ("Of 0 steps:", {"-"})
    assert [row.split()[0] for row in rows if not row.startswith(" ")] == ["scale_loss", "backward", "step", "other"]
