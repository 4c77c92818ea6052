"""Optimizer state of half parameters in FP32, past torch's `load_state_dict`, which rounds it to their type.

An optimizer that is made after `initialize` has no hook of ours yet when its state is loaded. So each saved group has
an empty dictionary more, with the exact state in an attribute, as `model.state_dict()` has `_metadata`: the same
tensors, which torch.save writes once. torch's load copies groups with it, and who walks through them meets no tensor.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_engine.ground.dtypes import is_low_precision
from amp_engine.stepping.beside import Beside
from amp_engine.stepping.exact import exact_of

_KEY = "amp_engine"  # of a group
_ATTRIBUTE = "_exact"  # of the dictionary: for each parameter of the group {name: exact state}


def floating(state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the entries of one parameter's state that torch casts to the parameter's type at a load."""
    for name, value in state.items():
        if isinstance(value, Tensor) and value.is_floating_point() and name != "step":
            yield name, value


def add_to(state_dict: dict[str, Any], optimizer: Optimizer) -> None:
    """Add the exact state of half parameters to a new result of `optimizer.state_dict()`."""
    groups: list[dict[str, Any]] = state_dict["param_groups"]
    for place, own in enumerate(optimizer.param_groups):
        exact = [
            {name: value for name, value in floating(optimizer.state.get(p, {})) if not is_low_precision(value)}
            if is_low_precision(p)
            else {}
            for p in own["params"]
        ]
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

    Returns how many tensors are exact now. Waits for the device where there are any.
    """
    taken = 0
    for group in optimizer.param_groups:
        exact = getattr(group.pop(_KEY, None), _ATTRIBUTE, ())
        for p, saved in zip(group["params"], exact, strict=False):  # parameters may have joined the group
            state = optimizer.state.get(p, {})
            home = next((one.stepped.device for one in exact_of(p) if isinstance(one, Beside)), p.device)
            for name, value in saved.items() if is_low_precision(p) else ():
                rounded = value.to(p.device, p.dtype)
                now = state.get(name)
                if isinstance(now, Tensor) and torch.equal(rounded, now.to(rounded)):
                    state[name] = value.to(home)
                    taken += 1
    return taken
