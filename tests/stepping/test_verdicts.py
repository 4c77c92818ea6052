"""Whether a step is skipped: who decides it, when the host hears of it, and what is said once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from amp_engine.stepping.backward import Verdict
from amp_engine.stepping.verdicts import Verdicts


class Flag:
    """A number of the device on its way to the host."""

    def __init__(self, value: float, is_known: bool, is_captured: bool = False) -> None:
        self.value, self._is_known, self.is_captured = value, is_known, is_captured

    def is_known(self) -> bool:
        return self._is_known

    def read(self) -> float:
        self._is_known = True
        return self.value


def verdict(overflowed: bool, is_known: bool = True, skips: bool = True, is_captured: bool = False) -> Any:
    flag = Flag(float(overflowed), is_known, is_captured)
    found_inf = torch.tensor(float(overflowed))
    return Verdict(0, SimpleNamespace(), found_inf, flag, flag, skips, [], torch.zeros(()))  # type: ignore[arg-type]


@pytest.fixture
def told() -> dict[str, list[Any]]:
    return {"skips": [], "reports": []}


@pytest.fixture
def verdicts(told: dict[str, list[Any]]) -> Verdicts:
    return Verdicts(lambda skips, verdicts: told["skips"].append((skips, len(verdicts))), told["reports"].append)


def test_without_a_backward_a_step_is_taken(verdicts: Verdicts, told: dict[str, list[Any]]) -> None:
    assert not verdicts.decide()
    assert not verdicts.skipped
    assert told == {"skips": [], "reports": []}


def test_one_overflow_of_several_backwards_skips_one_step_and_is_told_once(
    verdicts: Verdicts, told: dict[str, list[Any]]
) -> None:
    for overflowed in (False, True, False):
        verdicts.add(verdict(overflowed))
    assert verdicts.skips_next
    assert verdicts.decide()
    assert verdicts.skipped
    assert not verdicts.skips_next
    assert not verdicts.decide(), "the next step has no backward"
    assert told["skips"] == [(1, 1)]


def test_clean_backwards_do_not_pile_up(verdicts: Verdicts) -> None:
    for _ in range(5):
        verdicts.add(verdict(False))
    assert len(verdicts.pending) == 1
    for _ in range(3):
        verdicts.add(verdict(False, is_known=False))
    assert len(verdicts.pending) == 3, "what nobody knows yet is kept"


def test_skips_in_a_row_are_counted_until_a_step_is_taken(verdicts: Verdicts, told: dict[str, list[Any]]) -> None:
    for overflowed in (True, True, False, True):
        verdicts.add(verdict(overflowed))
        verdicts.decide()
    assert [skips for skips, _ in told["skips"]] == [1, 2, 1]


def test_an_overflow_that_does_not_skip_is_reported_and_the_step_taken(
    verdicts: Verdicts, told: dict[str, list[Any]]
) -> None:
    static = verdict(True, skips=False)
    verdicts.add(static)
    assert not verdicts.skips_next
    assert not verdicts.decide()
    assert told == {"skips": [], "reports": [static]}


def test_what_the_device_decides_is_heard_when_it_has_arrived(verdicts: Verdicts, told: dict[str, list[Any]]) -> None:
    late = verdict(True, is_known=False)
    verdicts.add(late)
    assert not verdicts.are_known()
    flags = verdicts.leave_to_device()
    assert [float(flag) for flag in flags] == [1.0]
    verdicts.hear(wait=False)
    assert told["skips"] == [], "it has not arrived"
    late.overflow.read()
    verdicts.hear(wait=False)
    assert told["skips"] == [(1, 1)]
    assert verdicts.skipped


def test_whoever_asks_waits_and_steps_are_told_in_their_order(verdicts: Verdicts, told: dict[str, list[Any]]) -> None:
    for overflowed in (True, False, True):
        verdicts.add(verdict(overflowed, is_known=False))
        verdicts.leave_to_device()
    assert verdicts.skipped
    assert [skips for skips, _ in told["skips"]] == [1, 1]


def test_flags_of_static_scales_are_not_given_to_the_device(verdicts: Verdicts, told: dict[str, list[Any]]) -> None:
    verdicts.add(verdict(True, is_known=False, skips=False))
    assert verdicts.leave_to_device() == []
    verdicts.hear(wait=True)
    assert len(told["reports"]) == 1


def test_a_captured_step_says_nothing(verdicts: Verdicts, told: dict[str, list[Any]]) -> None:
    verdicts.add(verdict(True, is_known=False, is_captured=True))
    assert len(verdicts.leave_to_device()) == 1
    verdicts.hear(wait=True)
    assert told == {"skips": [], "reports": []}


def test_a_step_that_somebody_else_skipped_counts_and_ends_what_was_pending(
    verdicts: Verdicts, told: dict[str, list[Any]]
) -> None:
    verdicts.caller_skips = True
    assert verdicts.skips_next
    verdicts.add(verdict(True))
    verdicts.skipped_by_caller()
    assert verdicts.skipped
    assert verdicts.skips_in_a_row == 1
    assert not verdicts.skips_next
    assert not verdicts.decide()
    assert told["skips"] == [], "whoever skips says so"
