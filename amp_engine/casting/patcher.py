"""The only file that assigns to modules that are not ours. Every patch is undone exactly.

At most one engine's casts are patched into torch. Those that are installed form a stack: the newest is in force, and
when it goes the next newest is patched in, or torch is left as it was found.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional
from torch import Tensor
from torch.nn.modules import rnn
from torch.optim.optimizer import register_optimizer_step_post_hook

from amp_engine.casting import wrappers
from amp_engine.casting.lists import FUNCTIONAL, LINALG, TENSOR, TORCH, CastLists
from amp_engine.casting.recurrent import RecurrentFunctions, check_shapes_only


@dataclass(frozen=True)
class Registration:
    """A function that a user wants cast: `module.name`, as "half", "float" or "promote".

    Raises ValueError if there is no such function.
    """

    kind: str
    module: Any
    name: str

    def __post_init__(self) -> None:
        if not hasattr(self.module, self.name):
            raise ValueError(f"No function named {self.name} in module {self.module}.")


class InstallableCasts(wrappers.Casts, Protocol):
    """Casts with what a user added to the lists."""

    registrations: Sequence[Registration]


class Patches:
    """Assignments to attributes of foreign objects, and the way back."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """`owner.name = value`, until `undo`. A name that `owner` inherited is deleted again, not assigned."""
        own = vars(owner)
        if name in own:
            original = own[name]
            self._undo.append(lambda: setattr(owner, name, original))
        else:
            self._undo.append(lambda: delattr(owner, name))
        setattr(owner, name, value)

    def on_undo(self, call: Callable[[], Any]) -> None:
        """Have `undo` call something."""
        self._undo.append(call)

    def undo(self) -> None:
        """Take everything back, last patch first."""
        while self._undo:
            self._undo.pop()()


_lock = threading.RLock()
_stack: list[InstallableCasts] = []
_patches = Patches()


def install(casts: InstallableCasts) -> None:
    """Put `casts` in force."""
    with _lock:
        _patches.undo()
        _stack.append(casts)
        _apply(casts)


def remove(casts: InstallableCasts) -> None:
    """Take `casts` out of force and put the next newest in."""
    with _lock:
        _patches.undo()
        _stack.remove(casts)
        if _stack:
            _apply(_stack[-1])


def in_force(casts: InstallableCasts) -> bool:
    """Whether `casts` is what torch's functions do now."""
    return bool(_stack) and _stack[-1] is casts


def _apply(casts: InstallableCasts) -> None:
    try:
        taken = _patch_registered(casts)
        _patch_lists(torch.nn.functional, FUNCTIONAL, casts, taken, "function")
        _patch_lists(torch, TORCH, casts, taken, "function")
        _patch_lists(torch.linalg, LINALG, casts, taken, "function")
        _patch_lists(torch.Tensor, TENSOR, casts, taken, "method")
        _patch_recurrent(casts)
        _watch_weights(casts)
        _switch_off_fast_path()
    except BaseException:
        _patches.undo()
        raise


def _patch_registered(casts: InstallableCasts) -> set[tuple[int, str]]:
    """Patch what users registered, which wins over the lists."""
    taken = set()
    for registration in casts.registrations:
        key = (id(registration.module), registration.name)
        if key in taken:
            continue
        taken.add(key)
        _wrap(registration.module, registration.name, wrappers.REGISTERED[registration.kind], casts)
    return taken


def _patch_lists(
    namespace: Any, lists: CastLists, casts: InstallableCasts, taken: set[tuple[int, str]], kind: str
) -> None:
    for wrapper, names in _wrappers(lists, kind):
        for name in names:
            # A registration wins over a list, but does not defeat the ban.
            listed = wrapper is wrappers.banned or (id(namespace), name) not in taken
            if listed and hasattr(namespace, name):
                _wrap(namespace, name, wrapper, casts)


def _wrappers(lists: CastLists, kind: str) -> Iterator[tuple[wrappers.Wrapper, tuple[str, ...]]]:
    yield wrappers.half, lists.half
    yield wrappers.float32, lists.float
    yield wrappers.promote, (*lists.promote, *lists.sequence)
    yield wrappers.match_self, lists.match_self
    yield wrappers.refused_in_place(kind), lists.refused_in_place
    yield wrappers.banned, lists.banned


def _wrap(owner: Any, name: str, wrapper: wrappers.Wrapper, casts: InstallableCasts) -> None:
    original = getattr(owner, name)
    static = isinstance(vars(owner).get(name), staticmethod)
    wrapped = wrapper(original, casts)
    _patches.set(owner, name, staticmethod(wrapped) if static else wrapped)


def _patch_recurrent(casts: InstallableCasts) -> None:
    _patches.set(rnn, "_VF", RecurrentFunctions(vars(rnn)["_VF"], casts))
    _patches.set(rnn.RNNBase, "check_input", check_shapes_only(rnn.RNNBase.check_input))


def _watch_weights(casts: InstallableCasts) -> None:
    """Drop casts of weights that may be written without moving their version.

    Most third-party optimizers write through `p.data`.
    """
    hook = register_optimizer_step_post_hook(lambda optimizer, args, kwargs: casts.cache.clear())
    _patches.on_undo(hook.remove)

    descriptor: Any = torch._C.TensorBase.data

    def get_data(tensor: Tensor) -> Tensor:
        casts.cache.discard(tensor)
        return descriptor.__get__(tensor)

    _patches.set(torch.Tensor, "data", property(get_data, descriptor.__set__, descriptor.__delete__))


def _switch_off_fast_path() -> None:
    """The fused transformer encoder of eval mode runs inside C++, past the patches, on FP32 weights and half input."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    _patches.on_undo(lambda: torch.backends.mha.set_fastpath_enabled(before))
