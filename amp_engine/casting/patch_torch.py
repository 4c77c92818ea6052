"""Patches torch for the casts in force; without any, torch is as it was found."""

from __future__ import annotations

import inspect
import pkgutil
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
    know_originals,
)
from amp_engine.casting.in_force import current, in_force, is_installed, put_in_force
from amp_engine.casting.lists import FLOAT_BY_DTYPE, NAMESPACES, CastLists
from amp_engine.casting.patches import Patches
from amp_engine.casting.recurrent import RecurrentFunctions, check_shapes_only
from amp_engine.casting.regions import cast_everywhere
from amp_engine.casting.replacements import PatchedMethod, patched_function, patched_method
from amp_engine.kernels.choice import CASTS

_LISTED = tuple((pkgutil.resolve_name(name), lists) for name, lists in NAMESPACES)
_WRITTEN_IN_C = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)
_patches = Patches()


def install(casts: Casts | None) -> None:
    """Put `casts` in force in the place of those before; None restores torch. If that fails, nothing has changed."""
    with locks.install:
        before = in_force()
        try:
            _apply(casts)
        except BaseException:
            _apply(before)
            raise
        if before is not None and before is not casts:
            before.cache.clear()


def tell_native() -> None:
    """Have the compiled wrappers do the casts that `current` returns."""
    if CASTS is None:
        return
    with locks.shared:
        casts = in_force()
        cache = None if casts is None or casts.is_disabled_everywhere else casts.cache.native
        if casts is None or cache is None:
            CASTS.put_out_of_force()
        else:
            through_python = casts.only_observe or casts.is_observed or not casts.were_used
            CASTS.put_in_force(casts.dtype, cache, casts.enable_caching, through_python, casts.everywhere)


def _apply(casts: Casts | None) -> None:
    was_cast = is_installed()
    with dynamo_at_rest():
        _patches.undo()
        put_in_force(casts)
        cast_everywhere(casts is None or casts.everywhere)
        if was_cast or is_installed():
            discard_compiled()
        know_originals()
        tell_native()
        if casts is not None:
            _patch(casts)


def _patch(casts: Casts) -> None:
    taken = _patch_registered(casts) | _patch_removed(casts)
    for namespace, lists in _LISTED:
        _patch_lists(namespace, lists, taken, casts.cache.native is not None)
    _patches.set(rnn, "_VF", RecurrentFunctions(vars(rnn)["_VF"], current))
    if casts.only_observe:
        return
    _patches.set(rnn.RNNBase, "check_input", check_shapes_only(rnn.RNNBase.check_input, current))
    compile_as_autocast(_patches)
    cast_attention(_patches, current)
    _patches.on_undo(register_optimizer_step_post_hook(lambda *step: casts.cache.clear()).remove)
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
