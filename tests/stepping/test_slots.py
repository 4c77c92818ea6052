"""Gradients that are held in half: taken once, in another order, clipped, dropped."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from amp_engine.kernels import tensor_lists
from amp_engine.stepping.master_parameter import HOLDING
from amp_engine.stepping.slots import NO_SLOTS, Slot, Slots

EIGHTH = SimpleNamespace(inv_scale=torch.tensor(0.125))


def held(*values: float | None) -> Slots:
    params = [nn.Parameter(torch.zeros(2, dtype=torch.float16)) for _ in values]
    for param, value in zip(params, values, strict=True):
        param.grad = None if value is None else torch.full((2,), value, dtype=torch.float16)
    return Slots(tensor_lists.gradients(params, bytes([1] * len(params))).held, EIGHTH)


def first(tensor: Tensor | None) -> float | None:
    return None if tensor is None else float(tensor[0])


def test_what_is_taken_is_unscaled_in_float32_and_gone() -> None:
    slots = held(16.0, None, 8.0)
    taken = slots.take([0])[0]
    assert taken is not None
    assert taken.dtype == torch.float32
    assert taken.tolist() == [2.0, 2.0]
    assert slots.take([0, 1]) == {}
    assert bytes(slots.states) == bytes([Slot.EMPTY, Slot.EMPTY, Slot.HELD])
    assert not slots.is_whole


def test_a_kept_gradient_is_clipped_by_torchs_factor() -> None:
    slots = held(16.0)
    slots.clip(torch.tensor(4.0), 1.0)
    assert first(slots.take([0])[0]) == pytest.approx(2.0 * 1.0 / (4.0 + 1e-6))


def test_a_norm_below_the_limit_clips_nothing() -> None:
    slots = held(16.0)
    slots.clip(torch.tensor(0.5), 1.0)
    assert first(slots.take([0])[0]) == 2.0


def test_the_last_one_taken_ends_the_keeping() -> None:
    slots = held(8.0, 8.0)
    assert id(slots) in HOLDING
    slots.empty(0)
    assert slots.inv_scale is not None
    slots.empty(1)
    assert id(slots) not in HOLDING
    assert slots.inv_scale is None


def test_rows_that_move_take_their_gradients_along() -> None:
    slots = held(8.0, 16.0, None)
    slots.clip(torch.tensor(1.0), 100.0)
    moved = slots.rearranged([None, 1, 2, 0])
    assert slots.count == 0, "nothing is held twice"
    assert moved.is_whole
    assert {row: first(grad) for row, grad in moved.take(range(4)).items()} == {1: 2.0, 3: 1.0}


def test_a_dropped_gradient_stays_dropped_when_rows_move() -> None:
    slots = held(8.0, 16.0)
    slots.empty(0)
    moved = slots.rearranged([1, 0])
    assert not moved.is_whole
    assert [moved.holds(0), moved.holds(1)] == [True, False]


def test_nothing_is_kept_without_a_backward() -> None:
    assert NO_SLOTS.count == 0
    assert not NO_SLOTS.holds(3)
    assert NO_SLOTS.take([3]) == {}
    assert NO_SLOTS.inv_scale is None
