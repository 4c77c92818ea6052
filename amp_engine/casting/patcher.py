"""The only file that assigns to modules that are not ours. Every patch is undone exactly.

At most one engine's casts are patched into torch. Those that are installed form a stack: the newest is in force, and
when it goes the next newest is patched in, or torch is left as it was found.
"""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import os
import pkgutil
import sys
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import (
    BuiltinFunctionType,
    FunctionType,
    MethodDescriptorType,
    ModuleType,
    SimpleNamespace,
    WrapperDescriptorType,
)
from typing import Any, Protocol

import torch
import torch.fx
import torch.nn.functional
from torch import Tensor, nn
from torch.nn.modules import rnn
from torch.optim import optimizer as optimizers

from amp_engine.casting import locks, wrappers
from amp_engine.casting.cache import tensors_hold_their_objects
from amp_engine.casting.lists import FLOAT_BY_DTYPE, NAMESPACES, PROMOTED_BY_TORCH, CastLists
from amp_engine.casting.recurrent import RecurrentFunctions, check_shapes_only
from amp_engine.errors import AmpTypeError
from amp_engine.kernels import _native
from amp_engine.torch_private import TensorBase, find_jit_builtin, register_jit_builtin


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
    removals: Sequence[tuple[Any, str]]
    is_native: bool
    is_disabled_everywhere: bool
    origin: str

    @property
    def is_disabled(self) -> bool:
        """Whether they are switched off, here or everywhere."""

    @property
    def is_observed(self) -> bool:
        """Whether each call must go through Python, which tells of it."""

    @property
    def is_wanted(self) -> bool:
        """Whether somebody is there who will remove them."""

    @property
    def modules(self) -> list[nn.Module] | None:
        """Those whose end is theirs and that are still there; None if they last until they are removed."""

    def abandon(self) -> None:
        """End them, now or when no other thread is in the way."""


class Patches:
    """Assignments to attributes of foreign objects, and the way back.

    A fork may find any of this half done: the way back is noted first, and may be gone twice.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """`owner.name = value`, until `undo`. A name that `owner` inherited is deleted again, not assigned."""
        was_own = name in vars(owner)
        original = vars(owner).get(name)

        def put_back() -> None:
            if was_own:
                setattr(owner, name, original)
            elif name in vars(owner):
                delattr(owner, name)

        self._undo.append(put_back)
        try:
            setattr(owner, name, value)
        except Exception:  # not a KeyboardInterrupt, which may come after it
            self._undo.pop()
            raise

    def on_undo(self, call: Callable[[], Any]) -> None:
        """Have `undo` call something, perhaps twice. To be said before what it takes back is done."""
        self._undo.append(call)

    def undo(self) -> None:
        """Take everything back, last patch first."""
        while self._undo:
            try:
                self._undo[-1]()
            except Exception:
                self._undo.pop()  # it would fail again; after a KeyboardInterrupt it is done again
                raise
            self._undo.pop()


class PatchedBuiltin:
    """Stands for a builtin function of a module: like one it does not bind to an instance, and is pickled by name."""

    __qualname__: str

    def __init__(self, original: Callable[..., Any], call: Callable[..., Any]) -> None:
        functools.update_wrapper(self, original)
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The original function, with its casts."""
        return self._call(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[[str], Any], tuple[str]]:
        return pkgutil.resolve_name, (f"{self.__module__}:{self.__qualname__}",)  # loads without amp_engine, too


class PatchedMethod:
    """Stands for a method of one object in that object. A copy of the object has its own method, which is not cast."""

    def __init__(self, original: Callable[..., Any], call: Callable[..., Any], owner: Any, name: str) -> None:
        functools.update_wrapper(self, original)
        self._call = call
        self._owner_and_name = owner, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The original method, with its casts."""
        return self._call(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, str]]:
        return getattr, self._owner_and_name  # of the bare copy, whose class knows the method


_LISTED = tuple((pkgutil.resolve_name(name), lists) for name, lists in NAMESPACES)
_WRITTEN_IN_C = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)
_IMMUTABLE_TYPE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE
_stack: list[InstallableCasts] = []
_abandoned: deque[InstallableCasts] = deque()
_patches = Patches()


@contextmanager
def changing() -> Iterator[None]:
    """Holds `locks.install`. Afterwards removes what finalizers in other threads abandoned meanwhile."""
    try:
        with locks.install.held():
            _applying.finish()
            yield
    finally:
        remove_abandoned()


def install(casts: InstallableCasts) -> None:
    """Put `casts` in force. If that fails, what was in force before stays."""
    with changing():
        _stack.append(casts)
        try:
            _applying.apply_newest()
        except BaseException:
            _take_out(casts)
            raise


def remove(casts: InstallableCasts) -> None:
    """Take `casts` out of force and put the next newest in. Does nothing if they are not installed."""
    with changing():
        _take_out(casts)


def abandon(casts: InstallableCasts) -> None:
    """As `remove`, for finalizers, which may run wherever something is allocated: waits for no other thread.

    Where a lock is taken, whoever has it removes the casts. While Dynamo compiles, whose caches go with them, they stay
    until the next collection of garbage, optimizer step or call that concerns casts.
    """
    _abandoned.append(casts)
    remove_abandoned()


def remove_abandoned() -> None:
    """Remove what finalizers could not, as they ran under a lock: to be called where one was released."""
    while _abandoned and not locks.is_shared_held_here():
        with locks.install.held_if_free() as is_held, _dynamo_if_free() as is_free:
            if not (is_held and is_free):
                return
            if _abandoned:
                _take_out(_abandoned.popleft())


def abandon_switches() -> None:
    """Remove casts, of any engine, whose models were gone before anything was cast."""
    for casts in list(_stack):
        if casts.modules == []:
            casts.abandon()


def newest() -> InstallableCasts | None:
    """The casts that patched functions do, switched on or off."""
    remove_abandoned()
    return _stack[-1] if _stack else None


def holds(casts: InstallableCasts) -> bool:
    """Whether `casts` are installed, in force or not."""
    return casts in _stack


def in_force(casts: InstallableCasts) -> bool:
    """Whether `casts` is what torch's functions do now."""
    try:
        return _stack[-1] is casts
    except IndexError:
        return False


def is_patchable(owner: Any) -> bool:
    """Whether attributes of `owner` can be assigned: not those of a class written in C, or of an object with slots."""
    is_immutable = isinstance(owner, type) and bool(owner.__flags__ & _IMMUTABLE_TYPE)
    return hasattr(owner, "__dict__") and not is_immutable


def check_patchable(owner: Any, name: str) -> None:
    """Raise AmpTypeError if `owner.name` cannot be assigned."""
    if not is_patchable(owner):
        raise AmpTypeError(
            f"{name} of {owner!r} cannot be replaced; functions of modules and Python classes can.  Type the name that "
            "it is called by, such as (torch.Tensor, 'softmax'), or decorate with amp.half_function what calls it."
        )


def is_installed() -> bool:
    """Whether any casts are, switched on or off."""
    return len(_stack) > 0  # bool() of it breaks graphs in torch 2.11


def current() -> InstallableCasts | None:
    """The casts in force, None where they are switched off.

    Patched functions ask at each call, so that one that somebody kept, `self.act = F.gelu`, follows the
    engine through another `initialize` and is the plain function after `close`.
    """
    try:
        casts = _stack[-1]
    except IndexError:
        return None
    return None if casts.is_disabled else casts


def tell_native() -> None:
    """Have the compiled wrappers do what `current` says."""
    if _native.module is None:
        return
    with locks.shared:
        casts = _stack[-1] if _stack else None
        if casts is None or casts.is_disabled_everywhere or not casts.is_native:
            _native.module.put_out_of_force()
        else:
            through_python = casts.is_observed or not casts.were_used
            _native.module.put_in_force(casts.dtype, casts.cache.native, casts.enable_caching, through_python)
    remove_abandoned()


def original(function: Any) -> Any:
    """What a function of a module or a native method stands for; anything else as it is."""
    return _originals.get(id(function), (None, function))[1]


def _take_out(casts: InstallableCasts) -> None:
    if holds(casts):
        is_newest = in_force(casts)
        _stack.remove(casts)
        if is_newest:
            _applying.apply_newest()
        else:
            _applying.finish()
        casts.cache.clear()


class _Applying:
    """Patches torch as the newest casts have it. A collection of garbage in the midst may end an engine: then anew."""

    def __init__(self) -> None:
        self._is_outdated = self._is_within = False
        os.register_at_fork(after_in_child=self._repair)

    def apply_newest(self) -> None:
        """Under `locks.install`; within itself, leaves it to the outer call."""
        self._is_outdated = True
        while self._is_outdated and not self._is_within:
            self._is_outdated, self._is_within = False, True
            try:
                _apply_newest()
            except BaseException:
                self._is_outdated = True
                raise
            finally:
                self._is_within = False

    def finish(self) -> None:
        """Under `locks.install`: do what an exception, such as a KeyboardInterrupt, cut short."""
        if self._is_outdated:
            self.apply_newest()

    def _repair(self) -> None:
        """In a child: do again what another thread of the parent, which is not here, had half done.

        What it was installing nobody here knows of, and goes. Dynamo is asked for nothing that may have to wait.
        """
        if not locks.install.was_held_by_another_thread:
            return
        self._is_outdated = self._is_within = False
        _stack[:] = [casts for casts in _stack if casts.is_wanted]
        _patches.undo()
        with _dynamo_if_free() as is_free:
            if is_free and "torch._dynamo.trace_rules" in sys.modules:
                _know_originals()
        _patch()


_applying = _Applying()


def _apply_newest() -> None:
    _patches.undo()
    _know_originals()
    _patch()


def _patch() -> None:
    tell_native()
    if not _stack:
        return
    casts = _stack[-1]
    casts.cache.clear()  # while others were in force nobody watched its weights
    taken = _patch_registered(casts) | _patch_removed(casts)
    for namespace, lists in _LISTED:
        _patch_lists(namespace, lists, taken, casts.is_native)
    _patch_recurrent()
    _watch_weights(casts)
    _leave_saved_tensors()
    _switch_off_fast_path()


def _patch_registered(casts: InstallableCasts) -> set[tuple[int, str]]:
    """Patch what users registered, which wins over the lists."""
    listed = {(id(space), name) for space, lists in _LISTED for names in vars(lists).values() for name in names}
    taken = set()
    for registration in casts.registrations:
        key = (id(registration.module), registration.name)
        if key not in taken:
            taken.add(key)
            wrapper = wrappers.REGISTERED[registration.kind]
            wrapper = wrappers.throughout(wrapper) if key in listed else wrapper
            _wrap(registration.module, registration.name, wrapper, casts.is_native)
    return taken


def _patch_removed(casts: InstallableCasts) -> set[tuple[int, str]]:
    """Have functions that a user took off the lists run without casts."""
    for owner, name in casts.removals:
        if not isinstance(getattr(owner, name), _WRITTEN_IN_C):  # which calls nothing that is patched
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
    is_native = is_native and wrapper in _NATIVE
    if isinstance(owner, ModuleType) and isinstance(original, (BuiltinFunctionType, FunctionType)):
        _patches.set(owner, name, _patched_function(original, wrapper, owner.__name__, name, is_native))
        return
    if owner is torch.Tensor and is_native:
        _patches.set(owner, name, _patched_method(original, wrapper, name))
        return
    # Not what getattr binds: a class method must go on to find its class, a static method to do without.
    as_it_stands = inspect.getattr_static(owner, name, original)
    is_method = isinstance(as_it_stands, (staticmethod, classmethod))
    known_as = f"{_qualified_name(owner)}.{name}"
    patched = wrappers.wrap(wrapper, as_it_stands if is_method else original, current, known_as)
    if owner is torch.Tensor:
        patched.__module__, patched.__qualname__ = "torch", f"Tensor.{name}"  # which pickles it
    if getattr(original, "__self__", None) is owner and not isinstance(owner, (ModuleType, type)):
        patched = PatchedMethod(original, patched, owner, name)
    _patches.set(owner, name, patched)


def _qualified_name(owner: Any) -> str:
    """`torch.nn.functional`, `torch.Tensor`; of an object that is no module and no class, its class's."""
    if isinstance(owner, ModuleType):
        return owner.__name__
    cls = owner if isinstance(owner, type) else type(owner)
    return f"{cls.__module__}.{cls.__qualname__}"


_NATIVE = frozenset(
    (
        wrappers.half,
        wrappers.float32,
        wrappers.float32_by_dtype,
        wrappers.promote,
        wrappers.match_self,
        wrappers.refused_function,
        wrappers.refused_method,
        wrappers.banned,
    )
)
_originals: dict[int, tuple[Any, Any]] = {}  # by the id of what is patched in, which is kept with it


@functools.cache  # the same object at each install, so that one that was kept can be pickled by name
def _patched_function(original: Any, wrapper: wrappers.Wrapper, module: str, name: str, is_native: bool) -> Any:
    """What the function `module.name` becomes. To torch.jit.script, which sees code and ids, it is the original."""
    reference: Any = wrapper(original, current, f"{module}.{name}")
    reference.__module__, reference.__qualname__ = module, name
    patched, native = reference, _native.module
    if is_native and native is not None:
        patched = native.patched_function(
            original, reference, name, original.__doc__ or "", module, wrapper.__name__, name in PROMOTED_BY_TORCH
        )
        torch.compiler.substitute_in_graph(patched, skip_signature_check=True)(reference)
        if isinstance(original, FunctionType):
            patched = _python_function(original, patched)
        elif original.__name__ != name:  # linalg_norm of torch.linalg.norm: a builtin is pickled by its __name__
            patched = PatchedBuiltin(original, patched)
    elif isinstance(original, BuiltinFunctionType):
        patched = PatchedBuiltin(original, reference)
    if not isinstance(patched, BuiltinFunctionType):
        patched.__module__, patched.__qualname__ = module, name
        patched.__prepare_scriptable__ = lambda: original
    operator = find_jit_builtin(original)
    if operator is not None:
        register_jit_builtin(patched, operator)
    _originals[id(patched)] = patched, original
    return patched


def _python_function(original: Any, call: Callable[..., Any]) -> Any:
    """What was a Python function stays one: with a signature, and with code that torch.jit.script may look for.

    It names its parameters. `*args, **kwargs` would add 0.3 us to each call.
    """
    signature = inspect.signature(original, follow_wrapped=False)
    passed = []
    for p in signature.parameters.values():
        by_name = p.kind is p.KEYWORD_ONLY or p.name in ("out", "dtype")  # which `call` looks for among keywords
        stars = "*" if p.kind is p.VAR_POSITIONAL else "**" if p.kind is p.VAR_KEYWORD else ""
        passed.append(f"{p.name}={p.name}" if by_name else stars + p.name)
    bare = [p.replace(annotation=p.empty, default=p.empty) for p in signature.parameters.values()]
    header = signature.replace(parameters=bare, return_annotation=signature.empty)
    names: dict[str, Any] = {"call": call}
    exec(compile(f"def patched{header}: return call({', '.join(passed)})", __file__, "exec"), names)
    patched: Any = functools.wraps(original)(names["patched"])
    patched.__defaults__, patched.__kwdefaults__ = original.__defaults__, original.__kwdefaults__
    return patched


@functools.cache
def _patched_method(original: Any, wrapper: wrappers.Wrapper, name: str) -> Any:
    """What `torch.Tensor.name` becomes: a method descriptor, which Dynamo and operators take as torch's own."""
    reference = wrapper(original, current, f"torch.Tensor.{name}")
    native: Any = _native.module
    doc = original.__doc__ or ""
    patched = native.patched_method(original, reference, name, doc, wrapper.__name__, name in PROMOTED_BY_TORCH)
    patched = reference if patched is None else patched
    _originals[id(patched)] = patched, original
    return patched


def _patch_recurrent() -> None:
    _patches.set(rnn, "_VF", RecurrentFunctions(vars(rnn)["_VF"], current))
    _patches.set(rnn.RNNBase, "check_input", check_shapes_only(rnn.RNNBase.check_input, current))


class _StepHooks(MutableMapping[Any, Any]):
    """torch's hooks after the step of any optimizer, and one of ours beside them, while functions are cast.

    It stands for torch's dictionary, which a step in another thread may be in the midst of: to add to it would make
    that step raise. What others add and remove meanwhile is added to and removed from torch's.
    """

    def __init__(self) -> None:
        self.theirs: MutableMapping[Any, Any] = vars(optimizers)["_global_optimizer_post_hooks"]
        self.ours: Callable[..., None] = lambda *_: None

    def __getitem__(self, key: Any) -> Any:
        return self.ours if key is self else self.theirs[key]

    def __setitem__(self, key: Any, hook: Any) -> None:
        self.theirs[key] = hook

    def __delitem__(self, key: Any) -> None:
        del self.theirs[key]

    def __iter__(self) -> Iterator[Any]:
        return iter([*self.theirs, self])

    def __len__(self) -> int:
        return len(self.theirs) + 1

    def __contains__(self, key: object) -> bool:
        return key is self or key in self.theirs

    def __hash__(self) -> int:
        return id(self)

    def values(self) -> Any:
        """All of them as they are now, for a step to go through."""
        return [*self.theirs.values(), self.ours]


_step_hooks = _StepHooks()  # one for ever: handles of what is added while it stands there refer to it weakly


def _watch_weights(casts: InstallableCasts) -> None:
    """Drop casts of weights that may be written without moving their version.

    Most third-party optimizers write through `p.data`.
    """

    def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        casts.cache.after_step()
        remove_abandoned()

    _step_hooks.ours = after_step
    if vars(optimizers)["_global_optimizer_post_hooks"] is not _step_hooks:
        _step_hooks.theirs = vars(optimizers)["_global_optimizer_post_hooks"]
        _patches.set(optimizers, "_global_optimizer_post_hooks", _step_hooks)

    drops_orphans = tensors_hold_their_objects()

    def on_collection(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and drops_orphans and info["generation"] == 2:
            casts.cache.drop_orphans()
        elif phase == "stop":
            remove_abandoned()

    def forget_collections() -> None:
        if on_collection in gc.callbacks:
            gc.callbacks.remove(on_collection)

    _patches.on_undo(forget_collections)
    gc.callbacks.append(on_collection)

    descriptor: Any = TensorBase.data

    def get_data(tensor: Tensor) -> Tensor:
        casts.cache.discard(tensor)
        return descriptor.__get__(tensor)

    def set_data(tensor: Tensor, data: Tensor) -> None:
        casts.cache.discard(tensor)
        descriptor.__set__(tensor, data)

    _patches.set(torch.Tensor, "data", property(get_data, set_data, descriptor.__delete__))


def _leave_saved_tensors() -> None:
    """Hooks on tensors that a graph saves cast nothing: the graph wants its own types back from them.

    `Tensor.cpu` is on a list, and save_on_cpu calls it. Where torch.utils.checkpoint recomputes in such a hook, it
    restores the autocast of its forward, and the casts with it.
    """
    hooks: Any = torch.autograd.graph.saved_tensors_hooks
    enter = hooks.__enter__

    def enter_uncast(self: Any) -> None:
        uncast = [
            hook if isinstance(hook, torch.fx.GraphModule) else wrappers.uncast(hook, current)  # which is compiled
            for hook in (self.pack_hook, self.unpack_hook)
        ]
        enter(SimpleNamespace(pack_hook=uncast[0], unpack_hook=uncast[1]))

    _patches.set(hooks, "__enter__", enter_uncast)


def _switch_off_fast_path() -> None:
    """The fused transformer encoder of eval mode runs inside C++, past the patches, on FP32 weights and half input."""
    before = torch.backends.mha.get_fastpath_enabled()
    _patches.on_undo(lambda: torch.backends.mha.set_fastpath_enabled(before))
    torch.backends.mha.set_fastpath_enabled(False)


@contextmanager
def _dynamo_if_free() -> Iterator[bool]:
    """Whether no thread compiles, this one included; none begins inside."""
    lock: Any = getattr(sys.modules.get("torch._dynamo.convert_frame"), "compile_lock", None)
    if lock is None:
        yield True
        return
    is_free = not lock._is_owned() and lock.acquire(blocking=False)
    try:
        yield is_free
    finally:
        if is_free:
            lock.release()


def forget_compiled() -> None:
    """Dynamo guards functions but not methods, operators and hooks."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def _know_originals() -> None:
    """Have Dynamo look torch's functions up, which it does by name and once, while they are the originals."""
    forget_compiled()
    trace_rules = importlib.import_module("torch._dynamo.trace_rules")
    trace_rules.get_tensor_method.cache_clear()
    known = trace_rules.get_torch_obj_rule_map()
    in_graph = trace_rules.TorchInGraphFunctionVariable
    if any(known.get(patched) is in_graph for patched, _ in _originals.values()):  # somebody had it look meanwhile
        trace_rules.get_torch_obj_rule_map.cache_clear()
        trace_rules.get_torch_obj_rule_map()
