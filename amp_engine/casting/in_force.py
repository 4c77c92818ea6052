"""The casts in force: torch is patched for them."""

from __future__ import annotations

from amp_engine.casting.calls import Casts


class _InForce:
    casts: Casts | None = None


def put_in_force(casts: Casts | None) -> None:
    """Make `casts` those in force. Only `patch_torch` calls this."""
    _InForce.casts = casts


def in_force() -> Casts | None:
    """Return the casts in force, switched on or off."""
    return _InForce.casts


def is_installed() -> bool:
    """True if functions are cast, switched on or off."""
    casts = _InForce.casts
    return casts is not None and not casts.only_observe


def discard_weight_casts() -> None:
    """Have weights cast anew that were written without moving their versions."""
    if _InForce.casts is not None:
        _InForce.casts.cache.clear()


def current() -> Casts | None:
    """Return the casts in force, or None if they are disabled.

    Patched functions call this at each call, so that one that was kept, as by `self.act = F.gelu`, follows the engine
    through another `initialize` and acts as the original after `close`.
    """
    casts = _InForce.casts
    return casts if casts is None or casts.only_observe or not casts.is_disabled else None
