"""A receipt as text, 100 columns wide where names allow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING

from amp_engine.telemetry import histogram_picture, wording
from amp_engine.telemetry.wording import number, plural, size

if TYPE_CHECKING:
    from amp_engine.telemetry.receipt import Receipt

WIDTH = 100


def rendered(receipt: Receipt) -> str:
    """All sections, each under its name."""
    lines = [receipt.title, "=" * len(receipt.title)]
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
        found = list(section(receipt))
        if found:
            lines += ["", name, *(f"  {line}".rstrip() for line in found)]
    return "\n".join(lines)


def _asked(receipt: Receipt) -> Iterator[str]:
    asked = receipt.asked
    yield asked.brief
    rows = [(p.name, p.value, f"the level alone: {p.default}" if p.is_override else "") for p in asked.properties]
    yield from _columns(rows)


def _models(receipt: Receipt) -> Iterator[str]:
    for model in receipt.models:
        yield f"{model.name}: {model.class_name}" if model.name else model.class_name
        rows = [
            (f"  {t.kind}", t.dtype, number(t.elements), f"in {plural(t.tensors, 'tensor')}", size(t.bytes))
            for t in model.types
        ]
        yield from _columns(rows, right=(2, 4))
        if model.kept:
            yield "  not in half:"
        for total, modules in wording.grouped(model.kept):
            what = f"{total.dtype}, {total.why}" if total.dtype else total.why
            names = wording.some([wording.module(one.module) for one in modules])
            text = f"{len(modules)} x {total.class_name}, {number(total.elements)} elements: {what} ({names})"
            yield from _wrapped(text, "    ")


def _functions(receipt: Receipt) -> Iterator[str]:
    functions = receipt.functions
    if functions.dtype is not None:
        lists = ", ".join(f"{count} {name}" for name, count in functions.lists)
        yield from _wrapped(f"cast to {functions.dtype} and float32; listed: {lists}")
    yield from functions.changes
    if functions.note:
        yield from _wrapped(functions.note)
    if functions.ops:
        head, rows = wording.op_table(functions.ops)
        yield from _ruled([head, *rows])


def _optimizers(receipt: Receipt) -> Iterator[str]:
    for one in receipt.optimizers:
        yield f"{one.class_name}: {plural(one.weights, 'tensor')}, stepped by {one.by}; {wording.stepped(one)}"
        yield from _wrapped(one.why, "  ")
        if one.masters:
            yield f"  {one.masters}"
    if not receipt.optimizers:
        yield wording.NO_OPTIMIZER


def _losses(receipt: Receipt) -> Iterator[str]:
    for one in receipt.losses:
        yield wording.loss(one)
        moves = [f"{p.backward}: {wording.scale(p.scale)}{'!' * (p.overflows > 0)}" for p in one.history]
        if len(moves) > 1:
            shown = moves if len(moves) <= 12 else [*moves[:4], "...", *moves[-7:]]
            yield from _wrapped(f"scale after backward (!: overflow)  {', '.join(shown)}", "  ")
    if not receipt.losses:
        yield wording.NO_LOSS


def _memory(receipt: Receipt) -> Iterator[str]:
    devices = {one.device for one in receipt.memory}
    rows = [
        (one.kind, one.device if len(devices) > 1 else "", plural(one.tensors, "tensor"), size(one.bytes))
        for one in receipt.memory
    ]
    total = sum(one.bytes for one in receipt.memory)
    yield from _columns([*rows, ("together", "", "", size(total))], right=(2, 3))


def _shapes(receipt: Receipt) -> Iterator[str]:
    shapes = receipt.shapes
    if not shapes.found:
        yield f"{wording.SHAPES_FINE}  ({plural(shapes.audited, 'module')})" if shapes.audited else wording.SHAPES_NONE
        return
    yield from _wrapped(wording.SHAPES_RULE)
    for one, names in wording.shapes(shapes.found):
        yield f"{one.class_name}: {one.dimension} = {one.size}, pad to {one.pad_to}"
        yield from _wrapped(wording.some(names), "    ")


def _gradients(receipt: Receipt) -> Iterator[str]:
    if receipt.gradients is None:
        yield from _wrapped(wording.NO_GRADIENTS)
        return
    for sentence in histogram_picture.losses(receipt.gradients):
        yield from _wrapped(sentence)


def _times(receipt: Receipt) -> Iterator[str]:
    times = receipt.times
    if times is None:
        yield from _wrapped(wording.NO_TIMES)
        return
    yield f"of {plural(times.steps, 'step')}"
    rows = [(p.name, wording.percent(times.share(p)), *wording.seconds(p), p.what) for p in times.phases]
    yield from _columns(rows, right=range(1, len(rows[0]) - 1) if rows else ())


def _software(receipt: Receipt) -> Iterator[str]:
    for fact in receipt.software:
        first, *rest = wrap(fact.value, WIDTH - 14, break_on_hyphens=False) or [""]
        yield f"{fact.name:<12}{first}"
        yield from (" " * 12 + line for line in rest)


def _columns(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> Iterator[str]:
    if not rows:
        return
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        yield "  ".join(cells).rstrip()


def _ruled(rows: Sequence[Sequence[str]]) -> list[str]:
    lines = list(_columns(rows, right=range(2, len(rows[0]))))
    rule = "-" * max(map(len, lines))
    return [lines[0], rule, *lines[1:-1], rule, lines[-1]]


def _wrapped(text: str, indent: str = "") -> list[str]:
    return [indent + line for line in wrap(text, WIDTH - 2 - len(indent), break_on_hyphens=False)]
