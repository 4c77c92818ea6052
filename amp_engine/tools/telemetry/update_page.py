"""An audit of updates as blocks of a page: verdict, picture, table."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from amp_engine.tools.page.page import Block, Figure, Sentence, Table
from amp_engine.tools.telemetry import plots
from amp_engine.tools.telemetry.update_report import LIMIT, AuditedOptimizer, AuditedTensor, UpdateReport, at_most
from amp_engine.tools.telemetry.wording import number, plural, share, size

SHOWN = 30
"""The table and the picture show this many tensors, the first ones."""

_HEAD = ("tensor", "weight", "shape", "erased", "never moved", "step / spacing", "take")
_LEGEND = (
    "erased: of the step that the optimizer makes of the same gradients in the next wider type; never moved: of the "
    "elements that it wanted to change; step / spacing: median, in distances to the weight's next number."
)
_ROW, _NAMES, _BARS, _WIDTH, _LONGEST = 20, 330, 520, 990, 48
_ERASED, _KEPT, _NEVER = plots.COLOURS[5], plots.COLOURS[1], "currentColor"


def blocks(report: UpdateReport) -> Sequence[Block]:
    """The verdict, a row for each tensor, and a line for each optimizer."""
    found: list[Block] = [Sentence(words, "" if report.is_well else "bad") for words in report.sentences]
    if report.tensors:
        found.append(Figure(picture(report.tensors)))
        found.append(Table([_cells(one) for one in report.tensors[:SHOWN]], _HEAD, numbers=range(3, 6)))
        if rest := report.tensors[SHOWN:]:
            most = at_most(max(one.erased for one in rest))
            found.append(Sentence(f"{plural(len(rest), 'more tensor')}, {most} erased; to_json() has all."))
        found.append(Sentence(_LEGEND, "soft"))
    return [*found, *(Sentence(_about(one), "soft") for one in report.optimizers)]


def _cells(one: AuditedTensor) -> tuple[str, ...]:
    weight = one.dtype if one.dtype == one.parameter_dtype else f"{one.dtype} of {one.parameter_dtype}"
    return (
        one.name,
        weight,
        "x".join(map(str, one.shape)) or "-",
        share(one.erased),
        share(one.never_moved),
        f"{one.step_in_spacings:.3g}",
        one.remedy,
    )


def _about(one: AuditedOptimizer) -> str:
    said = f"{one.class_name}: {number(one.audited)} of {plural(one.steps, 'step')} audited"
    if one.skipped:
        said += f", {number(one.skipped)} skipped or not finite"
    if one.milliseconds is not None:
        said += f"; the audit took {one.milliseconds:.3g} ms for each, and {size(one.bytes)}"
    return f"{said}.  {one.refused or one.note}".rstrip()


def picture(tensors: Sequence[AuditedTensor], is_file: bool = False) -> str:
    """Bars from 0 to 100 % erased, with a mark at the share that never moved; a file sets its own colours."""
    shown = tensors[:SHOWN]
    bottom = _ROW * len(shown) + 8
    ticks = "".join(
        f'<path d="M{_x(one):.1f} 4V{bottom}" stroke="currentColor" stroke-opacity="0.25"></path>'
        f'<text x="{_x(one):.1f}" y="{bottom + 16}" text-anchor="middle" fill-opacity="0.7">{100 * one:.0f} %</text>'
        for one in (0.0, LIMIT, 0.5, 1.0)
    )
    legend = (
        f'<g transform="translate({_NAMES} {bottom + 32})">{_key(0, _ERASED, "erased, 10 % or more lost")}'
        f"{_key(210, _KEPT, 'erased, less')}{_key(320, _NEVER, 'never moved')}</g>"
    )
    extra = ' xmlns="http://www.w3.org/2000/svg" style="background: #fff; color: #1b1f24"' if is_file else ""
    return (
        f'<svg viewBox="0 0 {_WIDTH} {bottom + 44}" width="100%" font-family="system-ui, sans-serif" font-size="12" '
        f'fill="currentColor" role="img" aria-label="Share of each tensor\'s steps that rounding erased"{extra}>'
        f"{ticks}{''.join(_bar(i, one) for i, one in enumerate(shown))}{legend}</svg>"
    )


def _bar(i: int, one: AuditedTensor) -> str:
    top = 6 + _ROW * i
    name = one.name if len(one.name) <= _LONGEST else f"...{one.name[3 - _LONGEST :]}"
    width = _x(min(one.erased, 1.0)) - _NAMES
    never = _x(one.never_moved)
    title = f"{one.name} ({one.dtype}): {share(one.erased)} erased, {share(one.never_moved)} never moved"
    return (
        f"<g><title>{escape(title)}</title>"
        f'<text x="{_NAMES - 8}" y="{top + 12}" text-anchor="end">{escape(name)}</text>'
        f'<rect x="{_NAMES}" y="{top + 2}" width="{width:.1f}" height="13" fill="{_ERASED if one.loses else _KEPT}">'
        f'</rect><path d="M{never:.1f} {top}v17" stroke="{_NEVER}" stroke-width="3"></path>'
        f'<text x="{_NAMES + _BARS + 12}" y="{top + 12}">{escape(f"{share(one.erased)}  {one.remedy}")}</text></g>'
    )


def _x(value: float) -> float:
    return _NAMES + _BARS * value


def _key(x: int, colour: str, words: str) -> str:
    return f'<rect x="{x}" y="-9" width="11" height="11" fill="{colour}"></rect><text x="{x + 17}">{words}</text>'
