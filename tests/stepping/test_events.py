"""Events: who is told, in which order, and that a backward tells each of what happens to it once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from amp_engine import Engine
from amp_engine.stepping.events import Event, Events
from tests.models import MLP
from tests.support import backward, started


def tell(event: Event[[int]], number: int) -> None:
    for observer in event.observers:
        observer(number)


def test_observers_are_told_in_the_order_in_which_they_subscribed() -> None:
    event: Event[[int]] = Event()
    told: list[tuple[str, int]] = []
    for name in "bac":
        event.subscribe(lambda number, name=name: told.append((name, number)))  # type: ignore[misc]
    tell(event, 1)
    assert told == [("b", 1), ("a", 1), ("c", 1)]


def test_who_unsubscribes_is_told_no_more_and_others_are() -> None:
    event: Event[[int]] = Event()
    first: list[int] = []
    second: list[int] = []
    unsubscribe = event.subscribe(first.append)
    event.subscribe(second.append)
    unsubscribe()
    unsubscribe()  # and once more, which changes nothing
    tell(event, 1)
    assert (first, second) == ([], [1])


def test_an_observer_may_unsubscribe_while_it_is_told() -> None:
    event: Event[[int]] = Event()
    told: list[int] = []
    unsubscribe = event.subscribe(lambda number: unsubscribe())
    event.subscribe(told.append)
    tell(event, 1)
    tell(event, 2)
    assert told == [1, 2]


def subscribed(events: Events) -> list[str]:
    """Names of what happens, as it happens."""
    told: list[str] = []
    for name in ("entering", "entered", "leaving", "closed", "left", "unchecked", "skipped", "reported"):
        getattr(events, name).subscribe(lambda *_, name=name: told.append(name))
    return told


@pytest.mark.parametrize("level", ["O2", "O0"])  # what is scaled, and what passes through
def test_a_backward_is_told_of_from_its_entry_to_its_end(level: str) -> None:
    with Engine() as engine:
        model, optimizer = started(level, task=MLP, engine=engine)
        told = subscribed(engine.records.events)
        backward(MLP.loss(model, MLP.batch(0)), optimizer, engine=engine)
        assert told == ["entering", "entered", "leaving", "closed", "left"]


@pytest.mark.parametrize("level", ["O2", "O0"])
def test_the_end_of_a_body_that_raises_is_told_and_nothing_was_closed(level: str) -> None:
    with Engine() as engine:
        model, optimizer = started(level, task=MLP, engine=engine)
        told = subscribed(engine.records.events)
        with pytest.raises(KeyError), engine.scale_loss(MLP.loss(model, MLP.batch(0)), optimizer):
            raise KeyError
        assert told == ["entering", "entered", "leaving", "left"]


def test_a_rehearsal_tells_observers_of_its_own_alone() -> None:
    with Engine() as engine:
        model, optimizer = started("O2", task=MLP, engine=engine)
        told = subscribed(engine.records.events)
        with engine.records.rehearsal() as events:
            own: list[Any] = []
            events.closed.subscribe(lambda rows, found: own.append(found))
            backward(MLP.loss(model, MLP.batch(0)), optimizer, engine=engine)
        assert told == []
        assert len(own) == 1
        optimizer.zero_grad()
        backward(MLP.loss(model, MLP.batch(0)), optimizer, engine=engine)
        assert len(told) == 5


def test_a_skip_is_told_once() -> None:
    with Engine() as engine:
        model, optimizer = started("O2", task=MLP, engine=engine)
        told = subscribed(engine.records.events)
        with engine.scale_loss(MLP.loss(model, MLP.batch(0)) * torch.inf, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        assert told.count("skipped") == 1
