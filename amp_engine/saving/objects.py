"""Saves the states of a user's objects in a checkpoint, and loads all of them or none."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from amp_engine.errors import AmpStateError, AmpTypeError, AmpValueError


def state_of(value: Any) -> Any:
    """Return `value` with the state of each object that has a `state_dict`, also in lists, tuples and dictionaries."""
    if callable(getattr(value, "state_dict", None)):
        return value.state_dict()
    if type(value) in (list, tuple):
        return type(value)(state_of(item) for item in value)
    if type(value) is dict:
        return {key: state_of(item) for key, item in value.items()}
    return value


def load_states(objects: Mapping[str, Any], saved: Mapping[str, Any], path: str) -> None:
    """Load the states in `saved` into `objects` of the same names: all of them, or none if one does not fit.

    During the load the host holds a copy of the earlier states. Raises AmpValueError, AmpTypeError or AmpStateError.
    """
    missing = [name for name in objects if name not in saved]
    if missing:
        raise AmpValueError(f"{path} has no {', '.join(map(repr, missing))}.  It has {', '.join(map(repr, saved))}.")
    pairs = [pair for name, value in objects.items() for pair in _pairs(name, value, saved[name])]
    before: list[tuple[str, Any, Any]] = []
    name = ""
    try:
        for name, target, state in pairs:
            before.append((name, target, _on_host(target.state_dict())))
            target.load_state_dict(state)
    except BaseException as e:
        refused = _put_back(before)
        if not isinstance(e, Exception):
            raise
        is_left = "nothing of it was loaded" if not refused else f"only {', '.join(refused)} may hold a part of it"
        also = f"  Its earlier state was refused as well: {refused[name]}" if name in refused else ""
        raise AmpStateError(f"{path} does not fit, and {is_left}.  {name}: {e}{also}") from e


def _put_back(before: list[tuple[str, Any, Any]]) -> dict[str, Exception]:
    """Load earlier states, the last first. Returns the error of each object that refuses its own, by name."""
    refused: dict[str, Exception] = {}
    with ExitStack() as undo:  # goes on where one raises, an interrupt too
        for name, target, state in before:
            undo.callback(_load_back, name, target, state, refused)
    return refused


def _load_back(name: str, target: Any, state: Any, refused: dict[str, Exception]) -> None:
    try:
        target.load_state_dict(state)
    except Exception as e:
        refused[name] = e


def _pairs(name: str, target: Any, state: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, object, its state) for each object in `target`."""
    if callable(getattr(target, "load_state_dict", None)):
        yield name, target, state
        return
    if type(target) not in (list, tuple, dict):
        raise AmpTypeError(
            f"{name} is a {type(target).__name__}, which has no load_state_dict.  Leave it out: amp.load returns it."
        )
    keys = list(target) if isinstance(target, dict) else list(range(len(target)))
    saved = (
        list(state) if isinstance(state, dict) else list(range(len(state))) if type(state) in (list, tuple) else None
    )
    if saved != keys:
        found = "no such container" if saved is None else saved
        raise AmpValueError(f"{name} is to be loaded into {keys}, and saved was {found}.")
    for key in keys:
        yield from _pairs(f"{name}[{key!r}]", target[key], state[key])


def _on_host(state: Any) -> Any:
    """Return a copy of a state dictionary with its tensors on the CPU."""
    if isinstance(state, Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        copied = copy.copy(state)  # with the attribute that has the versions of modules
        copied.update((key, _on_host(value)) for key, value in state.items())
        return copied
    if type(state) in (list, tuple):
        return type(state)(_on_host(item) for item in state)
    return copy.deepcopy(state)
