"""The result of `amp.gradient_histogram` and its pictures: text, and matplotlib's if that is installed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from amp_engine.tools.page.page import Block, Page, Sentence, Verbatim
from amp_engine.tools.telemetry.magnitudes import Limits, Magnitudes
from amp_engine.tools.telemetry.wording import number, percent, scale

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ROWS = 44  # most rows of a text picture
_BAR = 26
# Colours that colour-blind people can distinguish: Okabe and Ito, https://jfly.uni-koeln.de/color/
_BARS, _AT_1, _AT_SCALE = "#0072b2", "#d55e00", "#e69f00"


@dataclass(frozen=True)
class GradientHistogram:
    """The gradients of one batch, counted by powers of two, without the loss scale.

    Attributes:
        title: names the models and the level.
        dtype: the type whose limits are marked, such as "float16".
        loss_scale: loss scale of the run when it was measured.
        measured_at: the scale of the gradients while they were counted: at float16 levels the largest that overflows
            nowhere, so that the fewest gradients were lost.
        activations: gradients of modules' outputs, each tensor once; without losses, which have no dimensions.
        weights: gradients of parameters.

    `str()` is a picture in text, `plot()` draws one with matplotlib; notebooks and receipts show it too.
    """

    title: str
    dtype: str
    loss_scale: float
    measured_at: float
    activations: Magnitudes
    weights: Magnitudes

    @property
    def parts(self) -> tuple[tuple[str, Magnitudes], ...]:
        """The kinds of gradients by name, without a kind that has no gradient."""
        both = ("activation gradients", self.activations), ("weight gradients", self.weights)
        return tuple((name, found) for name, found in both if found.total)

    def lost(self, scale: float | None = None) -> float:
        """Share, 0 to 1, of the nonzero gradients of both kinds that are 0 in `dtype` at a loss scale.

        Default: the loss scale of the run. Values that are already 0 at `measured_at` are not among the nonzero ones.
        """
        both = self.activations + self.weights
        return both.lost(getattr(torch, self.dtype), self.loss_scale if scale is None else scale)

    def plot(self, path: str | None = None) -> Figure:
        """The picture as a matplotlib figure; also written to `path` if given.

        Raises ModuleNotFoundError without matplotlib: `pip install amp_engine[plots]`.
        """
        try:
            from matplotlib.figure import Figure
        except ModuleNotFoundError as e:
            raise ModuleNotFoundError(
                "plot() draws by matplotlib, which is not installed.  Type: pip install amp_engine[plots].  print() of "
                "the histogram needs nothing."
            ) from e
        low, high = _span(self)
        drawn = Figure(figsize=(9, 1.2 + 2.9 * len(self.parts)), layout="constrained")
        axes = drawn.subplots(len(self.parts), 1, squeeze=False)[:, 0]
        for axis, (_, found), sentence in zip(axes, self.parts, losses(self), strict=True):
            exponents = [e for e, _ in found.counts]
            shares = [100 * n / max(1, found.nonzero) for _, n in found.counts]
            axis.bar(exponents, shares, width=0.9, align="edge", color=_BARS)
            for mark in _marks(self):
                if low < mark.exponent <= high + 1:
                    colour = _AT_SCALE if mark.is_at_scale else _AT_1
                    style = "-" if mark.what.startswith("0") else ":"
                    axis.axvline(
                        mark.exponent, color=colour, linestyle=style, label=f"below 2^{mark.exponent}: {mark.what}"
                    )
            axis.set_xlim(low, high + 1)
            axis.set_ylabel("% of those not 0")
            axis.set_title(sentence, fontsize=9, wrap=True)
            if axis.get_legend_handles_labels()[0]:
                axis.legend(fontsize=8, loc="best")
        axes[-1].set_xlabel("log2 of the magnitude, without the loss scale")
        drawn.suptitle(self.title)
        if path is not None:
            drawn.savefig(path, dpi=120)
        return drawn

    def __str__(self) -> str:
        return "\n".join([self._picture(), "", *losses(self)])

    def _picture(self) -> str:
        parts = self.parts
        low, high = _span(self)
        step = max(1, math.ceil((high - low + 1) / _ROWS))
        rows = [
            (top, [_share(found, top - step + 1, top) for _, found in parts]) for top in range(high, low - 1, -step)
        ]
        longest = max((share for _, shares in rows for share in shares), default=0.0) or 1.0
        left = list(_marks(self))
        lines = [f"{self.title}, by powers of two, without the loss scale"]
        lines.append(f"(measured at a scale of {scale(self.measured_at)})")
        lines.append("".join([" " * 9, *(f"{name:<{_BAR + 10}}" for name, _ in parts)]).rstrip())
        for top, shares in rows:
            while left and left[0].exponent > top:
                mark = left.pop(0)
                lines.append(f"{'':9}-- below 2^{mark.exponent}: {mark.what} --")
            cells = [f"{percent(s):>7} {_bar(s / longest):<{_BAR + 2}}" if s else " " * (_BAR + 10) for s in shares]
            lines.append("".join([f"{f'2^{top - step + 1}':>7}  ", *cells]).rstrip())
        lines += [f"{'':9}-- below 2^{mark.exponent}: {mark.what} --" for mark in left if mark.exponent > low - step]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return Page.of(*blocks(self)).html()


class _Mark(NamedTuple):
    """A limit of the type: `what` describes values below 2^exponent."""

    exponent: int
    what: str
    is_at_scale: bool  # at the run's loss scale; False: at scale 1


def _marks(histogram: GradientHistogram) -> list[_Mark]:
    """The limits at scale 1 and at the loss scale of the run, largest first."""
    limits, name = Limits.of(getattr(torch, histogram.dtype)), histogram.dtype
    shift = math.frexp(histogram.loss_scale)[1] - 1
    found = [
        _Mark(limits.smallest_normal, f"subnormal in {name} at scale 1", False),
        _Mark(limits.smallest - 1, f"0 in {name} at scale 1", False),
    ]
    if shift:
        at = f"at the loss scale of {scale(histogram.loss_scale)}"
        found += [
            _Mark(limits.smallest_normal - shift, f"subnormal {at}", True),
            _Mark(limits.smallest - 1 - shift, f"0 {at}", True),
        ]
    return sorted(found, key=lambda mark: -mark.exponent)


def losses(histogram: GradientHistogram) -> Iterator[str]:
    """A sentence for each kind of gradients."""
    dtype: torch.dtype = getattr(torch, histogram.dtype)
    for name, found in histogram.parts:
        at_1, at_scale = (percent(found.lost(dtype, s)) for s in (1.0, histogram.loss_scale))
        zeros = percent(found.zeros / found.total)
        bad = f"  {number(found.nonfinite)} are not finite." if found.nonfinite else ""
        yield (
            f"{name}: of {number(found.nonzero)} that are not 0, {histogram.dtype} loses {at_1} at scale 1 "
            f"and {at_scale} at {scale(histogram.loss_scale)}; {zeros} of all were 0.{bad}"
        )


def blocks(histogram: GradientHistogram) -> Sequence[Block]:
    """The picture in text, and a sentence for each kind of gradients."""
    return [Verbatim(histogram._picture()), *map(Sentence, losses(histogram))]


def _span(histogram: GradientHistogram) -> tuple[int, int]:
    """The lowest and the highest exponent to draw: of all values, and of limits within 12 exponents of them."""
    found = [e for _, part in histogram.parts for e, _ in part.counts] or [0]
    near = [m.exponent for m in _marks(histogram) if min(found) - 12 <= m.exponent <= max(found) + 12]
    return min([*found, *(e - 1 for e in near)]), max([*found, *near])


def _share(found: Magnitudes, low: int, high: int) -> float:
    return sum(n for e, n in found.counts if low <= e <= high) / max(1, found.nonzero)


def _bar(share: float) -> str:
    return "#" * max(1, round(_BAR * share))
