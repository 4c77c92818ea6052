"""The installed casts, of which the newest are in force: torch's functions do them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import nn

from amp_engine.casting.calls import Casts
from amp_engine.casting.registration import Registration


class InstallableCasts(Casts, Protocol):
    """Casts with a user's changes to the lists."""

    registrations: Sequence[Registration]
    removals: Sequence[tuple[Any, str]]
    is_disabled_everywhere: bool
    origin: str
    everywhere: bool

    @property
    def is_disabled(self) -> bool:
        """True if they are switched off, here or everywhere."""

    @property
    def is_observed(self) -> bool:
        """True if each call must go through Python, which tells the observers."""

    @property
    def is_wanted(self) -> bool:
        """True unless they have ended, or their owner is gone or does not have them, as a forked child may find."""

    @property
    def modules(self) -> list[nn.Module] | None:
        """The live modules with the last of which the casts end; None if they last until they are removed."""

    def discard(self) -> None:
        """End them, now or as soon as no other thread holds a lock that this needs."""


STACK: list[InstallableCasts] = []
"""The installed casts of every engine, the newest last. Only `patch_torch` changes it."""


def holds(casts: InstallableCasts) -> bool:
    """True if `casts` are installed, in force or not."""
    return casts in STACK


def in_force(casts: InstallableCasts) -> bool:
    """True if torch's functions do `casts` now."""
    try:
        return STACK[-1] is casts
    except IndexError:
        return False


def is_installed() -> bool:
    """True if any casts are installed, switched on or off."""
    return len(STACK) > 0  # bool() of it breaks graphs in torch 2.11


def current() -> InstallableCasts | None:
    """Return the casts in force, or None if they are switched off.

    Patched functions ask at each call, so that a function that was kept, as by `self.act = F.gelu`, follows the engine
    through another `initialize` and is the plain function after `close`.
    """
    try:
        casts = STACK[-1]
    except IndexError:
        return None
    return None if casts.is_disabled else casts
