"""Layouts of tensors in memory, and tests of what the kernels can read and write."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from amp_engine.ground.torch_private import data_address

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
"""The types that the kernels take."""

# Access of the kernels to a gradient: there is none; they can take it; they cannot.
NONE, TAKEN, OTHER = range(3)


def mark(t: Tensor) -> tuple[int, int, torch.dtype, torch.device]:
    """Return address, version, type and device: equal until `t` is written or replaced, if its memory is not freed."""
    return data_address(t), version(t), t.dtype, t.device


def address_of(t: Tensor) -> int:
    """Return the address of the first element. `data_ptr()` would ask to write there, which copies shared memory."""
    return int(data_address(t) + t.storage_offset() * t.element_size())


def version(t: Tensor) -> int:
    """Return the number of writes that autograd has counted; -1 for an inference tensor, which has no count."""
    return -1 if t.is_inference() else t._version


def is_dense(t: Tensor) -> bool:
    """True if each element is once in the tensor's memory, without gaps, in any order: channels_last is dense."""
    return t.layout is torch.strided and (t.is_contiguous() or bool(torch.ops.aten.is_non_overlapping_and_dense(t)))


def is_lazy(t: Tensor) -> bool:
    """True if memory does not hold the elements of `t`: a negative or conjugate view, or zeros without memory."""
    return t.is_neg() or t.is_conj() or t._is_zerotensor()


def written_out(t: Tensor) -> Tensor:
    """Return `t`, or if it is lazy a copy whose elements are in memory."""
    return t.clone() if is_lazy(t) else t


def same_layout(a: Tensor, b: Tensor) -> bool:
    """True if `a` and `b` have the same shape and the same order in memory."""
    if a.shape != b.shape:
        return False
    return a.stride() == b.stride() or all(
        n <= 1 or x == y for n, x, y in zip(a.shape, a.stride(), b.stride(), strict=True)
    )


def access_of(grad: Tensor, param: Tensor) -> int:
    """Return the access of the kernels to `grad`, the gradient of `param`: TAKEN or OTHER."""
    readable = type(grad) is Tensor and grad.dtype in FLOATS and is_dense(grad) and same_layout(grad, param)
    return TAKEN if readable and not is_lazy(grad) else OTHER


def devices_of(tensors: Sequence[Tensor | None], accesses: bytes) -> list[torch.device]:
    """Return the devices of the `tensors` that the kernels can reach, each once."""
    return list(
        dict.fromkeys(t.device for t, how in zip(tensors, accesses, strict=True) if t is not None and how != OTHER)
    )
