"""Patches torch for the newest casts.

At most one engine's casts are patched into torch. The installed casts form a stack: the newest are in force. When they
are removed, the next newest are patched in; without any, torch is as it was found.
"""

from __future__ import annotations

import inspect
import os
import pkgutil
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import (
    BuiltinFunctionType,
    FunctionType,
    MethodDescriptorType,
    ModuleType,
    SimpleNamespace,
    WrapperDescriptorType,
)
from typing import Any

import torch
import torch.fx
import torch.nn.functional
from torch.nn.modules import rnn
from torch.optim.optimizer import register_optimizer_step_post_hook

from amp_engine.casting import locks, wrappers
from amp_engine.casting.attention import cast_attention
from amp_engine.casting.calls import Casts
from amp_engine.casting.compiled import (
    compile_as_autocast,
    discard_compiled,
    dynamo_at_rest,
    dynamo_if_free,
    know_originals,
)
from amp_engine.casting.in_force import STACK, current, in_force, set_watching, watching
from amp_engine.casting.lists import FLOAT_BY_DTYPE, NAMESPACES, CastLists
from amp_engine.casting.patches import Patches
from amp_engine.casting.recurrent import RecurrentFunctions, check_shapes_only
from amp_engine.casting.regions import cast_everywhere
from amp_engine.casting.replacements import PatchedMethod, patched_function, patched_method
from amp_engine.kernels.choice import CASTS

_LISTED = tuple((pkgutil.resolve_name(name), lists) for name, lists in NAMESPACES)
_WRITTEN_IN_C = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)
_discarded: deque[Casts] = deque()
_patches = Patches()


@contextmanager
def changing() -> Iterator[None]:
    """Hold `locks.install` inside; afterwards remove casts that finalizers in other threads discarded meanwhile."""
    try:
        with locks.install.lock:
            _applying.finish()
            yield
    finally:
        remove_discarded()


def install(casts: Casts) -> None:
    """Put `casts` in force. If that fails, the earlier casts stay in force."""
    with changing():
        STACK.append(casts)
        try:
            _applying.apply_newest()
        except BaseException:
            _take_out(casts)
            raise


def remove(casts: Casts) -> None:
    """Take `casts` out of force and put the next newest in force. Does nothing if they are not installed."""
    with changing():
        _take_out(casts)


def discard(casts: Casts) -> None:
    """Remove `casts`, for finalizers, which may run at any allocation: waits for no other thread.

    If another thread holds a lock that the removal needs, that thread removes the casts. While Dynamo compiles, they
    stay until the next garbage collection, optimizer step or call that concerns casts, as their removal discards
    Dynamo's caches.
    """
    _discarded.append(casts)
    remove_discarded()


def remove_discarded() -> None:
    """Remove casts that finalizers could not remove under a lock, and casts that only observe but have no observers.

    Call it after a lock is released.
    """
    while (_discarded or _is_unobserved()) and not locks.is_shared_held_here():
        with locks.held_if_free(locks.install.lock) as is_held, dynamo_if_free() as is_free:
            if not (is_held and is_free):
                return
            if _discarded:
                _take_out(_discarded.popleft())
            elif _is_unobserved():
                set_watching(None)
                if not STACK:
                    _applying.apply_newest()


def _is_unobserved() -> bool:
    casts = watching()
    return casts is not None and not casts.is_observed


def discard_switches() -> None:
    """Remove casts, of any engine, whose modules were all freed before anything was cast."""
    for casts in list(STACK):
        if casts.modules == []:
            casts.discard()


def watch(casts: Casts) -> None:
    """Pass calls to `casts`, which only observe, while no casts are installed and `casts` have observers.

    Does nothing if other casts already observe. Call it under `changing`.
    """
    if watching() is None:
        with dynamo_at_rest():
            set_watching(casts)
            if not STACK:
                _applying.apply_newest()


def newest() -> Casts | None:
    """Return the casts in force, switched on or off, after removing discarded ones; None if there are none."""
    remove_discarded()
    return STACK[-1] if STACK else None


def tell_native() -> None:
    """Have the compiled wrappers do the casts that `current` returns."""
    if CASTS is None:
        return
    with locks.shared:
        casts = STACK[-1] if STACK else watching()
        cache = None if casts is None or casts.is_disabled_everywhere else casts.cache.native
        if casts is None or cache is None:
            CASTS.put_out_of_force()
        else:
            through_python = casts.only_observe or casts.is_observed or not casts.were_used
            CASTS.put_in_force(casts.dtype, cache, casts.enable_caching, through_python, casts.everywhere)
    remove_discarded()


def _take_out(casts: Casts) -> None:
    if casts in STACK:
        if in_force(casts):
            _applying.is_outdated = True  # before an interrupt can come
        STACK.remove(casts)
        _applying.finish()
        casts.cache.clear()


class _Applying:
    """Patches torch for the newest casts, and again if a garbage collection ends an engine meanwhile."""

    def __init__(self) -> None:
        self.is_outdated = False  # True if torch is patched for other casts than the newest
        self._is_within = False
        self._has_cast = False  # True while compiled code may have casts in it
        os.register_at_fork(after_in_child=self._repair)

    def apply_newest(self) -> None:
        """Patch torch for the newest casts, under `locks.install`. A nested call leaves that to the outer call."""
        self.is_outdated = True
        while self.is_outdated and not self._is_within:
            self.is_outdated, self._is_within = False, True
            try:
                _apply_newest(discards=self._has_cast or bool(STACK))
                self._has_cast = bool(STACK)
            except BaseException:
                self.is_outdated = True
                raise
            finally:
                self._is_within = False

    def finish(self) -> None:
        """Do, under `locks.install`, the patching that an exception, such as a KeyboardInterrupt, cut short."""
        if self.is_outdated:
            self.apply_newest()

    def _repair(self) -> None:
        """Patch torch again in a forked child, if another thread of the parent was patching it at the fork.

        The child lacks that thread, so it discards casts that the thread was installing. Does not wait for Dynamo.
        """
        if not locks.install.was_held_by_another_thread:
            return
        self.is_outdated = self._is_within = False
        STACK[:] = [casts for casts in STACK if casts.is_wanted]
        _patches.undo()
        cast_everywhere(not STACK or STACK[-1].everywhere)
        with dynamo_if_free() as is_free:
            if is_free and "torch._dynamo.trace_rules" in sys.modules:
                discard_compiled()
                know_originals()
        _patch()


_applying = _Applying()


def _apply_newest(discards: bool) -> None:
    _patches.undo()
    cast_everywhere(not STACK or STACK[-1].everywhere)
    if discards:
        discard_compiled()
    know_originals()
    _patch()


def _patch() -> None:
    tell_native()
    casts = STACK[-1] if STACK else watching()
    if casts is None:
        return
    casts.cache.clear()  # weights may have been written while other casts were in force
    taken = _patch_registered(casts) | _patch_removed(casts)
    for namespace, lists in _LISTED:
        _patch_lists(namespace, lists, taken, casts.cache.native is not None)
    _patches.set(rnn, "_VF", RecurrentFunctions(vars(rnn)["_VF"], current))
    if casts.only_observe:
        return
    _patches.set(rnn.RNNBase, "check_input", check_shapes_only(rnn.RNNBase.check_input, current))
    compile_as_autocast(_patches)
    cast_attention(_patches, current)
    _clear_after_steps(casts)
    _leave_saved_tensors()
    _switch_off_fast_path()


def _patch_registered(casts: Casts) -> set[tuple[int, str]]:
    """Patch the functions that users registered, which win over the lists; returns their owners' ids and names."""
    listed = {(id(space), name) for space, lists in _LISTED for names in vars(lists).values() for name in names}
    taken = set()
    for registration in casts.registrations:
        key = (id(registration.module), registration.name)
        if key not in taken:
            taken.add(key)
            is_listed = key in listed
            wrapper = wrappers.REGISTERED[registration.kind]
            wrapper = wrappers.throughout(wrapper) if is_listed else wrapper
            is_native = casts.cache.native is not None and not is_listed
            _wrap(registration.module, registration.name, wrapper, is_native)
    return taken


def _patch_removed(casts: Casts) -> set[tuple[int, str]]:
    """Have functions that a user took off the lists run without casts; returns their owners' ids and names."""
    for owner, name in casts.removals:
        if not isinstance(getattr(owner, name), _WRITTEN_IN_C):  # C code calls no patched function
            _wrap(owner, name, wrappers.uncast, False)
    return {(id(owner), name) for owner, name in casts.removals}


def _patch_lists(namespace: Any, lists: CastLists, taken: set[tuple[int, str]], is_native: bool) -> None:
    refused = wrappers.refused_method if isinstance(namespace, type) else wrappers.refused_function
    for wrapper, names in (
        (wrappers.half, lists.half),
        (wrappers.float32, [name for name in lists.float if name not in FLOAT_BY_DTYPE]),
        (wrappers.float32_by_dtype, [name for name in lists.float if name in FLOAT_BY_DTYPE]),
        (wrappers.promote, (*lists.promote, *lists.sequence)),
        (wrappers.match_self, lists.match_self),
        (refused, lists.refused_in_place),
        (wrappers.banned, lists.banned),
    ):
        for name in names:
            # A registration wins over a list, but does not defeat the ban.
            listed = wrapper is wrappers.banned or (id(namespace), name) not in taken
            if listed and hasattr(namespace, name):
                _wrap(namespace, name, wrapper, is_native)


def _wrap(owner: Any, name: str, wrapper: wrappers.Wrapper, is_native: bool) -> None:
    original = getattr(owner, name)
    if isinstance(owner, ModuleType) and isinstance(original, (BuiltinFunctionType, FunctionType)):
        _patches.set(owner, name, patched_function(original, wrapper, owner.__name__, name, is_native))
        return
    if owner is torch.Tensor and is_native:
        _patches.set(owner, name, patched_method(original, wrapper, name))
        return
    # The attribute without binding: a class method must still get its class, and a static method no object.
    as_it_stands = inspect.getattr_static(owner, name, original)
    is_method = isinstance(as_it_stands, (staticmethod, classmethod))
    space = owner if isinstance(owner, (ModuleType, type)) else type(owner)
    known_as = space.__name__ if isinstance(space, ModuleType) else f"{space.__module__}.{space.__qualname__}"
    patched = wrappers.wrap(wrapper, as_it_stands if is_method else original, current, f"{known_as}.{name}")
    if owner is torch.Tensor:
        patched.__module__, patched.__qualname__ = "torch", f"Tensor.{name}"  # for pickle
    if getattr(original, "__self__", None) is owner and space is not owner:
        patched = PatchedMethod(original, patched, owner, name)
    _patches.set(owner, name, patched)


def _clear_after_steps(casts: Casts) -> None:
    """Discard casts of weights after each step of any optimizer, which may write them without moving versions."""

    def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        casts.cache.clear()
        remove_discarded()

    _patches.on_undo(register_optimizer_step_post_hook(after_step).remove)


def _leave_saved_tensors() -> None:
    """Run hooks of saved tensors without casts: they must return the types that the graph saved.

    save_on_cpu calls `Tensor.cpu`, which is on a list. torch.utils.checkpoint recomputes in such a hook, but restores
    the autocast state of its forward, and the casts with it.
    """
    hooks: Any = torch.autograd.graph.saved_tensors_hooks
    enter = hooks.__enter__

    def enter_uncast(self: Any) -> None:
        uncast = [
            hook if isinstance(hook, torch.fx.GraphModule) else wrappers.uncast(hook, current)  # it is compiled
            for hook in (self.pack_hook, self.unpack_hook)
        ]
        enter(SimpleNamespace(pack_hook=uncast[0], unpack_hook=uncast[1]))

    _patches.set(hooks, "__enter__", enter_uncast)


def _switch_off_fast_path() -> None:
    """Disable eval mode's fused transformer encoder: its C++ bypasses the patches, and would mix FP32 and half."""
    before = torch.backends.mha.get_fastpath_enabled()
    _patches.on_undo(lambda: torch.backends.mha.set_fastpath_enabled(before))
    torch.backends.mha.set_fastpath_enabled(False)
