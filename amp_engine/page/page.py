"""A page of sections: made once, written as text and as HTML."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from html import escape
from textwrap import indent, wrap

from amp_engine.page import markup, tables

WIDTH = 100
"""Of text, where names allow."""

_SHOWN_NAMES = 4


@dataclass(frozen=True)
class Block:
    """A part of a section; in text it is indented by so many steps."""

    indent: int = field(default=0, kw_only=True)


@dataclass(frozen=True)
class Sentence(Block):
    """A paragraph.

    Attributes:
        words: may be wrapped.
        kind: in HTML "title", "soft" for what matters less, "bad" for trouble.
        link: in HTML, an address to follow.
    """

    words: str
    kind: str = ""
    link: str = ""


@dataclass(frozen=True)
class Verbatim(Block):
    """Lines that are never wrapped, such as code."""

    lines: str


@dataclass(frozen=True)
class Named(Block):
    """A sentence about some modules, and their names: the first four in text; in HTML all of them, once opened."""

    words: str
    names: Sequence[str]


@dataclass(frozen=True)
class Table(Block):
    """Rows of as many cells each. In text words in the last column are wrapped.

    Attributes:
        rows: from the top down.
        head: of the columns; without one the cells say what they are.
        numbers: the columns that stand right.
        marked: the rows that stand out in HTML.
        has_total: True if the last row is a sum, which needs a head.
    """

    rows: Sequence[Sequence[str]]
    head: Sequence[str] = ()
    numbers: Container[int] = ()
    marked: Container[int] = ()
    has_total: bool = False


@dataclass(frozen=True)
class Figure(Block):
    """A picture in HTML; in text some paragraphs, or nothing."""

    picture: str
    words: Sequence[str] = ()


@dataclass(frozen=True)
class Section:
    """Blocks under a name, or under none; left out of a page where there are no blocks."""

    name: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Page:
    """Sections under a title, or under none; `style` is CSS of its pictures."""

    title: str
    sections: Sequence[Section]
    style: str = ""

    def text(self) -> str:
        """The page as text, `WIDTH` wide where names allow. Named sections are indented."""
        parts = [f"{self.title}\n{'=' * len(self.title)}"] if self.title else []
        for section in filter(lambda section: section.blocks, self.sections):
            steps = 1 if section.name else 0
            blocks = [_text(block, block.indent + steps) for block in section.blocks]
            parts.append("\n".join(filter(None, [section.name, *blocks])))
        return "\n\n".join(parts)

    def html(self) -> str:
        """The page as HTML with its style, for a notebook or another page."""
        parts = [f"<h1>{escape(self.title)}</h1>"] if self.title else []
        for section in filter(lambda section: section.blocks, self.sections):
            parts += [f"<h2>{escape(section.name)}</h2>"] if section.name else []
            parts += map(_html, section.blocks)
        return markup.fragment("".join(parts), self.style)

    def html_file(self) -> str:
        """The page as a file of HTML that loads nothing."""
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(self.title)}</title>"
            "<style>html { color-scheme: light dark; } body { margin: 0; }"
            "@media (prefers-color-scheme: dark) { body { background: #0d1117; } }</style>"
            f"</head><body>{self.html()}</body></html>\n"
        )


def _text(block: Block, steps: int) -> str:
    width, lines = WIDTH - 2 * steps, []
    match block:
        case Sentence(words):
            lines = _wrapped(words, width)
        case Verbatim(text):
            lines = text.splitlines()
        case Named(words, names):
            more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
            shown = _wrapped(", ".join(names[:_SHOWN_NAMES]) + more, width - 4)
            lines = [*_wrapped(words, width), *(f"    {line}" for line in shown)]
        case Table(rows, head, numbers):
            lines = tables.columns([head, *rows] if head else rows, numbers, width)
            lines = tables.ruled(lines, block.has_total) if head else lines
        case Figure(_, paragraphs):
            lines = [line for words in paragraphs for line in _wrapped(words, width)]
    return indent("\n".join(lines), "  " * steps)


def _html(block: Block) -> str:
    match block:
        case Sentence(words, kind, link):
            return markup.paragraph(words, kind, link)
        case Verbatim(text):
            return markup.preformatted(text)
        case Named(words, [name]):
            return f"<p>{escape(words)}: {markup.name(name)}</p>"
        case Named(words, names):
            inside = ", ".join(map(markup.name, names))
            return f"<details><summary>{escape(words)} ({len(names)} modules)</summary>{inside}</details>"
        case Table(rows, head, numbers, marked):
            classes = ["changed" if i in marked else "" for i in range(len(rows))]
            return markup.table(head, rows, numbers, [*classes[:-1], "total"] if block.has_total else classes)
        case Figure(picture):
            return picture
    raise TypeError(block)


def _wrapped(words: str, width: int) -> list[str]:
    return wrap(words, width, break_on_hyphens=False)
