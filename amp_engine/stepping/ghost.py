"""An optimizer with nothing to step, for torch to call `step` on when the work is done, or must not be.

torch lets a step pre-hook replace the arguments of the call, `self` among them. Hiding the gradients instead would
still move what optimizers count in their groups, and leave them hidden if the step raised.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_engine.errors import AmpStateError
from amp_engine.stepping.own_step import unhooked_step


def ghost(optimizer: Optimizer, stand_ins: bool = False) -> Optimizer:
    """An object of the same class whose `step` changes nothing of `optimizer`.

    It has copies of the groups' settings and of the state that belongs to no parameter, no hooks, and no
    parameters; with `stand_ins` one throw-away parameter a group, for classes that raise without any.
    Optimizers that it holds are ghosts too.
    """
    double = object.__new__(type(optimizer))
    double.__dict__.update({name: _aside(value, stand_ins) for name, value in vars(optimizer).items()})
    for base in type(optimizer).__mro__:
        for name in base.__dict__.get("__slots__", ()):
            if hasattr(optimizer, name) and name not in ("__dict__", "__weakref__"):
                object.__setattr__(double, name, _aside(getattr(optimizer, name), stand_ins))
    double.param_groups = [_empty_group(group, stand_ins) for group in optimizer.param_groups]
    double.state = defaultdict(dict)
    shared: dict[Any, Any] = optimizer.state  # annotated as keyed by tensors only, which not every class keeps to
    for key, value in shared.items():
        if not isinstance(key, Tensor):
            double.state[key] = _copied(value)
    # torch warns, once an optimizer, that one with only capturable groups is not captured: all of none are.
    double._warned_capturable_if_run_uncaptured = True
    double._optimizer_step_pre_hooks = OrderedDict()
    double._optimizer_step_post_hooks = OrderedDict()
    return double


def _empty_group(group: dict[str, Any], stand_in: bool) -> dict[str, Any]:
    settings = {key: _copied(value) for key, value in group.items() if key != "params"}
    params: list[nn.Parameter] = []
    if stand_in:
        device = group["params"][0].device if group["params"] else torch.device("cpu")
        params = [nn.Parameter(torch.zeros(1, device=device))]
        params[0].grad = torch.zeros(1, device=device)
    return {**settings, "params": params}


def _aside(value: Any, stand_ins: bool) -> Any:
    """An attribute for the ghost: what a step could change in place is a copy."""
    if isinstance(value, Optimizer):
        return ghost(value, stand_ins)
    if isinstance(value, list) and value and all(isinstance(v, Tensor) for v in value):
        return []  # parameters that the class keeps beside its groups
    if isinstance(value, (dict, list, set)):
        return copy.copy(value)
    if isinstance(value, Tensor) and value.dim() == 0:
        return value.detach().clone()
    return value


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    try:
        return copy.deepcopy(value)
    except Exception:  # a lock, a process group: whatever has no copy is shared
        return value


# Hiding the gradients, the obvious way to skip a step, moves what optimizers count in their groups all the same, and
# leaves them hidden when the step raises.
class Ghosts:
    """Those of one optimizer. Which kind its class can step is found out once."""

    def __init__(self) -> None:
        self._have_stand_ins: bool | None = None
        self._empty: Optimizer | None = None

    def of(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], steps_its_groups: bool
    ) -> Optimizer:
        """A ghost for `step(*args[1:], **kwargs)`.

        Args:
            optimizer: what `step` was called on.
            args: with it in the first place.
            kwargs: of the same call.
            steps_its_groups: whether the class is known to do nothing but step its groups.

        Raises AmpStateError for a class that can step nothing of either kind.
        """
        if steps_its_groups:
            if self._empty is None:
                self._empty = ghost(optimizer)
                self._empty.param_groups = []
            return self._empty
        if self._have_stand_ins is not None:
            return ghost(optimizer, self._have_stand_ins)
        failures = []
        for stand_ins in (False, True):
            try:
                unhooked_step(optimizer)(ghost(optimizer, stand_ins), *args[1:], **kwargs)
            except Exception as e:  # whatever a class raises when it finds nothing to step
                failures.append(e)
            else:
                self._have_stand_ins = stand_ins
                return ghost(optimizer, stand_ins)
        raise AmpStateError(
            f"{type(optimizer).__name__} cannot be stepped under amp: its step() fails when there is nothing to step "
            f"({failures[-1]!r}), so no step of it can be skipped.  Use opt_level='O0' or 'O3' without loss scaling."
        ) from failures[-1]
