"""Finds the objects that a user's objects refer to."""

from __future__ import annotations

import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice

import torch
from torch import Tensor, nn

_LIMIT = 20_000  # visited objects
ITEMS = 1_000  # visited items of one container, as a data set may be a list
_LEAVES = (str, bytes, int, float, complex, type(None), type, torch.dtype, torch.device)
# Functions of these modules refer to no objects of users. Each `assert` in a test names a module of pytest's, which
# refers to all tests.
_OPAQUE = {*sys.stdlib_module_names, "torch", "numpy", "_pytest", "amp_engine"}


def named_or_held(one: object) -> Iterator[object]:
    """Yield the objects of `held`, the global variables that a function names, and the methods of an object's class."""
    yield from held(one)
    if isinstance(one, types.FunctionType):
        yield from _globals(one)
    elif not isinstance(one, (Tensor, dict, list, tuple, set, frozenset, deque, types.MethodType, functools.partial)):
        for base in type(one).__mro__:
            if not _is_opaque(base.__module__):
                yield from (value for value in vars(base).values() if isinstance(value, types.FunctionType))


def reachable(roots: Iterable[object], parts: Callable[[object], Iterable[object]] = named_or_held) -> list[object]:
    """Return the roots, their `parts`, the parts of the parts and so on, the nearest first, up to a limit."""
    found: dict[int, object] = {}
    left = deque(roots)
    while left and len(found) < _LIMIT:
        one = left.popleft()
        if not isinstance(one, _LEAVES) and id(one) not in found:
            found[id(one)] = one
            left.extend(parts(one))
    return list(found.values())


def held(one: object) -> Iterator[object]:
    """Yield attributes, items and keys of an object, or the closure's variables and the defaults of a function."""
    if isinstance(one, (Tensor, types.ModuleType)):
        return
    if isinstance(one, dict):
        yield from islice(tuple(one), ITEMS)
        yield from islice(tuple(one.values()), ITEMS)
    elif isinstance(one, (list, tuple, set, frozenset, deque)):
        yield from islice(tuple(one), ITEMS)
    elif isinstance(one, types.FunctionType):
        for cell in one.__closure__ or ():
            with suppress(ValueError):  # it has no value yet
                yield cell.cell_contents
        yield from (one.__defaults__, one.__kwdefaults__)
    elif isinstance(one, types.MethodType):
        yield from (one.__self__, one.__func__)
    elif isinstance(one, functools.partial):
        yield from (one.func, one.args, one.keywords)
    elif not type(one).__module__.startswith("amp_engine") or isinstance(one, nn.Module):
        yield getattr(one, "__dict__", None)


def _globals(function: types.FunctionType) -> Iterator[object]:
    if _is_opaque(function.__module__):
        return
    codes = [function.__code__]
    for code in codes:
        codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
        for name in code.co_names:
            value = function.__globals__.get(name)
            if isinstance(value, types.ModuleType) and not _is_opaque(value.__name__):
                yield from (vars(value).get(attribute) for attribute in code.co_names)
            yield value


def _is_opaque(module: object) -> bool:
    return not isinstance(module, str) or module.partition(".")[0] in _OPAQUE
