"""Loops over parameters: native and in Python they are one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from amp_engine.kernels import walk


class Incomparable(Tensor):
    def __eq__(self, other: object) -> bool:
        raise AssertionError("elements were compared")

    __hash__ = Tensor.__hash__


def test_objects_are_the_same_only_if_they_are_the_very_objects() -> None:
    a, b = (torch.zeros(2).as_subclass(Incomparable) for _ in range(2))
    assert walk.same_objects([a, b], (a, b))
    assert walk.same_objects((), [])
    assert not walk.same_objects([a, b], (b, a))
    assert not walk.same_objects([a, b], (a,))
    assert not walk.same_objects([a], (a, b))
    assert not walk.same_objects([a, None], [a, b])


def test_gradients_come_with_how_and_where_they_can_be_taken() -> None:
    bucket = torch.ones(8)
    grads = [None, torch.ones(4), bucket[:4], torch.ones(4).to_sparse(), None]
    params = [nn.Parameter(torch.zeros(4)) for _ in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    found = walk.gradients(walk.params(params))
    assert [found.tensors[i] is g for i, g in enumerate(grads)] == [True] * 5
    assert list(found.walks) == [walk.NONE, walk.OWN, walk.SHARED, walk.OTHER, walk.NONE]
    assert found.devices == [torch.device("cpu")]
    assert walk.gradients(walk.params(params[3:])).devices == []


def test_a_copy_leaves_the_gradient_alone_and_is_left_alone() -> None:
    bucket = torch.ones(8)
    grads = [torch.ones(4), bucket[:4], torch.ones(4)]
    copies = walk.copies(grads, bytes([walk.OWN, walk.SHARED, walk.NONE]))
    for grad in grads:
        grad.add_(1)
    first, second = copies[0], copies[1]
    assert first is not None
    assert second is not None
    assert copies[2] is None
    assert not first.requires_grad
    first.mul_(3)
    assert (first.tolist(), second.tolist()) == ([3.0] * 4, [1.0] * 4)
    assert [g.tolist() for g in grads] == [[2.0] * 4] * 3
