# ruff: noqa: N999 - apex's name
"""`apex_C`: tensors as one flat tensor, and back."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from amp_engine.errors import AmpValueError
from amp_engine.ground.torch_private import flatten_dense_tensors, unflatten_dense_tensors


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Copy all elements of `tensors` into one contiguous 1-d tensor, differentiably. No host sync.

    Args:
        tensors: at least one; dense, of one type, on one device.

    Raises AmpValueError for an empty list, and for mixed types, which torch would widen silently.
    """
    if not tensors:
        raise AmpValueError("flatten: there are no tensors.  Pass a list of at least one.")
    for i, tensor in enumerate(tensors):
        if (tensor.dtype, tensor.device) != (tensors[0].dtype, tensors[0].device):
            raise AmpValueError(
                f"flatten: tensors[{i}] is {tensor.dtype} on {tensor.device}, but tensors[0] is {tensors[0].dtype} on "
                f"{tensors[0].device}.  Flatten each type and device by itself."
            )
    flat: Tensor = flatten_dense_tensors(tuple(tensors))
    return flat


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return views of `flat` in the shapes of `tensors`, in their order. No host sync.

    Raises AmpValueError unless `flat` has exactly as many elements as `tensors` together.
    """
    wanted = sum(tensor.numel() for tensor in tensors)
    if flat.dim() != 1 or flat.numel() != wanted:
        raise AmpValueError(
            f"unflatten: flat has shape {list(flat.shape)}, but the tensors have {wanted} elements together.  "
            "Pass what flatten made of tensors of these shapes."
        )
    views: tuple[Tensor, ...] = unflatten_dense_tensors(flat, tuple(tensors))
    return views
