"""Where no function is cast, in one thread: a state that torch carries, not one of our own.

It is the type of CPU autocast, which nobody else sets to float32: autocast has no such type. torch takes this state
along where a flag of ours would be lost: Dynamo puts it into its graphs, so that patched methods, which run on fake
tensors while a graph is made, see it, and activation checkpoints restore it when they recompute. Dynamo's guards
compare the type only where autocast is on, but always whether its cache is, so that is off inside as well.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, cast

import torch


def float_region() -> AbstractContextManager[Any]:
    """A context in which nothing is cast, in this thread. Nests. torch.autocast on the CPU is off inside as well."""
    if torch.compiler.is_compiling():
        region = torch.autocast("cpu", dtype=torch.float32, enabled=False, cache_enabled=False)
        return cast("AbstractContextManager[Any]", region)
    return _Region()


def in_float_region() -> bool:
    """Whether this thread is inside of one."""
    # Not whether the cache is off: a torch.autocast of another device that was made outside switches it on inside.
    return torch.get_autocast_dtype("cpu") is torch.float32


class _Region:
    """What torch.autocast does to its state, in a quarter of the time."""

    def __enter__(self) -> None:
        self._before = (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
        )
        _set_autocast(False, torch.float32, False)

    def __exit__(self, *error: object) -> None:
        _set_autocast(*self._before)


def _set_autocast(enabled: bool, dtype: torch.dtype, cache_enabled: bool) -> None:
    torch.set_autocast_enabled("cpu", enabled)
    torch.set_autocast_dtype("cpu", dtype)
    torch.set_autocast_cache_enabled(cache_enabled)
