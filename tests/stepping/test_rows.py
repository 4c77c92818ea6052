"""An optimizer steps rows with and without masters, and the kernels find their gradients in slots."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from amp_engine.stepping.master_parameter import MasterParameter
from amp_engine.stepping.slots import Slot


def slots_of(room: Any) -> list[str]:
    """Return the slot of each row: "held" is scaled still, "foreign" is one that the kernels may not take."""
    return [Slot(kind).name.lower() for kind in room.rows.step_input().slots]


def test_a_row_is_a_master_or_the_parameter_itself(make: Any) -> None:
    low, high = make.half(2), make.full(2)
    room = make.room(low, high)
    columns = room.rows.columns
    assert [type(w) for w in columns.weights] == [MasterParameter, nn.Parameter]
    assert columns.params == (low, high)
    assert columns.copies == (low, None)
    assert columns.plain == (high,)


def test_without_masters_low_precision_is_stepped_itself(make: Any) -> None:
    low = make.half(2)
    room = make.room(low, makes_masters=False)
    room.rows.scan()
    assert room.rows.columns.weights == (low,)
    assert room.rows.masters == []
    room.run(2.0)
    assert low.grad is not None
    assert low.grad.tolist() == [2.0, 2.0]
    assert slots_of(room) == ["own"]


def test_the_step_finds_half_gradients_as_they_are(make: Any) -> None:
    low, high, idle = make.half(2), make.full(2), make.half(2)
    room = make.room(low, high, idle)
    room.run(2.0, 3.0, None)
    assert slots_of(room) == ["held", "own", "empty"]
    rows = room.rows.step_input()
    assert rows.gradients[0].dtype == torch.float16
    assert rows.gradients[0].tolist() == [16.0, 16.0], "scaled still"
    assert rows.gradients[1].tolist() == [3.0, 3.0]
    assert rows.gradients[2] is None


def test_who_looks_at_a_gradient_gets_float32_and_the_step_steps_that(make: Any) -> None:
    room = make.room(make.half(2))
    room.run(2.0)
    assert room.gradients() == [2.0]
    assert slots_of(room) == ["own"]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch 2.11
def test_what_kernels_may_not_take_is_foreign(make: Any) -> None:
    high = make.full(4, 2)
    room = make.room(high)
    room.run(1.0)
    high.grad = torch.ones(4, 2).to_sparse()
    assert slots_of(room) == ["foreign"]


def test_a_gradient_that_is_dropped_stays_dropped_when_groups_move(make: Any) -> None:
    room = make.room(make.half(2), make.half(2))
    room.run(1.0, 2.0)
    room.weights[0].grad = None
    room.optimizer.param_groups.reverse()
    room.rows.scan()
    assert slots_of(room) == ["held", "empty"]
    assert room.gradients() == [2.0, None]


def test_the_check_counts_while_nobody_touches_a_gradient(make: Any) -> None:
    room = make.room(make.half(2), make.full(2))
    room.run(1.0, 1.0)
    check = room.rows.whole_check()
    assert check is not None
    assert float(check.norm) == 2.0
    room.params[1].grad.mul_(2)
    assert room.rows.whole_check() is None


@pytest.mark.parametrize("touch", ["look", "regroup", "drop", "add"])
def test_the_check_does_not_count_of_other_gradients(make: Any, touch: str) -> None:
    room = make.room(make.half(2), make.half(2))
    room.run(1.0, 1.0)
    if touch == "look":
        assert room.weights[0].grad is not None
    elif touch == "regroup":
        room.optimizer.param_groups.reverse()
        room.rows.scan()
    elif touch == "drop":
        room.weights[0].grad = None
    else:
        (room.weights[0] * 1.0).sum().backward()  # into the master itself
    assert room.rows.whole_check() is None


def test_a_parameter_is_not_stepped_beside_its_master(make: Any) -> None:
    low = make.half(2)
    room = make.room(low)
    room.optimizer.add_param_group({"params": [low]})
    with pytest.raises(RuntimeError, match="already steps its FP32 master"):
        room.rows.scan()
    assert [type(w) for w in room.weights] == [MasterParameter, nn.Parameter], "nothing was changed"


def test_release_gives_parameters_back_in_float32(make: Any) -> None:
    low = make.half(2)
    room = make.room(low)
    with torch.no_grad():
        room.weights[0].add_(1e-4)
    room.rows.release()
    assert room.weights == [low]
    assert low.dtype == torch.float32
    assert low.tolist() == torch.full((2,), 1.0001).tolist()
