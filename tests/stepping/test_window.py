"""A window: which states follow which, what is set aside meanwhile, what is put back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from amp_engine.errors import AmpStateError
from amp_engine.stepping.window import State

CALLS = {
    "open": lambda room: room.window.open(room.backward()),
    "prepare": lambda room: room.window.prepare(room.backward()),
    "leave open": lambda room: room.window.leave_open(),
    "close": lambda room: room.window.close(room.backward(), True, set()),
}
REACHED = {"open": State.OPEN, "prepare": State.PREPARED, "leave open": State.LEFT_OPEN, "close": State.CLOSED}
WAYS = {
    State.CLOSED: [],
    State.OPEN: ["open"],
    State.PREPARED: ["prepare"],
    State.LEFT_OPEN: ["open", "leave open"],
}
WRONG = {
    (State.CLOSED, "leave open"),
    (State.CLOSED, "close"),
    (State.OPEN, "open"),
    (State.OPEN, "prepare"),
    (State.LEFT_OPEN, "leave open"),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("state", list(State), ids=lambda state: state.value)
def test_each_call_leads_to_a_state_or_is_refused(make: Any, state: State, call: str) -> None:
    room = make.room(make.half(2))
    for earlier in WAYS[state]:
        CALLS[earlier](room)
    assert room.window.state is state
    if (state, call) in WRONG:
        with pytest.raises(AmpStateError, match=f"A window that is {state.value} cannot become"):
            CALLS[call](room)
        assert room.window.state is state
    else:
        CALLS[call](room)
        assert room.window.state is REACHED[call]


def test_gradients_of_a_window_are_added_to_those_before_it(make: Any) -> None:
    room = make.room(make.half(2), make.full(2))
    room.run(1.0, 2.0)
    room.run(10.0, 20.0)
    assert room.gradients() == [11.0, 22.0]


def test_discarding_puts_back_what_was_set_aside(make: Any) -> None:
    room = make.room(make.half(2), make.full(2))
    room.run(1.0, 2.0)
    room.window.open(room.backward())
    room.accumulate(10.0, 20.0)
    room.window.discard()
    assert room.gradients() == [1.0, 2.0]
    assert room.window.is_closed


def test_forgetting_leaves_gradients_as_they_are(make: Any) -> None:
    room = make.room(make.full(2))
    room.window.open(room.backward())
    room.accumulate(2.0)
    room.window.close_as_is()
    assert room.gradients() == [16.0]


def test_adopted_gradients_are_taken_for_scaled_ones(make: Any) -> None:
    room = make.room(make.half(2))
    room.accumulate(2.0)
    room.window.adopt(room.backward())
    assert room.window.state is State.PREPARED
    room.window.close(room.window.backward, True, set())
    assert room.gradients() == [2.0]


def test_two_bodies_of_one_window_are_unscaled_together(make: Any) -> None:
    room = make.room(make.half(2), make.full(2))
    room.window.open(room.backward())
    room.accumulate(1.0, 2.0)
    room.window.leave_open()
    backward = room.backward()
    room.window.open(backward)
    room.accumulate(10.0, 20.0)
    room.window.close(backward, True, set())
    assert room.gradients() == [11.0, 22.0]


def test_a_body_that_raises_before_its_backward_leaves_the_window_open(make: Any) -> None:
    room = make.room(make.half(2))
    room.window.open(room.backward())
    room.accumulate(1.0)
    room.window.leave_open()
    room.window.open(room.backward())
    room.window.discard_backward()
    assert room.window.is_left_open
    assert room.params[0].grad is not None


def test_a_body_that_raises_in_its_backward_drops_what_was_left(make: Any) -> None:
    room = make.room(make.half(2))
    room.window.open(room.backward())
    room.accumulate(1.0)
    room.window.leave_open()
    room.window.open(room.backward())
    room.accumulate(1.0)
    room.window.discard_backward()
    assert room.window.is_closed
    assert room.gradients() == [None]


def test_zero_grad_reaches_a_window_that_was_left_open(make: Any) -> None:
    room = make.room(make.half(2), make.full(2))
    room.window.open(room.backward())
    room.accumulate(1.0, 2.0)
    room.window.leave_open()
    room.optimizer.zero_grad()
    backward = room.backward()
    room.window.open(backward)
    room.accumulate(10.0, 20.0)
    room.window.close(backward, True, set())
    assert room.gradients() == [10.0, 20.0]


def test_an_empty_window_finds_nothing(make: Any) -> None:
    room = make.room(make.half(2))
    backward = room.run(None)
    assert backward.checked == []
    assert float(room.scaler.found_inf) == 0.0
    assert room.gradients() == [None]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch 2.11
def test_foreign_gradients_are_checked_and_unscaled_too(make: Any) -> None:
    high = make.full(4, 2)
    room = make.room(high)
    backward = room.backward()
    room.window.open(backward)
    high.grad = torch.full((4, 2), 16.0).to_sparse()
    room.window.close(backward, True, set())
    assert high.grad.to_dense().tolist() == [[2.0, 2.0]] * 4
    assert room.rows.ledger.slots.check is None, "the kernels did not see all"


@pytest.mark.parametrize("low", [True, False], ids=["half", "float32"])
def test_an_overflow_is_recorded_unless_nobody_asks(make: Any, low: bool) -> None:
    for asks in (True, False):
        room = make.room(make.half(2) if low else make.full(2))
        backward = room.backward()
        room.window.open(backward)
        room.accumulate(float("inf"))
        room.window.close(backward, asks, set())
        assert bool(room.scaler.found_inf) is asks
        assert bool(backward.checked[0].checks.nonfinite.any())


def test_what_another_optimizer_unscaled_is_not_unscaled_again(make: Any) -> None:
    high = make.full(2)
    first, second = make.room(high), make.room(high)
    backward, unscaled = first.backward(), set()
    for room in (first, second):
        room.window.open(backward)
    first.accumulate(2.0)
    for room in (first, second):
        room.window.close(backward, True, unscaled)
    assert first.gradients() == [2.0]


def test_a_window_that_is_closed_has_no_backward(make: Any) -> None:
    room = make.room(make.half(2))
    with pytest.raises(AmpStateError, match="has no backward"):
        _ = room.window.backward
