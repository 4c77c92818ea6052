"""Loops over parameters in plain Python, as `backend.TensorLists` documents them."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from amp_engine.ground.torch_private import data_address
from amp_engine.kernels.backend import Gradients, TensorList
from amp_engine.kernels.layout import NONE, OTHER, TAKEN, access_of, devices_of, mark, version

_GRAD: Any = torch.Tensor.grad


def params(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the list itself."""
    return tensors


class Marks:
    """Marks of some tensors; see `backend.Marks`."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._marks: list[Any] = []
        self._memory: list[Any] = []
        self.mark()

    def mark(self) -> None:
        """Mark all tensors."""
        self._marks = list(map(mark, self._tensors))
        self._memory = [t.untyped_storage() for t in self._tensors]

    bump = mark

    def mark_at(self, place: int) -> None:
        """Mark one tensor."""
        tensor = self._tensors[place]
        self._marks[place] = mark(tensor)
        self._memory[place] = tensor.untyped_storage()

    def take(self, place: int, other: Marks, other_place: int) -> None:
        """Take the mark that `other` has of the same tensor."""
        self._marks[place], self._memory[place] = other._marks[other_place], other._memory[other_place]

    def have_moved(self) -> bool:
        """True if a tensor was written or replaced since it was marked."""
        return list(map(mark, self._tensors)) != self._marks

    def has_moved(self, place: int) -> bool:
        """True if the tensor at `place` was written or replaced since it was marked."""
        return mark(self._tensors[place]) != self._marks[place]

    def has_other_memory(self, place: int) -> bool:
        """True if the tensor at `place` has other memory and else the same mark."""
        now, before = mark(self._tensors[place]), self._marks[place]
        return now[0] != before[0] and now[1:] == before[1:]


class GradientMarks:
    """Marks of the gradients of some parameters; see `backend.GradientMarks`."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.params = params
        self._marks = list(map(_gradient_mark, params))

    def have_moved(self) -> bool:
        """True if a gradient came, went, was replaced or written since it was marked."""
        return list(map(_gradient_mark, self.params)) != self._marks

    def moved(self) -> list[tuple[int, bool]]:
        """Return the place of each gradient that has moved, and True if there was one when it was marked."""
        pairs = zip(map(_gradient_mark, self.params), self._marks, strict=True)
        return [(place, then is not None) for place, (now, then) in enumerate(pairs) if now != then]


marks = Marks
gradient_marks = GradientMarks


def gradients(params: Sequence[Tensor]) -> Gradients:
    """Return the gradients, the kernels' access to each, and their devices."""
    grads: list[Tensor | None] = [_GRAD.__get__(p) for p in params]
    accesses = bytes(NONE if g is None else access_of(g, p) for p, g in zip(params, grads, strict=True))
    return Gradients(grads, accesses, devices_of(grads, accesses))


def where(mask: bytes, tensors: TensorList) -> TensorList:
    """Return `tensors[i] if mask[i] else None` for each i."""
    return [tensor if chosen else None for chosen, tensor in zip(mask, tensors, strict=True)]


def unscaled_outputs(plain: bytes, gradients: TensorList) -> TensorList:
    """Return new float32 memory for each half gradient whose byte in `plain` is 0, else the gradient itself."""
    return [
        g if g is None or is_plain or g.dtype is torch.float32 else torch.empty_like(g, dtype=torch.float32)
        for is_plain, g in zip(plain, gradients, strict=True)
    ]


def replace_gradients(params: Sequence[Tensor], before: TensorList, after: TensorList) -> None:
    """Set `param.grad` to the tensor of `after` where that is another than in `before`."""
    for param, earlier, now in zip(params, before, after, strict=True):
        if now is not None and now is not earlier:
            _GRAD.__set__(param, now)


def any_gradient(tensors: Sequence[Tensor]) -> bool:
    """True if any of `tensors` has a gradient."""
    return any(_GRAD.__get__(t) is not None for t in tensors)


def any_graph(tensors: Sequence[Tensor]) -> bool:
    """True if the gradient of any of `tensors` has a graph."""
    return any((grad := _GRAD.__get__(t)) is not None and grad.grad_fn is not None for t in tensors)


def any_other(params: Sequence[Tensor]) -> bool:
    """True if the access to the gradient of any of `params` is OTHER."""
    return OTHER in gradients(params).accesses


def count_apart(tensors: Sequence[Tensor]) -> None:
    """Do nothing: Python cannot give a tensor another version, and steps in Python mark all tensors at their end."""


def same_objects(a: Sequence[object], b: Sequence[object]) -> bool:
    """True if two sequences hold the identical objects."""
    return len(a) == len(b) and all(map(is_, a, b))


def same_entries(dicts: list[dict[str, Any]], named: Sequence[tuple[str, list[Any]]]) -> bool:
    """True if `dicts[i].get(name) is objects[i]` for each i, and each `name, objects` of `named`."""
    return all(d.get(name) is o for name, objects in named for d, o in zip(dicts, objects, strict=True))


def discard_gradients(tensors: Sequence[Tensor]) -> None:
    """Set `tensor.grad` to None for each tensor."""
    for t in tensors:
        _GRAD.__set__(t, None)


def _gradient_mark(param: Tensor) -> tuple[int, int, int] | None:
    grad = _GRAD.__get__(param)
    if grad is None:
        return None
    address = data_address(grad) if access_of(grad, param) == TAKEN else 0
    return id(grad), version(grad), address
