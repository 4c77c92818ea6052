"""Changes the tensors inside of a model's inputs and outputs, and keeps the containers' types."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn


def cast_tensors(value: Any, dtype: torch.dtype, only: Sequence[torch.dtype] | None = None) -> Any:
    """Return `value` with every floating tensor in it cast to `dtype`; with `only`, every tensor of these types.

    Objects with a `to` method (packed sequences, batch classes) cast themselves. Walks the containers that
    `map_tensors` walks. No host sync.
    """

    def cast(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(dtype) if (value.is_floating_point() if only is None else value.dtype in only) else value
        if only is not None and not _holds(value, only):
            return value
        try:
            return value.to(dtype)
        except (TypeError, AttributeError, ValueError):  # a `to` of another meaning, or a class instead of an object
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
    if isinstance(value, (list, tuple, deque)) and not hasattr(value, "to"):
        return _map_sequence(value, fn)
    # A dataclass that is a mapping too (Hugging Face's ModelOutput) keeps its items and fields in step
    # through item assignment.
    if isinstance(value, Mapping) and not hasattr(value, "to"):
        return _map_mapping(value, fn)
    names = _field_names(value)
    if names is not None and not hasattr(value, "to"):
        return _map_fields(value, names, fn)
    if callable(getattr(value, "to", None)) and not isinstance(value, type):
        return fn(value)
    return value


def _holds(value: Any, dtypes: Sequence[torch.dtype]) -> bool:
    """True if all floating tensors of an object with a `to` method, which casts all of them, are of these types."""
    items = (
        value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple) else vars(value).values()
    )
    types = {item.dtype for item in items if isinstance(item, Tensor) and item.is_floating_point()}
    return bool(types) and types.issubset(dtypes)


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
