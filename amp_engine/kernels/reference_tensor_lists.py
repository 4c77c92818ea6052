"""Loops over parameters in plain Python. `backend.TensorLists` says what each of them does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from amp_engine.ground.torch_private import data_address, lazy_clone
from amp_engine.kernels.backend import Gradients, GradientStamps, Stamps, TensorList
from amp_engine.kernels.layout import NONE, OWN, SHARED, access_of, devices_of

_GRAD: Any = torch.Tensor.grad


def params(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The list itself."""
    return tensors


def stamps(tensors: Sequence[Tensor]) -> Stamps:
    """Address, version, type and device of each. Inference tensors keep no version."""
    return [(t.data_ptr(), -1 if t.is_inference() else t._version, t.dtype, t.device) for t in tensors]


def have_stamps(tensors: Sequence[Tensor], before: Stamps) -> bool:
    """Whether these are the stamps still."""
    return stamps(tensors) == before


def gradients(params: Sequence[Tensor]) -> Gradients:
    """The gradients, how and where they can be taken."""
    grads = [_GRAD.__get__(p) for p in params]
    accesses = bytes(NONE if g is None else access_of(g, p) for p, g in zip(params, grads, strict=True))
    return Gradients(grads, accesses, devices_of(grads, accesses))


def copies(tensors: TensorList, accesses: bytes) -> TensorList:
    """Copies, on write where memory is a tensor's own."""
    return [
        None if t is None or how == NONE else _copied_on_write(t) if how == OWN else t.clone()
        for t, how in zip(tensors, accesses, strict=True)
    ]


def _copied_on_write(tensor: Tensor) -> Tensor:
    # Not on a GPU beside the default stream, as csrc/tensor_lists.cpp has it.
    device = tensor.device
    if device.type == "cuda" and torch.cuda.current_stream(device) != torch.cuda.default_stream(device):
        return tensor.clone()
    try:
        return lazy_clone(tensor)
    except RuntimeError:  # memory of others (numpy, DLPack), which copy-on-write cannot hold
        return tensor.clone()


def gradient_stamps(params: Sequence[Tensor]) -> GradientStamps:
    """Identity, version and address of each gradient."""
    return [_gradient_stamp(_GRAD.__get__(param), param) for param in params]


def have_gradient_stamps(params: Sequence[Tensor], before: GradientStamps) -> bool:
    """Whether these are the gradients' stamps still."""
    return gradient_stamps(params) == before


def watch_gradients(params: Sequence[Tensor]) -> None:
    """Python cannot have torch tell."""


def are_gradients_unwritten(params: Sequence[Tensor]) -> bool:
    """Nobody knows."""
    return False


def either(mask: bytes, first: TensorList, second: TensorList | None = None) -> TensorList:
    """`first[i] if mask[i] else second[i]`."""
    others = [None] * len(mask) if second is None else second
    return [a if chosen else b for chosen, a, b in zip(mask, first, others, strict=True)]


def any_gradient(tensors: Sequence[Tensor]) -> bool:
    """Whether one of them has a gradient."""
    return any(_GRAD.__get__(t) is not None for t in tensors)


def same_objects(a: Sequence[object], b: Sequence[object]) -> bool:
    """Whether they have the very same objects."""
    return len(a) == len(b) and all(map(is_, a, b))


def same_entries(dicts: list[dict[str, Any]], name: str, objects: Sequence[object]) -> bool:
    """Whether each dictionary has its object."""
    return all(d.get(name) is o for d, o in zip(dicts, objects, strict=True))


def discard_gradients(tensors: Sequence[Tensor]) -> None:
    """`tensor.grad = None` for each."""
    for t in tensors:
        _GRAD.__set__(t, None)


def watch_collectives(
    writing: Sequence[str], reading: Sequence[str], listener: Callable[[list[Tensor], bool], None]
) -> bool:
    """Not here: `initialization/collectives.py` registers kernels in Python, which a dispatcher can go on from."""
    return False


def _gradient_stamp(grad: Tensor | None, param: Tensor) -> tuple[int, int, int]:
    if grad is None:
        return id(grad), -1, 0
    address = data_address(grad) if access_of(grad, param) in (OWN, SHARED) else 0
    return id(grad), -1 if grad.is_inference() else grad._version, address
