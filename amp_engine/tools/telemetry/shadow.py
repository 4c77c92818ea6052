"""A shadow: an optimizer with other parameters, whose `step` changes nothing that its optimizer keeps."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer


def shadow(optimizer: Optimizer, params: Mapping[int, nn.Parameter]) -> Optimizer:
    """Return a shadow with other parameters and copies of all else but what cannot be copied, such as a lock.

    Args:
        optimizer: stays as it is.
        params: id of each parameter in its groups -> the parameter in the shadow's groups.

    Raises what `copy.deepcopy` raises if its groups or its state cannot be copied.
    """
    return _copied(optimizer, dict(params))


def _copied(optimizer: Optimizer, made: dict[int, Any]) -> Optimizer:
    """Copy an optimizer without its hooks; `made` has the copies that are there already, by id of the original."""
    double: Any = object.__new__(type(optimizer))
    made[id(optimizer)] = double
    for name, value in vars(optimizer).items():
        if isinstance(value, Optimizer) and id(value) not in made:
            _copied(value, made)  # `deepcopy` takes groups and state of an optimizer alone
        if name == "step" or name.startswith("_amp_"):  # a scheduler's wrapper of the original's `step`; the engine's
            continue
        if name.startswith("_optimizer_") and name.endswith("_hooks"):
            vars(double)[name] = OrderedDict()
            continue
        try:
            vars(double)[name] = copy.deepcopy(value, made)
        except Exception:
            if name in ("param_groups", "state"):
                raise
            vars(double)[name] = value  # a lock or a process group, say
    # torch warns once if all groups are capturable and the step is not captured.
    double._warned_capturable_if_run_uncaptured = True
    return double
