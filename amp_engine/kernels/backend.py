"""Types of the kernels' arguments and results, and protocols of the loops that exist compiled and in Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

TensorList = Sequence[Tensor | None]


class Checks(NamedTuple):
    """Findings of one pass over n tensors, about the values before the pass wrote any; on the device of the tensors.

    Attributes:
        nonfinite: bool, shape [n]: true if the tensor holds an inf or a NaN.
        sum_squares: float64, shape [n].
        largest: float32, shape [n]: largest magnitude; NaN if the tensor holds one.
    """

    nonfinite: Tensor
    sum_squares: Tensor
    largest: Tensor


class Looked(NamedTuple):
    """The gradients of n parameters after one look at all of them.

    Attributes:
        checks: of the gradients as they were before.
        accesses: n; NONE or TAKEN.
        gradients: n; the gradients now.
        marks: of these.
        is_kept: True if half gradients beside masters are still scaled.
    """

    checks: Checks
    accesses: bytes
    gradients: TensorList
    marks: GradientMarks
    is_kept: bool


class Gradients(NamedTuple):
    """The gradients of many parameters.

    Attributes:
        tensors: n; None for a parameter that has no gradient.
        accesses: n; how the kernels can reach each gradient: NONE, TAKEN or OTHER of layout.py.
        devices: devices of the gradients that the kernels can reach, each once.
    """

    tensors: TensorList
    accesses: bytes
    devices: list[torch.device]


class Marks(Protocol):
    """Marks of some tensors: address, version, type and device of each when it was last marked.

    A mark also identifies the storage, so that other memory at the same address is not taken for it.
    """

    def mark(self) -> None:
        """Mark all tensors."""
        ...

    def bump(self) -> None:
        """Mark all tensors, whose marks were right until one operation of the kernels wrote each."""
        ...

    def mark_at(self, place: int, /) -> None:
        """Mark one tensor."""
        ...

    def take(self, place: int, other: Any, other_place: int, /) -> None:
        """Take the mark that `other` has of the same tensor."""
        ...

    def have_moved(self) -> bool:
        """True if a tensor was written or replaced since it was marked."""
        ...

    def has_moved(self, place: int, /) -> bool:
        """True if the tensor at `place` was written or replaced since it was marked."""
        ...

    def has_other_memory(self, place: int, /) -> bool:
        """True if the tensor at `place` has other memory and otherwise the same mark, as after `tensor.data = x`."""
        ...


class GradientMarks(Protocol):
    """Marks of the gradients of some parameters, valid while these gradients are alive."""

    @property
    def params(self) -> Sequence[Tensor]:
        """The parameters, as they were passed."""
        ...

    def have_moved(self) -> bool:
        """True if a gradient came, went, was replaced or written since it was marked."""
        ...

    def moved(self) -> list[tuple[int, bool]]:
        """Return the place of each gradient that has moved, and True if there was one when it was marked. Slow."""
        ...


class TensorLists(Protocol):
    """Loops over parameters, on the host. They call no method of a subclass of Tensor.

    The loops run many times in an iteration, and in Python take a microsecond or more for each tensor.
    """

    def params(self, tensors: Sequence[Tensor], /) -> Sequence[Tensor]:
        """Return `tensors` in the form that the other loops read fastest, for lists that are read many times."""
        ...

    def marks(self, tensors: Sequence[Tensor], /) -> Marks:
        """Mark tensors as they are now."""
        ...

    def gradient_marks(self, params: Sequence[Tensor], /) -> GradientMarks:
        """Mark the gradients of `params`, a result of the loop `params`, as they are now."""
        ...

    def gradients(self, params: Sequence[Tensor], /) -> Gradients:
        """Return the gradient of each parameter, the kernels' access to it, and the devices."""
        ...

    def where(self, mask: bytes, tensors: TensorList, /) -> TensorList:
        """Return `tensors[i]` where `mask[i]` is not 0, else None."""
        ...

    def unscaled_outputs(self, plain: bytes, gradients: TensorList, /) -> TensorList:
        """Return where gradients are written unscaled: new float32 memory for half ones not in `plain`, else itself."""
        ...

    def replace_gradients(self, params: Sequence[Tensor], before: TensorList, after: TensorList, /) -> None:
        """Set `param.grad` to the tensor of `after` where that is another than in `before`."""
        ...

    def any_gradient(self, tensors: Sequence[Tensor], /) -> bool:
        """True if any of `tensors` has a gradient."""
        ...

    def any_graph(self, tensors: Sequence[Tensor], /) -> bool:
        """True if the gradient of any of `tensors` has a graph, as after `backward(create_graph=True)`."""
        ...

    def any_other(self, params: Sequence[Tensor], /) -> bool:
        """True if the access to the gradient of any of `params` is OTHER."""
        ...

    def count_apart(self, tensors: Sequence[Tensor], /) -> None:
        """Give distinct tensors that count their writes together, such as views of one tensor, a version each.

        Writes through other views of that tensor no longer move the versions of these, by which autograd finds what was
        written before a backward needs it. In Python nothing is done.
        """
        ...

    def same_objects(self, a: Sequence[object], b: Sequence[object], /) -> bool:
        """True if two lists or tuples hold the identical objects. `==` would compare the elements of tensors."""
        ...

    def same_entries(self, dicts: list[dict[str, Any]], named: Sequence[tuple[str, list[Any]]], /) -> bool:
        """True if `dicts[i].get(name) is objects[i]` for each i, and each `name, objects` of `named`."""
        ...

    def discard_gradients(self, tensors: Sequence[Tensor], /) -> None:
        """Set `tensor.grad` to None for each tensor."""
        ...
