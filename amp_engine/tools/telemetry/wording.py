"""Numbers in words, for tables and sentences."""

from __future__ import annotations

import math

NOTHING = "-"
"""In place of a number that is not known."""

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def number(value: int) -> str:
    """1,234,567."""
    return f"{value:,}"


def plural(count: int, noun: str) -> str:
    """1 step, 2 steps."""
    return f"{number(count)} {noun}{'' if count == 1 else 's'}"


def size(count: int | None) -> str:
    """A number of bytes in the unit that leaves up to four digits before the point."""
    if count is None:
        return NOTHING
    value, unit = float(count), 0
    while value >= 10_000 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:,.0f} {_UNITS[unit]}" if unit == 0 or value >= 100 else f"{value:,.1f} {_UNITS[unit]}"


def percent(share: float) -> str:
    """12.3 %, of a share from 0 to 1."""
    return f"{100 * share:.1f} %"


def share(value: float | None) -> str:
    """`percent`, but a share above 0 is never written as 0."""
    if value is None:
        return NOTHING
    if not math.isfinite(value):
        return "not finite"
    return "< 0.1 %" if 0 < value < 0.0005 else percent(value)


def scale(value: float | None) -> str:
    """A loss scale: 65536, 0.125."""
    return NOTHING if value is None else f"{value:.10g}"


def milliseconds(seconds: float | None) -> str:
    """Three digits: 21.3, 0.873."""
    if seconds is None:
        return NOTHING
    value = 1000 * seconds
    digits = 2 - math.floor(math.log10(value)) if value > 0 else 0
    return f"{value:,.{min(max(digits, 0), 3)}f}"
