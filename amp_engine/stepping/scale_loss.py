"""Scaled backwards for one optimizer or several: opens their windows, and closes them together."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from amp_engine.errors import AmpStateError
from amp_engine.ground import devices
from amp_engine.ground.devices import moved
from amp_engine.ground.distributed import has_ranks
from amp_engine.ground.torch_private import after_backward, disable_dynamo
from amp_engine.kernels import tensor_lists
from amp_engine.levels.policy import Skips
from amp_engine.optimizers.fused_step import fused_step_of
from amp_engine.scaling.losses import Scaling
from amp_engine.scaling.scaler import LossScaler
from amp_engine.stepping.backward import Backward
from amp_engine.stepping.events import Events
from amp_engine.stepping.evidence import Evidence
from amp_engine.stepping.reduction import Reduction
from amp_engine.stepping.stepper import Casts, Stepper
from amp_engine.stepping.unlisted import Unlisted


class ScaledBackwards:
    """The scaled backwards of all optimizers of an engine, and the only way to begin one.

    Args:
        scaling: knows if static scales skip, and which of them were reported to overflow.
        casts: the function casts; their `after_backward` is called at the end of each backward.
        models: gives the initialized models.

    Attributes:
        events: notify observers of each backward; replaced during a rehearsal.
    """

    def __init__(self, scaling: Scaling, casts: Casts, models: Callable[[], Sequence[nn.Module]]) -> None:
        self.casts = casts
        # Weak: the hooks of an optimizer own its Stepper. A parameter may refer to its optimizer, which a strong
        # reference here would keep alive.
        self._stepped: weakref.WeakKeyDictionary[Optimizer, weakref.ref[Stepper]]
        self._stepped = weakref.WeakKeyDictionary()
        self.scaling = scaling
        self.events = Events()
        self.evidence = Evidence(scaling, self.events)
        self.unlisted = Unlisted(models, lambda: self.optimizers)

    @property
    def optimizers(self) -> list[Optimizer]:
        """Every optimizer that was added."""
        # No iteration over the dictionary itself: an `initialize` in another thread may add to it.
        return [optimizer for ref in self._stepped.keyrefs() if (optimizer := ref()) is not None]

    @property
    def all(self) -> list[Stepper]:
        """The Stepper of every optimizer that was added."""
        return [one for optimizer in self.optimizers if (one := self.get(optimizer)) is not None]

    def get(self, optimizer: Optimizer) -> Stepper | None:
        """Return the Stepper of `optimizer`, or None."""
        ref = self._stepped.get(optimizer)
        return None if ref is None else ref()

    def add(self, stepped: Stepper) -> None:
        """Add a Stepper, with a weak reference: the hooks of its optimizer own it."""
        stepped.check_gathered = self._check_gathered
        stepped.gathered_scale = lambda: self.unlisted.scale
        self._stepped[stepped.optimizer] = weakref.ref(stepped)
        self.unlisted.join()

    def _check_gathered(self, optimizer: Optimizer, joined: Sequence[nn.Parameter]) -> None:
        self.unlisted.check_gathered(optimizer, joined, self.all)

    def remove(self, optimizer: Optimizer) -> None:
        """Remove an optimizer."""
        self._stepped.pop(optimizer, None)

    @contextmanager
    def rehearsal(self) -> Iterator[Events]:
        """Return a context in which no step is taken, and backwards notify only observers of the yielded Events."""
        before = self.events, self.evidence.is_rehearsal
        self.events, self.evidence.is_rehearsal = Events(), True
        try:
            yield self.events
        finally:
            self.events, self.evidence.is_rehearsal = before

    def refuse_inside(self, call: str) -> None:
        """Raise AmpStateError while the body of a `scale_loss` runs."""
        if any(one.window.is_in_body for one in self.all):
            raise AmpStateError(
                f"{call}() was called inside of a `with scale_loss(...)`, whose exit needs what it takes away.  Leave "
                "the `with` first."
            )

    def _passes_through(self, scaler: LossScaler, stepped: Sequence[Stepper]) -> bool:
        """True if there is nothing to scale: at O0, O3 and O4, unless the user asked for a scale or for masters."""
        return scaler.is_identity and all(not one.rows.makes_masters and one.window.is_closed for one in stepped)

    def _looks(self, stepped: Sequence[Stepper], device: torch.device | None) -> bool:
        """True if gradients that pass through are checked before a step. The host knows nothing of a captured loss."""
        is_wanted = self.scaling.skips is not Skips.NEVER and bool(stepped) and not self.evidence.is_rehearsal
        is_captured = device is not None and devices.is_capturing(device)
        return is_wanted and not is_captured and all(one.ranks.can_agree for one in stepped)

    def of(
        self,
        loss: Tensor,
        stepped: Sequence[Stepper],
        scaler: LossScaler,
        loss_id: int,
        delay_unscale: bool = False,
        delay_overflow_check: bool = False,
    ) -> AbstractContextManager[Tensor]:
        """Return the context for the body of a `scale_loss` with these arguments."""
        for one in stepped:
            one.check_first_use()
        if self._passes_through(scaler, stepped):
            return PassedThrough(self, loss, stepped, loss_id, scaler if self._looks(stepped, loss.device) else None)
        return ScaledBackward(self, loss, stepped, scaler, loss_id, delay_unscale, delay_overflow_check)

    def close_windows_into(self, stepped: Stepper) -> None:
        """Unscale all scaled gradients of the parameters of `stepped`, before a step."""
        self.unlisted.exit()  # of a compiled backward, which calls nothing at its end
        self.look_at_gathered(stepped, is_stepping=True)
        for other in self._windows_into([stepped]):
            if not other.window.is_in_body:
                self._close_left_open(other)
        self._close_left_open(stepped)

    def look_at_gathered(self, stepped: Stepper, is_stepping: bool = False) -> None:
        """Run an empty backward, to check gradients of `stepped` that no check saw."""
        stepped.rows.scan()
        if not stepped.window.is_closed or not stepped.has_gathered(is_stepping):
            return
        scaler = self.scaling.default()
        if not self._passes_through(scaler, [stepped]):
            backward = self.begin([stepped], scaler, 0)
            stepped.enter_backward(backward)
            self.close_windows([stepped], backward)

    def look_at_unseen(self, stepped: Stepper, is_stepping: bool = False) -> None:
        """Before a step or a clipping at a scale of 1: check gradients that came or were written since the last check.

        In a CUDA graph only a step of the kernels can be skipped, and no other gradients are looked at.

        Args:
            is_stepping: as in `Stepper.has_unseen`.
        """
        stepped.rows.scan()
        scaler, weights = self.scaling.default(), stepped.rows.columns.weights
        if not (weights and self._passes_through(scaler, [stepped]) and stepped.has_unseen(is_stepping)):
            return
        device = weights[0].device
        is_captured = devices.is_capturing(device)
        if not self._looks([stepped], None if is_captured and fused_step_of(stepped.optimizer) else device):
            return
        if stepped.passed is not None:
            self._look_at_passed(stepped.passed, stepped if is_stepping else None)
            return
        scaler.to(device)
        backward = Backward(scaler, 0, scaler.snapshot())
        self.evidence.enter_unseen(backward)
        self._look_at([stepped], backward, stepped if is_stepping else None, tells=True)

    def _look_at_passed(self, backward: Backward, stepping: Stepper | None = None) -> None:
        """Check all gradients that this backward, and earlier ones, left to be checked."""
        self._look_at([one for one in self.all if one.passed is backward], backward, stepping, tells=False)

    def _look_at(self, stepped: Sequence[Stepper], backward: Backward, stepping: Stepper | None, tells: bool) -> None:
        """Check all present gradients, which have a scale of 1 and stay where they are. No host sync.

        Those of an optimizer of which one cannot be read are left alone. `stepping` steps next, if it is one of them.
        """
        readable = [one for one in stepped if one.can_look()]
        for one in readable:
            one.window.adopt(backward)
        if readable:
            self.close_windows(readable, backward, tells=tells)
        for one in readable:
            one.note_seen(is_stepping=one is stepping)

    def close_windows(
        self,
        stepped: Sequence[Stepper],
        backward: Backward,
        delay_overflow_check: bool = False,
        loss: Tensor | None = None,
        tells: bool = True,
    ) -> None:
        """Unscale and check gradients, then update the scale. No host sync.

        If any of it raises, or is interrupted, no gradient stays that is scaled or unchecked: those of the entry are
        put back while all windows are open, and later all since the last step are discarded.

        If ranks must agree, the scale is updated when it is read, or when the step needs the decision.

        Args:
            loss: the last loss, whose graph has the order of the parameters; None if unknown.
            tells: False to notify no observers.
        """
        try:
            scaler = backward.scaler
            scaler.settle()
            backward.skips = scaler.dynamic or self.scaling.skips is not Skips.NEVER
            check = backward.skips or backward.loss_id not in self.scaling.reported
            unscaled: set[int] | None = set() if len(stepped) > 1 else None
            # Ranks do not agree on an overflow that is only reported: a rank that has reported one stops checking, and
            # the others would wait for it. Most processes have no ranks, and skip the list of groups.
            agrees = backward.skips and has_ranks()
            groups = list(dict.fromkeys(group for one in stepped for group in one.ranks.groups())) if agrees else []
            # Reset, since a backward with `delay_unscale` is closed once for each optimizer.
            backward.update = None
            backward.may_update = (
                check and len(stepped) == 1 and not groups and scaler.auto is None and not delay_overflow_check
            )
            squares: list[list[Tensor]] = []  # for each optimizer, the sums of squares from its checks
            for one in stepped:
                earlier = len(backward.checked)
                one.close_window(backward, check, unscaled)
                # No rank has the sums over whole DTensors.
                found = [] if one.rows.columns.has_shards else backward.checked[earlier:]
                squares.append([checked.checks.sum_squares for checked in found])
            if check:
                overflowed = backward.has_overflowed()
                is_in_trouble = overflowed is None and any(one.pending.skips_in_a_row > 0 for one in stepped)
                if overflowed or is_in_trouble or not backward.order:
                    self.evidence.keep(backward, loss, bool(overflowed), is_in_trouble)
            for tell in self.events.closed.observers if tells else ():
                tell([one.rows for one in stepped], backward)
            if delay_overflow_check:
                return
            reduction = backward.reduction = (
                Reduction(groups, scaler.found_inf, backward.loss_to_tell()) if groups else None
            )
            backward.of_replicas = reduction is not None and all(one.ranks.are_replicas for one in stepped)
            largest, bad_loss = (None, None) if scaler.auto is None else backward.for_auto_scale(groups)
            concludes = check and bool(stepped)
            is_noted = concludes and not self.evidence.is_rehearsal
            earlier_ones = stepped[0].pending.backwards if is_noted else ()
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
                    self.scaling.history.note(backward.loss_id, backward.outcome, backward.number, follows)

            if reduction is None:
                conclude()
            else:
                scaler.owe(conclude)
            if check:
                for i, one in enumerate(stepped):
                    one.pending.add(backward, squares[i])
        except BaseException:  # such as out of memory: no gradient may stay scaled, or come unchecked to a step
            are_open = not any(one.window.is_closed for one in stepped)
            for one in stepped:
                if are_open:
                    one.window.discard_backward()
                else:
                    one.forget_backwards()
            raise

    def _windows_into(self, stepped: Sequence[Stepper]) -> list[Stepper]:
        """Return other optimizers with an open window that share parameters with one of `stepped`."""
        if len(self._stepped) <= len(stepped):
            return []  # there are no others
        others = [one for one in self.all if not one.window.is_closed and one not in stepped]
        return [one for one in others if any(map(one.shares_parameters_with, stepped))]

    def close_loss(self, loss_id: int) -> None:
        """Check all gradients that backwards of this loss left to be checked. Those of one scale share one decision."""
        passed = [one.passed for one in self.all if one.passed is not None and one.passed.loss_id == loss_id]
        for backward in dict.fromkeys(passed):
            self._look_at_passed(backward)
        left = [one for one in self.all if one.window.is_left_open and one.window.backward.loss_id == loss_id]
        while left:
            scale = left[0].window.backward.snapshot
            alike = [one for one in left[1:] if one.window.backward.snapshot.equals(scale)]
            self._close_left_open(left[0], alike)
            left = [one for one in left if one.window.is_left_open]

    def _close_left_open(self, stepped: Stepper, others: Sequence[Stepper] = ()) -> None:
        """Close the windows of `stepped` and `others`, and left-open ones of optimizers that share their parameters.

        Args:
            others: their windows are left open, with gradients of the same loss and scale.
        """
        if stepped.window.is_closed:
            return  # never opened, or closed with another window
        together = [stepped, *others]
        for one in together:  # grows in this loop
            found = [other for other in self._windows_into([one]) if other.window.is_left_open]
            together += [other for other in found if other not in together]
        for one in together:
            one.join_open_window()
        self.close_windows(together, stepped.window.backward)

    def begin(self, stepped: Sequence[Stepper], scaler: LossScaler, loss_id: int) -> Backward:
        """Return the Backward of a loss, whose windows are opened next. It takes the scale of a window left open.

        All gradients of a loss have one scale. Gradients that were left with another scale are unscaled now, as before
        a step, and so are those of an optimizer that shares parameters with one whose window is closed.
        Raises AmpStateError, before anything is changed, for gradients left by another loss_id, and for parameters that
        an optimizer shares with one whose `scale_loss` body still runs.
        """
        opened = [one for one in stepped if not one.window.is_closed]
        others = self._windows_into(stepped)
        if not opened and not others:  # nearly always
            return Backward(scaler, loss_id, scaler.snapshot())
        if any(one.window.is_in_body for one in opened):
            return Backward(scaler, loss_id, scaler.snapshot())  # `enter_backward` refuses it
        for other in others:
            if other.window.is_in_body:
                raise AmpStateError(
                    f"scale_loss() was entered for an optimizer that has parameters in common with "
                    f"{type(other.optimizer).__name__}, inside of the body of that one's scale_loss: their gradients "
                    "would have two scales.  Leave the first `with amp.scale_loss(...)` before the next one, or call "
                    "amp.scale_loss(loss, [optimizer, other_optimizer]) once for both."
                )
        left = [one for one in opened if one.window.is_left_open and one.window.may_belong_to(scaler)]
        for one in left:
            if one.window.backward.loss_id != loss_id:
                found = one.window.backward.loss_id
                raise AmpStateError(
                    f"loss_id={loss_id}, but this optimizer has gradients of loss_id={found} that "
                    f"delay_unscale left scaled.  Use loss_id={found} here, or leave out delay_unscale where "
                    "it changes."
                )
        for other in others:
            self._close_left_open(other)
        unopened = [one for one in stepped if one.window.is_closed]
        for one in left:
            if any(map(one.shares_parameters_with, unopened)):
                self._close_left_open(one)
        left = [one for one in left if one.window.is_left_open]
        snapshot = left[0].window.backward.snapshot if left else scaler.snapshot()
        for one in left:
            if one.window.is_left_open and not one.window.backward.snapshot.equals(snapshot):
                self._close_left_open(one)
        backward = Backward(scaler, loss_id, snapshot)
        if left:
            backward.micro_batches = left[0].window.backward.micro_batches
        if left and scaler.auto is not None and left[0].window.is_left_open:
            backward.earlier_loss_is_bad = left[0].window.backward.loss_is_bad()
        return backward


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


class ScaledBackward(ContextOfLoss):
    """The context of one `scale_loss`. A generator would cost a loop of tiny steps 1 % more time.

    Gives `loss.float() * scale`. The exit unscales and checks gradients and updates the scale; with `delay_unscale` it
    leaves gradients scaled. If the body raises, its optimizers' gradients are put back as at the entry; for an exit
    that raises see `ScaledBackwards.close_windows`.

    The entry raises AmpStateError, with nothing changed, if gradients would have two scales. No host sync.
    """

    def __init__(
        self,
        backwards: ScaledBackwards,
        loss: Tensor,
        stepped: Sequence[Stepper],
        scaler: LossScaler,
        loss_id: int,
        delay_unscale: bool,
        delay_overflow_check: bool,
    ) -> None:
        self._backwards = backwards
        self._loss = loss
        self._stepped = stepped
        self._scaler = scaler
        self._loss_id = loss_id
        self._delay_unscale = delay_unscale
        self._delay_overflow_check = delay_overflow_check
        self._hook: RemovableHandle | None = None  # on the scaled loss, while that lives
        self._hook_of_loss: RemovableHandle | None = None  # on the unscaled loss, until the exit
        self._is_left = False  # True from the exit on
        self._has_begun = False  # True once a backward of the scaled loss has begun
        self._has_passed_by = False  # True if a backward of the unscaled loss began before any of the scaled loss
        self._is_on_its_way = False  # True while a backward of the scaled loss has not reached the unscaled loss
        # Marks of gradients, taken when a backward of the unscaled loss begins after one of the scaled loss.
        self._passed: list[tensor_lists.GradientMarks] | None = None
        self._is_mixed = False  # True if a backward of the unscaled loss left gradients

    def __enter__(self) -> Tensor:
        loss, scaler, events = self._loss, self._scaler, self._backwards.events
        for tell in events.entering.observers:
            tell(self)
        self._backwards.unlisted.exit()  # of a compiled backward in a body around this one
        scaler.to(loss.device)
        self._backward = backward = self._backwards.begin(self._stepped, scaler, self._loss_id)
        outside = [one for one in self._stepped if not one.window.is_in_body]
        try:
            scaled_loss = loss.float() * moved(backward.snapshot.scale, loss.device)
            for one in self._stepped:
                one.enter_backward(backward, scaled_loss.requires_grad)
            together = self._stepped[0].pending.accumulations if self._stepped else {}
            self._backwards.evidence.enter(backward, loss, together)
            # Autograd calls these before it accumulates anything.
            if scaled_loss.requires_grad:
                self._hook = scaled_loss.register_hook(self._begin)
                if loss.requires_grad and not backward.snapshot.is_identity:
                    self._hook_of_loss = loss.register_hook(self._pass_by)
            for tell_entered in events.entered.observers:
                tell_entered(self, loss, backward.snapshot.scale)
            return scaled_loss
        except BaseException:
            for hook in (self._hook, self._hook_of_loss):
                if hook is not None:
                    hook.remove()
            self._discard([one for one in outside if one.window.is_in_body])
            raise

    @disable_dynamo
    def _begin(self, grad: Tensor) -> None:
        if self._is_left:
            self._refuse_late()
            return
        self._look_at_passed()
        self._has_begun = self._is_on_its_way = True
        self._begin_windows()
        unlisted = self._backwards.unlisted
        if unlisted.enter(self._backward, self._backwards.all):
            after_backward(lambda: after_backward(unlisted.exit))

    @disable_dynamo
    def _pass_by(self, grad: Tensor) -> None:
        if not self._has_begun:
            self._has_passed_by = True
            self._begin_windows()
        elif not self._is_on_its_way:
            self._look_at_passed()
            self._passed = [tensor_lists.gradient_marks(one.rows.columns.param_handle) for one in self._stepped]
        self._is_on_its_way = False

    def _look_at_passed(self) -> None:
        """Record if a backward of the unscaled loss left gradients. `torch.autograd.grad` leaves none."""
        if self._has_passed_by and not self._has_begun:
            self._is_mixed |= any(one.window.has_arrived() for one in self._stepped)
        elif self._passed is not None:
            self._is_mixed |= any(marks.have_moved() for marks in self._passed)
            self._passed = None

    def _begin_windows(self) -> None:
        have_earlier = [one.window.begin() for one in self._stepped]
        if any(have_earlier):
            after_backward(lambda: after_backward(self._end_windows))  # after the callbacks in which reducers write

    def _end_windows(self) -> None:
        for one in self._stepped:
            one.window.end()

    def _discard(self, stepped: Sequence[Stepper]) -> None:
        self._backwards.unlisted.discard()
        for one in stepped:
            one.window.discard_backward()

    def _refuse_unscaled(self) -> None:
        """Raise AmpStateError if a backward of the unscaled loss left gradients."""
        self._look_at_passed()
        if self._is_mixed:
            raise AmpStateError(
                "backward() was called on the loss that was passed to amp.scale_loss, so its gradients are not scaled, "
                "and were put back.  Write `with amp.scale_loss(loss, optimizer) as scaled_loss:` and call "
                "scaled_loss.backward()."
            )

    def _warn_of_unscaled(self) -> None:
        """Warn if gradients came without a backward of the scaled or the unscaled loss."""
        if self._has_begun or self._has_passed_by or self._hook is None or self._backward.snapshot.is_identity:
            return
        for one in self._stepped:
            if one.window.has_arrived_unseen():
                one.missing_gradients.warn_of_unscaled(one.optimizer)

    def _refuse_late(self) -> None:
        """Raise AmpStateError in a backward after the exit, unless its gradients will still be unscaled."""
        if self._backward.snapshot.is_identity and not any(one.rows.makes_masters for one in self._stepped):
            return
        if not self._delay_unscale or any(one.window.is_closed for one in self._stepped):
            raise AmpStateError(
                "backward() was called on the scaled loss after its `with amp.scale_loss(...)` was left, whose exit "
                "unscales and checks gradients.  Nothing was added to any.  Call scaled_loss.backward() inside of the "
                "`with`."
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._is_left = True
            if self._hook_of_loss is not None:
                self._hook_of_loss.remove()
            for tell in self._backwards.events.leaving.observers:
                tell(self)
            if kind is not None:
                self._discard(self._stepped)
                return
            self._refuse_unscaled()
            self._warn_of_unscaled()
            self._backwards.unlisted.exit()
            for one in self._stepped:
                one.missing_gradients.note(self._has_begun)
            if self._delay_unscale:
                for one in self._stepped:
                    one.window.leave_open(self._backward)
            else:
                self._backwards.close_windows(self._stepped, self._backward, self._delay_overflow_check, self._loss)
        except BaseException:  # a refusal, an observer's error, an interrupt
            self._discard(self._stepped)
            raise
        finally:
            self._backwards.casts.after_backward()
            for tell in self._backwards.events.left.observers:
                tell(self)


class PassedThrough(ContextOfLoss):
    """The context of a `scale_loss` that does not scale the loss: gradients accumulate in `.grad`, as in plain PyTorch.

    Args:
        scaler: has the scale of 1, if gradients are checked before the step; else None.
    """

    def __init__(
        self,
        backwards: ScaledBackwards,
        loss: Tensor,
        stepped: Sequence[Stepper],
        loss_id: int,
        scaler: LossScaler | None,
    ) -> None:
        self._backwards = backwards
        self._loss = loss
        self._stepped = stepped
        self._loss_id = loss_id
        self._scaler = scaler
        self._backward: Backward | None = None

    def __enter__(self) -> Tensor:
        events, scaler = self._backwards.events, self._scaler
        for tell in events.entering.observers:
            tell(self)
        if scaler is None:
            self._backwards.evidence.enter_unchecked(self._loss, self._loss_id)
        else:
            scaler.to(self._loss.device)
            self._backward = Backward(scaler, self._loss_id, scaler.snapshot())
            for one in self._stepped:
                one.enter_passed()
            self._backwards.evidence.enter(self._backward, self._loss, self._stepped[0].pending.accumulations)
        for tell_entered in events.entered.observers:
            tell_entered(self, self._loss, 1.0)
        return self._loss.float()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        events = self._backwards.events
        for tell in events.leaving.observers:
            tell(self)
        try:
            if kind is None:
                for one in self._stepped:
                    one.missing_gradients.note(None)
                for tell_closed in events.closed.observers:
                    tell_closed([one.rows for one in self._stepped], None)
                if (backward := self._backward) is not None:
                    is_in_trouble = any(one.pending.skips_in_a_row > 0 for one in self._stepped)
                    if is_in_trouble or not backward.order:
                        self._backwards.evidence.keep(backward, self._loss, False, is_in_trouble)
                    for one in self._stepped:
                        one.leave_passed(backward)
        finally:
            self._backwards.casts.after_backward()
            for tell in events.left.observers:
                tell(self)
