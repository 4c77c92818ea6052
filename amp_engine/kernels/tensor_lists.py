"""Loops over parameters. `backend.TensorLists` says what those do of which there are two."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from amp_engine.kernels.backend import Gradients as Gradients
from amp_engine.kernels.backend import GradientStamps as GradientStamps
from amp_engine.kernels.backend import Stamps as Stamps
from amp_engine.kernels.choice import TENSOR_LISTS
from amp_engine.kernels.layout import NONE as NONE
from amp_engine.kernels.layout import OTHER as OTHER
from amp_engine.kernels.layout import OWN as OWN
from amp_engine.kernels.layout import SHARED as SHARED
from amp_engine.kernels.layout import devices_of as devices_of
from amp_engine.kernels.layout import is_lazy as is_lazy
from amp_engine.kernels.layout import written_out as written_out

_GRAD: Any = torch.Tensor.grad

params = TENSOR_LISTS.params
stamps = TENSOR_LISTS.stamps
have_stamps = TENSOR_LISTS.have_stamps
gradients = TENSOR_LISTS.gradients
copies = TENSOR_LISTS.copies
gradient_stamps = TENSOR_LISTS.gradient_stamps
have_gradient_stamps = TENSOR_LISTS.have_gradient_stamps
watch_gradients = TENSOR_LISTS.watch_gradients
are_gradients_unwritten = TENSOR_LISTS.are_gradients_unwritten
either = TENSOR_LISTS.either
any_gradient = TENSOR_LISTS.any_gradient
same_objects = TENSOR_LISTS.same_objects
same_entries = TENSOR_LISTS.same_entries
discard_gradients = TENSOR_LISTS.discard_gradients
watch_collectives = TENSOR_LISTS.watch_collectives


def copy(tensor: Tensor) -> Tensor:
    """A copy of a tensor that has its own memory, which takes none until one of the two is written, if it can."""
    copied = copies([tensor], bytes([OWN]))[0]
    assert copied is not None
    return copied


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


def have_other_memory(tensor: Tensor, before: Stamps) -> bool:
    """True if a tensor differs from its stamp by its address alone: `tensor.data = x`."""
    now = stamps([tensor])
    if isinstance(now, list) and isinstance(before, list):
        return now != before and [stamp[1:] for stamp in now] == [stamp[1:] for stamp in before]
    if isinstance(now, list) or isinstance(before, list):
        return False
    return now != before and now[8:] == before[8:]


def asks_for_gradients(params: Sequence[Tensor]) -> bool:
    """Whether a class among theirs has a `.grad` of its own, as masters do, which `gradients` would look past."""
    return any(getattr(kind, "grad", _GRAD) is not _GRAD for kind in set(map(type, params)))


def moved_since(params: Sequence[Tensor], before: GradientStamps) -> list[tuple[int, bool]]:
    """Where a gradient came, went, was replaced or written since `before`, and whether there was one. Slow.

    Nowhere for other parameters.
    """
    after = gradient_stamps(params)
    if after == before or len(after) != len(before):
        return []
    none = _triples(gradient_stamps([torch.empty(0)]))[0][0]
    pairs = zip(_triples(after), _triples(before), strict=True)
    return [(row, then[0] != none) for row, (now, then) in enumerate(pairs) if now != then]


def _stride(stamps: Stamps) -> int:
    return 1 if isinstance(stamps, list) else 32


def _triples(stamps: GradientStamps) -> list[tuple[int, int, int]]:
    return [*struct.iter_unpack("qqq", stamps)] if isinstance(stamps, bytes) else stamps
