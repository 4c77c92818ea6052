"""Where the float32 value of a low-precision parameter is kept: in a master beside it, or in a remainder.

`state_dict` finds them by the identity of the parameter, so that a hook needs no engine and a deepcopy, whose
parameters are others, finds none.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from contextlib import suppress
from operator import itemgetter
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from amp_engine.errors import AmpStateError


class Maker(Protocol):
    """Makes keepers for the parameters in an optimizer's groups."""

    def look_for_joined(self) -> None:
        """Make those of parameters that joined the groups."""


# Live parameter -> weak references to what keeps its value.
_KEEPERS: WeakIdKeyDictionary = WeakIdKeyDictionary()

# The rows of optimizers that make them, for what joins the groups.
_MAKERS: weakref.WeakSet[Maker] = weakref.WeakSet()

# Where the memory of such parameters and of masters begins and ends, in order; empty until somebody asks after one has
# moved.
_PLACES: list[tuple[int, int, TensorWeakRef]] = []


class Exact:
    """Keeps the float32 value of one parameter.

    Attributes:
        param: the parameter.
    """

    # A garbage collection goes through every dictionary, and making 50,000 of them sets off many.
    __slots__ = ("__weakref__", "_incoming", "param")

    def __init__(self, param: nn.Parameter) -> None:
        self.param = param
        self._incoming: Tensor | None = None

    def expect(self, value: Tensor | None) -> None:
        """Hold a checkpoint's value while torch copies it into the parameter."""
        self._incoming = value

    def pop_expected(self) -> Tensor | None:
        """That value, which is held no more."""
        value, self._incoming = self._incoming, None
        return value

    def in_sync(self) -> bool:
        """Whether nobody but us wrote the parameter since it was rounded from the value."""
        raise NotImplementedError

    def counts(self) -> bool:
        """True if the parameter was rounded from `value`, where it was not written since."""
        return self.in_sync()

    def value(self) -> Tensor:
        """The value before rounding, if it counts for the model: float32, new memory. No host sync.

        Where the parameter is not this value rounded somebody wrote it through `.data`, and it counts.
        """
        raise NotImplementedError

    def take(self, value_f32: Tensor) -> None:
        """Keep `value_f32`, which has been rounded into the parameter, from now on."""
        raise NotImplementedError

    def memory(self) -> Tensor | None:
        """Memory of its own that somebody else may write."""
        raise NotImplementedError


def keep_exact(one: Exact) -> None:
    """Have `one` found by its parameter, for as long as both live, behind those that are found already."""
    _PLACES.clear()
    _KEEPERS[one.param] = [weakref.ref(other) for other in (*exact_of(one.param), one)]


def add_maker(maker: Maker) -> None:
    """Have `maker` look for parameters before a checkpoint is loaded, until `discard_maker`."""
    _MAKERS.add(maker)


def discard_maker(maker: Maker) -> None:
    """Its optimizer has its parameters back."""
    _MAKERS.discard(maker)


def make_for_joined() -> None:
    """Keep the values of parameters that joined since the last backward; the next one says what it refuses."""
    for maker in list(_MAKERS):
        with suppress(AmpStateError):
            maker.look_for_joined()


def discard_exact(one: Exact) -> None:
    """Its parameter is float32 again, or stepped no more."""
    _KEEPERS[one.param].remove(weakref.ref(one))
    _PLACES.clear()


def exact_of(param: nn.Parameter) -> Iterator[Exact]:
    """What keeps the value of `param`: a master for each optimizer that owns it, or one remainder."""
    for ref in _KEEPERS.get(param, ()) if _KEEPERS else ():  # looking up takes a microsecond
        one = ref()
        if one is not None:
            yield one


def exact_value(param: nn.Parameter) -> Tensor | None:
    """A copy of the float32 value behind `param`, or None if none is kept that is up to date. No host sync."""
    return exact_value_of(exact_of(param))


def exact_value_of(keepers: Iterable[Exact]) -> Tensor | None:
    """The same of what keeps it."""
    return next((one.value() for one in keepers if one.counts()), None)


def places_moved() -> None:
    """A parameter, or what keeps its value, may have other memory now."""
    _PLACES.clear()


def written_through_data(tensors: Iterable[Tensor]) -> None:
    """Have masters follow what was written into their parameters behind autograd's back, as `p.data` of `tensors`."""
    for tensor in tensors:
        torch.autograd.graph.increment_version(written_memory(tensor))


def written_memory(tensor: Tensor) -> list[Tensor]:
    """The parameters with a value that have memory where `tensor` has it, and those masters."""
    if not _PLACES:
        for param in list(_KEEPERS):
            for t in (param, *(one.memory() for one in exact_of(param))):
                if t is not None and t.numel() > 0:
                    _PLACES.append((t.data_ptr(), t.data_ptr() + _extent(t), TensorWeakRef(t)))
        _PLACES.sort(key=itemgetter(0))
    begin = tensor.data_ptr()
    end = begin + _extent(tensor)
    found = []
    # Parameters do not overlap, but those that are one another's memory, whose places begin together.
    place = bisect_left(_PLACES, begin, key=itemgetter(1))
    while place < len(_PLACES) and _PLACES[place][0] < end:
        low, high, ref = _PLACES[place]
        param = ref()
        if param is not None and low < end and begin < high:
            found.append(param)
        place += 1
    return found


def _extent(tensor: Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    if tensor.numel() == 0:
        return 0
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
