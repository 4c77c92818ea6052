"""Finds the objects that a user's objects refer to."""

from __future__ import annotations

import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_LIMIT = 20_000  # visited objects
_ITEMS = 1_000  # visited items of one container, as a data set may be a list
_LEAVES = (str, bytes, int, float, complex, type(None), type, torch.dtype, torch.device)
# Functions of these modules refer to no objects of users. Each `assert` in a test names a module of pytest's, which
# refers to all tests.
_OPAQUE = {*sys.stdlib_module_names, "torch", "numpy", "_pytest", "amp_engine"}
_OPEN = {"builtins", "abc", "typing", "types", "collections", "argparse"}
# Objects of these classes, or of classes made from them, are threads, queues, loggers, files: no data of users.
_SEALED = {*sys.stdlib_module_names, "numpy", "_pytest"} - _OPEN
# Modules of torch's whose attributes follow another state: of a reducer, of shards, of compiled code.
_WRAPPERS = ("torch.nn.parallel", "torch.distributed", "torch._dynamo", "torch.jit")


def named_or_held(one: object) -> Iterator[object]:
    """Yield the objects of `held`, the global variables that a function names, and the methods of an object's class."""
    yield from held(one)
    if isinstance(one, types.FunctionType):
        yield from (value for _, _, value in globals_of(one))
    elif not isinstance(one, (Tensor, dict, list, tuple, set, frozenset, deque, types.MethodType, functools.partial)):
        for base in type(one).__mro__:
            if not _is_opaque(base.__module__):
                yield from (value for value in vars(base).values() if isinstance(value, types.FunctionType))


def reachable(
    roots: Iterable[object],
    parts: Callable[[object], Iterable[object]] = named_or_held,
    limit: int = _LIMIT,
) -> list[object]:
    """Return the roots, their `parts`, the parts of the parts and so on, the nearest first, up to a limit."""
    found: dict[int, object] = {}
    left = deque(roots)
    while left and len(found) < limit:
        one = left.popleft()
        if not isinstance(one, _LEAVES) and id(one) not in found:
            found[id(one)] = one
            left.extend(parts(one))
    return list(found.values())


def held(one: object) -> Iterator[object]:
    """Yield attributes, items and keys of an object, or the closure's variables and the defaults of a function.

    Objects that are not their user's to change have none: iterators, threads, files, most of torch's and amp_engine's.
    """
    if isinstance(one, (Tensor, types.ModuleType)):
        return
    if isinstance(one, dict):
        yield from islice(tuple(one), _ITEMS)
        yield from islice(tuple(one.values()), _ITEMS)
    elif isinstance(one, (list, tuple, set, frozenset, deque)):
        yield from islice(tuple(one), _ITEMS)
    elif isinstance(one, types.FunctionType):
        for cell in one.__closure__ or ():
            with suppress(ValueError):  # it has no value yet
                yield cell.cell_contents
        yield from (one.__defaults__, one.__kwdefaults__)
    elif isinstance(one, types.MethodType):
        yield from (one.__self__, one.__func__)
    elif isinstance(one, types.BuiltinMethodType):  # such as the `append` of a list
        yield one.__self__
    elif isinstance(one, functools.partial):
        yield from (one.func, one.args, one.keywords)
    elif _has_attributes(one):
        yield getattr(one, "__dict__", None)
        for slot in slots_of(one):
            with suppress(AttributeError):  # it has no value yet
                yield slot.__get__(one)
    elif isinstance(one, nn.Module):
        yield from (*one.children(), *one.parameters(recurse=False), *one.buffers(recurse=False))


def slots_of(one: object) -> Iterator[Any]:
    """Yield descriptors of the attributes of an object that its classes keep in `__slots__`."""
    if _has_attributes(one):
        for base in type(one).__mro__:
            if not _is_opaque(base.__module__):
                yield from (value for value in vars(base).values() if isinstance(value, types.MemberDescriptorType))


def _has_attributes(one: object) -> bool:
    kind = type(one)
    packages = {base.__module__.partition(".")[0] for base in kind.__mro__}
    if isinstance(one, Iterator) or packages & _SEALED:
        return False
    if kind.__module__.startswith("amp_engine"):
        return isinstance(one, (nn.Module, Optimizer))
    if "torch" in packages and not packages - _OPEN - {"torch", "amp_engine"}:
        return hasattr(kind, "state_dict") and not any(base.__module__.startswith(_WRAPPERS) for base in kind.__mro__)
    return True


def globals_of(function: types.FunctionType) -> Iterator[tuple[dict[str, Any], str, object]]:
    """Yield namespace, name and value of the global variables that a user's function names, also as `module.name`."""
    if _is_opaque(function.__module__):
        return
    codes = [function.__code__]
    for code in codes:
        codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
        for name in code.co_names:
            value = function.__globals__.get(name)
            if isinstance(value, types.ModuleType) and not _is_opaque(value.__name__):
                yield from ((vars(value), one, vars(value)[one]) for one in code.co_names if one in vars(value))
            if name in function.__globals__:
                yield function.__globals__, name, value


def _is_opaque(module: object) -> bool:
    return not isinstance(module, str) or module.partition(".")[0] in _OPAQUE
