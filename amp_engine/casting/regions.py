"""Where functions are cast, in one thread: a state that torch carries, not one of our own.

It is the type of CPU autocast, which nobody else sets to float32 or float64: autocast has no such types. float32 marks
a float region, float64 a cast region. torch takes this state along where a flag of ours would be lost: Dynamo puts it
into its graphs, so that patched methods, which run on fake tensors while a graph is made, see it, and activation
checkpoints restore it when they recompute.

Dynamo's guards compare the type only where autocast is on, but always whether its cache is. So the cache is off inside
of a region in which casts are not as outside of all regions, and on in the others.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, cast

import torch


class _Outside:
    """Outside of all regions, in every thread."""

    is_cast = True


def cast_everywhere(everywhere: bool) -> None:
    """Cast outside of all regions, in every thread, or in cast regions alone. Dynamo is to be reset afterwards."""
    _Outside.is_cast = everywhere


def casts_here() -> bool:
    """True where this thread is to cast functions, if there are casts."""
    # Not whether the cache is off: a torch.autocast of another device that was made outside switches it on inside.
    dtype = torch.get_autocast_dtype("cpu")
    return dtype is not torch.float32 if _Outside.is_cast else dtype is torch.float64


def is_outside() -> bool:
    """True outside of all regions of this thread."""
    return torch.get_autocast_dtype("cpu") not in (torch.float32, torch.float64)


def float_region() -> AbstractContextManager[Any]:
    """A context in which nothing is cast, in this thread. Nests. torch.autocast on the CPU is off inside as well."""
    return _region(torch.float32, not _Outside.is_cast)


def cast_region() -> AbstractContextManager[Any]:
    """A context in which functions are cast, in this thread. Nests. torch.autocast on the CPU is off inside as well."""
    return _region(torch.float64, _Outside.is_cast)


def _region(dtype: torch.dtype, cache_enabled: bool) -> AbstractContextManager[Any]:
    if torch.compiler.is_compiling():
        region = torch.autocast("cpu", dtype=dtype, enabled=False, cache_enabled=cache_enabled)
        return cast("AbstractContextManager[Any]", region)
    return _Region(dtype, cache_enabled)


class _Region:
    """Does to autocast's state as torch.autocast does, in a quarter of the time."""

    def __init__(self, dtype: torch.dtype, cache_enabled: bool) -> None:
        self._inside = False, dtype, cache_enabled

    def __enter__(self) -> None:
        self._before = (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
        )
        _set_autocast(*self._inside)

    def __exit__(self, *error: object) -> None:
        _set_autocast(*self._before)


def _set_autocast(enabled: bool, dtype: torch.dtype, cache_enabled: bool) -> None:
    torch.set_autocast_enabled("cpu", enabled)
    torch.set_autocast_dtype("cpu", dtype)
    torch.set_autocast_cache_enabled(cache_enabled)
