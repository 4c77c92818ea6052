"""Finds the original of a patched function."""

from __future__ import annotations

from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any

from torch import Tensor

from amp_engine.casting import recurrent, replacements, wrappers
from amp_engine.casting.replacements import PatchedBuiltin


def original(fn: Any) -> Any:
    """Return the function or method that the patched `fn` replaces; `fn` itself if it is not patched.

    The original of a bound method is bound to the same object. Also removes the decorators `half_function`,
    `float_function` and `promote_function`.
    """
    if isinstance(fn, MethodType):
        function = original(fn.__func__)
        return fn if function is fn.__func__ else function.__get__(fn.__self__)
    if isinstance(fn, BuiltinMethodType) and isinstance(fn.__self__, Tensor):
        method = getattr(Tensor, fn.__name__, None)
        function = replacements.original(method)
        return fn if function is method else function.__get__(fn.__self__)
    fn = replacements.original(fn)
    while _is_ours(fn):
        fn = fn.__wrapped__
    return fn


def _is_ours(fn: Any) -> bool:
    # Decided by the module of the code, as functools.wraps copies attributes onto a user's wrapper.
    ours = (vars(wrappers), vars(recurrent))
    return isinstance(fn, PatchedBuiltin) or (
        isinstance(fn, FunctionType) and hasattr(fn, "__wrapped__") and any(fn.__globals__ is space for space in ours)
    )
