"""Figures in words, for the table and for the recommendation."""

from __future__ import annotations

import math

from amp_engine.tools.telemetry import wording

NOTHING = "-"


def milliseconds(seconds: float | None) -> str:
    """Three digits: 21.3, 0.873."""
    if seconds is None:
        return NOTHING
    value = 1000 * seconds
    digits = 2 - math.floor(math.log10(value)) if value > 0 else 0
    return f"{value:,.{min(max(digits, 0), 3)}f}"


def share(value: float | None) -> str:
    """A share from 0 to 1 as percent; a share above 0 is never written as 0."""
    if value is None:
        return NOTHING
    return wording.share(value) if math.isfinite(value) else "not finite"


def scale(value: float | None) -> str:
    """A loss scale, or none."""
    return NOTHING if value is None else wording.scale(value)


def size(count: int | None) -> str:
    """A number of bytes, or none."""
    return NOTHING if count is None else wording.size(count)
