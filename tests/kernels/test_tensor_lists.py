"""Loops over parameters: native and in Python they are one."""

from __future__ import annotations

import contextlib
import copy
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from amp_engine import AmpValueError, kernels
from amp_engine.kernels import reference_tensor_lists, tensor_lists
from amp_engine.kernels.formulas import Sgd


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
        tensor_lists.OWN,
        tensor_lists.SHARED,
        tensor_lists.OTHER,
        tensor_lists.NONE,
    ]
    assert found.devices == [torch.device("cpu")]
    assert tensor_lists.gradients(tensor_lists.params(params[3:])).devices == []


@pytest.mark.parametrize("lazy", [torch._neg_view(torch.ones(4)), torch._efficientzerotensor((4,))])
def test_gradients_that_are_not_what_lies_in_their_memory_are_not_taken(lazy: Tensor) -> None:
    params = [nn.Parameter(torch.zeros(4)) for _ in range(2)]
    params[0].grad, params[1].grad = lazy, torch.ones(4)
    assert list(tensor_lists.gradients(tensor_lists.params(params)).accesses) == [tensor_lists.OTHER, tensor_lists.OWN]
    assert not tensor_lists.is_lazy(tensor_lists.written_out(lazy))
    assert torch.equal(tensor_lists.written_out(lazy), lazy.clone())
    assert tensor_lists.written_out(params[1]) is params[1]


def test_a_gradient_is_asked_for_only_while_gradients_are_held() -> None:
    holding, asked = set[int](), list[Tensor]()
    tensor, of_tensor = nn.Parameter(torch.zeros(4)), torch.ones(4)

    def slow(tensor: Tensor) -> Tensor | None:
        if holding:
            asked.append(tensor)
        return tensor.grad

    grad = tensor_lists.gradient_getter(holding, slow)
    assert grad(tensor) is None
    tensor.grad = of_tensor
    assert grad(tensor) is of_tensor
    assert not asked
    holding.add(1)
    assert grad(tensor) is of_tensor
    assert asked[0] is tensor


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
        tensor_lists.NONE if p.grad is None else tensor_lists.OTHER if p.grad.is_sparse else tensor_lists.OWN
        for p in params
    ]
    held = tensor_lists.gradients(listed_params, bytes([1] * n)).held
    assert held is not None
    assert [held[i] is not None for i in range(n)] == [how == tensor_lists.OWN for how in found.accesses]
    assert list(held.states()) == [how == tensor_lists.OWN for how in found.accesses]
    del held

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


def hold(*grads: Tensor | None) -> tuple[tensor_lists.Held, list[nn.Parameter]]:
    """Return the gradients, held, and parameters that have them."""
    params = [nn.Parameter(torch.zeros(4)) for _ in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    held = tensor_lists.gradients(tensor_lists.params(params), bytes([1] * len(params))).held
    assert held is not None
    return held, params


def values(held: tensor_lists.Held) -> list[list[float] | None]:
    return [None if (grad := held[row]) is None else grad.tolist() for row in range(len(held))]


def _by_numpy(grad: Tensor) -> None:
    grad.numpy()[:] = 7


def _by_list(grad: Tensor) -> None:
    torch._foreach_mul_([grad], 3.0)


def _by_view(grad: Tensor) -> None:
    grad.view(2, 2)[0].zero_()


def _by_dlpack(grad: Tensor) -> None:
    torch.from_dlpack(grad).fill_(5)


WRITES: list[Callable[[Tensor], Any]] = [
    lambda grad: grad.mul_(2),
    lambda grad: grad.data.fill_(9),
    lambda grad: grad.untyped_storage().fill_(0),
    _by_numpy,
    _by_list,
    _by_view,
    _by_dlpack,
]


@pytest.mark.parametrize("write", WRITES, ids=["mul_", "data", "storage", "numpy", "list", "view", "DLPack"])
def test_a_held_gradient_keeps_its_values_whoever_writes_it(write: Callable[[Tensor], Any]) -> None:
    grad, other = torch.ones(4), torch.ones(4)
    held, params = hold(grad, other)
    marks = tensor_lists.gradient_marks(tensor_lists.params(params))
    write(grad)
    assert grad.tolist() != [1.0] * 4
    assert values(held) == [[1.0] * 4] * 2
    tells = held.written() == [0] or marks.moved() == [(0, True)]
    assert tells, "the write is known"
    write(other)
    grad.add_(1)
    assert values(held) == [[1.0] * 4] * 2
    written = grad.tolist()
    del held
    assert grad.tolist() == written


def test_what_reads_or_drops_a_held_gradient_is_no_write() -> None:
    grad = torch.ones(4)
    held, params = hold(grad, torch.ones(4))
    grad.add(1), grad.norm(), grad.isfinite().all(), grad.clone(), copy.deepcopy(grad)
    assert held.written() == []
    params[1].grad = None
    assert values(held) == [[1.0] * 4] * 2


def test_views_of_one_bucket_are_held_as_they_are() -> None:
    bucket = torch.arange(12.0)
    before = [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0], [8.0, 9.0, 10.0, 11.0]]
    held, params = hold(bucket[:4], bucket[4:8], bucket[8:])
    assert values(held) == before
    held.discard(0)
    params[2].grad = None
    bucket.zero_()
    assert values(held) == [None, *before[1:]]
    assert not torch._C._is_cow_tensor(bucket)
    moved = held.rearranged([2, 1])
    bucket.fill_(1)
    held.discard(1)
    moved.discard(0)
    assert values(moved) == [None, before[1]]
    assert params[1].grad is not None
    assert params[1].grad.tolist() == [1.0] * 4
    again = tensor_lists.gradients(params, bytes([0, 1, 0])).held
    assert again is not None
    bucket.fill_(2)
    assert (values(moved), values(again)) == ([None, before[1]], [None, [1.0] * 4, None])
    del moved, again
    bucket.fill_(3)
    assert params[1].grad.tolist() == [3.0] * 4


def test_a_gradient_is_held_twice_and_one_that_two_parameters_have() -> None:
    grad = torch.ones(4)
    first, params = hold(grad, grad)
    second = tensor_lists.gradients(params, bytes([1, 0])).held
    assert second is not None
    assert second[1] is None
    grad.zero_()
    assert values(first) == [[1.0] * 4] * 2
    del first
    assert values(second) == [[1.0] * 4, None]


def test_held_gradients_move_to_other_rows_and_go_one_by_one() -> None:
    one, two = torch.ones(4), torch.full((4,), 2.0)
    held, _ = hold(one, None, two)
    moved = held.rearranged([2, -1, -1, 0])
    assert list(held.states()) == [0, 0, 0]
    one.zero_()
    assert values(moved) == [[2.0] * 4, None, None, [1.0] * 4]
    moved.discard(3)
    two.zero_()
    assert values(moved) == [[2.0] * 4, None, None, None]
    beside = moved.beside([None, one, None, None])
    assert [None if (t := beside[i]) is None else t.tolist() for i in range(4)] == [[2.0] * 4, [0.0] * 4, None, None]
    assert [moved.beside()[i] is None for i in range(4)] == [False, True, True, True]
    with pytest.raises((IndexError, ValueError)):
        moved[4]


def test_copies_leave_the_tensor_alone_and_are_left_alone() -> None:
    tensor = torch.ones(())
    first, second = tensor_lists.copy(tensor), tensor_lists.copy(tensor)
    tensor.add_(1)
    second.mul_(3)
    assert (first.item(), second.item(), tensor.item()) == (1.0, 3.0, 2.0)


def test_only_masked_rows_are_held() -> None:
    params = [nn.Parameter(torch.zeros(4)) for _ in range(3)]
    params[0].grad, params[1].grad, params[2].grad = torch.ones(4), torch.ones(4), torch.ones(4).to_sparse()
    tensors, _, _, held = tensor_lists.gradients(params, bytes([1, 0, 1]))
    assert held is not None
    assert list(held.states()) == [1, 0, 0], "a sparse one cannot be held"
    assert [tensors[i] is None for i in range(3)] == [True, False, False]
    with pytest.raises((ValueError, IndexError)):
        tensor_lists.gradients(params, bytes([1, 0]))


@pytest.mark.parametrize(
    "foreign",
    [
        lambda: torch.from_numpy(np.ones(4, dtype=np.float32)),
        lambda: torch.from_dlpack(torch.ones(4)),
        lambda: torch.from_dlpack(np.ones(4, dtype=np.float32)),
        lambda: torch.frombuffer(bytearray(torch.ones(4).numpy().tobytes()), dtype=torch.float32),
        lambda: torch.ones(4).share_memory_(),
        lambda: torch._lazy_clone(torch.ones(4)),
    ],
    ids=["numpy", "DLPack", "DLPack of numpy", "buffer", "processes", "copy-on-write"],
)
def test_memory_that_torch_did_not_allocate_is_copied_at_once(foreign: Callable[[], Tensor]) -> None:
    grads = [torch.ones(4), foreign(), torch.ones(4)]
    held, _ = hold(*grads)
    for grad in grads:
        grad.mul_(2)
    assert values(held) == [[1.0] * 4] * 3
    assert [g.tolist() for g in grads] == [[2.0] * 4] * 3


def test_a_lazy_clone_of_what_was_held_is_left_alone() -> None:
    grad = torch.ones(4)
    held, _ = hold(grad)
    grad.add_(1)
    clone = torch._lazy_clone(grad)
    del held
    grad.zero_()
    assert clone.tolist() == [2.0] * 4


def test_held_memory_that_was_resized_away_is_an_error_or_kept() -> None:
    grad = torch.ones(4)
    held, _ = hold(grad)
    grad.untyped_storage().resize_(0)
    with contextlib.suppress(RuntimeError):
        assert values(held) == [[1.0] * 4]


def test_in_python_a_gpu_is_copied_at_once() -> None:
    grad = types.SimpleNamespace(is_cpu=False, clone=lambda: "clone")
    assert reference_tensor_lists.copy(grad) == "clone"  # type: ignore[arg-type, comparison-overlap]


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
    if backend == "reference":
        pytest.skip("in Python a storage is known by keeping it")
    param = nn.Parameter(torch.ones(1000))
    memory = param.detach()
    marks = tensor_lists.marks([param])
    param.data = torch.ones(1000)
    assert marks.has_moved(0)
    assert torch._C._storage_Use_Count(memory.untyped_storage()._cdata) == 2  # `memory`, and this call


def test_a_gradient_that_is_held_again_after_a_write_is_held_as_it_is_then() -> None:
    grad = torch.ones(4)
    first, params = hold(grad)
    grad.add_(1)
    second = tensor_lists.gradients(params, bytes([1])).held
    assert second is not None
    assert values(first) == [[1.0] * 4]
    tensor_lists.watch_gradients(params)
    grad.add_(1)
    assert (values(first), values(second)) == ([[1.0] * 4], [[2.0] * 4])
    tensor_lists.watch_gradients(params)
    assert (values(first), values(second)) == ([[1.0] * 4], [[2.0] * 4])
    del first
    grad.add_(1)
    assert values(second) == [[2.0] * 4]
    third = tensor_lists.gradients(params, bytes([1])).held
    assert third is not None
    assert values(third) == [[4.0] * 4]


def test_a_held_gradient_is_stepped_only_by_a_weight_of_its_layout() -> None:
    param = nn.Parameter(torch.zeros(2, 3, dtype=torch.float16))
    param.grad = torch.ones(2, 3, dtype=torch.float16)
    held = tensor_lists.gradients([param], b"\1").held
    assert held is not None
    for weight in (torch.zeros(3, 2), torch.zeros(3, 2).t(), torch.zeros(2, 3)):
        table = kernels.step_table("sgd", [weight], [None], [None], [None], [0], torch.zeros(1))
        fits = weight.shape == (2, 3) and weight.is_contiguous()
        with contextlib.nullcontext() if fits else pytest.raises(AmpValueError):
            table.step(held.beside(), b"\1", [Sgd(lr=1.0)])
        assert weight.tolist() == ([[-1.0] * 3] * 2 if fits else torch.zeros_like(weight).tolist())


def test_entries_are_compared_with_as_many_objects() -> None:
    one = torch.ones(1)
    assert tensor_lists.same_entries([{"a": one}], [("a", [one]), ("b", [None])])
    assert not tensor_lists.same_entries([{"a": one}], [("a", [one]), ("b", [one])])
    with pytest.raises(ValueError, match="same_entries|zip"):
        tensor_lists.same_entries([{"a": one}], [("a", [])])
