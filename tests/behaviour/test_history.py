"""The history of the loss scale keeps and counts backwards, and never asks the device."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from amp_engine import AmpGradientWarning, Engine, amp
from amp_engine.ground.devices import HostNumbers
from amp_engine.scaling.history import KEPT_LOSSES, LIMIT, Point, ScaleHistory, Track
from tests.models import MLP
from tests.support import started


class Late:
    """An outcome on its way to the host."""

    keeps_loss = False

    def __init__(self, overflowed: bool, scale: float, is_captured: bool = False, loss: float | None = None) -> None:
        self._overflowed, self._scale, self._loss, self.is_captured = overflowed, scale, loss, is_captured
        self.is_there = False
        self.questions = 0

    def is_known(self) -> bool:
        self.questions += 1
        return self.is_there

    def overflowed(self) -> bool:
        self.is_there = True
        return self._overflowed

    def next_scale(self) -> float:
        return self._scale

    def number(self) -> float | None:
        return self._loss


def test_only_moves_and_overflows_are_kept_and_all_is_counted() -> None:
    track = Track(8.0)
    for overflowed, scale in ((False, 8.0), (True, 4.0), (False, 4.0), (True, 4.0), (False, 8.0)):
        track.add(overflowed, scale)
    assert track.points == [Point(0, 8.0), Point(2, 4.0, 1), Point(4, 4.0, 1), Point(5, 8.0)]
    assert (track.backwards, track.overflows, track.scale) == (5, 2, 8.0)


def test_a_full_track_is_thinned_and_loses_no_overflow_and_neither_end() -> None:
    track, count = Track(1.0), 3 * LIMIT + 1
    for i in range(count):
        track.add(i % 3 == 0, float(i % 7))
        assert len(track.points) <= LIMIT
    assert track.points[0] == Point(0, 1.0)
    assert (track.points[-1].backward, track.points[-1].scale) == (count, float((count - 1) % 7))
    assert sum(point.overflows for point in track.points) == track.overflows == LIMIT + 1
    numbers = [point.backward for point in track.points]
    assert numbers == sorted(set(numbers))
    assert all(point.scale == (point.backward - 1) % 7 for point in track.points[1:]), "a point is what was there"


def test_what_has_not_arrived_is_waited_for_by_nobody_but_who_says_so() -> None:
    history, late = ScaleHistory(), [Late(False, 8.0), Late(True, 4.0), Late(False, 4.0)]
    history.begin([8.0])
    for one in late:
        history.note(0, one)
    assert [one.questions for one in late] == [0, 0, 0], "nothing is asked on the way"
    assert history.track(0).backwards == 0
    assert [one.questions for one in late] == [1, 0, 0], "whoever reads asks for the first"
    late[0].is_there = True
    late[2].is_there = True
    early = Late(False, 4.0)
    early.is_there = True
    history.note(0, early)
    assert history.track(0).backwards == 1, "in their order"
    late[1].is_there = True
    assert (history.track(0).backwards, history.track(0).overflows) == (4, 1)
    assert history.track(0).points == [Point(0, 8.0), Point(2, 4.0, 1)]
    history.note(0, Late(False, 4.0))
    assert history.track(0).backwards == 4
    history.hear(wait=True)
    assert history.track(0).backwards == 5


def test_a_loss_of_several_elements_is_not_kept_until_somebody_asks() -> None:
    model, optimizer = started("O2")
    for _ in range(3):
        losses = model(MLP.batch()[0]).float().square()
        with amp.scale_loss(losses, optimizer) as scaled:
            scaled.mean().backward()
        optimizer.step()
    assert len(amp.current_engine()._scaling.history._waiting) == 0


def test_captured_backwards_are_left_out() -> None:
    history = ScaleHistory()
    history.begin([1.0])
    history.note(0, Late(True, 0.5, is_captured=True))
    history.hear(wait=True)
    assert history.track(0).backwards == 0


def test_the_losses_of_clean_backwards_are_kept_with_their_numbers() -> None:
    history, outcomes = ScaleHistory(), []
    history.begin([8.0])
    nan = float("nan")
    for number, (overflowed, loss) in enumerate([(False, 1.0), (True, 2.0), (False, nan), (False, 4.0), (False, 5.0)]):
        outcomes.append(Late(overflowed, 8.0, loss=loss))
        history.note(0, outcomes[-1], number)
    assert history.losses_before(0, 5) == [], "none has arrived"
    for one in outcomes[:4]:
        one.is_there = True
    assert history.losses_before(0, 5) == [1.0, 4.0]
    assert history.losses_before(0, 3) == [1.0]
    assert history.losses_before(1, 5) == []
    outcomes[4].is_there = True
    assert history.losses_before(0, 5) == [1.0, 4.0, 5.0]


def test_the_last_losses_are_kept() -> None:
    history = ScaleHistory()
    history.begin([8.0])
    for number in range(3 * KEPT_LOSSES):
        early = Late(False, 8.0, loss=float(number))
        early.is_there = True
        history.note(0, early, number)
    assert history.losses_before(0, 10**6) == [float(number) for number in range(2 * KEPT_LOSSES, 3 * KEPT_LOSSES)]


@pytest.mark.parametrize("is_delayed", [False, True])
def test_a_loss_of_several_optimizers_is_kept_once(is_delayed: bool) -> None:
    with Engine() as engine:
        model, optimizer = started("O1", task=MLP, engine=engine)
        other = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        engine.initialize([], other, opt_level="O1", verbosity=0)
        for index in range(3):
            loss = MLP.loss(model, MLP.batch(index))
            with engine.scale_loss(loss, [optimizer, other], delay_unscale=is_delayed) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            with pytest.warns(AmpGradientWarning, match="reached none") if index == 0 else nullcontext():
                other.step()
        assert [loss.number for loss in engine._scaling.history.track(0).losses] == [1, 2, 3]


def test_a_step_of_three_backwards_keeps_the_last_loss() -> None:
    with Engine() as engine:
        model, optimizer = started("O1", task=MLP, engine=engine)
        for index in range(2):
            for part in range(3):
                loss = MLP.loss(model, MLP.batch(3 * index + part)) * (1.0 if part else float("inf"))
                with engine.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
            optimizer.step()
        assert [loss.number for loss in engine._scaling.history.track(0).losses] == [3, 6]


def test_numbers_that_a_device_computes_have_arrived_when_somebody_has_read_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)  # as on a device without events
    numbers = HostNumbers(torch.tensor([1.0, 0.5]))
    assert numbers.values is None
    assert numbers.read(1) == 0.5
    assert numbers.values == [1.0, 0.5]
