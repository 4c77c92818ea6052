"""The types of the kernels' arguments and results, and the loops that there are twice: compiled, and in Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

TensorList = Sequence[Tensor | None]


class Checks(NamedTuple):
    """Findings of one pass over n tensors, of the values before the pass wrote any; on the device of the tensors.

    Attributes:
        nonfinite: bool, shape [n]: true where the tensor holds an inf or a NaN.
        sum_squares: float64, shape [n].
        largest: float32, shape [n]: largest magnitude; NaN if there is one.
    """

    nonfinite: Tensor
    sum_squares: Tensor
    largest: Tensor


class Gradients(NamedTuple):
    """The gradients of many parameters.

    Attributes:
        tensors: n; None where there is none.
        accesses: n; how the kernels can take each.
        devices: where those are that can be taken, each device once.
    """

    tensors: TensorList
    accesses: bytes
    devices: list[torch.device]


class Marks(Protocol):
    """Some tensors as they were when each was last marked: address, version, type and device.

    It keeps their memory alive, or another one could get its address.
    """

    def mark(self) -> None:
        """Mark all of them."""
        ...

    def mark_at(self, place: int, /) -> None:
        """Mark one of them."""
        ...

    def take(self, place: int, other: Any, other_place: int, /) -> None:
        """Have one be marked as `other` has marked the same tensor."""
        ...

    def have_moved(self) -> bool:
        """True if one was written or replaced since it was marked."""
        ...

    def has_moved(self, place: int, /) -> bool:
        """True if this one was."""
        ...

    def has_other_memory(self, place: int, /) -> bool:
        """True if this one has nothing new but its memory: `tensor.data = x`."""
        ...


class GradientMarks(Protocol):
    """The gradients of some parameters as they were; it tells for as long as they are alive."""

    @property
    def params(self) -> Sequence[Tensor]:
        """The parameters, as they were passed."""
        ...

    def have_moved(self) -> bool:
        """True if a gradient came, went, was replaced or written since."""
        ...

    def moved(self) -> list[tuple[int, bool]]:
        """Where that is so, and whether there was a gradient. Slow."""
        ...


class TensorLists(Protocol):
    """Loops over parameters, on the host. No subclass of Tensor is asked for anything.

    They are called many times an iteration, and Python takes a microsecond or more a tensor.
    """

    def params(self, tensors: Sequence[Tensor], /) -> Sequence[Tensor]:
        """`tensors` in a form that the others read fastest, for lists that are read again and again."""
        ...

    def marks(self, tensors: Sequence[Tensor], /) -> Marks:
        """Marks of tensors as they are now."""
        ...

    def gradient_marks(self, params: Sequence[Tensor], /) -> GradientMarks:
        """Marks of the gradients that they have now; `params` as the function of that name gives them."""
        ...

    def gradients(self, params: Sequence[Tensor], /) -> Gradients:
        """The gradient of each parameter."""
        ...

    def copies(self, tensors: TensorList, accesses: bytes, /) -> TensorList:
        """A copy of each tensor whose access is not NONE; None for the others.

        Copy-on-write where it has memory of its own: writing to either leaves the other alone, and is when memory is
        copied. Memory that is shared (a bucket of DDP) must not become copy-on-write as a whole, that of others (numpy,
        DLPack) cannot, and on another stream than the default one a GPU's would be copied out of order: these are
        copied at once.
        """
        ...

    def watch_gradients(self, params: Sequence[Tensor], /) -> None:
        """Have torch note requests for the memory of the gradients from now on, where it can (since 2.13)."""
        ...

    def are_gradients_unwritten(self, params: Sequence[Tensor], /) -> bool:
        """True if no memory of a gradient was asked for since it was watched, or is known from before."""
        ...

    def either(self, mask: bytes, first: TensorList, second: TensorList | None = None, /) -> TensorList:
        """`first[i]` where `mask[i]` is not 0, else `second[i]`; None where there is no `second`."""
        ...

    def any_gradient(self, tensors: Sequence[Tensor], /) -> bool:
        """True if one of them has a gradient."""
        ...

    def same_objects(self, a: Sequence[object], b: Sequence[object], /) -> bool:
        """True if two lists or tuples have the very same objects. `==` would ask tensors, and compare elements."""
        ...

    def same_entries(self, dicts: list[dict[str, Any]], name: str, objects: Sequence[object], /) -> bool:
        """True if `dicts[i].get(name) is objects[i]` for every i."""
        ...

    def discard_gradients(self, tensors: Sequence[Tensor], /) -> None:
        """`tensor.grad = None` for each."""
        ...

    def watch_collectives(
        self, writing: Sequence[str], reading: Sequence[str], listener: Callable[[list[Tensor], bool], None], /
    ) -> bool:
        """Have operators of c10d find memory that was asked for, and tell what they write. True if that is possible.

        listener(tensors, is_broadcast): called after each of the `writing` ones.
        """
        ...
