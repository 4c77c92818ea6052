"""Listed functions that are called where nothing is cast, for `amp.explain()` at O0, O2, O3 and O5."""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from amp_engine.casting.calls import Call
from amp_engine.casting.lists import NAMESPACES
from amp_engine.casting.original import original


class ListedFunctions(TorchFunctionMode):
    """Tells of the calls of listed functions in the thread that enters it, but not of those inside of one.

    Args:
        tell: called with each call after it; its type is the widest floating one among the arguments.
        is_cast: True while functions are cast, whose casts tell of calls by themselves.
    """

    def __init__(self, tell: Callable[[Call], None], is_cast: Callable[[], bool]) -> None:
        super().__init__()
        self._tell, self._is_cast = tell, is_cast

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = None if torch.compiler.is_compiling() or self._is_cast() else _by_function().get(func)
        if known is not None:
            given = [*args, *(kwargs or {}).values()]
            given += [one for sequence in given if isinstance(sequence, (list, tuple)) for one in sequence]
            dtypes = [one.dtype for one in given if isinstance(one, Tensor) and one.is_floating_point()]
            self._tell(Call(*known, functools.reduce(torch.promote_types, dtypes) if dtypes else None))
        return result


@functools.cache
def _by_function() -> dict[Any, tuple[str, str]]:
    """Of each listed function the first name that it is on a list by, and the list."""
    found: dict[Any, tuple[str, str]] = {}
    for namespace, lists in NAMESPACES:
        space = pkgutil.resolve_name(namespace)
        for kind, names in vars(lists).items():
            listed = "promote" if kind == "sequence" else kind
            for name in names:
                if hasattr(space, name):
                    found.setdefault(original(getattr(space, name)), (f"{namespace}.{name}", listed))
    return found
