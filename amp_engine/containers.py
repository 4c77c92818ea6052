"""Cast the tensors inside of whatever a model takes or returns, and keep the containers' types."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def cast_tensors(value: Any, dtype: torch.dtype, only: Sequence[torch.dtype] | None = None) -> Any:
    """`value` with every floating tensor in it cast to `dtype`; with `only`, every tensor of these types.

    Walked: lists, tuples, named tuples, deques, mappings, dataclass instances, and objects with a `to` method
    (packed sequences, batch classes). A container comes back in its own type and the one handed in is not
    changed; one in which nothing had to be cast comes back itself. Strings, numbers, sets, numpy arrays,
    generators, modules and everything else are returned as they are. No host sync.
    """
    if isinstance(value, Tensor):
        return value.to(dtype) if (value.is_floating_point() if only is None else value.dtype in only) else value
    if isinstance(value, (str, bytes, nn.Module)) or value is None:
        return value
    if isinstance(value, (list, tuple, deque)) and not hasattr(value, "to"):
        return _cast_sequence(value, dtype, only)
    # A dataclass that is a mapping too (Hugging Face's ModelOutput) keeps its items and fields in step
    # through item assignment.
    if isinstance(value, Mapping) and not hasattr(value, "to"):
        return _cast_mapping(value, dtype, only)
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and not hasattr(value, "to"):
        return _cast_dataclass(value, dtype, only)
    if callable(getattr(value, "to", None)) and not isinstance(value, type):
        return value.to(dtype) if only is None or _holds(value, only) else value
    return value


def _holds(value: Any, dtypes: Sequence[torch.dtype]) -> bool:
    """Whether the floating tensors of an object with a `to` method, which casts them all, are of these types."""
    items = (
        value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple) else vars(value).values()
    )
    types = {item.dtype for item in items if isinstance(item, Tensor) and item.is_floating_point()}
    return bool(types) and types.issubset(dtypes)


def _cast_sequence(value: Any, dtype: torch.dtype, only: Sequence[torch.dtype] | None) -> Any:
    items = [cast_tensors(item, dtype, only) for item in value]
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    if hasattr(value, "_make"):
        return value._make(items)
    if isinstance(value, deque):
        return type(value)(items, value.maxlen)
    # `torch.return_types.max` and kin are tuples that take one iterable, as list and tuple do.
    return type(value)(items)


def _cast_mapping(value: Any, dtype: torch.dtype, only: Sequence[torch.dtype] | None) -> Any:
    items = {key: cast_tensors(item, dtype, only) for key, item in value.items()}
    if all(items[key] is item for key, item in value.items()):
        return value
    rebuilt = copy.copy(value)
    try:
        for key, item in items.items():
            rebuilt[key] = item
    except TypeError:  # an immutable mapping; its constructor takes the items
        return type(value)(items)
    return rebuilt


def _cast_dataclass(value: Any, dtype: torch.dtype, only: Sequence[torch.dtype] | None) -> Any:
    rebuilt = copy.copy(value)
    changed = False
    for field in dataclasses.fields(value):
        if not hasattr(value, field.name):
            continue
        old = getattr(value, field.name)
        new = cast_tensors(old, dtype, only)
        if new is not old:
            # Not dataclasses.replace: it would run __post_init__ again and lose init=False state.
            object.__setattr__(rebuilt, field.name, new)
            changed = True
    return rebuilt if changed else value
