"""Loops over parameters: native and in Python they are one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_engine.kernels import tensor_lists


class Incomparable(Tensor):
    def __eq__(self, other: object) -> bool:
        raise AssertionError("elements were compared")

    __hash__ = Tensor.__hash__


def test_objects_are_the_same_only_if_they_are_the_very_objects() -> None:
    a, b = (torch.zeros(2).as_subclass(Incomparable) for _ in range(2))
    assert tensor_lists.same_objects([a, b], (a, b))
    assert tensor_lists.same_objects((), [])
    assert not tensor_lists.same_objects([a, b], (b, a))
    assert not tensor_lists.same_objects([a, b], (a,))
    assert not tensor_lists.same_objects([a], (a, b))
    assert not tensor_lists.same_objects([a, None], [a, b])


def test_gradients_come_with_how_and_where_they_can_be_taken() -> None:
    bucket = torch.ones(8)
    grads = [None, torch.ones(4), bucket[:4], torch.ones(4).to_sparse(), None]
    params = [nn.Parameter(torch.zeros(4)) for _ in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    found = tensor_lists.gradients(tensor_lists.params(params))
    assert [found.tensors[i] is g for i, g in enumerate(grads)] == [True] * 5
    assert list(found.accesses) == [
        tensor_lists.NONE,
        tensor_lists.TAKEN,
        tensor_lists.TAKEN,
        tensor_lists.OTHER,
        tensor_lists.NONE,
    ]
    assert found.devices == [torch.device("cpu")]
    assert tensor_lists.gradients(tensor_lists.params(params[3:])).devices == []


@pytest.mark.parametrize("lazy", [torch._neg_view(torch.ones(4)), torch._efficientzerotensor((4,))])
def test_gradients_that_are_not_what_lies_in_their_memory_are_not_taken(lazy: Tensor) -> None:
    params = [nn.Parameter(torch.zeros(4)) for _ in range(2)]
    params[0].grad, params[1].grad = lazy, torch.ones(4)
    assert list(tensor_lists.gradients(tensor_lists.params(params)).accesses) == [
        tensor_lists.OTHER,
        tensor_lists.TAKEN,
    ]
    assert not tensor_lists.is_lazy(tensor_lists.written_out(lazy))
    assert torch.equal(tensor_lists.written_out(lazy), lazy.clone())
    assert tensor_lists.written_out(params[1]) is params[1]


@pytest.mark.parametrize("n", [0, 1, 8, 9, 16, 17, 24, 25, 40])  # native loops ask for what is 8, 16 and 24 ahead
@pytest.mark.parametrize("listed", [lambda tensors: tensor_lists.params(tensors), list], ids=["params", "list"])
def test_lists_of_any_length_are_walked_to_their_end(
    n: int, listed: Callable[[list[Tensor]], Sequence[Tensor]]
) -> None:
    params = [nn.Parameter(torch.zeros(1 + i % 3)) for i in range(n)]
    with torch.inference_mode():
        unversioned = torch.ones(1)
    for i, param in enumerate(params):
        one = torch.ones_like(param)
        param.grad = (one, None, one.to_sparse(), unversioned if i % 3 == 0 else None)[i % 4]
    listed_params = listed(params)
    found = tensor_lists.gradients(listed_params)
    assert [found.tensors[i] is p.grad for i, p in enumerate(params)] == [True] * n
    assert list(found.accesses) == [
        tensor_lists.NONE if p.grad is None else tensor_lists.OTHER if p.grad.is_sparse else tensor_lists.TAKEN
        for p in params
    ]
    marks, gradient_marks = tensor_lists.marks(params), tensor_lists.gradient_marks(tensor_lists.params(params))
    assert not marks.have_moved()
    assert not gradient_marks.have_moved()
    for p in params[-1:]:
        torch.autograd.graph.increment_version(p)
        p.grad = torch.ones_like(p)
    assert marks.have_moved() == gradient_marks.have_moved() == (n > 0)
    assert [marks.has_moved(i) for i in range(n)] == [i == n - 1 for i in range(n)]
    assert [place for place, _ in gradient_marks.moved()] == [*range(n)][-1:]

    assert tensor_lists.any_gradient(listed_params) == (n > 0)
    tensor_lists.discard_gradients(listed_params)
    assert all(p.grad is None for p in params)
    assert not tensor_lists.any_gradient(listed_params)
    for p in params[-1:]:
        p.grad = torch.ones_like(p)
    assert tensor_lists.any_gradient(listed_params) == (n > 0)


def test_marks_of_gradients_tell_what_came_went_was_replaced_or_written() -> None:
    params = [nn.Parameter(torch.zeros(4)) for _ in range(4)]
    params[0].grad, params[1].grad, params[3].grad = torch.ones(4), torch.ones(4), torch.ones(4)
    handle = tensor_lists.params(params)
    alive = tensor_lists.gradients(handle)
    marks = tensor_lists.gradient_marks(handle)
    assert marks.params is handle
    assert marks.moved() == []
    params[0].grad.mul_(2)
    assert marks.moved() == [(0, True)]
    params[1].grad = torch.ones(4)
    params[2].grad = torch.ones(4)
    params[3].grad = None
    assert marks.moved() == [(0, True), (1, True), (2, False), (3, True)]
    assert marks.have_moved()
    params[1].grad, params[2].grad, params[3].grad = alive.tensors[1], None, alive.tensors[3]
    assert marks.moved() == [(0, True)]


def test_gradients_without_a_version_are_marked() -> None:
    param = nn.Parameter(torch.zeros(4))
    with torch.inference_mode():
        grad = torch.ones(4)
    param.grad = grad
    assert not tensor_lists.gradient_marks(tensor_lists.params([param])).have_moved()


def test_a_mask_chooses() -> None:
    tensors = [torch.zeros(1), None, torch.zeros(1)]
    chosen = tensor_lists.where(bytes([1, 2, 0]), tensors)
    assert [chosen[i] for i in range(3)] == [tensors[0], None, None]
    assert [tensor_lists.where(bytes([0, 0, 1]), chosen)[i] for i in range(3)] == [None] * 3
    with pytest.raises(ValueError, match="where|zip"):
        tensor_lists.where(bytes(2), tensors)


def test_tensors_are_marked_one_by_one_or_together() -> None:
    params = [torch.ones(2), torch.ones(3), torch.ones(4)]
    marks = tensor_lists.marks(params)
    for p in params[1:]:
        p.mul_(2)
    assert [marks.has_moved(i) for i in range(3)] == [False, True, True]
    marks.mark_at(1)
    assert marks.have_moved()
    assert [marks.has_moved(i) for i in range(3)] == [False, False, True]
    marks.mark()
    assert not marks.have_moved()


def test_marks_of_other_places_are_taken() -> None:
    a, b = torch.ones(2), torch.ones(3)
    earlier = tensor_lists.marks([a, b])
    b.mul_(2)
    marks = tensor_lists.marks([b, a])
    assert not marks.have_moved()
    marks.take(0, earlier, 1)
    marks.take(1, earlier, 0)
    assert [marks.has_moved(i) for i in range(2)] == [True, False]


def test_other_memory_is_told_from_other_values() -> None:
    params = [nn.Parameter(torch.ones(4)) for _ in range(3)]
    marks = tensor_lists.marks(params)
    params[0].data = torch.ones(4)
    params[1].data = torch.ones(4)
    torch.autograd.graph.increment_version(params[1])
    torch.autograd.graph.increment_version(params[2])
    assert [marks.has_moved(i) for i in range(3)] == [True] * 3
    assert [marks.has_other_memory(i) for i in range(3)] == [True, False, False]


def test_memory_that_was_marked_gives_its_address_to_no_other() -> None:
    param = nn.Parameter(torch.ones(1000))
    marks = tensor_lists.marks([param])
    for _ in range(10):
        param.data = torch.ones(1000)
        assert marks.has_moved(0)


def test_marks_keep_no_memory_that_was_replaced(backend: str) -> None:
    if backend == "plain":
        pytest.skip("in Python a storage is known by keeping it")
    param = nn.Parameter(torch.ones(1000))
    memory = param.detach()
    marks = tensor_lists.marks([param])
    param.data = torch.ones(1000)
    assert marks.has_moved(0)
    assert torch._C._storage_Use_Count(memory.untyped_storage()._cdata) == 2  # `memory`, and this call


def test_marks_are_bumped_past_one_write() -> None:
    written = torch.ones(1)
    marks = tensor_lists.marks([written])
    written.add_(1)
    marks.bump()
    assert not marks.have_moved()


def test_entries_are_compared_with_as_many_objects() -> None:
    one = torch.ones(1)
    assert tensor_lists.same_entries([{"a": one}], [("a", [one]), ("b", [None])])
    assert not tensor_lists.same_entries([{"a": one}], [("a", [one]), ("b", [one])])
    with pytest.raises(ValueError, match="same_entries|zip"):
        tensor_lists.same_entries([{"a": one}], [("a", [])])


def test_new_float32_gradients_are_apart_and_laid_out_as_the_half_ones() -> None:
    halves = [torch.ones(n, dtype=torch.bfloat16) for n in (1, 16, 17, 4096, 4097, 0)]
    halves += [torch.ones(5, 3, dtype=torch.half).t(), *[torch.ones(4000, dtype=torch.half) for _ in range(80)]]
    made = tensor_lists.unscaled_outputs(bytes(len(halves)), tensor_lists.gradients(_params_of(halves)).tensors)
    tensors = [made[i] for i in range(len(halves))]
    for i, tensor in enumerate(tensors):
        tensor.fill_(i)
    for i, (half, tensor) in enumerate(zip(halves, tensors, strict=True)):
        assert (tensor.dtype, tensor.shape, tensor.stride()) == (torch.float32, half.shape, half.stride())
        assert bool((tensor == i).all())
        assert tensor.data_ptr() % 16 == 0
        assert tensor._version == 1


def test_memory_that_small_gradients_share_is_no_larger_than_they_are(backend: str) -> None:
    if backend == "plain":
        pytest.skip("in Python each has memory of its own")
    halves = [torch.ones(16, dtype=torch.half) for _ in range(3)]
    made = tensor_lists.unscaled_outputs(bytes(3), tensor_lists.gradients(_params_of(halves)).tensors)
    assert [made[i].untyped_storage().nbytes() for i in range(3)] == [3 * 64] * 3


def _params_of(halves: Sequence[Tensor]) -> Any:
    params = [nn.Parameter(torch.zeros_like(half)) for half in halves]
    for param, half in zip(params, halves, strict=True):
        param.grad = half
    return tensor_lists.params(params)


def test_tensors_that_count_writes_together_count_apart_afterwards() -> None:
    """In Python nothing is done, as nothing can be."""
    fused = torch.zeros(6)
    alone, alias = nn.Parameter(torch.zeros(2)), torch.zeros(2)
    params = [*map(nn.Parameter, fused.chunk(3)), alone, nn.Parameter(alias)]
    with torch.no_grad():
        fused.add_(1.0)
    before = [p._version for p in params]
    if tensor_lists.count_apart.__module__.startswith("amp_engine.kernels."):
        tensor_lists.count_apart(params)
        assert params[0]._version == params[1]._version
        return
    tensor_lists.count_apart(params)
    assert [p._version for p in params] == before
    with torch.no_grad():
        params[1].add_(1.0)
    assert [p._version for p in params] == [before[0], before[1] + 1, *before[2:]]
    assert torch.equal(fused, torch.tensor([1.0, 1.0, 2.0, 2.0, 1.0, 1.0]))  # the memory is still one
    alias.add_(1.0)
    assert params[4]._version == before[4] + 1  # shared with no tensor of the list, it is as it was
