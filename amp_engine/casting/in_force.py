"""The installed casts, of which the newest are in force: torch's functions do them."""

from __future__ import annotations

from amp_engine.casting.calls import Casts

STACK: list[Casts] = []
"""The installed casts of every engine, the newest last. Only `patch_torch` changes it."""


def in_force(casts: Casts) -> bool:
    """True if torch's functions do `casts` now."""
    try:
        return STACK[-1] is casts
    except IndexError:
        return False


def is_installed() -> bool:
    """True if any casts are installed, switched on or off."""
    return len(STACK) > 0  # bool() of it breaks graphs in torch 2.11


class _Watch:
    casts: Casts | None = None


def set_watching(casts: Casts | None) -> None:
    """Have `casts`, which only observe, or none be current where none are installed."""
    _Watch.casts = casts


def watching() -> Casts | None:
    """Return the casts that only observe, where none are installed; None if nobody does."""
    return _Watch.casts


def current() -> Casts | None:
    """Return the casts in force, or None if they are switched off. Where none are installed: `watching()`.

    Patched functions ask at each call, so that a function that was kept, as by `self.act = F.gelu`, follows the engine
    through another `initialize` and is the plain function after `close`.
    """
    try:
        casts = STACK[-1]
    except IndexError:
        return _Watch.casts
    return None if casts.is_disabled else casts
