"""A step: skipped or taken, by the kernels or by the class, and what is left after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from amp_engine.optimizers.fused_step import fused_step_of
from amp_engine.scaling.losses import Scaling
from amp_engine.scaling.scaler import LossScaler
from amp_engine.stepping.backward import Backward
from amp_engine.stepping.events import Events
from amp_engine.stepping.rows import MasterRows
from amp_engine.stepping.stepper import Stepper


class Stepping:
    """One optimizer of one half parameter that is 1, with lr 1, at a static scale of 8 that skips."""

    def __init__(self, kind: Any = torch.optim.SGD) -> None:
        self.param = nn.Parameter(torch.ones(2, dtype=torch.float16))
        self.optimizer = kind([self.param], lr=1.0)
        self.scaler = LossScaler(8.0)
        self.skips: list[int] = []
        events = Events()
        events.skipped.subscribe(lambda skips, backwards: self.skips.append(skips))
        rows = MasterRows(self.optimizer)
        rows.keep()
        self.stepped = Stepper(self.optimizer, rows, Scaling([self.scaler], True), events)

    def backward(self, grad: float) -> None:
        backward = Backward(self.scaler, 0, self.scaler.snapshot())
        self.stepped.enter_backward(backward)
        self.param.grad = torch.full_like(self.param, 8.0 * grad)
        self.stepped.close_window(backward, True, set())
        backward.conclude(self.scaler.update_(backward.snapshot))
        self.stepped.pending.add(backward)

    def step(self, by_kernels: bool = True) -> None:
        fused = fused_step_of(self.optimizer) if by_kernels else None
        self.stepped.step((self.optimizer,), {}, fused, None)

    @property
    def master(self) -> float:
        return float(self.optimizer.param_groups[0]["params"][0].detach()[0])

    def has_left_nothing(self) -> bool:
        """True if the only gradients are tiny ones, for `zero_grad` to find."""
        grads = [self.param.grad, self.optimizer.param_groups[0]["params"][0].grad]
        return all(grad is not None and bool((grad < 1e-4).all()) for grad in grads)


class Raises(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        super().step()
        raise KeyError("after the step")


@pytest.mark.parametrize("by_kernels", [True, False], ids=["kernels", "class"])
def test_a_step_moves_master_and_parameter_and_drops_gradients(by_kernels: bool) -> None:
    one = Stepping()
    one.backward(0.25)
    one.step(by_kernels)
    assert one.master == 0.75
    assert one.param.tolist() == [0.75, 0.75]
    assert one.has_left_nothing()
    assert one.stepped.rows.ledger.slots.count == 0


@pytest.mark.parametrize("by_kernels", [True, False], ids=["kernels", "class"])
def test_a_skip_moves_nothing_and_drops_gradients(by_kernels: bool) -> None:
    one = Stepping()
    one.backward(float("inf"))
    one.step(by_kernels)
    assert one.master == 1.0
    assert one.skips == [1]
    assert one.has_left_nothing()
    assert one.stepped.pending.skipped
    one.backward(0.25)
    one.step(by_kernels)
    assert one.master == 0.75
    assert not one.stepped.pending.skipped


def test_an_overflow_among_several_backwards_skips_the_step() -> None:
    one = Stepping()
    for grad in (0.25, float("nan"), 0.25):
        one.backward(grad)
    one.step()
    assert one.master == 1.0


def test_clipping_is_a_factor_of_the_step() -> None:
    one = Stepping()
    one.backward(3.0)
    norm = one.stepped.grad_norm(2.0)
    assert norm is not None
    assert float(norm) == pytest.approx(3.0 * 2**0.5)
    one.stepped.clip_grads_with_norm_(norm, 2**0.5)
    assert one.stepped.rows.ledger.slots.count == 1, "no gradient was looked at"
    one.step()
    assert one.master == pytest.approx(0.0, abs=1e-6)


def test_a_norm_is_known_of_one_untouched_backward_only() -> None:
    one = Stepping()
    assert one.stepped.grad_norm(2.0) is None, "there was no backward"
    one.backward(1.0)
    assert one.stepped.grad_norm(3.0) is None, "of no other order"
    one.backward(1.0)
    assert one.stepped.grad_norm(2.0) is None, "of a sum"


def test_a_parameter_agrees_with_its_master_after_a_step_that_raises() -> None:
    one = Stepping(Raises)
    one.backward(0.25)
    with pytest.raises(KeyError):
        one.step(by_kernels=False)
    assert one.master == 0.75
    assert one.param.tolist() == [0.75, 0.75]


def test_release_in_the_middle_drops_what_overflowed() -> None:
    one = Stepping()
    one.backward(float("inf"))
    one.stepped.release(one.stepped.may_have_overflowed())
    assert one.optimizer.param_groups[0]["params"][0] is one.param
    assert one.param.dtype == torch.float32
    assert one.param.grad is None
