"""Changes the tensors inside of a model's inputs and outputs, and keeps the containers' types."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn


def cast_tensors(value: Any, dtype: torch.dtype, only: Sequence[torch.dtype] | None = None) -> Any:
    """Return `value` with every floating tensor in it cast to `dtype`; with `only`, every tensor of these types.

    Objects with a `to` method (packed sequences, batch classes) cast themselves, unless their tensors have the type.
    Walks the containers that `map_tensors` walks. No host sync.
    """

    def cast(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(dtype) if (value.is_floating_point() if only is None else value.dtype in only) else value
        types = {tensor.dtype for tensor in _tensors_of(value, set()) if tensor.is_floating_point()}
        if types == {dtype} or (only is not None and not (types and types.issubset(only))):
            return value  # its `to` may return a copy all the same
        try:
            return value.to(dtype)
        except (TypeError, AttributeError, ValueError):  # a `to` of another meaning
            return value

    return map_tensors(value, cast)


def map_tensors(value: Any, fn: Callable[[Any], Any]) -> Any:
    """Return `value` with `fn` applied to every tensor in it, and to objects with a `to` method.

    Walks lists, tuples, named tuples, deques, mappings, simple namespaces, and instances of dataclasses and of classes
    of attrs. Returns a container of the same type, and does not change the given one; returns the given one itself if
    `fn` changed nothing in it, or if no new one can be built. Strings, numbers, sets, numpy arrays, generators, modules
    and all other objects are returned unchanged.
    """
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, (str, bytes, nn.Module, torch.fx.Proxy)) or value is None:
        return value
    if _has_to(value):
        return fn(value)
    if isinstance(value, (list, tuple, deque)):
        return _map_sequence(value, fn)
    # A dataclass that is a mapping too (Hugging Face's ModelOutput) keeps its items and fields in step
    # through item assignment.
    if isinstance(value, Mapping):
        return _map_mapping(value, fn)
    names = _field_names(value)
    return value if names is None else _map_fields(value, names, fn)


def attributes_not_walked(value: Any) -> Mapping[str, Any]:
    """Return the attributes of an object that `map_tensors` returns unchanged; none of one that it walks."""
    is_walked = isinstance(value, (Tensor, nn.Module, list, tuple, deque, Mapping)) or _has_to(value)
    return {} if is_walked or _field_names(value) is not None else getattr(value, "__dict__", {})


def _has_to(value: Any) -> bool:
    """True for an object with a `to` method; of a mapping only its class counts, as attributes may be items."""
    owner = type(value) if isinstance(value, Mapping) else value
    return not isinstance(value, type) and callable(getattr(owner, "to", None))


def _tensors_of(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Yield the tensors that an object with a `to` method holds, once each: objects may refer to each other."""
    if isinstance(value, Tensor):
        yield value
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    items: Any = ()
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, (list, tuple)):
        items = value
    elif _has_to(value):
        items = getattr(value, "__dict__", {}).values()
    for item in items:
        yield from _tensors_of(item, seen)


def _map_sequence(value: Any, fn: Callable[[Any], Any]) -> Any:
    items = [map_tensors(item, fn) for item in value]
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    kind = type(value)
    if kind is list:
        return items
    if kind is tuple:
        return tuple(items)
    with suppress(Exception):  # the constructor may take something else
        if hasattr(value, "_make"):
            return value._make(items)
        # `torch.return_types.max` and similar types are tuples that take one iterable, as list and tuple do.
        return kind(items, value.maxlen) if isinstance(value, deque) else kind(items)
    with suppress(Exception):
        return _refilled(value, items)
    return value


def _refilled(value: Any, items: list[Any]) -> Any:
    """Copy a list, tuple or deque of a subclass, with other items."""
    if isinstance(value, tuple):
        of_tuple = tuple.__new__(type(value), items)
        getattr(of_tuple, "__dict__", {}).update(getattr(value, "__dict__", {}))
        return of_tuple
    rebuilt: Any = copy.copy(value)
    for i, item in enumerate(items):
        rebuilt[i] = item
    return rebuilt


def _map_mapping(value: Any, fn: Callable[[Any], Any]) -> Any:
    items = {key: map_tensors(item, fn) for key, item in value.items()}
    if all(items[key] is item for key, item in value.items()):
        return value
    if type(value) is dict:
        return items
    with suppress(Exception):
        rebuilt = _copied_mapping(value)
        for key, item in items.items():
            rebuilt[key] = item
        return rebuilt
    with suppress(Exception):  # an immutable mapping; its constructor takes the items
        return type(value)(items)
    return value


def _copied_mapping(value: Any) -> Any:
    """Copy `value` so that replacing items of the copy does not change `value`."""
    if isinstance(value, OrderedDict) and type(value).__reduce__ is OrderedDict.__reduce__:
        # copy.copy calls the class, which may want arguments.
        rebuilt = type(value).__new__(type(value))
        getattr(rebuilt, "__dict__", {}).update(getattr(value, "__dict__", {}))
        return rebuilt
    rebuilt = copy.copy(value)
    if isinstance(value, dict) and getattr(value, "__dict__", None) is value:  # attributes are the items
        object.__setattr__(rebuilt, "__dict__", rebuilt)
    if not isinstance(value, dict) and not hasattr(value, "__copy__"):
        for name, inner in list(vars(rebuilt).items()):  # among them the container that has the items
            if isinstance(inner, (dict, list)) and inner is vars(value).get(name):
                vars(rebuilt)[name] = copy.copy(inner)
    return rebuilt


def _field_names(value: Any) -> list[str] | None:
    """Return the names of the fields of an object that has a fixed set of them, or None."""
    if isinstance(value, SimpleNamespace):
        return list(vars(value))
    if isinstance(value, type):
        return None
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value)]
    fields = getattr(type(value), "__attrs_attrs__", None)
    return None if fields is None else [field.name for field in fields]


def _map_fields(value: Any, names: list[str], fn: Callable[[Any], Any]) -> Any:
    changed = {}
    for name in names:
        if hasattr(value, name):
            old = getattr(value, name)
            new = map_tensors(old, fn)
            if new is not old:
                changed[name] = new
    if not changed:
        return value
    # Not dataclasses.replace: it would run __post_init__ again and lose init=False state.
    with suppress(Exception):  # its class may refuse copies
        rebuilt = copy.copy(value)
        for name, new in changed.items():
            object.__setattr__(rebuilt, name, new)
        return rebuilt
    return value


class GivenMappings:
    """The mappings among inputs, into which a forward may write, or into copies of them that were cast.

    Args:
        given, cast: lists of inputs, and of what `cast_tensors` made of them.
    """

    def __init__(self, given: Sequence[Any], cast: Sequence[Any]) -> None:
        self._pairs = [*_mappings(given, cast)]

    def write_back(self, output: Any, fn: Callable[[Any], Any]) -> Any:
        """Put what was written, by `fn`, into the given mappings, and return `fn(output)`.

        Where the output, or an item of a list or tuple, is such a mapping, it is the given one, and not changed more.
        """
        for given, cast, items in self._pairs:
            left = dict(cast.items())  # not its iterator: that of a TensorDict gives rows
            for key in items.keys() - left.keys() if given is not cast else ():
                del given[key]
            for key, item in left.items():
                if key not in items or item is not items[key]:
                    given[key] = fn(item)
        return self._given_for(output, fn)

    def _given_for(self, output: Any, fn: Callable[[Any], Any]) -> Any:
        for given, cast, _ in self._pairs:
            if output is cast:
                return given
        if self._pairs and type(output) in (list, tuple):
            return type(output)(self._given_for(item, fn) for item in output)
        return fn(output)


def _mappings(given: Any, cast: Any) -> Iterator[tuple[Any, Any, dict[Any, Any]]]:
    """Yield each mapping that can be written, the innermost first; its copy or itself; and the items of that."""
    if isinstance(given, (list, tuple)) and isinstance(cast, (list, tuple)):
        for one, other in zip(given, cast, strict=False):
            yield from _mappings(one, other)
    elif isinstance(given, MutableMapping) and isinstance(cast, MutableMapping):
        before, items = dict(given.items()), dict(cast.items())
        if any(cast[key] is not item for key, item in items.items()):
            return  # it makes its items when they are read
        for key, item in items.items():
            yield from _mappings(before.get(key), item)
        yield given, cast, items
