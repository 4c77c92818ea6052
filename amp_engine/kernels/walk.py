"""Loops over parameters: native where there is a native module, since Python takes a microsecond or more a tensor."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp_engine.kernels import _native
from amp_engine.torch_private import lazy_clone

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
"""The types that the kernels take."""

# How the kernels can take a gradient: there is none; in its own memory; in memory that other tensors share; not at all.
NONE, OWN, SHARED, OTHER = range(4)

_GRAD: Any = torch.Tensor.grad

Stamps = bytes | bytearray | list[tuple[int, int, torch.dtype, torch.device]]
GradientStamps = bytes | list[tuple[int, int]]


def params(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """`tensors` in a form that the functions below walk fastest, for lists that are walked again and again."""
    if _native.module is None:
        return tensors
    handle: Sequence[Tensor] = _native.module.Params(tensors)
    return handle


def stamps(tensors: Sequence[Tensor]) -> Stamps:
    """What tells that a tensor was written or replaced since: its address, version, type and device."""
    if _native.module is not None:
        return _native.module.stamps(tensors)
    # Inference tensors keep no version.
    return [(t.data_ptr(), -1 if t.is_inference() else t._version, t.dtype, t.device) for t in tensors]


def have_stamps(tensors: Sequence[Tensor], before: Stamps) -> bool:
    """Whether nobody wrote or replaced the tensors since `stamps(tensors)` gave `before`."""
    if _native.module is not None:
        return bool(_native.module.have_stamps(tensors, before))
    return stamps(tensors) == before


def stamps_of(stamps: Stamps, place: int) -> Stamps:
    """Of many stamps those of one tensor, as `stamps([tensor])` gives them."""
    n = _stride(stamps)
    return stamps[n * place : n * (place + 1)]


def joined(parts: Iterable[Stamps]) -> Stamps:
    """Stamps of several tensors or lists as those of one list."""
    parts = list(parts)
    if all(isinstance(part, (bytes, bytearray)) for part in parts):
        return b"".join(parts)  # type: ignore[arg-type]
    return [stamp for part in parts for stamp in part]  # type: ignore[misc]


def put_stamps(stamps: Stamps, place: int, of_one: Stamps) -> Stamps:
    """`stamps` with those of one tensor replaced by what `stamps([tensor])` gave: in place, but the first time."""
    if isinstance(stamps, bytes):
        stamps = bytearray(stamps)
    n = _stride(stamps)
    stamps[n * place : n * (place + 1)] = of_one  # type: ignore[assignment]
    return stamps


def _stride(stamps: Stamps) -> int:
    return 1 if isinstance(stamps, list) else 32


class Gradients(NamedTuple):
    """The gradients of many parameters.

    Attributes:
        tensors: n; None where there is none.
        walks: n; how the kernels can take each.
        devices: where those are that can be taken, each device once.
    """

    tensors: Sequence[Tensor | None]
    walks: bytes
    devices: list[torch.device]


def gradients(params: Sequence[Tensor]) -> Gradients:
    """The gradient of each parameter, without asking a subclass."""
    if _native.module is not None:
        return Gradients(*_native.module.gradients(params))
    grads = [_GRAD.__get__(p) for p in params]
    walks = bytes(NONE if g is None else _walk_of(g, p) for p, g in zip(params, grads, strict=True))
    return Gradients(grads, walks, devices_of(grads, walks))


def devices_of(tensors: Sequence[Tensor | None], walks: bytes) -> list[torch.device]:
    """The devices of what the kernels can take of `tensors`, each once."""
    return list(
        dict.fromkeys(t.device for t, how in zip(tensors, walks, strict=True) if t is not None and how != OTHER)
    )


def copies(tensors: Sequence[Tensor | None], walks: bytes) -> Sequence[Tensor | None]:
    """A copy of each tensor whose walk is not NONE; None for the others.

    Copy-on-write where it has memory of its own: writing to either leaves the other alone, and is when memory is
    copied. Memory that is shared (a bucket of DDP) must not become copy-on-write as a whole, and is copied at once.
    """
    if _native.module is not None:
        handle: Sequence[Tensor | None] = _native.module.copies(tensors, walks)
        return handle
    return [
        None if t is None or how == NONE else lazy_clone(t) if how == OWN else t.clone()
        for t, how in zip(tensors, walks, strict=True)
    ]


def asks_for_gradients(params: Sequence[Tensor]) -> bool:
    """Whether a class among theirs has a `.grad` of its own, as masters do, which `gradients` would look past."""
    return any(getattr(kind, "grad", _GRAD) is not _GRAD for kind in set(map(type, params)))


def gradient_stamps(params: Sequence[Tensor]) -> GradientStamps:
    """What tells that a gradient was replaced or written since, while it is alive: which one it is, and its version."""
    if _native.module is not None:
        found: bytes = _native.module.gradient_stamps(params)
        return found
    return [(id(g), -1 if g is None or g.is_inference() else g._version) for g in map(_GRAD.__get__, params)]


def have_gradient_stamps(params: Sequence[Tensor], before: GradientStamps) -> bool:
    """Whether nobody wrote or replaced the gradients since `gradient_stamps(params)` gave `before`."""
    if _native.module is not None:
        return bool(_native.module.have_gradient_stamps(params, before))
    return gradient_stamps(params) == before


def any_gradient_written(params: Sequence[Tensor], before: GradientStamps) -> bool:
    """Whether a gradient is the one that `before` tells of and was written since. Slow; False for other parameters."""
    now, then = _pairs(gradient_stamps(params)), _pairs(before)
    return len(now) == len(then) and any(
        new == old and version > earlier for (new, version), (old, earlier) in zip(now, then, strict=True)
    )


def _pairs(stamps: GradientStamps) -> list[tuple[int, int]]:
    return [*struct.iter_unpack("qq", stamps)] if isinstance(stamps, bytes) else stamps


def either(
    mask: bytes, first: Sequence[Tensor | None], second: Sequence[Tensor | None] | None = None
) -> Sequence[Tensor | None]:
    """`first[i]` where `mask[i]` is not 0, else `second[i]`; None where there is no `second`."""
    if _native.module is not None:
        chosen: Sequence[Tensor | None] = _native.module.either(mask, first, second)
        return chosen
    others = [None] * len(mask) if second is None else second
    return [a if chosen else b for chosen, a, b in zip(mask, first, others, strict=True)]


def any_gradient(tensors: Sequence[Tensor]) -> bool:
    """Whether one of them has a gradient, without asking a subclass."""
    if _native.module is not None:
        found: bool = _native.module.any_gradient(tensors)
        return found
    return any(_GRAD.__get__(t) is not None for t in tensors)


def same_objects(a: Sequence[object], b: Sequence[object]) -> bool:
    """Whether two lists or tuples have the very same objects. `==` would ask tensors, and compare their elements."""
    if _native.module is not None:
        same: bool = _native.module.same_objects(a, b)
        return same
    return len(a) == len(b) and all(map(is_, a, b))


def same_entries(dicts: list[dict[str, Any]], name: str, objects: Sequence[object]) -> bool:
    """Whether `dicts[i].get(name) is objects[i]` for every i."""
    if _native.module is not None:
        same: bool = _native.module.same_entries(dicts, name, objects)
        return same
    return all(d.get(name) is o for d, o in zip(dicts, objects, strict=True))


def drop_gradients(tensors: Sequence[Tensor]) -> None:
    """`tensor.grad = None` for each, without asking a subclass."""
    if _native.module is not None:
        _native.module.drop_gradients(tensors)
        return
    for t in tensors:
        _GRAD.__set__(t, None)


def watch_collectives(
    writing: Sequence[str], reading: Sequence[str], listener: Callable[[list[Tensor], bool], None]
) -> bool:
    """Have operators of c10d find memory that was asked for, and tell what they write. Whether it is native.

    listener(tensors, is_broadcast): called after each of the `writing` ones.
    """
    register = getattr(_native.module, "watch_collectives", None)
    if register is not None:
        register(list(writing), list(reading), listener)
    return register is not None


def is_dense(t: Tensor) -> bool:
    """Whether every element lies once, without gaps, in the tensor's memory. In any order: channels_last is dense."""
    return t.layout is torch.strided and (t.is_contiguous() or bool(torch.ops.aten.is_non_overlapping_and_dense(t)))


def is_lazy(t: Tensor) -> bool:
    """Whether the elements are not those in memory: of a negative or conjugate view, or zeros that have no memory."""
    return t.is_neg() or t.is_conj() or t._is_zerotensor()


def written_out(t: Tensor) -> Tensor:
    """`t`, or if it is lazy a copy that lies in memory as it is."""
    return t.clone() if is_lazy(t) else t


def same_layout(a: Tensor, b: Tensor) -> bool:
    """Whether `a` and `b` are of one shape and one order in memory."""
    if a.shape != b.shape:
        return False
    return a.stride() == b.stride() or all(
        n <= 1 or x == y for n, x, y in zip(a.shape, a.stride(), b.stride(), strict=True)
    )


def _walk_of(grad: Tensor, param: Tensor) -> int:
    walked = type(grad) is Tensor and grad.dtype in FLOATS and is_dense(grad) and same_layout(grad, param)
    if not walked or is_lazy(grad):
        return OTHER
    shared = grad._is_view() or grad.untyped_storage().nbytes() > grad.numel() * grad.element_size()
    return SHARED if shared else OWN
