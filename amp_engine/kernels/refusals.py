"""Checks of lists of tensors before plain PyTorch computes; the compiled kernels make their own in `csrc/checks.h`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeGuard

import torch
from torch import Tensor

from amp_engine.errors import AmpValueError
from amp_engine.ground.dtypes import dtype_name
from amp_engine.kernels.backend import TensorList
from amp_engine.kernels.layout import FLOATS, address_of, is_dense, is_lazy, same_layout

_LAZY_REFUSED = (
    ", whose elements are not those in its memory (a negative view, or zeros without memory).  Pass a .clone() of it."
)


def check_lists(
    op: str,
    lists: Mapping[str, TensorList],
    written: Sequence[str] = (),
    *,
    allowed: Mapping[str, Sequence[torch.dtype]] | None = None,
    device: torch.device | None = None,
) -> None:
    """Raise AmpValueError for lists that the kernels cannot take together. No host sync.

    Args:
        op: name of the operation in messages.
        lists: by name; entries of one index must have the same shape and order in memory. None is skipped.
        written: names of lists that are written; see `check_apart`.
        allowed: types allowed in a list, by its name; lists that are not named may have all three floating types.
        device: the device of all tensors; None: that of the first tensor.
    """
    first_name, first = next(iter(lists.items()))
    for name, tensors in lists.items():
        if len(tensors) != len(first):
            raise AmpValueError(
                f"{op}: {name} has {len(tensors)} entries, but {first_name} has {len(first)}.  "
                "All lists of one call are of one length."
            )
    for name, tensors in lists.items():
        for i, tensor in enumerate(tensors):
            if tensor is None:
                continue
            if device is None:
                device = tensor.device
            _check_tensor(f"{op}: {name}[{i}]", tensor, device, (allowed or {}).get(name, FLOATS))
            leader = first[i]
            if leader is not None and not same_layout(tensor, leader):
                raise AmpValueError(
                    f"{op}: {name}[{i}] is {_text(tensor)}, but {first_name}[{i}] is {_text(leader)}.  "
                    "Shapes and strides must be equal."
                )
    if written:
        are_written = {name: tensors for name, tensors in lists.items() if name in written}
        are_read = {name: tensors for name, tensors in lists.items() if name not in written}
        check_apart(op, are_written, are_read, lists[written[0]])


def check_apart(
    op: str, written: Mapping[str, TensorList], read: Mapping[str, TensorList], outputs: TensorList = ()
) -> None:
    """Raise AmpValueError for memory that is written twice, or written and read through different tensors.

    Args:
        op: name of the operation in messages.
        written, read: lists by name, of dense tensors; None is skipped.
        outputs: written tensors; each may be the tensor that is read under its index.
    """
    n = len(written)
    ranges = [
        _Range(tensor, rank, i, name, is_written=rank < n)
        for rank, (name, tensors) in enumerate([*written.items(), *read.items()])
        for i, tensor in enumerate(tensors)
        if _has_memory(tensor) and not (rank >= n and i < len(outputs) and _is_same(tensor, outputs[i]))
    ]
    furthest: dict[bool, _Range] = {}  # the ranges that end last: of written memory (True) and of read memory
    for one in sorted(ranges, key=lambda r: r.begin):
        for is_written in (True, False):
            other = furthest.get(is_written)
            if (is_written or one.is_written) and other is not None and other.end > one.begin:
                first, second = sorted((one, other), key=lambda r: (r.rank, r.index))
                is_same = (first.begin, first.end) == (second.begin, second.end)
                how = "has the same memory as" if is_same else "shares memory with"
                raise AmpValueError(
                    f"{op}: {second.name}[{second.index}] {how} {first.name}[{first.index}].  Each tensor that is "
                    "written may be there once, and overlaps no other one."
                )
        if one.is_written not in furthest or one.end > furthest[one.is_written].end:
            furthest[one.is_written] = one


def check_scalars(
    op: str, device: torch.device | None, dtype: torch.dtype = torch.float32, **scalars: Tensor | None
) -> None:
    """Raise AmpValueError for `scalars` that are not one element of `dtype` each on `device` (None: on any device)."""
    where = "" if device is None else f" on {device}"
    for name, scalar in scalars.items():
        if scalar is not None and (
            scalar.numel() != 1 or scalar.dtype != dtype or (device is not None and scalar.device != device)
        ):
            raise AmpValueError(f"{op}: {name} is {_text(scalar)}, but must be one {dtype_name(dtype)}{where}.")
        if scalar is not None and is_lazy(scalar):
            raise AmpValueError(f"{op}: {name} is {_text(scalar)}{_LAZY_REFUSED}")


class _Range:
    """The addresses of a dense tensor, and its place in the lists."""

    __slots__ = ("begin", "end", "index", "is_written", "name", "rank")

    def __init__(self, tensor: Tensor, rank: int, index: int, name: str, is_written: bool) -> None:
        self.begin = tensor.data_ptr() if is_written else address_of(tensor)
        self.end = self.begin + tensor.numel() * tensor.element_size()
        self.rank, self.index, self.name, self.is_written = rank, index, name, is_written


def _has_memory(tensor: Tensor | None) -> TypeGuard[Tensor]:
    return tensor is not None and tensor.numel() > 0 and tensor.device.type != "meta"


def _is_same(a: Tensor, b: Tensor | None) -> bool:
    return b is not None and address_of(a) == address_of(b) and a.dtype == b.dtype


def _check_tensor(place: str, tensor: Tensor, device: torch.device, dtypes: Sequence[torch.dtype]) -> None:
    if tensor.dtype not in dtypes:
        names = [dtype_name(dtype) for dtype in dtypes]
        allowed = ", ".join(names[:-1]) + " or " * (len(names) > 1) + names[-1] + "."
        raise AmpValueError(f"{place} is {_text(tensor)}, but the type must be {allowed}")
    if tensor.layout is not torch.strided:
        raise AmpValueError(f"{place} is {_text(tensor)}, but only dense (strided) ones are allowed.")
    if tensor.device != device:
        raise AmpValueError(f"{place} is {_text(tensor)}, but the first tensor of the call is on {device}.")
    if not is_dense(tensor):
        raise AmpValueError(f"{place} is {_text(tensor)}, which has gaps or overlaps.  Pass .contiguous() tensors.")
    if is_lazy(tensor):
        raise AmpValueError(f"{place} is {_text(tensor)}{_LAZY_REFUSED}")


def _text(tensor: Tensor) -> str:
    layout = str(tensor.layout).removeprefix("torch.")
    strides = f"strides {list(tensor.stride())}" if tensor.layout is torch.strided else f"layout {layout}"
    return f"a {dtype_name(tensor.dtype)} tensor of shape {list(tensor.shape)} and {strides} on {tensor.device}"
