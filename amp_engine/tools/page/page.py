"""A page of sections, which can be written as text and as HTML."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from textwrap import indent, wrap

from amp_engine.errors import AmpValueError
from amp_engine.tools.page.style import STYLE

WIDTH = 100
"""Width of text in characters; long names may exceed it."""

_SHOWN_NAMES = 4


@dataclass(frozen=True)
class Block:
    """A part of a section; text is indented by `indent` steps of two spaces."""

    indent: int = field(default=0, kw_only=True)

    def _lines(self, width: int) -> Sequence[str]:
        raise NotImplementedError

    def _html(self) -> str:
        raise NotImplementedError


@dataclass(frozen=True)
class Sentence(Block):
    """A paragraph.

    Attributes:
        words: the text, which may be wrapped.
        kind: in HTML "title", "soft" for less important text, "bad" for trouble.
        link: in HTML, an address to link to.
    """

    words: str
    kind: str = ""
    link: str = ""

    def _lines(self, width: int) -> Sequence[str]:
        return _wrapped(self.words, width)

    def _html(self) -> str:
        opened = f'<p class="{self.kind}">' if self.kind else "<p>"
        linked = f' <a href="{escape(self.link)}">{escape(self.link)}</a>' if self.link else ""
        return f"{opened}{escape(self.words)}{linked}</p>"


@dataclass(frozen=True)
class Verbatim(Block):
    """Lines that are never wrapped, such as code."""

    lines: str

    def _lines(self, width: int) -> Sequence[str]:
        return self.lines.splitlines()

    def _html(self) -> str:
        return f"<pre>{escape(self.lines)}</pre>"


@dataclass(frozen=True)
class Named(Block):
    """A sentence about some modules, and their names: the first four in text, all in HTML, where they unfold."""

    words: str
    names: Sequence[str]

    def _lines(self, width: int) -> Sequence[str]:
        left = len(self.names) - _SHOWN_NAMES
        shown = ", ".join(self.names[:_SHOWN_NAMES]) + (f" and {left} more" if left > 0 else "")
        return [*_wrapped(self.words, width), *(f"    {line}" for line in _wrapped(shown, width - 4))]

    def _html(self) -> str:
        words, names = escape(self.words), ", ".join(map(_breakable, self.names))
        if len(self.names) == 1:
            return f"<p>{words}: {names}</p>"
        return f"<details><summary>{words} ({len(self.names)} modules)</summary>{names}</details>"


@dataclass(frozen=True)
class Table(Block):
    """Rows with the same number of cells. In text, words in the last column are wrapped.

    Attributes:
        rows: the rows from top to bottom.
        head: names of the columns, or empty.
        numbers: the right-aligned columns.
        marked: the rows that are highlighted in HTML.
        has_total: True if the last row is a sum, which needs a head.
    """

    rows: Sequence[Sequence[str]]
    head: Sequence[str] = ()
    numbers: Container[int] = ()
    marked: Container[int] = ()
    has_total: bool = False

    def _lines(self, width: int) -> Sequence[str]:
        rows = [self.head, *self.rows] if self.head else self.rows
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [line for row in rows for line in self._lines_of(row, widths, width)]
        if not self.head:
            return lines
        rule = "-" * max(map(len, lines))
        if self.has_total:
            return [lines[0], rule, *lines[1:-1], rule, lines[-1]]
        return [lines[0], rule, *lines[1:]]

    def _lines_of(self, row: Sequence[str], widths: Sequence[int], width: int) -> Iterator[str]:
        left = sum(widths[:-1]) + 2 * (len(widths) - 1)
        is_wrapped = len(row) - 1 not in self.numbers
        first, *rest = (_wrapped(row[-1], max(width - left, 20)) or [""]) if is_wrapped else [row[-1]]
        cells = enumerate(zip([*row[:-1], first], widths, strict=True))
        yield "  ".join(cell.rjust(w) if i in self.numbers else cell.ljust(w) for i, (cell, w) in cells).rstrip()
        yield from (" " * left + line for line in rest)

    def _html(self) -> str:
        kinds = ["changed" if i in self.marked else "" for i in range(len(self.rows))]
        kinds = [*kinds[:-1], "total"] if self.has_total else kinds
        head = f"<thead>{self._html_of(self.head, 'th')}</thead>" if self.head else ""
        rows = "".join(self._html_of(row, "td", kind) for row, kind in zip(self.rows, kinds, strict=True))
        return f'<div class="wide"><table>{head}<tbody>{rows}</tbody></table></div>'

    def _html_of(self, row: Sequence[str], tag: str, kind: str = "") -> str:
        cells = (
            f'<{tag} class="n">{escape(cell)}</{tag}>' if i in self.numbers else f"<{tag}>{_breakable(cell)}</{tag}>"
            for i, cell in enumerate(row)
        )
        return (f'<tr class="{kind}">' if kind else "<tr>") + "".join(cells) + "</tr>"


@dataclass(frozen=True)
class Section:
    """Blocks under a name, which may be empty. A page leaves out a section without blocks."""

    name: str
    blocks: Sequence[Block]

    def _text(self) -> str:
        texts = [self.name]
        for block in self.blocks:
            steps = block.indent + (1 if self.name else 0)
            texts.append(indent("\n".join(block._lines(WIDTH - 2 * steps)), "  " * steps))
        return "\n".join(filter(None, texts))

    def _html(self) -> str:
        name = [f"<h2>{escape(self.name)}</h2>"] if self.name else []
        return "".join([*name, *(block._html() for block in self.blocks)])


@dataclass(frozen=True)
class Page:
    """Sections under a title, which may be empty."""

    title: str
    sections: Sequence[Section]

    @classmethod
    def of(cls, *blocks: Block) -> Page:
        """A page of blocks, without a title."""
        return cls("", [Section("", blocks)])

    def text(self) -> str:
        """The page as text, `WIDTH` wide unless names are longer. Named sections are indented."""
        parts = [f"{self.title}\n{'=' * len(self.title)}"] if self.title else []
        return "\n\n".join([*parts, *(section._text() for section in self.sections if section.blocks)])

    def html(self) -> str:
        """The page as HTML with its style, for a notebook or another page."""
        title = f"<h1>{escape(self.title)}</h1>" if self.title else ""
        sections = "".join(section._html() for section in self.sections if section.blocks)
        return f'<div class="amp"><style>{STYLE}</style>{title}{sections}</div>'

    def html_file(self) -> str:
        """The page as the text of an HTML file that loads nothing."""
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(self.title)}</title>"
            "<style>html { color-scheme: light dark; } body { margin: 0; }"
            "@media (prefers-color-scheme: dark) { body { background: #0d1117; } }</style>"
            f"</head><body>{self.html()}</body></html>\n"
        )


class Paged:
    """Has a page, which `str()`, `repr()` and notebooks show."""

    def _page(self) -> Page:
        raise NotImplementedError

    def __str__(self) -> str:
        return self._page().text()

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return self._page().html()


def _wrapped(words: str, width: int) -> list[str]:
    return wrap(words, width, break_on_hyphens=False)


def _breakable(text: str) -> str:
    """The text as HTML in which lines may break after each dot and underscore."""
    return escape(text).replace(".", ".<wbr>").replace("_", "_<wbr>")


def write_by_suffix(path: str | os.PathLike[str], writers: Mapping[str, Callable[[], str]], what: str) -> None:
    """Write a file by the suffix of its path.

    Args:
        path: path of the file.
        writers: functions that return the text, by suffix.
        what: names the object in the error, which advises .html: "a receipt".

    Raises AmpValueError for another suffix, OSError as `open` does.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in writers:
        *most, last = writers
        raise AmpValueError(
            f"save({os.fspath(path)!r}): {what} is written as {', '.join(most)} or {last}.  Use for example "
            f"{str(Path(path).with_suffix('.html'))!r}."
        )
    Path(path).write_text(writers[suffix](), encoding="utf-8")
