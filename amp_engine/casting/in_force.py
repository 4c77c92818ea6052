"""The installed casts. The newest of them are in force: torch is patched for them."""

from __future__ import annotations

from amp_engine.casting.calls import Casts

STACK: list[Casts] = []
"""The installed casts of every engine, the newest last. Only `patch_torch` changes it."""


def in_force(casts: Casts) -> bool:
    """True if `casts` are the newest installed ones."""
    try:
        return STACK[-1] is casts
    except IndexError:
        return False


def is_installed() -> bool:
    """True if any casts are installed, switched on or off."""
    return len(STACK) > 0  # bool(STACK) breaks graphs in torch 2.11


class _Watch:
    casts: Casts | None = None


def set_watching(casts: Casts | None) -> None:
    """Make `casts`, which only observe, or None current while no casts are installed."""
    _Watch.casts = casts


def watching() -> Casts | None:
    """Return the casts of `set_watching`."""
    return _Watch.casts


def current() -> Casts | None:
    """Return the casts in force, or None if they are disabled; `watching()` while no casts are installed.

    Patched functions call this at each call, so that one that was kept, as by `self.act = F.gelu`, follows the engine
    through another `initialize` and acts as the original after `close`.
    """
    try:
        casts = STACK[-1]
    except IndexError:
        return _Watch.casts
    return None if casts.is_disabled else casts
