"""Two engines in one process: each is blind to the gradients of parameters that belong to the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_engine import Engine, amp
from tests.models import NORMED_MLP
from tests.support import assert_bitwise, frozen, started

# One engine at a time casts functions.
PAIRS = [("O1", "O2"), ("O2", "O1"), ("O2", "O2"), ("O2", "O4"), ("O5", "O1"), ("O5", "O2"), ("O5", "O4")]


@dataclass
class Run:
    """An engine with a model and an optimizer of its own."""

    engine: Engine
    model: Any
    optimizer: torch.optim.Optimizer

    @classmethod
    def of(cls, engine: Engine, level: str, seed: int) -> Run:
        keywords = {} if level == "O4" else {"loss_scale": 64.0 * 2**seed}
        return cls(engine, *started(level, seed=seed, engine=engine, **keywords))

    def scaled(self, index: int = 0, **keywords: Any) -> Any:
        return self.engine.scale_loss(NORMED_MLP.loss(self.model, NORMED_MLP.batch(index)), self.optimizer, **keywords)

    def backward(self, index: int = 0, **keywords: Any) -> None:
        with self.scaled(index, **keywords) as scaled_loss:
            scaled_loss.backward()

    def values(self) -> list[Tensor]:
        return frozen([*amp.master_params(self.optimizer)])


def backward_in_the_body(one: Run, other: Run) -> None:
    with one.scaled() as scaled_loss:
        other.backward()
        scaled_loss.backward()
    other.optimizer.step()


def backward_after_that_of_the_body(one: Run, other: Run) -> None:
    with one.scaled() as scaled_loss:
        scaled_loss.backward()
        other.backward()
    other.optimizer.step()


def step_in_the_body(one: Run, other: Run) -> None:
    other.backward()
    with one.scaled() as scaled_loss:
        scaled_loss.backward()
        other.optimizer.step()


def zero_grad_in_the_body(one: Run, other: Run) -> None:
    other.backward(1)
    with one.scaled() as scaled_loss:
        scaled_loss.backward()
        other.optimizer.zero_grad()
    other.backward()
    other.optimizer.step()


def open_window(one: Run, other: Run) -> None:
    other.backward(1, delay_unscale=True)
    one.backward()
    other.backward()
    one.backward()
    other.optimizer.step()


def overlapping_bodies(one: Run, other: Run) -> None:
    first, second = one.scaled(), other.scaled()
    scaled_losses = first.__enter__(), second.__enter__()
    for scaled_loss in scaled_losses:
        scaled_loss.backward()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    other.optimizer.step()


def body_that_raises(one: Run, other: Run) -> None:
    with suppress(ZeroDivisionError), one.scaled() as scaled_loss:
        scaled_loss.backward()
        other.backward()
        raise ZeroDivisionError
    other.optimizer.step()


ORDERS: list[Callable[[Run, Run], None]] = [
    backward_in_the_body, backward_after_that_of_the_body, step_in_the_body, zero_grad_in_the_body, open_window,
    overlapping_bodies, body_that_raises,
]  # fmt: skip


class Idle(Run):
    """An engine whose bodies do nothing."""

    def scaled(self, index: int = 0, **keywords: Any) -> Any:
        return nullcontext(torch.zeros((), requires_grad=True))


@pytest.fixture
def engines() -> Iterator[tuple[Engine, Engine]]:
    with Engine() as one, Engine() as other:
        yield one, other


def same(steps: Callable[[type[Run], Engine, Engine], list[Tensor]]) -> None:
    """Assert that weights are stepped to the same values beside an engine that runs and beside an idle one."""
    values = []
    for kind in (Run, Idle):
        with Engine() as one, Engine() as other:
            values.append(steps(kind, one, other))
    assert_bitwise(*values)


@pytest.mark.filterwarnings("ignore:.*finds no gradient")
@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.__name__)
@pytest.mark.parametrize(("level", "other_level"), PAIRS)
def test_bodies_of_one_engine_leave_gradients_of_the_other_alone(level: str, other_level: str, order: Any) -> None:
    def steps(kind: type[Run], first: Engine, second: Engine) -> list[Tensor]:
        one, other = kind.of(first, level, 0), Run.of(second, other_level, 1)
        for _ in range(2):
            order(one, other)
            other.optimizer.zero_grad()
        return other.values()

    same(steps)


@pytest.mark.parametrize("in_module", [False, True], ids=["", "in a module"])
@pytest.mark.parametrize(("level", "other_level"), PAIRS)
def test_what_joins_an_optimizer_of_one_engine_is_no_concern_of_the_other(
    level: str, other_level: str, in_module: bool
) -> None:
    def steps(kind: type[Run], first: Engine, second: Engine) -> list[Tensor]:
        one, other = kind.of(first, level, 0), Run.of(second, other_level, 1)
        for index in range(3):
            torch.manual_seed(index)
            head = nn.Linear(4, 4).to(other.model[0].weight.dtype)
            one.backward()  # while nothing tells whose head it is
            if in_module:
                other.model.append(head)
            other.optimizer.add_param_group({"params": list(head.parameters())})
            with one.scaled() as scaled_loss:
                output = other.model(NORMED_MLP.batch()[0])
                loss = (output if in_module else head(output.to(head.weight.dtype))).float().square().mean()
                with other.engine.scale_loss(loss, other.optimizer) as other_loss:
                    other_loss.backward()
                scaled_loss.backward()
                other.optimizer.step()
        return other.values()

    same(steps)
