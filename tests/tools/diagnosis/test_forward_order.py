"""The order in which a forward used parameters, from its graph."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from amp_engine.tools.diagnosis.forward_order import _nodes as nodes_of
from amp_engine.tools.diagnosis.forward_order import forward_order, origin_of_nonfinite, saved_by, undefined_derivative


def test_parameters_stand_in_the_order_of_their_use() -> None:
    late, early, unused, twice = (nn.Parameter(torch.ones(3)) for _ in range(4))
    h = torch.ones(3) * twice
    h = h * early
    h = (h + h.detach()) * late
    loss = (h * twice).sum()
    order = forward_order(loss)
    assert order.keys() == {id(late), id(early), id(twice)}
    assert order[id(early)] < order[id(late)] < order[id(twice)]
    assert id(unused) not in order


def test_a_loss_without_a_graph_has_none() -> None:
    assert forward_order(torch.tensor(1.0)) == {}


def test_a_graph_that_meets_itself_again_is_seen_once() -> None:
    weight = nn.Parameter(torch.ones(()))
    h = weight * 1.0
    for _ in range(200):  # 2**200 ways through it
        h = h * h
    assert forward_order(h).keys() == {id(weight)}


def test_a_parameter_that_is_the_loss_itself() -> None:
    weight = nn.Parameter(torch.ones(()))
    assert forward_order(weight) == {}


@pytest.mark.parametrize("value", [1.0, math.inf])
def test_weights_whose_memory_was_released_before_the_backward_are_not_read(value: float) -> None:
    """FSDP releases it so. Reading them, or running the formulas that do, would end the process."""
    layer, norm = nn.Linear(4, 4), nn.RMSNorm(4)
    x = torch.ones(2, 4, requires_grad=True)
    result = norm(layer(x * value))
    loss = (result * result).sum()
    shapes = [tensor.shape for node in nodes_of(loss) for tensor in saved_by(node)]
    for parameter in (layer.weight, norm.weight):
        parameter.untyped_storage().resize_(0)
    left = [tensor.shape for node in nodes_of(loss) for tensor in saved_by(node)]
    assert len(left) < len(shapes)
    reason, origin = undefined_derivative(loss)
    assert reason is None
    assert (origin is None) == (value == 1.0)
    found = origin_of_nonfinite(loss)
    assert (found is None) == (value == 1.0)
