"""Kept modules at O1: nothing is cast inside of their forward, and their inputs are FP32.

The hooks are functions of this file, so that modules with them can be pickled, copied and compiled.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from amp_engine.casting import in_force
from amp_engine.casting.compiled import discard_compiled
from amp_engine.casting.forward_casts import is_cast_at_forward, stack
from amp_engine.casting.regions import cast_region, float_region, is_outside
from amp_engine.errors import AmpTypeError
from amp_engine.ground.containers import cast_tensors
from amp_engine.ground.dtypes import LOW_PRECISION
from amp_engine.ground.dynamo import part_of_a_graph

M = TypeVar("M", bound=nn.Module)


class _Inside(threading.local):
    """The modules whose forward this thread runs in a region of ours, each with its region and the frame of its call.

    The module is needed because torch calls `leave_float` without `enter_float` if a user's hook raised before it. The
    frame is needed because torch calls no hook after a KeyboardInterrupt: a forward that still runs is on the stack.
    """

    def __init__(self) -> None:
        self.regions: list[tuple[nn.Module, Iterator[None], FrameType | None]] = []


_inside = _Inside()


def keep_float(module: M, keep: bool = True) -> M:
    """Keep `module` in FP32, like `Engine.keep_float`, or stop keeping it. Raises AmpTypeError if it is no module."""
    if not isinstance(module, nn.Module):
        raise AmpTypeError(
            f"keep_float() takes a torch.nn.Module, not a {type(module).__name__}.  Call amp.keep_float(model.head); "
            "for a function call amp.register_float_function(module, 'name')."
        )
    if keep != is_kept(module):
        if keep:
            module.register_forward_pre_hook(enter_float, with_kwargs=True)
            module.register_forward_hook(leave_float, prepend=True, always_call=True)
        else:
            remove_hooks(module, lambda hook: hook is enter_float or hook is leave_float)
        discard_compiled()
    return module


def cast_functions_in(model: nn.Module) -> list[RemovableHandle]:
    """Have functions cast inside of calls of `model`, unless its forward does so. Returns the hooks that it added."""
    if is_cast_at_forward(model):
        return []
    leave = model.register_forward_hook(leave_float, prepend=True, always_call=True)
    return [model.register_forward_pre_hook(enter_casts), leave]


def is_kept(module: nn.Module) -> bool:
    """True if `module` itself was passed to `keep_float`."""
    return any(hook is enter_float for hook in module._forward_pre_hooks.values())


def kept_modules(model: nn.Module) -> Iterator[tuple[nn.Module, bool]]:
    """Yield each kept module of `model`, and True if it is inside of no other kept module."""
    within: set[nn.Module] = set()
    for module in model.modules():  # parents first
        if is_kept(module):
            yield module, module not in within
            within.update(module.modules())


def discard_interrupted(compiled: bool = True) -> None:
    """Leave the regions of modules whose forward an interrupt has ended in this thread.

    compiled: also leave modules that compiled code entered, whose frames are not known; none of these may be running.
    """
    regions = _inside.regions
    running = set(map(id, stack())) if regions else set()
    while regions and (compiled if (caller := regions[-1][2]) is None else id(caller) not in running):
        next(regions.pop()[1], None)


def enter_float(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Switch casts off and cast inputs to float32, as a forward pre-hook."""
    if not in_force.is_installed():
        return None
    args, kwargs = (cast_tensors(value, torch.float32, LOW_PRECISION) for value in (args, kwargs))
    _enter(module, _region(float_region))
    return args, kwargs


def enter_casts(module: nn.Module, args: Any) -> None:
    """Switch casts on, as a forward pre-hook of a model whose forward does not cast functions by itself."""
    if is_outside():
        _enter(module, _region(cast_region))


def leave_float(module: nn.Module, args: Any, output: Any) -> None:
    """Restore the casts as they were, as a forward hook that is also called after an error."""
    if _inside.regions and _inside.regions[-1][0] is module:
        next(_inside.regions.pop()[1], None)


def _enter(module: nn.Module, region: Iterator[None]) -> None:
    caller = None
    if not torch.compiler.is_compiling():
        discard_interrupted(compiled=False)
        caller = sys._getframe(2)
    next(region)
    _inside.regions.append((module, region, caller))


def _region(kind: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    # A generator, as Dynamo cannot trace a call of __enter__, but can trace a `with` that exits in another function.
    with kind():
        yield


part_of_a_graph(enter_float)
part_of_a_graph(enter_casts)
part_of_a_graph(leave_float)


# The attributes of a module that hold its hooks, and for each the attributes in which torch notes options of hooks.
_HOOKS: dict[str, list[str]] = {
    "_forward_pre_hooks": ["_forward_pre_hooks_with_kwargs"],
    "_forward_hooks": ["_forward_hooks_with_kwargs", "_forward_hooks_always_called"],
    "_state_dict_pre_hooks": [],
    "_state_dict_hooks": [],
    "_load_state_dict_pre_hooks": [],
    "_load_state_dict_post_hooks": [],
}


def remove_hooks(module: nn.Module, is_ours: Callable[[Any], bool]) -> list[Any]:
    """Remove the hooks for which `is_ours` returns True from `module` itself, and return them."""
    removed = []
    for name, extras in _HOOKS.items():
        hooks = getattr(module, name)
        for key, hook in list(hooks.items()):
            hook = getattr(hook, "hook", hook)  # torch wraps some
            if is_ours(hook):
                removed.append(hook)
                for noted in (hooks, *(getattr(module, extra) for extra in extras)):
                    noted.pop(key, None)
    return removed
