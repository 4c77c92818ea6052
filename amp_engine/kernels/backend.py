"""Types of the kernels' arguments and results, and protocols of the loops that exist compiled and in Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


class Held(Protocol):
    """Gradients that are held for a step, at most one in each of n rows: later writes do not change their values.

    From torch 2.13 on, a row holds a reference, and the storage is copied before a write: once for all views of a DDP
    bucket, and on a GPU in the order of the writer's stream, also in a capture. Memory of numpy or DLPack is copied at
    once. With an older torch, or without the compiled module, a row holds a copy-on-write clone; views, and GPU memory
    on a stream other than the default one, are copied at once.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> Tensor | None:
        """Return the gradient of a row; write only to a copy of it."""
        ...

    def states(self) -> bytes:
        """Return one byte a row: 1 where a gradient is held, else 0."""
        ...

    def discard(self, row: int, /) -> None:
        """Discard the gradient of a row."""
        ...

    def rearranged(self, rows: Sequence[int], /) -> Held:
        """Move the gradients into a new Held: `rows` has, for each new row, the present row or -1."""
        ...

    def written(self) -> list[int]:
        """Return rows whose gradient may have been written in place, as far as torch notes requests."""
        ...

    def beside(self, tensors: TensorList | None = None, /) -> TensorList:
        """Return n entries: the held gradient; if the row holds none, the entry of `tensors`, or None without it."""
        ...


class Gradients(NamedTuple):
    """The gradients of many parameters.

    Attributes:
        tensors: n; None for a parameter that has no gradient or whose gradient is held.
        accesses: n; how the kernels can reach each gradient: NONE, OWN, SHARED or OTHER of layout.py.
        devices: devices of the gradients that the kernels can reach, each once.
        held: the gradients that `mask` selects and the kernels can reach; None without a mask.
    """

    tensors: TensorList
    accesses: bytes
    devices: list[torch.device]
    held: Held | None


class Marks(Protocol):
    """Marks of some tensors: address, version, type and device of each when it was last marked.

    A mark also identifies the storage, so that other memory at the same address is not taken for it.
    """

    def mark(self) -> None:
        """Mark all tensors."""
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

    def gradients(self, params: Sequence[Tensor], mask: bytes | None = None, /) -> Gradients:
        """Return the gradient of each parameter; hold the gradients of parameters whose byte in `mask` is not 0."""
        ...

    def watch_gradients(self, params: Sequence[Tensor], /) -> None:
        """Have torch note requests for the memory of the gradients from now on, if it can (since 2.13)."""
        ...

    def are_gradients_unwritten(self, params: Sequence[Tensor], /) -> bool:
        """True if no request for a gradient's memory came since the watch began, and no other tensor shares it."""
        ...

    def copy(self, tensor: Tensor, /) -> Tensor:
        """Copy a tensor that has its own memory; if possible, copy the memory only when either tensor is written."""
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

    def gradient_getter(
        self, holding: set[int], slow: Callable[[Any], Tensor | None], /
    ) -> Callable[[Any], Tensor | None]:
        """Return a getter of `tensor.grad` that calls `slow(tensor)` only while `holding` has entries."""
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

    def watch_collectives(
        self, writing: Sequence[str], reading: Sequence[str], listener: Callable[[list[Tensor], bool], None], /
    ) -> bool:
        """Have operators of c10d request memory before they use it, and call `listener`. True if that is possible.

        listener(tensors, is_broadcast): called after each of the `writing` operators with the tensors that it wrote.
        """
        ...

    def ask_for_written_lists(self) -> None:
        """Have torch's operators on lists (`_foreach_mul_`, `_fused_adam_`) request the memory that they write.

        Without this, their GPU kernels do not, and write both a copy-on-write clone and its origin.
        """
        ...
