"""Loops over parameters: native and in Python they are one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
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


@pytest.mark.parametrize("lazy", [torch._neg_view(torch.ones(4)), torch._efficientzerotensor((4,))])
def test_gradients_that_are_not_what_lies_in_their_memory_are_not_taken(lazy: Tensor) -> None:
    params = [nn.Parameter(torch.zeros(4)) for _ in range(2)]
    params[0].grad, params[1].grad = lazy, torch.ones(4)
    assert list(walk.gradients(walk.params(params)).walks) == [walk.OTHER, walk.OWN]
    assert not walk.is_lazy(walk.written_out(lazy))
    assert torch.equal(walk.written_out(lazy), lazy.clone())
    assert walk.written_out(params[1]) is params[1]


@pytest.mark.parametrize("n", [0, 1, 8, 9, 16, 17, 24, 25, 40])  # native loops ask for what is 8, 16 and 24 ahead
@pytest.mark.parametrize("listed", [lambda tensors: walk.params(tensors), list], ids=["params", "list"])
def test_lists_of_any_length_are_walked_to_their_end(
    n: int, listed: Callable[[list[Tensor]], Sequence[Tensor]]
) -> None:
    params = [nn.Parameter(torch.zeros(1 + i % 3)) for i in range(n)]
    with torch.inference_mode():
        unversioned = torch.ones(1)
    for i, param in enumerate(params):
        one = torch.ones_like(param)
        param.grad = (one, None, one.to_sparse(), unversioned if i % 3 == 0 else None)[i % 4]
    walked = listed(params)
    found = walk.gradients(walked)
    assert [found.tensors[i] is p.grad for i, p in enumerate(params)] == [True] * n
    assert list(found.walks) == [
        walk.NONE if p.grad is None else walk.OTHER if p.grad.is_sparse else walk.OWN for p in params
    ]
    copies = walk.copies(found.tensors, bytes(0 if how == walk.OTHER else how for how in found.walks))
    assert [copies[i] is not None for i in range(n)] == [how == walk.OWN for how in found.walks]

    before, gradients_before = walk.stamps(walked), walk.gradient_stamps(walked)
    for p in params[-1:]:
        torch.autograd.graph.increment_version(p)
        p.grad = torch.ones_like(p)
    moved = [walk.stamps_of(before, i) != walk.stamps([p]) for i, p in enumerate(params)]
    assert moved == [i == n - 1 for i in range(n)]
    assert (walk.gradient_stamps(walked) != gradients_before) == (n > 0)

    assert walk.any_gradient(walked) == (n > 0)
    walk.drop_gradients(walked)
    assert all(p.grad is None for p in params)
    assert not walk.any_gradient(walked)
    for p in params[-1:]:
        p.grad = torch.ones_like(p)
    assert walk.any_gradient(walked) == (n > 0)


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


def test_gradient_stamps_tell_what_was_replaced_or_written() -> None:
    params = [nn.Parameter(torch.zeros(4)) for _ in range(3)]
    params[0].grad, params[1].grad = torch.ones(4), torch.ones(4)
    handle = walk.params(params)
    alive = walk.gradients(handle)
    before = walk.gradient_stamps(handle)
    assert walk.gradient_stamps(handle) == before
    params[0].grad.mul_(2)
    written = walk.gradient_stamps(handle)
    params[1].grad = torch.ones(4)
    replaced = walk.gradient_stamps(handle)
    params[2].grad = torch.ones(4)
    added = walk.gradient_stamps(handle)
    params[0].grad = params[1].grad = params[2].grad = None
    dropped = walk.gradient_stamps(handle)
    assert all(
        a != b
        for i, a in enumerate((before, written, replaced, added, dropped))
        for b in (before, written, replaced, added, dropped)[:i]
    )
    assert len(alive.tensors) == 3


def test_gradients_without_a_version_have_stamps() -> None:
    param = nn.Parameter(torch.zeros(4))
    with torch.inference_mode():
        grad = torch.ones(4)
    param.grad = grad
    assert walk.gradient_stamps([param]) == walk.gradient_stamps([param])


def test_either_chooses_by_the_mask() -> None:
    a, b = [torch.zeros(1), None, torch.zeros(1)], [torch.ones(1), torch.ones(1), None]
    chosen = walk.either(bytes([1, 2, 0]), a, b)
    assert [chosen[i] for i in range(3)] == [a[0], None, None]
    assert [walk.either(bytes([0, 0, 1]), a, b)[i] for i in range(3)] == [b[0], b[1], a[2]]
    assert [walk.either(bytes([0, 0, 1]), walk.either(bytes(3), a))[i] for i in range(3)] == [None] * 3
    with pytest.raises(ValueError, match="either|zip"):
        walk.either(bytes(2), a)


def test_stamps_of_one_are_replaced_in_place():
    params = [torch.ones(2), torch.ones(3), torch.ones(4)]
    stamps = walk.stamps(params)
    params[1].mul_(2)
    assert not walk.have_stamps(params, stamps)
    replaced = walk.put_stamps(stamps, 1, walk.stamps([params[1]]))
    assert walk.have_stamps(params, replaced)
    assert replaced == walk.stamps(params)
    params[2].mul_(2)
    assert walk.put_stamps(replaced, 2, walk.stamps([params[2]])) is replaced
    assert walk.have_stamps(params, replaced)
    assert walk.joined(walk.stamps_of(replaced, i) for i in range(3)) == walk.stamps(params)
