"""Checks at the door of the reference. `csrc/checks.h` makes the same ones for the native kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from amp_engine.errors import AmpValueError
from amp_engine.kernels.walk import FLOATS, is_dense, is_lazy, same_layout

TensorList = Sequence[Tensor | None]

_LAZY_REFUSED = (
    ", whose elements are not those in its memory (a negative view, or zeros without memory).  Pass a .clone() of it."
)


def check_lists(
    op: str,
    lists: Mapping[str, TensorList],
    written: Sequence[str] = (),
    *,
    float32: Sequence[str] = (),
    device: torch.device | None = None,
) -> None:
    """Raise AmpValueError for lists that the kernels cannot walk together. No host sync.

    Args:
        op: what messages call the operation.
        lists: by name; entries of one index must have one shape and one order in memory. None takes no part.
        written: names of lists that are written, none of whose tensors may be there twice.
        float32: names of lists that may hold nothing else.
        device: where the tensors must be; None: where the first one is.
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
            _check_tensor(f"{op}: {name}[{i}]", tensor, device, FLOATS[:1] if name in float32 else FLOATS)
            leader = first[i]
            if leader is not None and not same_layout(tensor, leader):
                raise AmpValueError(
                    f"{op}: {name}[{i}] is {_text(tensor)}, but {first_name}[{i}] is {_text(leader)}.  "
                    "Shapes and strides must be equal."
                )
    by_address: dict[int, str] = {}
    for name in written:
        for i, tensor in enumerate(lists[name]):
            # A meta tensor has no memory.
            if tensor is not None and tensor.numel() and tensor.device.type != "meta":
                there = by_address.setdefault(tensor.data_ptr(), f"{name}[{i}]")
                if there != f"{name}[{i}]":
                    raise AmpValueError(
                        f"{op}: {name}[{i}] has the same memory as {there}.  "
                        "Each tensor that is written may be there once."
                    )


def check_scalars(
    op: str, device: torch.device | None, dtype: torch.dtype = torch.float32, **scalars: Tensor | None
) -> None:
    """Raise AmpValueError for `scalars` that are not one `dtype` each on `device` (None: on any device)."""
    where = "" if device is None else f" on {device}"
    for name, scalar in scalars.items():
        if scalar is not None and (
            scalar.numel() != 1 or scalar.dtype != dtype or (device is not None and scalar.device != device)
        ):
            raise AmpValueError(f"{op}: {name} is {_text(scalar)}, but must be one {_type_name(dtype)}{where}.")
        if scalar is not None and is_lazy(scalar):
            raise AmpValueError(f"{op}: {name} is {_text(scalar)}{_LAZY_REFUSED}")


def check_vector(op: str, name: str, vector: Tensor | None, n: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise AmpValueError if `vector` is neither None nor a contiguous `dtype` tensor of shape [n] on `device`."""
    if vector is not None and (
        vector.shape != (n,) or vector.dtype != dtype or vector.device != device or not vector.is_contiguous()
    ):
        raise AmpValueError(
            f"{op}: {name} is {_text(vector)}, but must be a contiguous {_type_name(dtype)} tensor of shape [{n}] on "
            f"{device}."
        )
    if vector is not None and is_lazy(vector):
        raise AmpValueError(f"{op}: {name} is {_text(vector)}{_LAZY_REFUSED}")


def _check_tensor(place: str, tensor: Tensor, device: torch.device, dtypes: Sequence[torch.dtype]) -> None:
    if tensor.dtype not in dtypes:
        allowed = "float32." if len(dtypes) == 1 else "float32, float16 or bfloat16."
        raise AmpValueError(f"{place} is {_text(tensor)}, but the type must be {allowed}")
    if tensor.layout is not torch.strided:
        raise AmpValueError(f"{place} is {_text(tensor)}, but only dense (strided) ones are walked.")
    if tensor.device != device:
        raise AmpValueError(f"{place} is {_text(tensor)}, but the first tensor of the call is on {device}.")
    if not is_dense(tensor):
        raise AmpValueError(f"{place} is {_text(tensor)}, which has gaps or overlaps.  Pass .contiguous() tensors.")
    if is_lazy(tensor):
        raise AmpValueError(f"{place} is {_text(tensor)}{_LAZY_REFUSED}")


def _type_name(kind: torch.dtype | torch.layout) -> str:
    return str(kind).removeprefix("torch.")


def _text(tensor: Tensor) -> str:
    strides = (
        f"strides {list(tensor.stride())}" if tensor.layout is torch.strided else f"layout {_type_name(tensor.layout)}"
    )
    return f"a {_type_name(tensor.dtype)} tensor of shape {list(tensor.shape)} and {strides} on {tensor.device}"
