"""Explains and records overflows: each of them, and once many skips in a row."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from amp_engine.engine import Engine
from amp_engine.ground.distributed import is_any_sharded, local_of
from amp_engine.levels.report import Reporter
from amp_engine.scaling.losses import Scaling
from amp_engine.stepping.backward import Backward
from amp_engine.stepping.exact import exact_value
from amp_engine.stepping.forward_order import CHECKPOINTED, Origin
from amp_engine.stepping.pending import SKIPS_BEFORE_DIAGNOSIS
from amp_engine.tools.diagnosis.post_mortem import (
    OverflowRecord,
    OverflowReport,
    Place,
    diagnosis,
    growth_of,
    likely_cause,
    place_of,
    repeated,
    where_it_began,
)
from amp_engine.tools.diagnosis.recorder import buffers_in, places_in

KEPT_RECORDS = 1000


@dataclass
class _Row:
    """The skips in a row of one loss.

    Attributes:
        cause: the cause of the last skip.
        count: number of last skips in a row with this cause.
        records: the records of all skips, up to the diagnosis.
    """

    cause: tuple[object, ...] = ()
    count: int = 0
    records: list[OverflowRecord] = field(default_factory=list)


class OverflowWatch:
    """Turns overflows into records and explanations.

    Args:
        reporter: prints the messages.
        models: called, when there is a message, for the initialized models.
        params: called for the parameters that are trained.
        scaling: has earlier losses.
    """

    def __init__(
        self,
        reporter: Reporter,
        models: Callable[[], Sequence[nn.Module]],
        params: Callable[[], Sequence[nn.Parameter]],
        scaling: Scaling,
    ) -> None:
        self._reporter = reporter
        self._models = models
        self._params = params
        self._scaling = scaling
        self._records: deque[OverflowRecord] = deque(maxlen=KEPT_RECORDS)
        self._count = 0
        self._rows: dict[int, _Row] = {}  # by loss_id

    def report(self) -> OverflowReport:
        """The records so far. No host sync."""
        return OverflowReport(list(self._records), self._count - len(self._records))

    def begin_row(self) -> None:
        """Forget the row of skips before."""
        self._rows.clear()

    def skipped(self, backward: Backward, skips_in_a_row: int, is_told: bool, is_last: bool) -> None:
        """Record why a step was skipped.

        A cause that repeats in a row of skips is printed once, and only counted from then on.
        """
        loss_id, scaler = backward.loss_id, backward.scaler
        is_diagnosed = skips_in_a_row == SKIPS_BEFORE_DIAGNOSIS and is_last
        record = self._record(backward, skipped=True, looks_at_weights=is_diagnosed)
        is_said = is_told or _is_of_this_rank(record, backward)
        row = self._rows.setdefault(loss_id, _Row())
        if skips_in_a_row <= SKIPS_BEFORE_DIAGNOSIS:
            row.records.append(record)
        self._note(record, is_said, self._repeats(row, record))
        if is_diagnosed and is_said:
            scale = backward.outcome.next_scale() if scaler.dynamic else scaler.loss_scale()
            text = diagnosis(row.records, skips_in_a_row, scaler.loss_scale())
            self._reporter.say(
                text, level=logging.WARNING, amp_loss_id=loss_id, amp_loss_scale=scale, amp_cause=record.cause
            )

    def taken(self, backward: Backward, is_told: bool) -> None:
        """Record a step taken on an overflow, or on a loss that is not finite."""
        self._note(self._record(backward, skipped=False), is_told)

    def unchecked(self, backward: int, loss_id: int, loss: float, origin: Origin | None) -> None:
        """Record a loss that is not finite if gradients are not checked."""
        places = places_in(self._models())
        weights = self._bad_weights()
        known = (backward, loss_id, loss, origin, weights, places)
        self._note(self._explained(*known, loss_scale=1.0, skipped=False, is_checked=False))

    def _repeats(self, row: _Row, record: OverflowRecord) -> int:
        """Return how many skips in a row, this one included, have the cause of `record`."""
        cause = record.cause, record.operation, where_it_began(record), record.why is not None
        if cause != row.cause:
            row.cause, row.count = cause, 0
        row.count += 1
        return row.count

    def _note(self, record: OverflowRecord, is_said: bool = True, count: int = 1) -> None:
        self._records.append(record)
        self._count += 1
        # A cause that repeats is printed again after 10, 100, 1,000... times.
        is_round = count > 1 and count == 10 ** (len(str(count)) - 1)
        if is_said and (count == 1 or is_round or self._reporter.verbosity > 1):
            self._reporter.say(
                repeated(record, count) if is_round else str(record),
                level=logging.INFO if record.skipped else logging.WARNING,  # the step was taken
                amp_loss_id=record.loss_id,
                amp_loss_scale=record.loss_scale,
                amp_cause=record.cause,
            )

    def _record(self, backward: Backward, skipped: bool, looks_at_weights: bool = False) -> OverflowRecord:
        """The record of `backward`. Waits for the device."""
        places = places_in(self._models())
        together = backward.accumulation
        first_of, last_of = backward.micro_batches
        loss, origin = backward.outcome.loss(), backward.origin
        if together.bad and first_of <= together.bad <= last_of:
            first_of = last_of = together.bad
            loss, origin = together.loss, together.origin
        nonfinite = backward.nonfinite()
        in_order = backward.in_order(nonfinite)
        is_finite = loss is None or math.isfinite(loss)
        is_fine = loss is not None and is_finite and origin is None
        weights = [] if is_fine and not looks_at_weights else self._bad_weights()
        if not is_finite and origin is None:
            self._scaling.heard_of_loss(is_finite=False)
        of_first: dict[str, Any] = {}
        if in_order:
            param, has_nan = in_order[0]
            kind = "nan" if has_nan else "inf"
            of_first = {**place_of(param, places)._asdict(), "kind": kind, "numel": param.numel()}
            if " = " in of_first["parameter"]:
                names = (place_of(param, places).parameter for param, _ in in_order)
                of_first["instead"] = next((name for name in names if " = " not in name), None)
            if CHECKPOINTED in backward.order and id(param) not in backward.order:
                hidden = [param for param, _ in in_order if id(param) not in backward.order]
                of_first["hidden"] = tuple(place_of(param, places).parameter for param in hidden)
        reduction = backward.reduction
        if reduction is not None:
            of_first |= {"rank": reduction.rank, "rank_losses": tuple(reduction.losses())}
        return self._explained(
            backward.number,
            backward.loss_id,
            loss,
            origin,
            weights,
            places,
            loss_scale=backward.outcome.scale(),
            undefined=backward.undefined if is_finite else None,
            elements=backward.elements,
            nonfinite=tuple(place_of(param, places).parameter for param, _ in nonfinite),
            checked=sum(len(checked.arrived) - checked.arrived.count(0) for checked in backward.checked),
            skipped=skipped,
            micro_batches=(first_of, last_of, together.count),
            **of_first,
        )

    def _explained(
        self,
        backward: int,
        loss_id: int,
        loss: float | None,
        origin: Origin | None,
        weights: list[nn.Parameter],
        places: dict[int, Place],
        undefined: str | None = None,
        **details: Any,
    ) -> OverflowRecord:
        """The record with these details, and with facts from the loss, the losses before it, and its graph."""
        earlier = self._scaling.history.losses_before(loss_id, backward)
        came_from_outside = origin is not None and origin.operation is None and not origin.is_parameter
        cause = likely_cause(
            loss,
            earlier,
            has_gradient=details.get("parameter") is not None,
            has_bad_weights=bool(weights),
            traced_to=None if origin is None else "data" if came_from_outside else "forward",
            rank_losses=details.get("rank_losses", ()),
        )
        if origin is not None and origin.region is not None:
            before, after, *part = origin.region
            names = [places[one].parameter if one in places else None for one in (before, after)]
            details |= {"region": tuple(names), "part": tuple(part)}
        near = None if origin is None or origin.parameter is None else places.get(origin.parameter)
        trained = self._trained() if cause == "data" else set(places)
        memory = 0 if origin is None else origin.memory
        buffers = buffers_in(self._models()) if memory else {}
        was_taken = any(not one.skipped and one.nonfinite for one in self._records)
        return OverflowRecord(
            backward,
            loss_id,
            loss=loss,
            cause=cause,
            operation=None if origin is None else origin.operation or origin.took,
            near=None if near is None else near.parameter,
            weights=tuple(place_of(param, places).parameter for param in weights),
            outgrown=tuple(
                (place_of(param, places).parameter, largest)
                for param in weights
                if (largest := _finite_master(param)) is not None
            ),
            growth=growth_of(loss, earlier),
            is_exact=origin is None or origin.is_exact,
            why=undefined if origin is None else origin.why,
            untrained=tuple(place.parameter for key, place in places.items() if key not in trained),
            buffer=next((name for name, buffer in buffers.items() if _address(buffer) == memory), None),
            only_checked=cause == "weights" and bool(details.get("checked")) and not was_taken,
            **details,
        )

    def _trained(self) -> set[int]:
        """Ids of the parameters that an optimizer steps, and of the whole ones `fully_shard` shows in a forward."""
        in_shards = [model for model in self._models() if is_any_sharded(model)]
        return {id(p) for p in self._params()} | {
            id(p) for model in in_shards for p in model.parameters() if p.requires_grad
        }

    def _bad_weights(self) -> list[nn.Parameter]:
        """The parameters that are not finite. Waits for the device, and reads all parameters."""
        return [param for param in self._params() if not local_of(param.detach()).isfinite().all()]


def overflow_report(engine: Engine) -> OverflowReport:
    """A record of each overflow since the first `initialize`, or the first after `close`, oldest first.

    It has the newest 1000 that the host knows of; `str()` of the record is a table, and `str()` of an entry is the
    line that was printed. Each entry has the parameter and the module in which the backward first became
    non-finite, the number of such elements, inf or nan, the loss and its scale, the likely cause and, for a
    non-finite loss, the operation that made it non-finite. No host sync.
    """
    return engine.overflows.report()


def _address(buffer: Tensor) -> int:
    """The address of the storage of `buffer`, as in `Origin.memory`; 0 if it has none."""
    values = local_of(buffer)
    return values.untyped_storage().data_ptr() if values.layout is torch.strided else 0


def _finite_master(param: nn.Parameter) -> float | None:
    """The largest magnitude of the FP32 master; None without a master, or if it is not finite."""
    value = exact_value(param)
    largest = math.inf if value is None else float(value.abs().max())
    return largest if math.isfinite(largest) else None


def _is_of_this_rank(record: OverflowRecord, backward: Backward) -> bool:
    """True if this rank has details that rank 0 of the group lacks. Waits for the device."""
    if record.cause == "elsewhere":
        return False
    return not record.loss_is_finite or not backward.is_the_same_on_all_ranks()
