"""An audit of updates as blocks of a page: verdict and table."""

from __future__ import annotations

from collections.abc import Sequence

from amp_engine.tools.page.page import Block, Sentence, Table
from amp_engine.tools.telemetry.update_report import AuditedOptimizer, AuditedTensor, UpdateReport, at_most
from amp_engine.tools.telemetry.wording import number, plural, share, size

SHOWN = 10
"""The table shows this many tensors, the first ones."""

_HEAD = ("tensor", "weight", "shape", "erased", "never moved", "step / spacing", "take")
_LEGEND = (
    "erased: of the step that the optimizer makes of the same gradients in the next wider type; never moved: of the "
    "elements that it wanted to change; step / spacing: median, in distances to the weight's next number."
)


def blocks(report: UpdateReport) -> Sequence[Block]:
    """The summary, the verdict, a row for each tensor, and a line for each optimizer."""
    found: list[Block] = [Sentence(words, "title") for words in report.summary]
    found += [Sentence(words, "" if report.is_well else "bad") for words in report.sentences]
    if report.tensors:
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
