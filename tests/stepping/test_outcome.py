"""The numbers of a backward on their way to the host: the flag, norms and losses."""

from __future__ import annotations

import math

import pytest
import torch

from amp_engine.scaling.outcome import Outcome


def numbers(flag: float = 1.0, *flushed: float, loss: float = 0.0) -> torch.Tensor:
    return torch.tensor([flag, 4.0, 8.0, loss, *flushed])


def test_the_numbers_are_told_by_name() -> None:
    outcome = Outcome(numbers())
    assert outcome.is_known()
    assert (outcome.overflowed(), outcome.next_scale(), outcome.scale()) == (True, 4.0, 8.0)
    assert (outcome.number(), outcome.loss(), outcome.has_flushed()) == (None, None, False)
    assert not Outcome(numbers(0.0)).overflowed()


@pytest.mark.parametrize("flag", [2.0, 0.5, math.nan])
def test_any_flag_but_0_is_an_overflow(flag: float) -> None:
    assert Outcome(numbers(flag)).overflowed()


def test_a_loss_that_the_host_knows_is_not_sent() -> None:
    outcome = Outcome(numbers(), value=0.25, loss=torch.tensor(7.0))
    assert (outcome.number(), outcome.loss()) == (0.25, 0.25)


@pytest.mark.parametrize("loss", [torch.tensor(0.25), torch.tensor([0.25]), torch.tensor([[0.25]]).half()])
@pytest.mark.parametrize("flushed", [(), (1.0,)])
def test_one_number_travels_with_the_others(loss: torch.Tensor, flushed: tuple[float, ...]) -> None:
    outcome = Outcome(numbers(1.0, *flushed, loss=0.25), loss=loss)
    assert (outcome.number(), outcome.loss()) == (0.25, 0.25)
    assert outcome.has_flushed() == bool(flushed)


def test_several_losses_are_summed_when_somebody_asks() -> None:
    outcome = Outcome(numbers(1.0, 0.0), loss=torch.tensor([0.25, 0.5]))
    assert (outcome.number(), outcome.loss(), outcome.has_flushed()) == (None, 0.75, False)


def test_a_loss_on_another_device_does_not_travel() -> None:
    outcome = Outcome(numbers(), loss=torch.tensor(0.25, device="meta"))
    assert outcome.number() is None
