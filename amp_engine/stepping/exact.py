"""Keepers of the float32 value of a low-precision parameter: a master beside it, or a remainder.

`state_dict` finds keepers by the identity of the parameter, so a hook needs no engine, and a deepcopy, which has
other parameters, finds none.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

# Live parameter -> weak references to the keepers of its value.
_KEEPERS: WeakIdKeyDictionary = WeakIdKeyDictionary()


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

    def counts(self) -> bool:
        """True if each element of the parameter that was not written since was rounded from `value`."""
        raise NotImplementedError

    def value(self) -> Tensor:
        """Return the value before rounding: float32, new memory. Call it only if `counts()`. No host sync.

        Elements of the parameter that are not this value rounded were written through `.data`, and are returned as
        they are.
        """
        raise NotImplementedError

    def take(self, value_f32: Tensor) -> None:
        """Keep `value_f32` from now on; it has been rounded into the parameter already."""
        raise NotImplementedError


def keep_exact(one: Exact) -> None:
    """Register `one` for its parameter while both live."""
    _KEEPERS[one.param] = [weakref.ref(other) for other in (*exact_of(one.param), one)]


def discard_exact(one: Exact) -> None:
    """Unregister `one`: its parameter is float32 again, or is no longer stepped."""
    with suppress(ValueError):  # an interrupted release is repeated
        _KEEPERS[one.param].remove(weakref.ref(one))


def exact_of(param: nn.Parameter) -> Iterator[Exact]:
    """Yield the keeper of `param`, its master or its remainder, if it has one."""
    for ref in _KEEPERS.get(param, ()) if _KEEPERS else ():  # looking up takes a microsecond
        one = ref()
        if one is not None:
            yield one


def exact_value(param: nn.Parameter) -> Tensor | None:
    """Return a copy of the float32 value behind `param`, or None if no keeper is up to date. No host sync."""
    return next((one.value() for one in exact_of(param) if one.counts()), None)


def float32_of(tensor: Tensor) -> Tensor:
    """Return `exact_value` of a parameter, or else the tensor itself in float32. No host sync."""
    value = exact_value(tensor) if isinstance(tensor, nn.Parameter) else None
    return tensor.detach().float() if value is None else value
