"""Float and cast regions of one thread, kept in torch's autocast state.

A region is the type of CPU autocast: float32 in a float region, float64 in a cast region. No other code sets these
types, as autocast does not support them. torch carries this state where it would lose a flag of ours: Dynamo puts it
into its graphs, so that patched methods, which run on fake tensors while a graph is made, see it, and activation
checkpoints restore it when they recompute.

Dynamo's guards compare the type only if autocast is on, but always compare if autocast's cache is on. So the cache is
off inside of a region where the casts differ from those outside of all regions, and on inside of the other regions.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, cast

import torch


class _Outside:
    """`is_cast`: True if functions are cast outside of all regions, in every thread."""

    is_cast = True


def cast_everywhere(everywhere: bool) -> None:
    """Cast outside of all regions too, in every thread, or in cast regions only. The caller must then reset Dynamo."""
    _Outside.is_cast = everywhere


def casts_here() -> bool:
    """True if this thread casts functions now, provided that casts are in force."""
    # The cache cannot decide: a torch.autocast of another device that was made outside switches it on inside.
    dtype = torch.get_autocast_dtype("cpu")
    return dtype is not torch.float32 if _Outside.is_cast else dtype is torch.float64


def is_outside() -> bool:
    """True outside of all regions of this thread."""
    return torch.get_autocast_dtype("cpu") not in (torch.float32, torch.float64)


# The end of a warning.
TAKE_AUTOCAST_OUT = (
    "Take `with torch.autocast(...)` out, or a trainer's option for it: bf16, mixed_precision, precision."
)


def is_in_autocast() -> bool:
    """True inside of a torch.autocast of the user's, which casts beside our casts, or in spite of a float region."""
    return torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")


def float_region() -> AbstractContextManager[Any]:
    """Return a context in which this thread casts nothing. Nests. torch.autocast on the CPU is off inside, too."""
    return _region(torch.float32, not _Outside.is_cast)


def cast_region() -> AbstractContextManager[Any]:
    """Return a context in which this thread casts functions. Nests. torch.autocast on the CPU is off inside, too."""
    return _region(torch.float64, _Outside.is_cast)


def _region(dtype: torch.dtype, cache_enabled: bool) -> AbstractContextManager[Any]:
    if torch.compiler.is_compiling():
        region = torch.autocast("cpu", dtype=dtype, enabled=False, cache_enabled=cache_enabled)
        return cast("AbstractContextManager[Any]", region)
    return _Region(dtype, cache_enabled)


class _Region:
    """Sets autocast's state like torch.autocast, in a quarter of the time."""

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
