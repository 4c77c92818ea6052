"""Tables of text: a head, a rule, rows in columns."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from textwrap import wrap


def table(rows: Sequence[Sequence[str]], words: int, has_total: bool = False) -> str:
    """Align the cells of rows, with a rule below the first row, the head.

    Args:
        rows: as many cells in each.
        words: how many columns, from the left, are words and stand left; the others are numbers and stand right.
        has_total: True if the last row is a sum.
    """
    return "\n".join(ruled(columns(rows, range(words, len(rows[0]))), has_total))


def ruled(lines: Sequence[str], has_total: bool) -> list[str]:
    """The lines of a table with a rule below the head, and one above the last line if that is a sum."""
    rule = "-" * max(map(len, lines))
    if has_total:
        return [lines[0], rule, *lines[1:-1], rule, lines[-1]]
    return [lines[0], rule, *lines[1:]]


def columns(rows: Sequence[Sequence[str]], numbers: Container[int], width: int | None = None) -> list[str]:
    """Align the cells of rows in columns, two spaces apart.

    Args:
        rows: as many cells in each.
        numbers: the columns that stand right.
        width: of a line; words in the last column are wrapped to it. None: nothing is wrapped.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    indent = sum(widths[:-1]) + 2 * (len(widths) - 1)
    room = max((width or 0) - indent, 20)
    is_wrapped = width is not None and len(widths) - 1 not in numbers

    def lines(row: Sequence[str]) -> Iterator[str]:
        first, *rest = (wrap(row[-1], room, break_on_hyphens=False) or [""]) if is_wrapped else [row[-1]]
        cells = zip([*row[:-1], first], widths, strict=True)
        yield "  ".join(c.rjust(w) if i in numbers else c.ljust(w) for i, (c, w) in enumerate(cells)).rstrip()
        yield from (" " * indent + line for line in rest)

    return [line for row in rows for line in lines(row)]
