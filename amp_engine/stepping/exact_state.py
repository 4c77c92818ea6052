"""Optimizer state of half parameters in FP32, past torch's `load_state_dict`, which rounds it to their type.

An optimizer that is made after `initialize` has no hook of ours yet when its state is loaded. So each saved group has
an empty dictionary more, with the exact state in an attribute, as `model.state_dict()` has `_metadata`: the same
tensors, which torch.save writes once. torch's load copies groups with it, and who walks through them meets no tensor.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_engine.ground.dtypes import is_low_precision
from amp_engine.stepping.beside import Beside
from amp_engine.stepping.exact import exact_of

_KEY = "amp_engine"  # of a group
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_ATTRIBUTE = "_exact"  # of the dictionary: for each parameter of the group {name: exact state}


def floating(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the entries of one parameter's state that torch casts to the parameter's type at a load.

    These are floating tensors, and containers that have some.
    """
    for name, value in state.items():
        if name != "step" and next(tensors_in(value), None) is not None:
            yield name, value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the floating tensors in an entry, however deep."""
    if isinstance(value, Tensor):
        yield from [value] if value.is_floating_point() else []
    elif isinstance(value, _CONTAINERS):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(part)


def has_float32(state: Mapping[str, Any], param: Tensor) -> bool:
    """True if the state of a parameter is in FP32, scalars apart: half beside it is what the class keeps in half."""
    least = min(param.numel(), 2)
    return any(tensor.dtype is torch.float32 and tensor.numel() >= least for tensor in tensors_in(state))


def mapped(value: Any, to: Callable[[Tensor], Tensor]) -> Any:
    """Return an entry with what `to` returns for each of its tensors, in new containers like torch's load."""
    if isinstance(value, Tensor):
        return to(value)
    if isinstance(value, dict):
        return {key: mapped(part, to) for key, part in value.items()}
    if isinstance(value, _CONTAINERS) and next(tensors_in(value), None) is not None:
        return type(value)(mapped(part, to) for part in value)
    return value


def add_to(state_dict: dict[str, Any], optimizer: Optimizer) -> None:
    """Add the exact state of half parameters to a new result of `optimizer.state_dict()`."""
    groups: list[dict[str, Any]] = state_dict["param_groups"]
    for place, own in enumerate(optimizer.param_groups):
        exact = []
        for p in own["params"]:
            entries = dict(floating(optimizer.state.get(p, {}))) if is_low_precision(p) else {}
            exact.append(entries if has_float32(entries, p) else {})
        if any(exact):
            carrier: OrderedDict[str, Any] = OrderedDict()  # has attributes, and torch.load(weights_only=True) takes it
            vars(carrier)[_ATTRIBUTE] = exact
            groups[place][_KEY] = carrier


def leave_out(state_dict: dict[str, Any]) -> None:
    """Remove exact state from a state dictionary, without a change to its groups, which are the caller's."""
    groups = state_dict["param_groups"]
    state_dict["param_groups"] = [{key: value for key, value in one.items() if key != _KEY} for one in groups]


def take(optimizer: Optimizer) -> int:
    """Put exact state from the groups in the place of its rounded values; what was written since stays as it is.

    Returns how many entries are exact now. Waits for the device where there are any.
    """
    taken = 0
    for group in optimizer.param_groups:
        exact = getattr(group.pop(_KEY, None), _ATTRIBUTE, ())
        for p, saved in zip(group["params"], exact, strict=False):  # parameters may have joined the group
            state = optimizer.state.get(p, {})
            home = next((one.stepped.device for one in exact_of(p) if isinstance(one, Beside)), p.device)
            for name, value in saved.items() if is_low_precision(p) else ():
                if _is_rounded(list(tensors_in(value)), list(tensors_in(state.get(name))), p):
                    state[name] = mapped(value, lambda tensor, home=home: tensor.to(home))  # type: ignore[misc]
                    taken += 1
    return taken


def _is_rounded(exact: Sequence[Tensor], now: Sequence[Tensor], param: Tensor) -> bool:
    """True if `now` is `exact` rounded to the type of a parameter. Waits for the device."""
    rounded = [tensor.to(param.device, param.dtype) for tensor in exact]
    return len(rounded) == len(now) and all(
        torch.equal(one, other.to(one)) for one, other in zip(rounded, now, strict=True)
    )
