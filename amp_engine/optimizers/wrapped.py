"""Optimizers around an optimizer: LARC, and subclasses of torch.optim.Optimizer that have no hooks of their own."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Iterable
from types import FrameType
from typing import Any

from torch.optim import Optimizer

from amp_engine.errors import AmpStateError
from amp_engine.ground.reachable import held, reachable
from amp_engine.optimizers.larc import LARC

# Attributes in which torch.optim.Optimizer keeps the hooks that amp_engine uses. A class that never calls
# Optimizer.__init__ lacks some of them, and its `step` is not `hooked`: torch calls no hook.
_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
)


def inner_optimizers(optimizer: Optimizer) -> dict[str, Optimizer]:
    """Return optimizers in attributes of `optimizer`, and in lists and dictionaries there (as in Lookahead, SAM)."""
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
    """True if torch calls the hooks that are registered with `optimizer`."""
    for hooks in _HOOKS:  # no generator, as this runs at each `scale_loss`
        if not hasattr(optimizer, hooks):
            return False
    return hasattr(type(optimizer).step, "hooked")


def inner_of(optimizer: Any) -> Any:
    """Return the optimizer that steps: inside of LARC or of a wrapper without hooks (timm's Lookahead), or `optimizer`.

    A wrapper without hooks must hold exactly one optimizer that has them, and share its groups' lists of parameters.
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
    """True if the groups of both share their lists of parameters, so that a master in one list is in the other."""
    groups = getattr(optimizer, "param_groups", [])
    return [id(group["params"]) for group in groups] == [id(group["params"]) for group in inner.param_groups]


def only_hands_on(wrapper: Any, inner: Optimizer) -> bool:
    """True if `wrapper` has no groups and no state but those of `inner`, as Accelerate's and Lightning's."""
    own = getattr(wrapper, "param_groups", None), getattr(wrapper, "state", None)
    return own[0] is inner.param_groups and own[1] is inner.state


def refuse_around_masters(wrapper: Any, inner: Optimizer) -> None:
    """Raise AmpStateError for a wrapper that reads and writes the weights in the groups, which are half parameters."""
    if not isinstance(wrapper, LARC) and not only_hands_on(wrapper, inner):
        raise AmpStateError(
            f"A {type(wrapper).__name__} is around an optimizer with FP32 masters, which lie beside the groups: it "
            "would go on from half parameters.  Choose opt_level='O4' (or 'O1'), where the parameters are FP32, or do "
            "what it does inside of `with amp.on_masters(optimizer):`."
        )


def refuse_calling(inner: Optimizer) -> None:
    """In a step: raise AmpStateError if a wrapper calls it, without hooks and with its groups, that keeps a state."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "step" and code.co_argcount:  # `f_locals` of a longer call would keep its tensors alive
            caller = frame.f_locals.get(code.co_varnames[0])
            if (
                isinstance(caller, Optimizer)
                and not takes_hooks(caller)
                and shares_groups(caller, inner)
                and any(one is inner for one in inner_optimizers(caller).values())
            ):
                refuse_around_masters(caller, inner)
        frame = frame.f_back


def parameters_elsewhere(wrapper: Optimizer, inner: Optimizer) -> str | None:
    """Return an attribute in which `wrapper` keeps parameters of `inner` that no master replaces; None if none.

    Ignores groups, state, optimizers and objects that `wrapper` shares with `inner`, and, if `wrapper` is `inner`,
    attributes that only `__init__` names.
    """
    own = {id(value) for value in (vars(inner) if wrapper is not inner else {}).values()}
    own |= {id(one) for both in (wrapper, inner) for one in (both.param_groups, both.state)}
    own |= {id(group["params"]) for both in (wrapper, inner) for group in both.param_groups}

    def parts(one: object) -> Iterable[object]:
        return () if id(one) in own or isinstance(one, Optimizer) else held(one)

    named = _names_used(type(wrapper)) if wrapper is inner else vars(wrapper).keys()
    params = {id(p) for group in inner.param_groups for p in group["params"]}
    for name, value in vars(wrapper).items():
        if name in named and id(value) not in own and any(id(one) in params for one in reachable([value], parts)):
            return name
    return None


def _names_used(kind: type) -> set[str]:
    """Return the names that a class's methods use, without `__init__` and methods of torch."""
    bases = [base for base in kind.__mro__ if base.__module__.partition(".")[0] not in ("torch", "builtins", "typing")]
    methods = (value for base in bases for name, value in vars(base).items() if name != "__init__")
    functions = (value.fget if isinstance(value, property) else value for value in methods)
    codes = [inspect.unwrap(one).__code__ for one in functions if isinstance(one, types.FunctionType)]
    for code in codes:  # grows in the loop
        codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return {name for code in codes for name in code.co_names}
