"""Optimizers around an optimizer: LARC, and subclasses of torch.optim.Optimizer that have no hooks of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.optim import Optimizer

from amp_engine.optimizers.larc import LARC

# Where torch.optim.Optimizer keeps the hooks that are used here. A class that never calls its __init__ lacks some, and
# its `step` is not `hooked`: torch calls none of them.
_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
)


def inner_optimizers(optimizer: Optimizer) -> dict[str, Optimizer]:
    """Attributes of `optimizer` that are optimizers themselves (Lookahead, SAM and kin)."""
    return {name: v for name, v in vars(optimizer).items() if isinstance(v, Optimizer)}


def takes_hooks(optimizer: Optimizer) -> bool:
    """Whether torch calls what is registered with `optimizer`."""
    for hooks in _HOOKS:  # no generator: asked at each `scale_loss`
        if not hasattr(optimizer, hooks):
            return False
    return hasattr(type(optimizer).step, "hooked")


def inner_of(optimizer: Any) -> Any:
    """What steps: the optimizer inside of LARC, or of one without hooks, as timm's Lookahead; else `optimizer` itself.

    Without hooks it must hold exactly one optimizer that has them, and share the lists of parameters in its groups.
    """
    if isinstance(optimizer, LARC):
        return optimizer.optim
    if not isinstance(optimizer, Optimizer) or takes_hooks(optimizer):
        return optimizer
    found = list({id(inner): inner for inner in inner_optimizers(optimizer).values()}.values())
    if len(found) == 1 and takes_hooks(found[0]) and shares_groups(optimizer, found[0]):
        return found[0]
    return optimizer


def shares_groups(optimizer: Optimizer, inner: Optimizer) -> bool:
    """Whether the groups of both have the very same lists of parameters, so that a master in one is in the other."""
    groups = getattr(optimizer, "param_groups", [])
    return [id(group["params"]) for group in groups] == [id(group["params"]) for group in inner.param_groups]


def parameters_elsewhere(wrapper: Optimizer, inner: Optimizer) -> str | None:
    """The attribute in which `wrapper` keeps parameters beside its groups and its state, where no master replaces them.

    What it has in common with `inner` is no such place.
    """
    params = {id(p) for group in inner.param_groups for p in group["params"]}
    shared = {id(value) for value in vars(inner).values()}
    for name, value in vars(wrapper).items():
        known = name in ("param_groups", "state") or id(value) in shared or isinstance(value, Optimizer)
        if not known and any(id(leaf) in params for leaf in _leaves(value)):
            return name
    return None


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _leaves(item)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value
