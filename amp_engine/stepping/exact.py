"""Keepers of the float32 value of a low-precision parameter: a master beside it, or a remainder.

`state_dict` finds keepers by the identity of the parameter, so a hook needs no engine, and a deepcopy, which has
other parameters, finds none.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

# Live parameter -> weak references to the keepers of its value.
_KEEPERS: WeakIdKeyDictionary = WeakIdKeyDictionary()

# Begin and end of the memory of these parameters and of their masters, sorted; cleared when one may have moved, and
# refilled on demand.
_PLACES: list[tuple[int, int, TensorWeakRef]] = []


class Exact:
    """Keeps the float32 value of one parameter."""

    # Slots: a garbage collection visits every dictionary, and making 50,000 of them triggers many.
    __slots__ = ("__weakref__", "_incoming", "param")

    def __init__(self, param: nn.Parameter) -> None:
        self.param = param
        self._incoming: tuple[Mapping[str, Any], str] | None = None

    def expect(self, state_dict: Mapping[str, Any], key: str) -> None:
        """Hold a checkpoint while torch copies a value of it into the parameter. Hooks may still change it."""
        self._incoming = state_dict, key

    def pop_expected(self) -> Tensor | None:
        """Return the value that the checkpoint has by now, and hold it no longer."""
        incoming, self._incoming = self._incoming, None
        value = None if incoming is None else incoming[0].get(incoming[1])
        return value if isinstance(value, Tensor) else None

    def in_sync(self) -> bool:
        """True if only this keeper wrote the parameter since it was rounded from the value."""
        raise NotImplementedError

    def counts(self) -> bool:
        """True if each element of the parameter that was not written since was rounded from `value`."""
        return self.in_sync()

    def value(self) -> Tensor:
        """Return the value before rounding: float32, new memory. Call it only if `counts()`. No host sync.

        Elements of the parameter that are not this value rounded were written through `.data`, and are returned as
        they are.
        """
        raise NotImplementedError

    def take(self, value_f32: Tensor) -> None:
        """Keep `value_f32` from now on; it has been rounded into the parameter already."""
        raise NotImplementedError

    def memory(self) -> Tensor | None:
        """Return the memory of this keeper that other code may write; None if there is none."""
        return None


def keep_exact(one: Exact) -> None:
    """Register `one` for its parameter, behind earlier keepers, while both live."""
    _PLACES.clear()
    _KEEPERS[one.param] = [weakref.ref(other) for other in (*exact_of(one.param), one)]


def discard_exact(one: Exact) -> None:
    """Unregister `one`: its parameter is float32 again, or is no longer stepped."""
    with suppress(ValueError):  # an interrupted release is repeated
        _KEEPERS[one.param].remove(weakref.ref(one))
    _PLACES.clear()


def exact_of(param: nn.Parameter) -> Iterator[Exact]:
    """Yield the keepers of `param`: a master for each optimizer that owns it, or one remainder."""
    for ref in _KEEPERS.get(param, ()) if _KEEPERS else ():  # looking up takes a microsecond
        one = ref()
        if one is not None:
            yield one


def exact_value(param: nn.Parameter) -> Tensor | None:
    """Return a copy of the float32 value behind `param`, or None if no keeper is up to date. No host sync."""
    return exact_value_of(exact_of(param))


def exact_value_of(keepers: Iterable[Exact]) -> Tensor | None:
    """Like `exact_value`, for given keepers."""
    return next((one.value() for one in keepers if one.counts()), None)


def float32_of(tensor: Tensor) -> Tensor:
    """Return `exact_value` of a parameter, or else the tensor itself in float32. No host sync."""
    value = exact_value(tensor) if isinstance(tensor, nn.Parameter) else None
    return tensor.detach().float() if value is None else value


def places_moved() -> None:
    """Forget known places: a parameter or a keeper may have other memory now."""
    _PLACES.clear()


def written_through_data(tensors: Iterable[Tensor]) -> None:
    """Have masters follow writes into `tensors` that autograd did not see, such as `p.data`."""
    for tensor in tensors:
        torch.autograd.graph.increment_version(written_memory(tensor))


def written_memory(tensor: Tensor) -> list[Tensor]:
    """Return the parameters with a keeper, and the masters, whose memory overlaps that of `tensor`."""
    if not _PLACES:
        for param in list(_KEEPERS):
            for t in (param, *(one.memory() for one in exact_of(param))):
                if t is not None and t.numel() > 0:
                    _PLACES.append((t.data_ptr(), t.data_ptr() + _extent(t), TensorWeakRef(t)))
        _PLACES.sort(key=itemgetter(0))
    begin = tensor.data_ptr()
    end = begin + _extent(tensor)
    found = []
    # Parameters overlap only if they have the same memory, and then they begin at the same address.
    place = bisect_left(_PLACES, begin, key=itemgetter(1))
    while place < len(_PLACES) and _PLACES[place][0] < end:
        low, high, ref = _PLACES[place]
        param = ref()
        if param is not None and low < end and begin < high:
            found.append(param)
        place += 1
    return found


def _extent(tensor: Tensor) -> int:
    """Return the bytes from the first element to the end of the last."""
    if tensor.numel() == 0:
        return 0
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
