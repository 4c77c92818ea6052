"""Decisions to skip a step: who makes them, when the host hears of them, and what is said once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from amp_engine.stepping.backward import Backward
from amp_engine.stepping.events import Events
from amp_engine.stepping.pending import Pending, Skip, Take


class Late:
    """An outcome on its way to the host."""

    def __init__(self, overflowed: bool, is_known: bool, is_captured: bool) -> None:
        self.flag = torch.tensor(float(overflowed))
        self._is_known, self.is_captured = is_known, is_captured

    def is_known(self) -> bool:
        return self._is_known

    def overflowed(self) -> bool:
        self._is_known = True
        return bool(self.flag)

    def number(self) -> float:
        return 1.0

    def has_flushed(self) -> bool:
        return False


def backward(overflowed: bool, is_known: bool = True, skips: bool = True, is_captured: bool = False) -> Any:
    result = Backward(SimpleNamespace(settle=lambda: None), 0, SimpleNamespace())  # type: ignore[arg-type]
    result.outcome = Late(overflowed, is_known, is_captured)  # type: ignore[assignment]
    result.skips = skips
    return result


def flags_left_to_the_device(pending: Pending) -> list[float]:
    decision = pending.decide(on_device=True)
    pending.conclude()
    assert isinstance(decision, Take)
    return [float(flag) for flag in decision.flags]


def is_skipped(pending: Pending) -> bool:
    decision = pending.decide(on_device=False)
    pending.conclude()
    return isinstance(decision, Skip)


@pytest.fixture
def told() -> dict[str, list[Any]]:
    return {"skips": [], "reports": []}


@pytest.fixture
def pending(told: dict[str, list[Any]]) -> Pending:
    events = Events()
    events.skipped.subscribe(lambda skips, backwards: told["skips"].append((skips, len(backwards))))
    events.reported.subscribe(lambda backward, in_a_row: told["reports"].append(backward))
    return Pending(events)


def test_without_a_backward_a_step_is_taken(pending: Pending, told: dict[str, list[Any]]) -> None:
    assert not is_skipped(pending)
    assert not pending.skipped
    assert told == {"skips": [], "reports": []}


def test_one_overflow_of_several_backwards_skips_one_step_and_is_told_once(
    pending: Pending, told: dict[str, list[Any]]
) -> None:
    for overflowed in (False, True, False):
        pending.add(backward(overflowed))
    assert pending.overflowed()
    assert is_skipped(pending)
    assert pending.skipped
    assert not pending.overflowed()
    assert not is_skipped(pending), "the next step has no backward"
    assert told["skips"] == [(1, 1)]


def test_clean_backwards_do_not_pile_up(pending: Pending) -> None:
    for _ in range(5):
        pending.add(backward(False))
    assert len(pending.backwards) == 1
    for _ in range(3):
        pending.add(backward(False, is_known=False))
    assert len(pending.backwards) == 3, "what nobody knows yet is kept"


def test_skips_in_a_row_are_counted_until_a_step_is_taken(pending: Pending, told: dict[str, list[Any]]) -> None:
    for overflowed in (True, True, False, True):
        pending.add(backward(overflowed))
        is_skipped(pending)
    assert [skips for skips, _ in told["skips"]] == [1, 2, 1]


def test_an_overflow_that_does_not_skip_is_reported_and_the_step_taken(
    pending: Pending, told: dict[str, list[Any]]
) -> None:
    static = backward(True, skips=False)
    pending.add(static)
    assert not pending.overflowed()
    assert not is_skipped(pending)
    assert told == {"skips": [], "reports": [static]}


def test_what_the_device_decides_is_heard_when_it_has_arrived(pending: Pending, told: dict[str, list[Any]]) -> None:
    late = backward(True, is_known=False)
    pending.add(late)
    assert flags_left_to_the_device(pending) == [1.0]
    pending.hear(wait=False)
    assert told["skips"] == [], "it has not arrived"
    late.outcome.overflowed()
    pending.hear(wait=False)
    assert told["skips"] == [(1, 1)]
    assert pending.skipped


def test_whoever_asks_waits_and_steps_are_told_in_their_order(pending: Pending, told: dict[str, list[Any]]) -> None:
    for overflowed in (True, False, True):
        pending.add(backward(overflowed, is_known=False))
        flags_left_to_the_device(pending)
    assert pending.skipped
    assert [skips for skips, _ in told["skips"]] == [1, 1]


def test_flags_of_static_scales_are_not_given_to_the_device(pending: Pending, told: dict[str, list[Any]]) -> None:
    pending.add(backward(True, is_known=False, skips=False))
    assert flags_left_to_the_device(pending) == []
    pending.hear(wait=True)
    assert len(told["reports"]) == 1


def test_a_captured_step_says_nothing(pending: Pending, told: dict[str, list[Any]]) -> None:
    pending.add(backward(True, is_known=False, is_captured=True))
    assert len(flags_left_to_the_device(pending)) == 1
    pending.hear(wait=True)
    assert told == {"skips": [], "reports": []}


def test_what_the_host_knows_is_not_left_to_the_device(pending: Pending, told: dict[str, list[Any]]) -> None:
    pending.add(backward(True))
    assert isinstance(pending.decide(on_device=True), Skip)
    pending.conclude()
    pending.add(backward(False))
    assert flags_left_to_the_device(pending) == []
    assert told["skips"] == [(1, 1)]


def test_a_step_that_can_read_no_flag_waits(pending: Pending, told: dict[str, list[Any]]) -> None:
    pending.add(backward(True, is_known=False))
    assert is_skipped(pending)
    assert told["skips"] == [(1, 1)]
