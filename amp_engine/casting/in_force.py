"""Which casts are installed, and which of them torch's functions do: the newest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import nn

from amp_engine.casting.calls import Casts
from amp_engine.casting.registration import Registration


class InstallableCasts(Casts, Protocol):
    """Casts with what a user added to the lists."""

    registrations: Sequence[Registration]
    removals: Sequence[tuple[Any, str]]
    is_disabled_everywhere: bool
    origin: str
    everywhere: bool

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

    def discard(self) -> None:
        """End them, now or when no other thread is in the way."""


STACK: list[InstallableCasts] = []
"""Those of every engine that are installed, the newest last. Only `patch_torch` changes it."""


def holds(casts: InstallableCasts) -> bool:
    """Whether `casts` are installed, in force or not."""
    return casts in STACK


def in_force(casts: InstallableCasts) -> bool:
    """Whether `casts` is what torch's functions do now."""
    try:
        return STACK[-1] is casts
    except IndexError:
        return False


def is_installed() -> bool:
    """Whether any casts are, switched on or off."""
    return len(STACK) > 0  # bool() of it breaks graphs in torch 2.11


def current() -> InstallableCasts | None:
    """The casts in force, None where they are switched off.

    Patched functions ask at each call, so that one that somebody kept, `self.act = F.gelu`, follows the
    engine through another `initialize` and is the plain function after `close`.
    """
    try:
        casts = STACK[-1]
    except IndexError:
        return None
    return None if casts.is_disabled else casts
