"""Numbers in words, for tables and sentences."""

from __future__ import annotations

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def number(value: int) -> str:
    """1,234,567."""
    return f"{value:,}"


def plural(count: int, noun: str) -> str:
    """1 step, 2 steps."""
    return f"{number(count)} {noun}{'' if count == 1 else 's'}"


def size(count: int) -> str:
    """A number of bytes in the unit that leaves up to four digits before the point."""
    value, unit = float(count), 0
    while value >= 10_000 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:,.0f} {_UNITS[unit]}" if unit == 0 or value >= 100 else f"{value:,.1f} {_UNITS[unit]}"


def percent(share: float) -> str:
    """12.3 %, of a share from 0 to 1."""
    return f"{100 * share:.1f} %"


def share(value: float) -> str:
    """`percent`, but a share above 0 is never written as 0."""
    return "< 0.1 %" if 0 < value < 0.0005 else percent(value)


def scale(value: float) -> str:
    """A loss scale: 65536, 0.125."""
    return f"{value:.10g}"
