"""A receipt as HTML: a fragment for notebooks, and a page in one file that loads nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from amp_engine.page import markup
from amp_engine.page.markup import paragraph, table
from amp_engine.telemetry import histogram_picture, plots, wording
from amp_engine.telemetry.memory import KINDS
from amp_engine.telemetry.shapes import RULE
from amp_engine.telemetry.wording import number, plural, size

if TYPE_CHECKING:
    from amp_engine.telemetry.receipt import Receipt


def page(receipt: Receipt) -> str:
    """The whole file."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(receipt.title)}</title>"
        "<style>html { color-scheme: light dark; } body { margin: 0; }"
        "@media (prefers-color-scheme: dark) { body { background: #0d1117; } }</style>"
        f"</head><body>{rendered(receipt)}</body></html>\n"
    )


def rendered(receipt: Receipt) -> str:
    """What a notebook shows, and what is in the page."""
    parts = [f"<h1>{escape(receipt.title)}</h1>", paragraph(receipt.asked.brief, "soft")]
    for name, section in (
        ("Asked for", _asked),
        ("Models", _models),
        ("Functions", _functions),
        ("Optimizers", _optimizers),
        ("Loss scale", _losses),
        ("Memory", _memory),
        ("Shapes for tensor cores", _shapes),
        ("Gradients", _gradients),
        ("Time", _times),
        ("Software", _software),
    ):
        found = "".join(section(receipt))
        if found:
            parts += [f"<h2>{name}</h2>", found]
    return markup.fragment("".join(parts), plots.STYLE + histogram_picture.STYLE)


def _asked(receipt: Receipt) -> Iterator[str]:
    found = receipt.asked.properties
    if found:
        yield table(
            ("property", "value", "the level alone"),
            [(p.name, p.value, p.default if p.is_override else "the same") for p in found],
            classes=["changed" if p.is_override else "" for p in found],
        )


def _models(receipt: Receipt) -> Iterator[str]:
    for model in receipt.models:
        title = f"{model.name}: {model.class_name}" if model.name else model.class_name
        yield f"<p><b>{escape(title)}</b></p>"
        yield table(
            ("", "type", "elements", "tensors", "memory"),
            [(t.kind, t.dtype, number(t.elements), number(t.tensors), size(t.bytes)) for t in model.types],
            numbers=(2, 3, 4),
        )
        rows = []
        for total, modules in wording.grouped(model.kept):
            shown = _names([wording.module(one.module) for one in modules])
            why = f"{total.dtype}: {total.why}" if total.dtype else total.why
            rows.append((total.class_name, shown, number(total.elements), why))
        if rows:
            yield paragraph("Not in half, and why:")
            yield table(("class", "modules", "elements", "why"), rows, numbers=(2,), markup=(1,))


def _names(names: Sequence[str]) -> str:
    """Of modules: one, or how many, and all of them for who asks."""
    if len(names) == 1:
        return markup.name(names[0])
    inside = ", ".join(map(markup.name, names))
    return f"<details><summary>{plural(len(names), 'module')}</summary>{inside}</details>"


def _functions(receipt: Receipt) -> Iterator[str]:
    functions = receipt.functions
    if functions.dtype is not None:
        lists = ", ".join(f"{count} {name}" for name, count in functions.lists)
        yield paragraph(f"Functions are cast to {functions.dtype} and float32.  Listed: {lists}.")
    for change in functions.changes:
        yield paragraph(change)
    if functions.note:
        yield markup.preformatted(functions.note) if "\n" in functions.note else paragraph(functions.note, "soft")
    if functions.ops:
        yield op_table(receipt)


def op_table(receipt: Receipt) -> str:
    """How often each function ran in each type."""
    head, rows = wording.op_table(receipt.functions.ops or ())
    classes = [""] * (len(rows) - 1) + ["total"]
    # The list stands beside the function, which a narrow window has no room for in a column of its own.
    shown = [[f'{markup.name(row[0])} <span class="soft">{markup.name(row[1])}</span>', *row[2:]] for row in rows]
    return table(["function", *head[2:]], shown, numbers=range(1, len(head) - 1), classes=classes, markup=(0,))


def _optimizers(receipt: Receipt) -> Iterator[str]:
    for one in receipt.optimizers:
        line = f"{plural(one.weights, 'tensor')}, stepped by {one.by}; {wording.stepped(one)}"
        kind = ' class="bad"' if one.skips_in_a_row > 1 else ""
        yield f"<p><b>{escape(one.class_name)}</b>: <span{kind}>{escape(line)}</span></p>"
        yield paragraph(f"{one.why}  {one.masters}".strip(), "soft")
    if not receipt.optimizers:
        yield paragraph(wording.NO_OPTIMIZER, "soft")


def _losses(receipt: Receipt) -> Iterator[str]:
    for one in receipt.losses:
        yield paragraph(wording.loss(one))
        if len(one.history) > 1:
            yield plots.scale_over_backwards(one)
            if any(point.overflows for point in one.history):
                yield paragraph("Ticks at the bottom: backwards that overflowed.", "soft")
    if not receipt.losses:
        yield paragraph(wording.NO_LOSS, "soft")


def _memory(receipt: Receipt) -> Iterator[str]:
    memory = receipt.memory
    if not memory:
        return
    yield plots.memory_bar(memory, KINDS)
    rows = [
        (
            f'<span class="swatch" style="background: {plots.colour(one.kind, KINDS)}"></span>{escape(one.kind)}',
            one.device,
            number(one.tensors),
            size(one.bytes),
        )
        for one in memory
    ]
    total = ("together", "", "", size(sum(one.bytes for one in memory)))
    yield table(
        ("class", "device", "tensors", "memory"),
        [*rows, total],
        numbers=(2, 3),
        classes=[""] * len(rows) + ["total"],
        markup=(0,),
    )


def _shapes(receipt: Receipt) -> Iterator[str]:
    shapes = receipt.shapes
    if not shapes.found:
        text = f"{wording.SHAPES_FINE}  ({plural(shapes.audited, 'module')})" if shapes.audited else wording.SHAPES_NONE
        yield paragraph(text, "soft")
        return
    yield f'<p>{escape(wording.SHAPES_RULE)} <a href="{RULE}">{RULE}</a></p>'
    yield table(
        ("class", "dimension", "size", "pad to", "modules"),
        [
            (one.class_name, one.dimension, number(one.size), number(one.pad_to), _names(names))
            for one, names in wording.shapes(shapes.found)
        ],
        numbers=(2, 3),
        markup=(4,),
    )


def _gradients(receipt: Receipt) -> Iterator[str]:
    if receipt.gradients is None:
        yield paragraph(wording.NO_GRADIENTS, "soft")
    else:
        yield histogram_picture.section(receipt.gradients)


def _times(receipt: Receipt) -> Iterator[str]:
    times = receipt.times
    if times is None:
        yield paragraph(wording.NO_TIMES, "soft")
        return
    rows = [(p.name, p.what, wording.percent(times.share(p)), *wording.seconds(p)) for p in times.phases]
    head = ("part", "what", "share", "host", "device")[: max(map(len, rows), default=0)]
    yield paragraph(f"Of {plural(times.steps, 'step')}:")
    yield table(head, rows, numbers=range(2, len(head)))


def _software(receipt: Receipt) -> Iterator[str]:
    if receipt.software:
        yield table(("", ""), [(fact.name, fact.value) for fact in receipt.software])
