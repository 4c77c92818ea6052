"""The order in which a forward used parameters, from its graph."""

from __future__ import annotations

import torch
from torch import nn

from amp_engine.stepping.forward_order import forward_order


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
