"""The replacements of patched functions of torch, and the original of each."""

from __future__ import annotations

import functools
import inspect
import pkgutil
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

from amp_engine.casting import wrappers
from amp_engine.casting.in_force import current
from amp_engine.casting.lists import PROMOTED_BY_TORCH
from amp_engine.ground.torch_private import find_jit_builtin, register_jit_builtin
from amp_engine.kernels.choice import CASTS


class PatchedBuiltin:
    """Replaces a builtin function of a module: like a builtin, it binds to no instance and is pickled by name."""

    __qualname__: str

    def __init__(self, original: Callable[..., Any], call: Callable[..., Any]) -> None:
        functools.update_wrapper(self, original)
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the original function, with its casts."""
        return self._call(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return pkgutil.resolve_name, (f"{self.__module__}:{self.__qualname__}",)  # loads without amp_engine, too


class PatchedMethod(PatchedBuiltin):
    """Replaces a method in one object. A copy of the object has its own method, which is not cast."""

    def __init__(self, original: Callable[..., Any], call: Callable[..., Any], owner: Any, name: str) -> None:
        super().__init__(original, call)
        self._owner_and_name = owner, name

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return getattr, self._owner_and_name  # the unpickled owner gets the method from its class


ORIGINALS: dict[int, tuple[Any, Any]] = {}  # by id of the replacement, which is kept too, so its id stays valid


@functools.cache  # one object for all installs, so that users' references to it can be pickled by name
def patched_function(original: Any, wrapper: wrappers.Wrapper, module: str, name: str, is_native: bool) -> Any:
    """Return the replacement of `module.name`. torch.jit.script, which looks at code and ids, sees the original."""
    reference: Any = wrapper(original, current, f"{module}.{name}")
    reference.__module__, reference.__qualname__ = module, name
    patched, native = reference, CASTS
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
    ORIGINALS[id(patched)] = patched, original
    return patched


def _python_function(original: Any, call: Callable[..., Any]) -> Any:
    """Make a Python function that calls `call`: with the original's signature, and code, which torch.jit.script reads.

    The code names the parameters, as `*args, **kwargs` would add 0.3 us to each call.
    """
    signature = inspect.signature(original, follow_wrapped=False)
    passed = []
    for p in signature.parameters.values():
        by_name = p.kind is p.KEYWORD_ONLY or p.name in ("out", "dtype")  # `call` looks for these among keywords
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
def patched_method(original: Any, wrapper: wrappers.Wrapper, name: str) -> Any:
    """Return the replacement of `torch.Tensor.name`: a method descriptor, for Dynamo and operators like torch's own."""
    reference = wrapper(original, current, f"torch.Tensor.{name}")
    native: Any = CASTS
    doc = original.__doc__ or ""
    patched = native.patched_method(original, reference, name, doc, wrapper.__name__, name in PROMOTED_BY_TORCH)
    patched = reference if patched is None else patched
    ORIGINALS[id(patched)] = patched, original
    return patched


def original(function: Any) -> Any:
    """Return the original of a patched function of a module or native method; any other object unchanged."""
    return ORIGINALS.get(id(function), (None, function))[1]
