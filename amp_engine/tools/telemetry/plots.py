"""The two plots of a receipt as inline SVG. Lines and bars scale with the window; text is HTML, and does not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from amp_engine.tools.telemetry import wording
from amp_engine.tools.telemetry.records import Loss, Memory

# Colours that colour-blind people can distinguish: Okabe and Ito, https://jfly.uni-koeln.de/color/
COLOURS = ("#0072b2", "#56b4e9", "#e69f00", "#cc79a7", "#009e73", "#d55e00", "#d55e00", "#999999")
_WIDTH, _HEIGHT, _MARGIN = 1000.0, 160.0, 12.0
_TICKS = '<p class="soft">Ticks at the bottom: backwards that overflowed.</p>'

STYLE = """
.amp .plot { display: grid; grid-template-columns: auto 1fr; column-gap: .6em; margin: .6em 0; }
.amp .plot svg, .amp .bar svg { display: block; width: 100%; background: var(--shade); }
.amp .plot svg { height: 160px; } .amp .bar svg { height: 28px; }
.amp .plot .y { display: flex; flex-direction: column; justify-content: space-between; text-align: right;
  padding: 4px 0; } .amp .plot .x { grid-column: 2; display: flex; justify-content: space-between; }
.amp .plot .y, .amp .plot .x { color: var(--soft); font-size: 12px; font-variant-numeric: tabular-nums; }
.amp .swatch { display: inline-block; width: .8em; height: .8em; margin: 0 .5em; vertical-align: -.05em; }
"""


def scale_over_backwards(loss: Loss) -> str:
    """The loss scale as a stair on a logarithmic axis, with a tick for each overflow. Needs at least two points."""
    last = max(loss.backwards, loss.history[-1].backward, 1)
    exponents = [math.log2(point.scale) for point in loss.history]
    low, high = min(exponents), max(exponents)
    if high - low < 1:
        low, high = low - 0.5, high + 0.5

    def x(backward: int) -> float:
        return _WIDTH * backward / last

    def y(exponent: float) -> float:
        return _MARGIN + (_HEIGHT - 3 * _MARGIN) * (high - exponent) / (high - low)

    path = f"M{x(loss.history[0].backward):.1f} {y(exponents[0]):.1f}"
    for point, exponent in zip(loss.history[1:], exponents[1:], strict=True):
        path += f"H{x(point.backward):.1f}V{y(exponent):.1f}"
    path += f"H{_WIDTH:.1f}"
    ticks = "".join(
        f"M{x(point.backward):.1f} {_HEIGHT - _MARGIN:.1f}V{_HEIGHT:.1f}" for point in loss.history if point.overflows
    )
    stroke = 'fill="none" vector-effect="non-scaling-stroke"'
    marks = f'<path d="{ticks}" {stroke} style="stroke: var(--bad)" stroke-width="2"></path>' if ticks else ""
    label = f"Loss scale of loss_id {loss.loss_id} over {wording.plural(loss.backwards, 'backward')}"
    return (
        f'<div class="plot"><div class="y"><span>{_power(high)}</span><span>{_power(low)}</span></div>'
        f'<svg viewBox="0 0 {_WIDTH:.0f} {_HEIGHT:.0f}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(label)}"><path d="{path}" {stroke} style="stroke: var(--mark)" stroke-width="2"></path>'
        f"{marks}</svg>"
        f'<div class="x"><span>0</span><span>backward</span><span>{wording.number(last)}</span></div></div>'
        f"{_TICKS if ticks else ''}"
    )


def memory_bar(memory: Sequence[Memory], kinds: Sequence[str]) -> str:
    """A bar with a part for each class, whose width is its share of the bytes, and a legend of the colours."""
    total = sum(one.bytes for one in memory)
    parts, start = [], 0.0
    colours = {one.kind: COLOURS[kinds.index(one.kind) % len(COLOURS)] for one in memory}
    for one in memory:
        width = _WIDTH * one.bytes / total if total else 0.0
        title = f"{one.kind} on {one.device}: {wording.size(one.bytes)}"
        parts.append(
            f'<rect x="{start:.2f}" y="0" width="{width:.2f}" height="28" fill="{colours[one.kind]}">'
            f"<title>{escape(title)}</title></rect>"
        )
        start += width
    legend = " ".join(
        f'<span class="swatch" style="background: {colour}"></span>{escape(kind)}' for kind, colour in colours.items()
    )
    return (
        f'<div class="bar"><svg viewBox="0 0 {_WIDTH:.0f} 28" preserveAspectRatio="none" role="img" '
        f'aria-label="Memory by class">{"".join(parts)}</svg></div><p class="soft">{legend}</p>'
    )


def _power(exponent: float) -> str:
    return wording.scale(2.0**exponent)
