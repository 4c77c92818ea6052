"""Scaled backwards for one optimizer or several: the bodies of `scale_loss`, and their records closed together."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from amp_engine.errors import AmpStateError
from amp_engine.ground import devices
from amp_engine.ground.devices import HostNumbers, moved
from amp_engine.ground.distributed import has_ranks
from amp_engine.ground.torch_private import disable_dynamo
from amp_engine.kernels import tensor_lists
from amp_engine.levels.policy import Skips
from amp_engine.optimizers.fused_step import fused_step_of
from amp_engine.scaling.history import Loss
from amp_engine.scaling.losses import Scaling
from amp_engine.scaling.outcome import is_number
from amp_engine.scaling.scaler import LossScaler
from amp_engine.stepping.backward import Accumulation, Backward
from amp_engine.stepping.events import Events
from amp_engine.stepping.record import Record, State
from amp_engine.stepping.reduction import Reduction, agree


class Casts(Protocol):
    """The function casts of an engine."""

    def off(self) -> AbstractContextManager[None] | None:
        """Return a context that turns the casts off in this thread; None if there are none."""

    def after_backward(self) -> None:
        """Discard casts of weights, which live for one iteration."""


class Records:
    """The records of all optimizers of an engine, and the only way to begin a scaled backward.

    Args:
        scaling: knows if static scales skip, and which of them were reported to overflow.
        casts: the function casts; their `after_backward` is called at the end of each backward.

    Attributes:
        events: notify observers of each backward; replaced during a rehearsal.
        is_rehearsal: True while a batch is rehearsed: no step is taken, and backwards have no number.
    """

    def __init__(self, scaling: Scaling, casts: Casts) -> None:
        self.casts = casts
        # Weak: the hooks of an optimizer own its Record. A parameter may refer to its optimizer, which a strong
        # reference here would keep alive.
        self._records: weakref.WeakKeyDictionary[Optimizer, weakref.ref[Record]]
        self._records = weakref.WeakKeyDictionary()
        self.scaling = scaling
        self.events = Events()
        self.is_rehearsal = False
        self._has_scaled = False  # True once a loss was scaled
        self._count = 0  # of backwards
        # By loss_id, of losses whose gradients are not checked: the last one, on its way from a GPU; and how many of
        # the last in a row were not finite.
        self._sent: dict[int, tuple[Backward, HostNumbers]] = {}
        self._bad_losses: dict[int, int] = {}
        self._of_one = LossScaler(1.0)  # of gradients that were written since an exit unscaled them

    @property
    def optimizers(self) -> list[Optimizer]:
        """Every optimizer that was added."""
        # No iteration over the dictionary itself: an `initialize` in another thread may add to it.
        return [optimizer for ref in self._records.keyrefs() if (optimizer := ref()) is not None]

    @property
    def all(self) -> list[Record]:
        """The record of every optimizer that was added."""
        return [one for optimizer in self.optimizers if (one := self.get(optimizer)) is not None]

    def get(self, optimizer: Optimizer) -> Record | None:
        """Return the record of `optimizer`, or None."""
        ref = self._records.get(optimizer)
        return None if ref is None else ref()

    def add(self, record: Record) -> None:
        """Add a record, with a weak reference: the hooks of its optimizer own it."""
        self._records[record.optimizer] = weakref.ref(record)

    def remove(self, optimizer: Optimizer) -> None:
        """Remove an optimizer."""
        self._records.pop(optimizer, None)

    def begin_counting(self) -> None:
        """Count backwards from 1 again, and forget losses and scales of earlier models."""
        self._count, self._has_scaled = 0, False
        self._sent.clear()
        self._bad_losses.clear()

    def note_scaled(self) -> None:
        """Note that a loss is scaled, so that gradients may be."""
        self._has_scaled = True

    @property
    def may_be_scaled(self) -> bool:
        """True if a gradient that no exit saw may be scaled."""
        return self._has_scaled and not self.scaling.default().is_identity

    @contextmanager
    def rehearsal(self) -> Iterator[Events]:
        """Return a context in which no step is taken, and backwards notify only observers of the yielded Events."""
        before = self.events, self.is_rehearsal
        self.events, self.is_rehearsal = Events(), True
        try:
            yield self.events
        finally:
            self.events, self.is_rehearsal = before

    def refuse_inside(self, call: str) -> None:
        """Raise AmpStateError while the body of a `scale_loss` runs."""
        if any(one.is_in_body for one in self.all):
            raise AmpStateError(
                f"{call}() was called inside of a `with scale_loss(...)`, whose exit needs what it takes away.  Leave "
                "the `with` first."
            )

    def of(
        self,
        loss: Tensor,
        records: Sequence[Record],
        scaler: LossScaler,
        loss_id: int,
        delay_unscale: bool = False,
        delay_overflow_check: bool = False,
    ) -> AbstractContextManager[Tensor]:
        """Return the context for the body of a `scale_loss` with these arguments."""
        for one in records:
            one.check_first_use()
        if scaler.is_identity and all(one.state is State.IDLE for one in records):
            return Unscaled(self, loss, records, loss_id, scaler, self._looks(records, loss.device))
        return Body(self, loss, records, scaler, loss_id, delay_unscale, delay_overflow_check)

    def begin(self, records: Sequence[Record], scaler: LossScaler, loss_id: int) -> Backward:
        """Return the Backward of a loss, whose body is entered next. It takes the scale of gradients left scaled.

        All gradients of a loss have one scale. Gradients that were left with another scale are unscaled now, and so
        are those of another optimizer with common parameters.
        Raises AmpStateError, before anything is changed, for gradients left by another loss_id, and for parameters that
        an optimizer shares with one whose body still runs.
        """
        others = self._open_beside(records)
        left = [one for one in records if one.state is State.DELAYED]
        if not left and not others:  # nearly always
            return Backward(scaler, loss_id, scaler.snapshot())
        if any(one.is_in_body for one in records):
            return Backward(scaler, loss_id, scaler.snapshot())  # `enter` refuses it
        for other in others:
            if other.is_in_body:
                raise AmpStateError(
                    f"scale_loss() was entered for an optimizer that has parameters in common with "
                    f"{type(other.optimizer).__name__}, inside of the body of that one's scale_loss: their gradients "
                    "would have two scales.  Leave the first `with amp.scale_loss(...)` before the next one, or call "
                    "amp.scale_loss(loss, [optimizer, other_optimizer]) once for both."
                )
        for one in left:
            assert one.delayed is not None
            if one.delayed.loss_id != loss_id:
                found = one.delayed.loss_id
                raise AmpStateError(
                    f"loss_id={loss_id}, but this optimizer has gradients of loss_id={found} that "
                    f"delay_unscale left scaled.  Use loss_id={found} here, or leave out delay_unscale where "
                    "it changes."
                )
        for other in others:
            self.close_delayed([other, *(one for one in left if one.shares_parameters_with(other))])
        for one in left:
            one.rows.scan()
            if not one.has_gradients():
                one.discard()  # they were zeroed
            elif any(one.shares_parameters_with(other) for other in records if other.state is State.IDLE):
                self.close_delayed([one])
        left = [one for one in left if one.state is State.DELAYED]
        snapshot = scaler.snapshot()
        if left and left[0].delayed is not None:
            snapshot = left[0].delayed.snapshot
        for one in left:
            if one.delayed is not None and not one.delayed.snapshot.equals(snapshot):
                self.close_delayed([one])
        backward = Backward(scaler, loss_id, snapshot)
        if left and (earlier := left[0].delayed) is not None:
            backward.micro_batches = earlier.micro_batches
            if scaler.auto is not None:
                backward.earlier_loss_is_bad = earlier.loss_is_bad()
        return backward

    def _open_beside(self, records: Sequence[Record]) -> list[Record]:
        """Return other optimizers with gradients at a scale that share parameters with one of `records`."""
        if len(self._records) <= len(records):
            return []  # there are no others
        others = [one for one in self.all if one.state is not State.IDLE and one not in records]
        return [one for one in others if any(map(one.shares_parameters_with, records))]

    # Numbers and losses of backwards.

    def number(self, backward: Backward, accumulations: dict[int, Accumulation]) -> None:
        """Number a backward that is checked: in its engine, and among those for the same step.

        Args:
            accumulations: those for the same step, by loss_id.
        """
        if self.is_rehearsal:
            return
        self._count = backward.number = self._count + 1
        if (together := accumulations.get(backward.loss_id)) is None:
            together = accumulations[backward.loss_id] = Accumulation()
        together.count += 1
        backward.accumulation = together
        backward.micro_batches = backward.micro_batches[0] or together.count, together.count

    def note_loss(self, backward: Backward, loss: Tensor) -> None:
        """Note the loss of a backward that is checked. No host sync."""
        if self.is_rehearsal:
            return
        if not (type(loss) is Tensor and loss.is_cpu and loss.numel() == 1):  # not `is_number`: saves a call
            backward.loss = loss.detach() if is_number(loss) else loss.detach().clone()  # the user may write it
            return
        backward.value = value = loss.item()
        together = backward.accumulation
        if not math.isfinite(value) and not together.bad:
            together.bad, together.loss = together.count, value

    def note_unchecked(self, backward: Backward, loss: Tensor) -> None:
        """Number a backward whose gradients are not checked, and tell of its loss if it is not finite. No host sync.

        The host hears of a loss on a GPU a backward or two later.
        """
        if self.is_rehearsal:
            return
        self._count = backward.number = self._count + 1
        if not is_number(loss):
            return
        if loss.is_cpu:
            self._hear_of_unchecked(backward, loss.item(), loss)
            return
        if (sent := self._sent.get(backward.loss_id)) is not None:
            if not sent[1].is_known():
                return
            self._hear_of_unchecked(sent[0], sent[1].read(), None)
        self._sent[backward.loss_id] = backward, HostNumbers(torch.stack([loss.detach().float()]))

    def heard(self, closure: Callable[[], Any], record: Record) -> Callable[[], Any]:
        """Return `closure`, which tells of a loss that is not finite, for a step that takes its gradients unchecked."""
        if not self._looks([record], None):  # nothing is told, or a `scale_loss` in it tells
            return closure

        def heard_closure() -> Any:  # tools/explanation.py knows the name
            loss, scaler = closure(), self.scaling.default()
            if isinstance(loss, (Tensor, float)):
                value = loss.detach() if isinstance(loss, Tensor) else torch.tensor(loss, dtype=torch.float64)
                self.note_unchecked(Backward(scaler, 0, scaler.snapshot()), value)
            return loss

        return heard_closure

    def _hear_of_unchecked(self, backward: Backward, value: float, loss: Tensor | None) -> None:
        loss_id = backward.loss_id
        if math.isfinite(value):
            self._bad_losses.pop(loss_id, None)
            self.scaling.history.track(loss_id).losses.append(Loss(backward.number, value))
            return
        in_a_row = self._bad_losses[loss_id] = self._bad_losses.get(loss_id, 0) + 1
        for tell in self.events.unchecked.observers:
            tell(backward, value, in_a_row, loss)

    # Checks.

    @property
    def skips_unscaled(self) -> bool:
        """True if gradients at a scale of 1 that are not finite skip a step."""
        return self.scaling.skips is not Skips.NEVER

    def _looks(self, records: Sequence[Record], device: torch.device | None) -> bool:
        """True if gradients at a scale of 1 are checked before a step. The host knows nothing of a captured loss."""
        is_wanted = self.skips_unscaled and bool(records) and not self.is_rehearsal
        is_captured = device is not None and devices.is_capturing(device)
        return is_wanted and not is_captured and all(one.ranks.can_agree for one in records)

    def look_at_unseen(self, record: Record, is_stepping: bool = False, is_clipping: bool = False) -> None:
        """Check gradients that came or were written since the last check. Call after a scan.

        In a CUDA graph only a step of the kernels can be skipped, and no other gradients are looked at.

        Args:
            is_stepping: as in `Record.is_unseen`.
            is_clipping: True before a clipping. There as before a step, AmpStateError is raised for half gradients at a
                level that scales, if nothing has scaled them.
        """
        if record.state is not State.IDLE or not record.is_unseen(is_stepping):
            if is_stepping:
                record.forget_gone()
            return
        scaler, device = self.scaling.default(), record.columns.params[0].device
        is_captured = devices.is_capturing(device)
        if not scaler.is_identity:
            if is_stepping or (is_clipping and record.kept is None):
                record.refuse_foreign()
                record.refuse_unscaled()
                is_known = any(one.missing_gradients.is_scale_known for one in self.all)
                if not (is_known or record.backward_seen or self.scaling.latched or self.is_rehearsal):
                    record.missing_gradients.warn_of_no_scale(record.optimizer)
            if is_captured or self.is_rehearsal or not self._skips(scaler):
                return
            scaler = self._of_one
        elif not self._looks([record], None if is_captured and fused_step_of(record.optimizer) else device):
            return
        backward = record.passed
        if backward is not None:
            self._look_at([one for one in self.all if one.passed is backward], backward, tells=False)
            return
        scaler.to(device)
        backward = Backward(scaler, 0, scaler.snapshot())
        if scaler is self._of_one and record.pending.backwards:  # without a body there was no backward more
            record.pending.checked_again_by(backward)
        else:
            self.number(backward, {})
        self._look_at([record], backward, tells=True)

    def look_to_clip(self, record: Record) -> None:
        """`look_at_unseen` before a clipping."""
        self.look_at_unseen(record, is_clipping=True)

    def _look_at(self, records: Sequence[Record], backward: Backward, tells: bool) -> None:
        """Check all present gradients, which are unscaled and stay where they are. No host sync.

        Those of an optimizer of which one cannot be read are left alone.
        """
        readable = [one for one in records if one.can_look()]
        if readable:
            self._conclude(readable, backward, self._checks(backward), Record.look, tells=tells)

    def close_into(self, record: Record) -> None:
        """Unscale all scaled gradients of the parameters of `record`, before a step or a read."""
        others = [one for one in self._open_beside([record]) if not one.is_in_body]
        self.close_delayed([one for one in (record, *others) if one.state is State.DELAYED])

    def close_loss(self, loss_id: int) -> None:
        """Check all gradients that backwards of this loss left to be checked. Those of one scale share one decision."""
        passed = [one.passed for one in self.all if one.passed is not None and one.passed.loss_id == loss_id]
        for backward in dict.fromkeys(passed):
            self._look_at([one for one in self.all if one.passed is backward], backward, tells=False)
        self.close_delayed([one for one in self.all if one.delayed is not None and one.delayed.loss_id == loss_id])

    def close_delayed(self, records: Sequence[Record]) -> None:
        """Unscale gradients that `delay_unscale` left scaled. Those of one scale share one decision."""
        left = [one for one in records if one.state is State.DELAYED]
        while left:
            backward = left[0].delayed
            assert backward is not None
            alike = [one for one in left if one.delayed is not None and one.delayed.snapshot.equals(backward.snapshot)]
            self.close(alike, backward)
            left = [one for one in left if one.state is State.DELAYED]

    def close(
        self,
        records: Sequence[Record],
        backward: Backward,
        delay_overflow_check: bool = False,
    ) -> None:
        """Unscale and check gradients, then update the scale. No host sync.

        If any of it raises, or is interrupted, no gradient stays that is scaled or unchecked: those of the entry are
        put back while all are in a body, and later all since the last step are discarded.
        """
        unscaled: set[int] | None = None
        if len(records) > 1:
            owned = [one.param_ids() for one in records]
            unscaled = set() if len(frozenset().union(*owned)) < sum(map(len, owned)) else None
        check = self._checks(backward)
        try:
            self._conclude(
                records,
                backward,
                check,
                lambda one, of: one.close(of, check, unscaled, keeps=not self.events.closed.observers),
                delay_overflow_check=delay_overflow_check,
            )
        except BaseException:  # such as out of memory: no gradient may stay scaled, or come unchecked to a step
            is_open = all(one.is_in_body for one in records)
            for one in records:
                if is_open:
                    one.put_back()
                else:
                    one.discard()
            raise

    def _skips(self, scaler: LossScaler) -> bool:
        """True if an overflow skips the step; False if it is only reported."""
        return scaler.dynamic or scaler is self._of_one or self.scaling.skips is not Skips.NEVER

    def _checks(self, backward: Backward) -> bool:
        """Decide whether an overflow skips, and return True if one is recorded."""
        backward.skips = self._skips(backward.scaler)
        return backward.skips or backward.loss_id not in self.scaling.reported

    def _conclude(
        self,
        records: Sequence[Record],
        backward: Backward,
        check: bool,
        look: Callable[[Record, Backward], list[Any]],
        *,
        delay_overflow_check: bool = False,
        tells: bool = True,
    ) -> None:
        """Check the gradients of `records` by `look`, then decide together and update the scale.

        If ranks must agree, the scale is updated when it is read, or when the step needs the decision.

        Args:
            check: True if an overflow is recorded.
            tells: True to tell observers that gradients are as the step will find them.
        """
        scaler = backward.scaler
        scaler.settle()
        # Ranks do not agree on an overflow that is only reported: a rank that has reported one stops checking, and
        # the others would wait for it. Most processes have no ranks, and skip the list of groups.
        agrees = backward.skips and has_ranks()
        groups = list(dict.fromkeys(group for one in records for group in one.ranks.groups())) if agrees else []
        # Reset, since a backward with `delay_unscale` is closed once for each optimizer.
        backward.update, backward.checked = None, []
        backward.of = backward.of or tuple(map(id, records))
        backward.may_update = (
            check and len(records) == 1 and not groups and scaler.auto is None and not delay_overflow_check
        )
        squares: list[list[Tensor]] = []  # for each optimizer, the sums of squares from its checks
        for one in records:
            found = look(one, backward)
            one.is_captured |= devices.is_capturing(backward.snapshot.scale.device)
            # No rank has the sums over whole DTensors.
            squares.append([] if one.columns.has_shards else [checked.checks.sum_squares for checked in found])
        for tell_checked in self.events.checked.observers if check else ():
            tell_checked(backward)
        for tell in self.events.closed.observers if tells else ():
            tell([one.rows for one in records], backward)
        if delay_overflow_check:
            return
        reduction = backward.reduction = (
            Reduction(groups, scaler.found_inf, backward.loss_to_tell()) if groups else None
        )
        backward.of_replicas = reduction is not None and all(one.ranks.are_replicas for one in records)
        largest, bad_loss = (None, None) if scaler.auto is None else backward.for_auto_scale(groups)
        concludes = check and bool(records)
        is_noted = concludes and not self.is_rehearsal and scaler is not self._of_one
        earlier_ones = records[0].pending.backwards if is_noted else ()
        follows = earlier_ones[-1].number if earlier_ones else None

        def conclude() -> None:
            if reduction is not None:
                scaler.found_inf.copy_(reduction.wait())
            if backward.update is None:
                outcome = scaler.update_(backward.snapshot, largest, bad_loss, backward.loss_to_send())
            else:
                outcome = scaler.end_update(backward.update)
            if concludes:
                backward.conclude(outcome)
            if is_noted:
                self.scaling.history.note(backward.loss_id, backward.outcome, backward.number, follows, backward.of)

        if reduction is None:
            conclude()
        else:
            scaler.owe(conclude)
        if check:
            for i, one in enumerate(records):
                one.pending.add(backward, squares[i])

    # Around a backward in a `scale_loss` of apex's, copied into a script, which names the scaler at its exit.

    def prepare(self, record: Record) -> None:
        """Entry: set gradients aside. Raises AmpStateError inside of a body."""
        if record.is_in_body:
            raise AmpStateError(
                f"_prepare_amp_backward() was called for {type(record.optimizer).__name__} inside of a `with "
                "amp.scale_loss(...)`, which did it at its entry.  Leave out one of the two."
            )
        self.note_scaled()
        record.enter()
        record.begin()

    def post(self, record: Record, scaler: LossScaler) -> None:
        """Exit: unscale by `scaler`, and record overflows in it. No host sync but that of `scaler.to`."""
        for param in record.columns.params[:1]:
            scaler.to(param.device)
        record.close(Backward(scaler, 0, scaler.snapshot()), True)
        agree(record.ranks.groups(), scaler.found_inf)  # the caller reads found_inf next


class ContextOfLoss:
    """The context that `scale_loss` returns. Its AttributeError says how to get the scaled loss."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise AttributeError(
            f"amp.scale_loss(...) is a context, and has no .{name}: the scaled loss is what it gives to `with`.  Write "
            "`with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`."
        )


class Disabled(ContextOfLoss, nullcontext[Tensor]):
    """The context of a `scale_loss` with enabled=False, which gives the loss unchanged."""


class Body(ContextOfLoss):
    """The context of one `scale_loss`. A generator would cost a loop of tiny steps 1 % more time.

    Gives `loss.float() * scale`. The exit unscales and checks gradients and updates the scale; with `delay_unscale` it
    leaves gradients scaled. If the body raises, its optimizers' gradients are put back as at the entry; for an exit
    that raises see `Records.close`.

    The entry raises AmpStateError, with nothing changed, if gradients would have two scales. No host sync.
    """

    def __init__(
        self,
        owner: Records,
        loss: Tensor,
        records: Sequence[Record],
        scaler: LossScaler,
        loss_id: int,
        delay_unscale: bool,
        delay_overflow_check: bool,
    ) -> None:
        self._owner = owner
        self._loss = loss
        self._records = records
        self._scaler = scaler
        self._loss_id = loss_id
        self._delay_unscale = delay_unscale
        self._delay_overflow_check = delay_overflow_check
        self._hook: RemovableHandle | None = None  # on the scaled loss, while that lives
        self._hook_of_loss: RemovableHandle | None = None  # on the unscaled loss, until the exit
        self._is_left = False  # True from the exit on
        self._has_begun = False  # True once a backward of the scaled loss has begun
        self._is_on_its_way = False  # True while a backward of the scaled loss has not reached the unscaled loss
        self._others: list[tuple[Record, tensor_lists.GradientMarks]] = []  # of optimizers that are not listed

    def __enter__(self) -> Tensor:
        loss, scaler, events = self._loss, self._scaler, self._owner.events
        for tell in events.entering.observers:
            tell(self)
        scaler.to(loss.device)
        self._backward = backward = self._owner.begin(self._records, scaler, self._loss_id)
        outside = [one for one in self._records if not one.is_in_body]
        try:
            scaled_loss = loss.float() * moved(backward.snapshot.scale, loss.device)
            for one in self._records:
                one.enter()
                one.refuse_joined(not backward.snapshot.is_identity)
            together = self._records[0].pending.accumulations if self._records else {}
            backward.of = tuple(map(id, self._records))
            self._owner.number(backward, together)
            if not backward.snapshot.is_identity:
                self._owner.note_scaled()
            self._owner.note_loss(backward, loss)
            # Autograd calls these before it accumulates anything.
            if scaled_loss.requires_grad:
                self._hook = scaled_loss.register_hook(self._begin)
                if loss.requires_grad and not backward.snapshot.is_identity:
                    self._hook_of_loss = loss.register_hook(self._pass_by)
            for tell_entered in events.entered.observers:
                tell_entered(self, backward, loss)
            return scaled_loss
        except BaseException:
            for hook in (self._hook, self._hook_of_loss):
                if hook is not None:
                    hook.remove()
            for one in outside:
                one.put_back()
            raise

    @disable_dynamo
    def _begin(self, grad: Tensor) -> None:
        if self._is_left:
            self._refuse_late()
            return
        if not self._has_begun:
            everyone = self._owner.all
            if len(everyone) > len(self._records) and not self._backward.snapshot.is_identity:
                others = [one for one in everyone if one not in self._records]
                self._others = [(one, tensor_lists.gradient_marks(one.columns.handle)) for one in others]
        self._has_begun = self._is_on_its_way = True
        for one in self._records:
            one.begin()

    @disable_dynamo
    def _pass_by(self, grad: Tensor) -> None:
        """Raise AmpStateError in a backward of the unscaled loss."""
        if not self._is_on_its_way:
            raise AmpStateError(
                "backward() was called on the loss that was passed to amp.scale_loss, so its gradients would not be "
                "scaled.  Nothing was added to any.  Write `with amp.scale_loss(loss, optimizer) as scaled_loss:` and "
                "call scaled_loss.backward(); run torch.autograd.grad(loss, ...) before the `with`."
            )
        self._is_on_its_way = False

    def _put_back(self) -> None:
        for one, before in self._others:
            for row, _ in before.moved() if one.has_foreign(before) else ():
                one.columns.params[row].grad = None
        for one in self._records:
            one.put_back()

    def _warn_of_unscaled(self) -> None:
        """Warn if gradients came without a backward of the scaled loss."""
        if self._has_begun or self._hook is None or self._backward.snapshot.is_identity:
            return
        for one in self._records:
            if one.has_arrived_unseen():
                one.missing_gradients.warn_of_unscaled(one.optimizer)

    def _refuse_graph(self) -> None:
        """Refuse gradients with a graph; the check does it where it sees all before it writes any."""
        if self._backward.snapshot.is_identity:
            return
        arrived = [one for one in self._records if one.has_arrived()]
        if len(self._records) == 1 and not self._delay_unscale:
            self._backward.refuses_graph = bool(arrived)
            return
        for one in arrived:
            one.refuse_graph()

    def _refuse_late(self) -> None:
        """Raise AmpStateError in a backward after the exit, unless its gradients will still be unscaled."""
        if self._backward.snapshot.is_identity:
            return
        if not self._delay_unscale or any(one.state is State.IDLE for one in self._records):
            raise AmpStateError(
                "backward() was called on the scaled loss after its `with amp.scale_loss(...)` was left, whose exit "
                "unscales and checks gradients.  Nothing was added to any.  Call scaled_loss.backward() inside of the "
                "`with`."
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        owner, backward = self._owner, self._backward
        try:
            self._is_left = True
            if self._hook_of_loss is not None:
                self._hook_of_loss.remove()
            for tell in owner.events.leaving.observers:
                tell(self)
            if kind is not None:
                self._put_back()
                return
            self._refuse_graph()
            self._warn_of_unscaled()
            for one in self._records:
                one.missing_gradients.note(self._has_begun)
            ours = {id(p) for one in self._records for p in one.columns.params} if self._others else set()
            for one, before in self._others:
                one.note_foreign(before, ours)
            if self._delay_unscale and not any(one.has_earlier() for one in self._records):
                for one in self._records:
                    one.leave_delayed(backward)
            else:
                owner.close(self._records, backward, self._delay_overflow_check)
        except BaseException:  # a refusal, an observer's error, an interrupt
            self._put_back()
            raise
        finally:
            owner.casts.after_backward()
            for tell in owner.events.left.observers:
                tell(self)


class Unscaled(ContextOfLoss):
    """The context of a `scale_loss` at a scale of 1: gradients accumulate in `.grad`, as in plain PyTorch.

    Earlier half gradients beside masters become float32 first, so that sums lose nothing.

    Args:
        scaler: has the scale of 1.
        is_checked: True if gradients are checked before the step.
    """

    def __init__(
        self,
        owner: Records,
        loss: Tensor,
        records: Sequence[Record],
        loss_id: int,
        scaler: LossScaler,
        is_checked: bool,
    ) -> None:
        self._owner = owner
        self._loss = loss
        self._records = records
        self._loss_id = loss_id
        self._scaler = scaler
        self._is_checked = is_checked
        self._backward: Backward | None = None

    def __enter__(self) -> Tensor:
        events, scaler = self._owner.events, self._scaler
        for tell in events.entering.observers:
            tell(self)
        for one in self._records:
            one.enter_unscaled()
        if self._is_checked:
            scaler.to(self._loss.device)
        backward = Backward(scaler, self._loss_id, scaler.snapshot())
        if self._is_checked:
            self._backward = backward
            self._owner.number(backward, self._records[0].pending.accumulations)
            self._owner.note_loss(backward, self._loss)
        for tell_entered in events.entered.observers:
            tell_entered(self, backward, self._loss)
        if not self._is_checked:
            self._owner.note_unchecked(backward, self._loss)
        return self._loss.float()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        owner = self._owner
        for tell in owner.events.leaving.observers:
            tell(self)
        try:
            if kind is None:
                for one in self._records:
                    one.missing_gradients.note(None)
                for tell_closed in owner.events.closed.observers:
                    tell_closed([one.rows for one in self._records], None)
                for one in self._records:
                    one.leave_unscaled(self._backward)
        finally:
            owner.casts.after_backward()
            for tell in owner.events.left.observers:
                tell(self)
