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
    """Optimizers that `optimizer` keeps in its attributes, in lists and dictionaries too (Lookahead, SAM and kin)."""
    found: dict[str, Optimizer] = {}
    for name, value in vars(optimizer).items():
        if isinstance(value, Optimizer):
            found[name] = value
        elif isinstance(value, (list, tuple)) and name != "param_groups":
            found |= {f"{name}[{i}]": item for i, item in enumerate(value) if isinstance(item, Optimizer)}
        elif isinstance(value, dict) and name != "state":
            found |= {f"{name}[{key!r}]": item for key, item in value.items() if isinstance(item, Optimizer)}
    return found


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


def has_groups_of(optimizer: Optimizer, inner: Optimizer) -> bool:
    """True if each group of `inner` has the very list of parameters of some group of `optimizer`."""
    lists = {id(group["params"]) for group in optimizer.param_groups}
    return all(id(group["params"]) in lists for group in inner.param_groups)


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
