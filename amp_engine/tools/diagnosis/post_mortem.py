"""Explains an overflow afterwards: its record, its likely cause, and the lines to print."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from amp_engine.levels.scale_rule import DynamicLossScale
from amp_engine.tools.diagnosis.saved_values import advice, is_of_range
from amp_engine.tools.page.page import Page, Paged, Sentence, Table

Cause = Literal["data", "forward", "backward", "divergence", "weights", "elsewhere"]

# A loss explodes if it is more than this many times the median of the losses before it. Batches of one task differ by
# less, and a learning rate that is too high exceeds it within a few steps. Chosen by us; there is no source.
EXPLOSION = 10.0
# A single step after steps that left the loss unchanged does not raise it by a larger factor; a different batch does.
JUMP = 1e6
RISES = 3
"""The loss must double at least this many times in a row, without a much lower loss in between."""


_EPS = "Add an eps inside.  A torch.where around it does not help."
_UNKNOWN = (
    "Why is not known: an overflow at this scale, or nan at any scale, as of a derivative that is not defined (sqrt of "
    "0) or of a value that the loss hides.  amp.find_overflow(step_fn) tells."
)
_UNSEEN = (
    "Why is not known, as the loss was not passed to amp.scale_loss: it may not be finite itself.  "
    "amp.find_overflow(step_fn) tells."
)
_UNTRACED = "amp.find_overflow(step_fn) tells where it began; from now on explanations do, too."
_SINCE_THE_CHECK = (
    "No step was taken on a gradient that was not finite when it was checked: look at the learning rate, and at what "
    "else writes weights."
)


class Place(NamedTuple):
    """The name of a parameter, and the path and class of its module ("" and None if no model has it).

    A tied parameter has all of its names, "embed.weight = head.weight", and the module of the first.
    """

    parameter: str
    module: str = ""
    module_type: str | None = None


def place_of(param: Tensor, places: Mapping[int, Place]) -> Place:
    """The place of a parameter by its id; if no model has it, its shape replaces the name."""
    return places.get(id(param), Place(f"a parameter of shape {tuple(param.shape)}"))


@dataclass(frozen=True)
class OverflowRecord:
    """One backward whose gradients, or whose loss, were not finite.

    Attributes:
        backward: its number among the scaled backwards of the engine, from 1.
        loss_id: the id of the loss, and so of its scaler.
        loss_scale: the factor of the loss.
        loss: the loss before scaling; the sum if there are several; None if the engine does not know it.
        cause: "data": a value that is not finite came into the graph from outside; "forward": an operation of the
            forward made it, or the graph does not tell; "backward": a gradient has such a value, while loss and
            forward are not known to have one;
            "divergence": losses have risen from step to step until they exploded; "weights": a parameter is not finite;
            "elsewhere": on another rank, or in an earlier backward of the step.
        parameter: name of the first parameter whose gradient was not finite, in the order of the backward from the loss
            to the input; None without any.
        module: name of the module of `parameter`, "encoder.0"; "" for the model itself.
        module_type: class of that module.
        kind: "nan" if the gradient of `parameter` has a NaN, else "inf"; None without `parameter`.
        elements: number of elements of that gradient that were not finite; None if they were not counted, as on GPUs,
            where the overflow reaches the host too late.
        numel: number of all elements of `parameter`.
        operation: the operation, by autograd's name ("softmax"), that gave the first value that is not finite in the
            forward, or took it from outside; None if the forward is not the cause, or its graph did not tell.
        is_exact: True if all inputs of `operation` are known to have been finite. If not, an operation before it may
            have made the value, because the graph does not keep every value for the backward.
        near: name of the parameter that `operation` used, or else of the last parameter used before it.
        nonfinite: names of all parameters whose gradients were not finite, in the order of the optimizer.
        checked: number of gradients that were checked.
        weights: names of the parameters that are not finite themselves; searched if the loss is not finite.
        outgrown: those of `weights` whose FP32 masters are finite, but too large for the type of the model; with the
            largest magnitude of each master.
        skipped: True if the step was skipped.
        growth: the loss over the median of the losses before; None if either is not known.
        why: "log of 0 in 36 of 40 elements", if the inputs of `operation` tell; "sqrt of 0 in 3 of 4 elements" for a
            derivative that is not finite, searched from the second overflow in a row on; else None.
        instead: name of the parameter whose gradient is the first that is not finite if `parameter` is tied, and its
            last use made no such gradient; else None.
        micro_batches: the first and last micro-batch of this backward, and the number of micro-batches of the step.
        rank: this process's rank in the group that agreed on the overflow.
        rank_losses: the loss of each rank of that group, None if it is not known; empty without a group.
        region: the parameters before and after the checkpointed operations with the value, None at an end; else None.
        hidden: names of parameters in checkpointed parts; one of them has the first gradient that is not finite.
        untrained: for the cause "data", names of the models' parameters that no optimizer steps, because a part of the
            model that has only such parameters leaves no graph; else empty.
        buffer: for the cause "data", name of the models' buffer that holds the value; None if no buffer does.
        only_checked: for the cause "weights", True if, as far as the host knows, no step was taken on a gradient that
            was not finite when it was checked.
        is_checked: False if gradients are not checked at all, so that the step is taken.
        is_traced: False for the first overflow, before which nobody looks: `parameter` is then the last of `nonfinite`,
            and `elements`, `operation`, `near` and `why` are None.
    """

    backward: int
    loss_id: int
    loss_scale: float
    loss: float | None
    cause: Cause
    parameter: str | None = None
    module: str | None = None
    module_type: str | None = None
    kind: Literal["inf", "nan"] | None = None
    elements: int | None = None
    numel: int = 0
    operation: str | None = None
    near: str | None = None
    nonfinite: tuple[str, ...] = ()
    checked: int = 0
    weights: tuple[str, ...] = ()
    outgrown: tuple[tuple[str, float], ...] = ()
    skipped: bool = True
    growth: float | None = None
    is_exact: bool = True
    why: str | None = None
    untrained: tuple[str, ...] = ()
    instead: str | None = None
    micro_batches: tuple[int, int, int] = (1, 1, 1)
    rank: int = 0
    rank_losses: tuple[float | None, ...] = ()
    region: tuple[str | None, str | None] | None = None
    hidden: tuple[str, ...] = ()
    buffer: str | None = None
    only_checked: bool = False
    is_checked: bool = True
    is_traced: bool = True

    @property
    def loss_is_finite(self) -> bool:
        """True if the loss before scaling is finite or not known."""
        return self.loss is None or math.isfinite(self.loss)

    def __str__(self) -> str:
        return f"Amp post-mortem:  {self.cause}.  {_what_happened(self)}"


class OverflowReport(Paged, Sequence[OverflowRecord]):
    """The overflows that the host knows of, oldest first; `str()` is a table of them.

    Args:
        records: the newest records, as many as the engine keeps.
        dropped: number of older records that are not kept.
    """

    def __init__(self, records: Sequence[OverflowRecord], dropped: int = 0) -> None:
        self._records = tuple(records)
        self.dropped = dropped

    def __getitem__(self, index: int) -> OverflowRecord:  # type: ignore[override]
        return self._records[index]

    def __len__(self) -> int:
        return len(self._records)

    def _page(self) -> Page:
        if not self._records:
            return Page.of(Sentence("No backward has overflowed, as far as the host has heard."))
        head = ("cause", "first in", "kind", "operation", "step", "backward", "loss_id", "scale", "loss", "elements")
        rows = [
            (
                r.cause,
                where_it_began(r) or "-",
                r.kind or "-",
                r.operation or "-",
                "skipped" if r.skipped else "taken",
                str(r.backward),
                str(r.loss_id),
                f"{r.loss_scale:g}",
                _number(r.loss),
                "-" if r.elements is None else f"{r.elements} of {r.numel}",
            )
            for r in self._records
        ]
        older = [Sentence(f"{self.dropped} older ones are not kept.")] if self.dropped else []
        return Page.of(Table(rows, head, numbers=range(5, len(head))), *older)


def where_it_began(record: OverflowRecord) -> str | None:
    """The parameter nearest to the origin of an overflow. Gradients of a loss that is not finite do not show it."""
    if record.cause == "weights" and record.weights:
        return record.weights[0]
    return record.near or (record.parameter if record.loss_is_finite else None)


def likely_cause(
    loss: float | None,
    earlier: Sequence[float],
    *,
    has_gradient: bool,
    has_bad_weights: bool,
    traced_to: Literal["data", "forward"] | None,
    rank_losses: Sequence[float | None],
) -> Cause:
    """The likely reason why gradients are not finite.

    Args:
        earlier: losses of clean backwards, oldest first.
        traced_to: the known origin of a forward value that is not finite, which a finite loss may hide; else None.
    """
    is_finite = (loss is None or math.isfinite(loss)) and traced_to is None
    if traced_to == "data" and not has_bad_weights:
        return "data"
    if has_exploded(loss, earlier):
        return "divergence"
    if has_bad_weights:
        return "weights"
    if not is_finite:
        return "forward"
    if any(one is not None and not math.isfinite(one) for one in rank_losses):
        return "elsewhere"
    return "backward" if has_gradient else "elsewhere"


def growth_of(loss: float | None, earlier: Sequence[float]) -> float | None:
    """`loss`, or the last of `earlier` if it is not finite, over the median of the losses before; None if unknown."""
    past = [abs(one) for one in earlier]
    if loss is None or not math.isfinite(loss):
        loss = past.pop() if past else None
    if loss is None or not past:
        return None
    median = sorted(past)[(len(past) - 1) // 2]
    return abs(loss) / max(median, 1e-30)


def has_exploded(loss: float | None, earlier: Sequence[float]) -> bool:
    """True if losses rise step after step, as when training diverges.

    One bad batch after many good ones is a single rise, and so are batches that are all far worse than those that a
    model was trained on. A loss that is not finite counts as higher than any other.
    """
    growth = growth_of(loss, earlier)
    if growth is None or growth <= EXPLOSION:
        return False
    losses = [abs(one) for one in earlier]
    if loss is not None:
        losses.append(abs(loss) if math.isfinite(loss) else math.inf)
    level = max(sorted(losses[:-1])[(len(losses) - 2) // 4], 1e-30)  # a quartile: a median of few has risen already
    last = list(itertools.takewhile(lambda one: one > 2 * level, reversed(losses)))
    rises = 0
    for one in reversed(last):
        if one >= 2 * level:
            if rises == 0 and one > JUMP * level and len(losses) - len(last) > 2:
                return False
            level, rises = one, rises + 1
    return rises >= RISES


def _what_happened(record: OverflowRecord) -> str:
    """The sentences after the cause."""
    gradient = _first_gradient(record)
    numbers = f"{_whose_loss(record)} is {_number(record.loss)}, scaled by {record.loss_scale:g}."
    if record.growth is not None and record.growth > EXPLOSION and record.cause in ("forward", "backward"):
        numbers += (
            f"  Losses have grown {record.growth:.3g}-fold at once: this batch is unlike those before, or training "
            "begins to diverge."
        )
    if not record.skipped and record.checked > 0 and not record.nonfinite:
        numbers += "  All gradients are finite, so the step was taken."
    if not record.is_checked:
        numbers += (
            "  Gradients are not checked here, so the step is taken: amp.initialize(..., skip_on_overflow=True) skips "
            "such steps."
        )
    if record.loss_is_finite and record.cause in ("data", "forward"):
        numbers += "  The loss does not show what is not finite in the forward, and gradients do."
    numbers += _ranks(record)
    near = f", at or after {record.near}," if record.near else ""
    if record.cause == "data":
        given = f"{numbers}  {record.operation}{near} was given a value that is not finite from outside of the graph"
        if record.buffer is not None:
            return f"{given}: the buffer {record.buffer} holds it."
        frozen = f", at parameters that are not trained ({some(record.untrained)})" if record.untrained else ""
        return (
            f"{given}: look at the batch, at buffers, at what is computed of them without parameters{frozen}, and at "
            "models that run without gradients.  amp.find_overflow(step_fn) tells which."
        )
    if record.cause == "forward" and record.region is not None:
        return (
            f"{numbers}  The first value that is not finite came from {_checkpointed(record)}, of whose operations "
            "nothing is kept: amp.find_overflow(step_fn) tells which."
        )
    if record.cause == "forward" and record.why is not None:
        return f"{numbers}  {record.why.rstrip(',')}{near.rstrip(',')}.  {advice(record.why)}"
    if record.cause == "forward" and record.operation is not None and not record.is_exact:
        return (
            f"{numbers}  {record.operation}{near} or an operation before it, of which nothing was kept, gave the first "
            "value that is not finite: amp.find_overflow(step_fn) tells which."
        )
    if record.cause == "forward" and record.operation is not None:
        return f"{numbers}  {record.operation}{near} gave the first value that is not finite."
    if record.cause == "forward" and not record.is_traced:
        return f"{numbers}  {_UNTRACED}"
    if record.cause == "forward":
        return f"{numbers}  Its graph does not tell where that comes from: amp.find_overflow(step_fn) does."
    if record.cause == "divergence":
        since = (
            "" if record.growth is None else f"  Losses have grown {record.growth:.3g}-fold: lower the learning rate."
        )
        return f"{numbers}{since}  {gradient}".rstrip()
    if record.cause == "weights":
        why = f"  {_outgrown(record)}" if record.outgrown else ""
        if record.only_checked and not record.outgrown:
            why = f"  {_SINCE_THE_CHECK}"
        return f"{numbers}  Parameters are not finite: {some(record.weights)}.{why}"
    if record.cause == "elsewhere" and record.parameter is not None:
        return numbers
    if record.cause == "elsewhere":
        return (
            f"{numbers}  Each gradient of this process is finite: look at the other ranks, at earlier backwards of the "
            "step, and whether zero_grad() is called after steps that were skipped."
        )
    if record.loss is None and record.why is None:
        return f"{gradient}  {numbers}  {_UNSEEN}"
    why = "" if record.why is None else f"  {_of_derivative(record.why)}"
    has_grown = record.growth is not None and record.growth > EXPLOSION
    if not record.is_traced:
        why = f"  {_UNTRACED}"
    elif record.kind == "nan" and record.why is None and not has_grown and not _ranks(record):
        why = f"  {_UNKNOWN}"
    return f"{gradient}  {numbers}{why}"


def _outgrown(record: OverflowRecord) -> str:
    """Sentences on masters whose values are too large for the model's type."""
    named = some([f"{name} ({largest:.6g})" for name, largest in record.outgrown])
    return (
        f"Their FP32 masters are finite, and beyond float16's 65504: {named}.  Train on in bfloat16 (opt_level='O5'), "
        "keep the module in FP32 (amp.keep_float), or go back to a checkpoint, with weight decay or a lower learning "
        "rate."
    )


def _first_gradient(record: OverflowRecord) -> str:
    """The sentence about the first gradient that is not finite; empty without one."""
    if record.parameter is None:
        return ""
    if not record.is_traced:
        found = f"{len(record.nonfinite)} of {record.checked}"
        return f"{found} gradients are not finite: {some(record.nonfinite[::-1])}."
    if record.hidden:
        return (
            f"The first gradient that is not finite, as the backward goes, is in {_checkpointed(record)}, of which no "
            f"order is kept (one of {some(record.hidden)})."
        )
    count = "" if record.elements is None else f" in {record.elements} of {record.numel} elements"
    kind = f"{record.kind}{count}"
    if record.instead is not None:
        return (
            f"The gradient of {record.instead} is the first that is not finite, as the backward goes, or that of "
            f"{record.parameter}, which is used before and after it: {kind}."
        )
    of = f" ({record.module_type})" if record.module_type else ""
    return f"The gradient of {record.parameter}{of} is the first that is not finite, as the backward goes: {kind}."


def _whose_loss(record: OverflowRecord) -> str:
    """The beginning of the sentence about the loss."""
    first, last, count = record.micro_batches
    if count == 1:
        return "The loss"
    if first == last:
        return f"Micro-batch {first} of {count}: the loss"
    return f"One of micro-batches {first} to {last}: the last loss"


def _ranks(record: OverflowRecord) -> str:
    """The sentence about a rank whose loss is far from those of other ranks; empty without one."""
    known = [(rank, one) for rank, one in enumerate(record.rank_losses) if one is not None]
    count = len(record.rank_losses)
    if len(known) < 2:
        return ""
    bad = [(rank, one) for rank, one in known if not math.isfinite(one)]
    if not record.loss_is_finite:
        return f"  This is rank {record.rank} of {count}." if len(bad) < len(known) else ""
    if bad:
        rank, loss = bad[0]
        return f"  Look at what rank {rank} of {count} says: its loss is {_number(loss)}."
    *others, (largest, rank) = sorted((abs(one), rank) for rank, one in known)
    middle, other = others[len(others) // 2]
    if largest <= EXPLOSION * max(middle, 1e-30):
        return ""
    its, others_loss = dict(known)[rank], dict(known)[other]
    return f"  Look at rank {rank} of {count}: its loss is {_number(its)}, rank {other}'s {_number(others_loss)}."


def _checkpointed(record: OverflowRecord) -> str:
    """Words for a checkpointed part and the parameters around it."""
    said = "a checkpointed part"
    before, after = record.region or (None, None)
    if before and after:
        return f"{said}, between {before} and {after}"
    return f"{said}, after {before}" if before else f"{said}, before {after}" if after else said


def _of_derivative(why: str) -> str:
    """Sentences on a derivative that is not finite, or numbers beyond their type's range, behind a finite loss."""
    if is_of_range(why):
        return f"On the way {why}.  {advice(why)}"
    return f"{why}: its derivative is not finite there.  {_EPS}"


def repeated(record: OverflowRecord, count: int) -> str:
    """The line for a cause that `count` skips in a row had."""
    where = where_it_began(record)
    at = f", at {where}" if where else ""
    return f"Amp post-mortem:  {record.cause}{at}, as in each of the last {count} skipped steps."


def diagnosis(row: Sequence[OverflowRecord], skips: int, loss_scale: float) -> str:
    """The message after many skips in a row.

    Args:
        row: the skips of this loss.
        skips: number of skips in a row, of all losses.
        loss_scale: the present loss scale.
    """
    # A bad loss that nobody traced counts as "forward", but may be of the others' cause.
    sure = [record for record in row if record.is_traced or record.cause != "forward"]
    causes = Counter(record.cause for record in sure or row)
    cause = row[-1].cause if row[-1].weights else causes.most_common(1)[0][0]
    if cause == "backward" and all(record.why is None for record in row if record.cause == cause):
        # Prefer other causes: a lower scale may mend "backward" and "elsewhere", but no other.
        cause = max(causes, key=lambda one: (one not in ("backward", "elsewhere"), causes[one]))
    mixed = ""
    if len(causes) > 1:
        counts = ", ".join(f"{count} {one}" for one, count in causes.items())
        mixed = f"  Causes differ: {counts}; the last {cause}:"
    of_cause = [record for record in row if record.cause == cause]
    record = of_cause[-1]
    is_finite = "not known" if record.loss is None else "yes" if record.loss_is_finite else "no"
    bad = f"{len(record.nonfinite)} of {record.checked} ({some(record.nonfinite) or 'none'})"
    return (
        f"Amp diagnosis:  {skips} steps in a row were skipped; loss scaler {record.loss_id} is at {loss_scale}.{mixed}"
        f"  Loss finite: {is_finite}.  Non-finite gradients: {bad}.  {_what_happened(record)}  {_remedy(of_cause)}"
    ).rstrip()


def _remedy(row: Sequence[OverflowRecord]) -> str:
    """Return what several skips of one cause tell beyond the explanation of one; empty if that is nothing."""
    first, record = row[0], row[-1]
    is_lowered = record.loss_scale < first.loss_scale
    if record.cause == "weights":
        return "No scale can help." if record.outgrown else "No scale can help: go back to a checkpoint."
    if record.cause == "forward" and record.why is None:
        return (
            "No scale can help: look at the learning rate, the input, a logarithm or a division, or an overflow of "
            "float16 (bfloat16 has none: 'O4', 'O5')."
        )
    if record.cause in ("data", "forward"):
        return "No scale can help."
    if record.cause == "divergence":
        return "No scale and no type mends that: go back to a checkpoint if the loss does not come down by itself."
    if record.parameter is None or (record.loss is None and record.why is None):
        return ""
    if record.why is not None:
        return "" if is_of_range(record.why) else "No scale and no type mends that."
    if record.growth is not None and record.growth > EXPLOSION:
        return "Lower the learning rate, and go back to a checkpoint if the loss does not come down by itself."
    if record.kind == "inf" and is_lowered and len(record.nonfinite) < len(first.nonfinite):
        return (
            f"And fewer gradients overflow the lower the scale is: {len(first.nonfinite)} at {first.loss_scale:g}, "
            f"{len(record.nonfinite)} at {record.loss_scale:g}.  The scale is nearly found: nothing to do."
        )
    if is_lowered and record.loss_scale > DynamicLossScale.init_scale and first.kind == "inf":
        return (
            f"The scale is above {DynamicLossScale.init_scale:g}, which few models bear: it is on its way down.  "
            "Nothing to do yet."
        )
    if record.kind == "nan":
        scales = f"It is NaN at each scale from {first.loss_scale:g} to {record.loss_scale:g}.  "
        if not is_lowered or any(one.kind != "nan" for one in row):
            scales = ""
        return (
            f"{scales}If it overflows, a lower scale helps, FP32 (amp.keep_float), or bfloat16.  A derivative that is "
            "not defined (sqrt or norm of 0, 0 in a division) is NaN in every type: add an eps inside."
        )
    return "Keep its module and the one behind it in FP32 (amp.keep_float), or use bfloat16 (opt_level='O4' or 'O5')."


def some(names: Sequence[str]) -> str:
    """The first eight names, for a line."""
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def _number(loss: float | None) -> str:
    return "not known" if loss is None else f"{loss:.6g}"
