"""The order in which a forward used parameters, from its graph."""

from __future__ import annotations

import torch
from torch import nn

from amp_engine.stepping.forward_order import forward_order, saved_by, undefined_derivative


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


def test_weights_whose_memory_was_released_before_the_backward_are_not_read() -> None:
    """As FSDP releases it. Reading them would end the process."""
    layer = nn.Linear(4, 4)
    loss = layer(torch.ones(2, 4, requires_grad=True)).square().sum()
    saved = [tensor.shape for tensor in saved_by(loss.grad_fn.next_functions[0][0].next_functions[0][0])]
    layer.weight.untyped_storage().resize_(0)
    left = [tensor.shape for tensor in saved_by(loss.grad_fn.next_functions[0][0].next_functions[0][0])]
    assert (len(saved), len(left)) == (2, 1)
    assert undefined_derivative(loss) == (None, None)
