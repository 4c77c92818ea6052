"""A shadow: an optimizer with other parameters, whose `step` changes nothing that its optimizer keeps."""

from __future__ import annotations

import copy
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def shadow(optimizer: Optimizer, params: Mapping[int, nn.Parameter]) -> Optimizer:
    """Return a shadow with other parameters and copies of their state: its `step` writes those and nothing else.

    Args:
        optimizer: stays as it is.
        params: id of each parameter in its groups -> the parameter in the shadow's groups.
    """
    return _Copies(params).ghost(optimizer)


def discard_ghost(double: Optimizer) -> None:
    """Free the copies of a ghost: they are in a cycle, and would wait for a garbage collection."""
    _, copies = vars(double).pop(_BEHIND, (None, None))
    if copies is not None:
        copies.clear()
        vars(double).clear()


def _forget_hooks(double: Optimizer) -> None:
    double._optimizer_step_pre_hooks = OrderedDict()
    double._optimizer_step_post_hooks = OrderedDict()
    # torch warns once if all groups are capturable and the step is not captured; without groups all are.
    double._warned_capturable_if_run_uncaptured = True


_BEHIND = "_amp_behind"  # a ghost's attribute: its optimizer, and the copies made for it


class _CopiesWhenLookedAt:
    """First base of a ghost's class, before the optimizer's: copies an attribute when it is first read."""

    __slots__ = ()

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Bypass the optimizer's own method, which might register the class of ghosts."""

    def __getattr__(self, name: str) -> Any:
        optimizer, copies = vars(self).get(_BEHIND, (None, None))
        if optimizer is not None and name in vars(optimizer):
            value = vars(self)[name] = copies.of(vars(optimizer)[name])
            return value
        if optimizer is not None and name in _slots(optimizer) and hasattr(optimizer, name):
            value = copies.of(getattr(optimizer, name))
            object.__setattr__(self, name, value)
            return value
        inherited = getattr(super(), "__getattr__", None)
        if inherited is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return inherited(name)


@lru_cache
def _ghostly(kind: Any) -> Any:
    """Return the class of ghosts for optimizers of class `kind`."""
    names = {"__slots__": (), "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind)(kind.__name__, (_CopiesWhenLookedAt, kind), names)


def _slots(value: Any) -> tuple[str, ...]:
    kind: Any = type(value)
    return _slots_of(kind)


@lru_cache
def _slots_of(kind: Any) -> tuple[str, ...]:
    names: list[str] = []
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


@lru_cache
def _kept_by_class(kind: Any) -> tuple[str, ...]:
    """Return the names of attributes of the class and its bases that a step could change in place."""
    bases = kind.__mro__[: kind.__mro__.index(Optimizer)] if Optimizer in kind.__mro__ else ()
    kinds = (dict, list, set, deque, Tensor, torch.Generator)
    return tuple(
        name
        for base in bases
        for name, value in base.__dict__.items()
        if isinstance(value, kinds) and not name.startswith("__")
    )


_ATOMS = (type(None), bool, int, float, complex, str, bytes, type)


class _Copies:
    """Copies of the attributes of one optimizer, each made once.

    Args:
        params: id of a parameter -> the parameter that replaces it in ghosts, with its state. Others are left out.
    """

    def __init__(self, params: Mapping[int, nn.Parameter]) -> None:
        self._params = params
        self._made: dict[int, Any] = dict(params)  # by the id of the original
        self._originals: list[Any] = []  # kept alive, so that no other object gets their ids

    def of(self, value: Any) -> Any:
        """Return a copy that shares nothing writable with `value`, or `value` itself if it cannot be copied."""
        if isinstance(value, _ATOMS):
            return value
        if id(value) not in self._made:
            self._remember(value, self._copy(value))
        return self._made[id(value)]

    def clear(self) -> None:
        """Free all copies."""
        self._made.clear()
        self._originals.clear()

    def ghost(self, optimizer: Optimizer) -> Optimizer:
        """Return the ghost of `optimizer`."""
        kind: Any = type(optimizer)
        double: Any = object.__new__(_ghostly(kind))
        self._remember(optimizer, double)
        vars(double)[_BEHIND] = optimizer, self
        for name, value in vars(optimizer).items():
            if name.startswith("_optimizer_") and name.endswith("_hooks"):
                vars(double)[name] = copy.copy(value)
        _forget_hooks(double)
        # An inner optimizer often shares the list of groups with its wrapper.
        groups = optimizer.param_groups
        if id(groups) not in self._made:
            self._remember(groups, [self._group(group) for group in groups])
        vars(double)["param_groups"] = self._made[id(groups)]
        shared: dict[Any, Any] = optimizer.state  # annotated as keyed by tensors only, but some classes add other keys
        if id(shared) not in self._made:
            state: dict[Any, Any] = defaultdict(dict)
            self._remember(shared, state)
            state.update((key, self.of(value)) for key, value in self._with_keys(shared))
        vars(double)["state"] = self._made[id(shared)]
        for name in (*vars(optimizer), *_kept_by_class(kind)):
            if name not in vars(double) and hasattr(kind, name):  # else the read would find the class attribute
                vars(double)[name] = self.of(getattr(optimizer, name))
        return double

    def _remember(self, value: Any, made: Any) -> None:
        self._made[id(value)] = made
        self._originals.append(value)

    def _group(self, group: dict[str, Any]) -> dict[str, Any]:
        if id(group) in self._made:
            return self._made[id(group)]
        params: list[nn.Parameter] = []
        double: dict[str, Any] = {}
        self._remember(group, double)
        self._remember(group["params"], params)
        params += self._stepped(group["params"])
        for key, value in group.items():
            double[key] = value[: len(params)] if key == "param_names" else self.of(value)
        return double

    def _copy(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            clone = value.detach().clone()
            return nn.Parameter(clone, value.requires_grad) if isinstance(value, nn.Parameter) else clone
        if isinstance(value, torch.Generator):
            generator = torch.Generator(value.device)
            generator.set_state(value.get_state())
            return generator
        if isinstance(value, Optimizer):
            return self.ghost(value)
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.BuiltinFunctionType):  # also a method, such as `[].append`
            owner = value.__self__
            own = self.of(owner) if owner is not None and not isinstance(owner, types.ModuleType) else owner
            return value if own is owner else getattr(own, value.__name__)
        if isinstance(value, partial):
            keywords = {name: self.of(item) for name, item in value.keywords.items()}
            return type(value)(self.of(value.func), *map(self.of, value.args), **keywords)
        if isinstance(value, types.MethodType):
            return types.MethodType(self.of(value.__func__), self.of(value.__self__))
        if isinstance(value, weakref.ReferenceType):
            made = self._made.get(id(value()))
            return value if made is None else weakref.ref(made)
        if isinstance(value, tuple):
            items = self._items(value)
            return type(value)._make(items) if hasattr(value, "_make") else tuple(items)
        if isinstance(value, frozenset):
            return frozenset(self._items(value))
        try:
            # NumPy's generators and iterators are no plain objects, and have no attributes to copy one by one.
            is_plain = hasattr(value, "__dict__") or bool(_slots(value))
            is_plain = is_plain and not hasattr(value, "__deepcopy__")
            is_container = isinstance(value, (dict, list, set, deque))
            double = copy.copy(value) if is_plain or is_container else copy.deepcopy(value, self._made)
        except Exception:  # a lock or a process group cannot be copied, and is shared
            return value
        if double is value or not (is_plain or is_container):
            return double
        self._remember(value, double)  # before its contents, which may refer to it
        if isinstance(value, dict):
            double.clear()
            for key, item in self._with_keys(value):
                double[self.of(key) if isinstance(key, tuple) else key] = self.of(item)
        elif isinstance(value, set):
            double.clear()
            double.update(self._items(value))
        elif is_container:
            double.clear()
            double.extend(self._items(value))
        for name, item in list(getattr(value, "__dict__", {}).items()):
            vars(double)[name] = self.of(item)
        for name in _slots(value):
            if hasattr(value, name):
                object.__setattr__(double, name, self.of(getattr(value, name)))
        return double

    def _function(self, value: types.FunctionType) -> types.FunctionType:
        """Return a function with its own copies of variables, defaults and attributes; `value` itself without any."""
        if not (value.__closure__ or value.__defaults__ or value.__kwdefaults__ or vars(value)):
            return value
        cells = tuple(map(self._own_cell, value.__closure__ or ()))
        double = types.FunctionType(value.__code__, value.__globals__, value.__name__, None, cells or None)
        self._remember(value, double)
        for old, new in zip(value.__closure__ or (), cells, strict=True):
            with suppress(ValueError):  # it has no value yet
                new.cell_contents = self.of(old.cell_contents)
        double.__defaults__ = None if value.__defaults__ is None else tuple(map(self.of, value.__defaults__))
        double.__kwdefaults__ = self.of(value.__kwdefaults__)
        for name, item in vars(value).items():
            vars(double)[name] = self.of(item)
        return double

    def _own_cell(self, cell: types.CellType) -> types.CellType:
        """Return a new cell, shared by all functions that share the variable."""
        if id(cell) not in self._made:
            self._remember(cell, types.CellType())
        return self._made[id(cell)]

    def _items(self, values: Iterable[Any]) -> Iterator[Any]:
        """Return copies of `values`; if all of them are parameters, the parameters that the ghost steps instead."""
        listed = list(values)
        if listed and all(isinstance(value, nn.Parameter) for value in listed):
            return iter(self._stepped(listed))
        return map(self.of, listed)

    def _stepped(self, params: list[Any]) -> list[nn.Parameter]:
        """Return the parameters that replace `params` in a shadow."""
        return [self._params[id(p)] for p in params if id(p) in self._params]

    def _with_keys(self, values: dict[Any, Any]) -> Iterator[tuple[Any, Any]]:
        """Yield the entries of a dictionary; a tensor among the keys is replaced, or left out with its value."""
        for key, value in values.items():
            if not isinstance(key, Tensor):
                yield key, value
            elif id(key) in self._params:
                yield self._params[id(key)], value
