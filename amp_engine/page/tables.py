"""Tables of text: a head, a rule, rows in columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(rows: Sequence[Sequence[str]], words: int, has_total: bool = False) -> str:
    """The rows as lines of columns, the first as the head.

    Args:
        rows: as many cells in each.
        words: how many columns, from the left, are words and stand left; the others are numbers and stand right.
        has_total: whether the last row is a sum, and stands behind a rule as well.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [_line(row, widths, words) for row in rows]
    rule = "-" * max(map(len, lines))
    if has_total:
        return "\n".join((lines[0], rule, *lines[1:-1], rule, lines[-1]))
    return "\n".join((lines[0], rule, *lines[1:]))


def _line(row: Iterable[str], widths: Sequence[int], words: int) -> str:
    cells = zip(row, widths, strict=True)
    return "  ".join(c.ljust(w) if i < words else c.rjust(w) for i, (c, w) in enumerate(cells)).rstrip()
