"""Explains and records overflows: each of them, and once many skips in a row."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from amp_engine.engine import Engine
from amp_engine.ground.distributed import is_any_sharded, local_of
from amp_engine.levels.report import Reporter
from amp_engine.scaling.losses import Scaling
from amp_engine.stepping.backward import Backward
from amp_engine.stepping.events import Events
from amp_engine.stepping.exact import exact_value
from amp_engine.stepping.pending import SKIPS_BEFORE_DIAGNOSIS
from amp_engine.tools.diagnosis.evidence import Evidence, Seen
from amp_engine.tools.diagnosis.forward_order import CHECKPOINTED
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
    """Turns overflows into records and explanations. From the first one on it listens, and traces those that follow.

    Args:
        reporter: prints the messages.
        models: called, when there is a message, for the initialized models.
        params: called for the parameters that are trained.
        scaling: has earlier losses.
        events: those of the engine.

    Attributes:
        evidence: what is seen of backwards, from the first overflow on.
    """

    def __init__(
        self,
        reporter: Reporter,
        models: Callable[[], Sequence[nn.Module]],
        params: Callable[[], Sequence[nn.Parameter]],
        scaling: Scaling,
        events: Events,
    ) -> None:
        self._reporter = reporter
        self._models = models
        self._params = params
        self._scaling = scaling
        self.evidence = Evidence(events)
        self._untraced: set[int] = set()  # loss_ids whose present row of losses that are not finite has no known origin
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

    def taken(self, backward: Backward, is_told: bool, in_a_row: int) -> None:
        """Record a step taken on an overflow, or on the first loss of a row that is not finite, and its origin once."""
        if self._is_news(backward, in_a_row):
            self._note(self._record(backward, skipped=False), is_told)

    def unchecked(self, backward: Backward, value: float, in_a_row: int, loss: Tensor | None) -> None:
        """Record the first loss of a row that is not finite if gradients are not checked, and its origin once.

        The step that follows spoils the weights: this is the time to look at `loss`.
        """
        if loss is not None and in_a_row == 1:
            self.evidence.look(backward, loss)
        if self._is_news(backward, in_a_row):
            facts = backward, self.evidence.of(backward), value, self._bad_weights(), places_in(self._models())
            self._note(self._explained(*facts, loss_scale=1.0, skipped=False, is_checked=False))

    def _is_news(self, backward: Backward, in_a_row: int) -> bool:
        """True for the first loss of a row that is not finite, and for the next one whose origin is known."""
        has_origin, loss_id = self.evidence.of(backward).origin is not None, backward.loss_id
        is_news = in_a_row == 1 or (has_origin and loss_id in self._untraced)
        if has_origin:
            self._untraced.discard(loss_id)
        elif in_a_row == 1:
            self._untraced.add(loss_id)
        return is_news

    def _repeats(self, row: _Row, record: OverflowRecord) -> int:
        """Return how many skips in a row, this one included, have the cause of `record`."""
        cause = record.cause, record.operation, where_it_began(record), record.why is not None, record.is_traced
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
        places, seen = places_in(self._models()), self.evidence.of(backward)
        first_of, last_of = backward.micro_batches
        loss, bad = backward.outcome.loss(), self.evidence.bad_loss(backward)
        if bad is not None and first_of <= bad.micro_batch <= last_of:
            first_of = last_of = bad.micro_batch
            loss, seen = bad.loss, replace(seen, origin=bad.origin)
        nonfinite = backward.nonfinite()
        in_order = seen.in_order(nonfinite)
        is_fine = loss is not None and math.isfinite(loss) and seen.origin is None
        weights = [] if is_fine and not looks_at_weights else self._bad_weights()
        of_first: dict[str, Any] = {}
        if in_order:
            param, has_nan = in_order[0]
            kind = "nan" if has_nan else "inf"
            of_first = {**place_of(param, places)._asdict(), "kind": kind, "numel": param.numel()}
            if " = " in of_first["parameter"]:
                names = (place_of(param, places).parameter for param, _ in in_order)
                of_first["instead"] = next((name for name in names if " = " not in name), None)
            if CHECKPOINTED in seen.order and id(param) not in seen.order:
                hidden = [param for param, _ in in_order if id(param) not in seen.order]
                of_first["hidden"] = tuple(place_of(param, places).parameter for param in hidden)
        reduction = backward.reduction
        if reduction is not None:
            of_first |= {"rank": reduction.rank, "rank_losses": tuple(reduction.losses())}
        return self._explained(
            backward,
            seen,
            loss,
            weights,
            places,
            loss_scale=backward.outcome.scale(),
            elements=seen.elements,
            nonfinite=tuple(place_of(param, places).parameter for param, _ in nonfinite),
            checked=sum(len(checked.arrived) - checked.arrived.count(0) for checked in backward.checked),
            skipped=skipped,
            micro_batches=(first_of, last_of, backward.accumulation.count),
            **of_first,
        )

    def _explained(
        self,
        backward: Backward,
        seen: Seen,
        loss: float | None,
        weights: list[nn.Parameter],
        places: dict[int, Place],
        **details: Any,
    ) -> OverflowRecord:
        """The record with these details, and with facts from the loss, the losses before it, and what was seen."""
        origin, loss_id = seen.origin, backward.loss_id
        is_finite = loss is None or math.isfinite(loss)
        if is_finite or origin is None:
            self.evidence.expect(loss_id, is_finite)
        earlier = self._scaling.history.losses_before(loss_id, backward.number, backward.of)
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
            details["region"] = tuple(places[one].parameter if one in places else None for one in origin.region)
        near = None if origin is None or origin.parameter is None else places.get(origin.parameter)
        trained = self._trained() if cause == "data" else set(places)
        memory = 0 if origin is None else origin.memory
        buffers = buffers_in(self._models()) if memory else {}
        was_taken = any(not one.skipped and one.nonfinite for one in self._records)
        return OverflowRecord(
            backward.number,
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
            why=origin.why if origin is not None else seen.undefined if is_finite else None,
            is_traced=seen.is_traced,
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
    line that was printed. Each entry has the loss and its scale, the likely cause, and the parameters whose gradients
    are not finite. From the second one on, as the first makes amp look, also the parameter and the module in which the
    backward first became non-finite, the number of such elements and, for a non-finite loss, the operation that made
    it non-finite. No host sync.
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
