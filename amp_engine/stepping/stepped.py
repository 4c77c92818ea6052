"""One optimizer: its window around a backward, and its step, skipped or done with masters kept."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_engine import kernels
from amp_engine.devices import moved
from amp_engine.errors import AmpStateError
from amp_engine.kernels import walk
from amp_engine.optimizers.fused_step import FusedStep, Plan, release_fused_step
from amp_engine.scaler import LossScaler, ScaleSnapshot
from amp_engine.stepping import strays
from amp_engine.stepping.backward import NO_LOSS, Checked, PassOne
from amp_engine.stepping.lazy_gradients import clip_factor
from amp_engine.stepping.master_weights import MasterWeights
from amp_engine.stepping.own_step import foreach_as_by_default, unhooked_step
from amp_engine.stepping.roster import forget_roster, roster_of
from amp_engine.stepping.rows import Rows, rows_of
from amp_engine.stepping.scaling import Scaling
from amp_engine.stepping.verdicts import Verdicts
from amp_engine.stepping.window import GradientWindow
from amp_engine.torch_private import lazy_clone


class WeightCopies(Protocol):
    """Low-precision copies of FP32 parameters, for the functions that are cast."""

    def copies(self, weights: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """What a step is to write beside the weights."""

    def written(self, weights: Sequence[Tensor]) -> None:
        """A step wrote these weights and copies, and no other weight."""


class Hook(Protocol):
    """What torch calls before the step."""

    def be_last(self) -> None:
        """Stand behind the hooks that were registered by now."""

    def remove(self) -> None:
        """Have torch call it no more."""


class SteppedOptimizer:
    """One optimizer in the care of an engine.

    Args:
        optimizer: while `masters` exist its groups hold them.
        masters: its FP32 masters, or None.
        scaling: has the scaler of gradients that nobody said the scaler of.
        verdicts: what decides whether a step is skipped.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        masters: MasterWeights | None,
        scaling: Scaling,
        verdicts: Verdicts,
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.masters = masters
        self.window: GradientWindow | None = None
        self.in_backward = False
        self.backward_seen = False  # since the last step
        self.adopts_next = False  # whether the next backward looks for writes through `param.data`
        self.verdicts = verdicts
        self._pass_one: PassOne | None = None
        self._list_check = kernels.ListCheck()
        self._scaling = scaling
        self._is_wrapped = False
        self._written_gradients = strays.WrittenGradients()
        self._left_gradients = False  # whether masters still have those of the last step, for a wrapper to see
        # Held by the optimizer; here weakly, or the two would wait for a collection of garbage.
        self.hook: Callable[[], Hook | None] = lambda: None

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer, which outlives every call that needs it."""
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    def wrapped_by(self, wrapper: Optimizer) -> None:
        """Leave gradients after a step, and expect masters to be written, as `wrapper`, which calls `step`, may do."""
        self._is_wrapped = True
        if self.masters is not None:
            self.masters.wrapped_by(wrapper)

    def enter_backward(self, scaler: LossScaler, loss_id: int, snapshot: ScaleSnapshot) -> None:
        """Entry of `scale_loss`: look for new parameters and foreign writes, open or re-enter the window."""
        if self.in_backward:
            raise AmpStateError(
                f"scale_loss() was entered again for {type(self.optimizer).__name__} inside of its own body.  Leave "
                "the first `with amp.scale_loss(...)` before the next one, or call scale_loss once on the sum."
            )
        self._open_window(scaler, loss_id, snapshot)
        self.in_backward = True

    def leave_open(self, loss: Tensor) -> None:
        """Exit of `scale_loss(..., delay_unscale=True)`."""
        assert self.window is not None
        self.in_backward = False
        self.window.leave_open(loss)

    def close_window(self, check: bool, unscaled: set[int]) -> list[Checked]:
        """Exit of `scale_loss`: unscale and check, but what another optimizer of it did. No host sync."""
        assert self.window is not None
        checked, self._pass_one = self.window.close(check, unscaled, self._list_check)
        self.in_backward = False
        self.backward_seen = True
        self.window = None
        if self.masters is not None:
            self._written_gradients.note(self.masters)
        if (hook := self.hook()) is not None:
            hook.be_last()
        return checked

    # Around a backward in somebody's own `scale_loss`, who names the scaler in the end, and decides on the skip.

    def look_for_parameters(self) -> None:
        """Give new parameters masters, and take foreign writes over into masters."""
        if self.masters is not None:
            self.masters.scan()
            self.masters.refresh(self.adopts_next)
        self.adopts_next = False

    def prepare_backward(self) -> None:
        """Entry: open or re-enter the window."""
        if self.in_backward:
            raise AmpStateError(
                f"_prepare_amp_backward() was called for {type(self.optimizer).__name__} inside of an `with "
                "amp.scale_loss(...)`, which did it at its entry.  Leave out one of the two."
            )
        scaler = self._scaling.default()
        self._open_window(scaler, 0, scaler.snapshot(), is_claimed=False)

    def post_backward(self, scaler: LossScaler) -> None:
        """Exit: unscale by `scaler`, and record in it what was not finite. No host sync but `scaler.to`'s."""
        window = self._adopted_window()
        for weight in roster_of(self.optimizer, self.masters).weights[:1]:
            scaler.to(weight.device)
        window.claim(scaler, 0, scaler.snapshot())
        self.close_window(True, set())

    def set_left_open(self, value: bool) -> None:
        """Declare the gradients that are there scaled, or not, without looking at them."""
        if value:
            window = self._adopted_window()
            if not window.is_left_open:
                window.leave_open(NO_LOSS)
        elif self.window is not None and self.window.is_left_open:
            self.window.forget()
            self.window = None

    def skipped_by_caller(self) -> None:
        """The step was skipped without us, and all that was decided about it is past."""
        self.verdicts.skipped_by_caller()
        self.backward_seen = False
        self._pass_one = None
        forget_roster(self.optimizer)
        if self.masters is not None:
            self.masters.drop_gradients()

    def _open_window(self, scaler: LossScaler, loss_id: int, snapshot: ScaleSnapshot, is_claimed: bool = True) -> None:
        self.verdicts.hear(wait=False)
        self._pass_one = None
        self._drop_left_gradients()
        self.look_for_parameters()
        if self.window is not None and not self.window.is_left_open:
            self.window.discard()  # of a body that raised, with nobody to close it
            self.window = None
        if self.window is None:
            self.window = GradientWindow(self.optimizer, self.masters, scaler, loss_id, snapshot, is_claimed=is_claimed)
            return
        self.window.reenter()
        if is_claimed:
            self.window.claim(scaler, loss_id, snapshot)

    def _adopted_window(self) -> GradientWindow:
        """The open window, or one around the gradients that are there."""
        if self.window is None:
            self._pass_one = None
            self._drop_left_gradients()
            self.look_for_parameters()
            scaler = self._scaling.default()
            self.window = GradientWindow(
                self.optimizer, self.masters, scaler, 0, scaler.snapshot(), is_claimed=False, is_entered=False
            )
        return self.window

    def grad_norm(self, norm_type: float) -> Tensor | None:
        """Norm of all unscaled gradients, as the last backward's check took it: float32, shape []. No host sync.

        None if something else than that backward is in the gradients by now, or for another norm than 2 and infinity.
        """
        if self.masters is not None:
            self.masters.scan()  # parameters may have come, or left the groups, since
        one = self._pass_one
        if one is None or one.unscaling.norm is not None or norm_type not in (2.0, math.inf):
            return None
        if not one.holds(self.optimizer, self.masters):
            return None
        if norm_type == math.inf:
            return (one.checked.checks.largest.max().double() * one.unscaling.inv_scale.double()).float()
        # The caller's to write to.
        return lazy_clone(one.norm)

    def clip_grads_with_norm_(self, norm: Tensor, max_norm: float) -> None:
        """Multiply the gradients by `min(1, max_norm / (norm + 1e-6))`: masters' in the step. After `grad_norm`."""
        one = self._pass_one
        assert one is not None
        one.unscaling.clip(lazy_clone(norm), max_norm)
        if one.plain:
            factor = clip_factor(norm, max_norm).float()
            grads = [g for g in one.plain.grads if g is not None]
            if floats := [g for g in grads if g.dtype == torch.float32]:
                torch._foreach_mul_(floats, factor)
            for g in grads:
                if g.dtype != torch.float32:  # a 0-d factor would be rounded to their type
                    g.copy_(g.float() * factor)

    def shares_parameters_with(self, other: SteppedOptimizer) -> bool:
        """Whether a parameter is stepped by both."""
        ids = {id(p) for p in roster_of(other.optimizer, other.masters).params}
        return any(id(p) in ids for p in roster_of(self.optimizer, self.masters).params)

    def abandon(self) -> None:
        """The body of `scale_loss` raised."""
        self.in_backward = False
        if self.window is not None and not self.window.abandon():
            self.window = None

    def release(self) -> None:
        """Remove the hook and give the optimizer its own parameters back."""
        if (hook := self.hook()) is not None:
            hook.remove()
        if self.window is not None:
            self.window.discard()
            self.window = None
        self.verdicts.hear(wait=True)
        self._drop_left_gradients()
        release_fused_step(self.optimizer)
        forget_roster(self.optimizer)
        if self.verdicts.overflowed():
            for group in self.optimizer.param_groups:
                for p in group["params"]:
                    p.grad = None  # not finite, and nobody is left to skip the step
        if self.masters is not None:
            self.masters.release()

    @property
    def is_pending(self) -> bool:
        """Whether a backward since the last step has something to say about the next one."""
        return bool(self.verdicts.pending) or self.window is not None

    def step(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], fused: FusedStep | None, weight_copies: WeightCopies | None
    ) -> None:
        """Skip, or step: fused, or as the class does it on FP32 gradients. Gradients are unscaled by now.

        Args:
            args, kwargs: what the optimizer's `step` was called with, the optimizer first.
            fused: what can step its class, or None.
            weight_copies: of FP32 parameters, for a fused step to write.

        Waits for the device if the host has to decide and does not know yet.
        """
        optimizer, masters = self.optimizer, self.masters
        backward_seen, self.backward_seen = self.backward_seen, False
        if masters is not None:
            masters.scan()
            masters.follow()
        # A wrapper goes on after this step by what it finds, so the host decides.
        is_open = not self._is_wrapped and not self.verdicts.are_known()
        planned = self._plan(fused) if fused is not None and is_open else None
        flags: list[Tensor] = []
        if planned is not None:
            flags = self.verdicts.leave_to_device()
        elif self.verdicts.decide():
            self._skip()
            return
        elif fused is not None:
            planned = self._plan(fused)
        if not backward_seen and masters is not None:
            strays.warn_of_unseen_gradients(optimizer, masters)
        try:
            if planned is not None:
                self._step_fused(*planned, flags, None if masters is not None else weight_copies)
            else:
                self._step_unfused(optimizer, args, kwargs)
            if masters is not None and self._is_wrapped:
                walk.drop_gradients(masters.params)
                self._left_gradients = True
            elif masters is not None:
                masters.drop_gradients()
        finally:
            self._pass_one = None
            forget_roster(optimizer)

    def look_at_gradients(self) -> None:
        """Before a step: drop what an earlier step left, and say what never reaches the masters.

        Raises AmpStateError where torch.amp.GradScaler is to step such gradients.
        """
        left = self.masters if self._left_gradients and not self.backward_seen else None
        if left is not None and walk.any_gradient(left.params):
            self._drop_left_gradients()  # a backward that we did not see: nothing of an earlier one stands for it
        self.verdicts.hear(wait=False)
        if self.masters is not None:
            if hasattr(self.optimizer, "found_inf"):
                self.refuse_foreign_scaler()
            if self.backward_seen:
                self._written_gradients.warn(self.optimizer, self.masters)

    def _skip(self) -> None:
        """Do nothing but drop what the step would have."""
        if self.masters is not None:
            self.masters.drop_gradients()
        if self._is_wrapped:
            walk.drop_gradients(roster_of(self.optimizer, self.masters).plain)  # nothing for a wrapper to go by
        forget_roster(self.optimizer)

    def _drop_left_gradients(self) -> None:
        """Drop the gradients of the last step that a wrapper was to see."""
        if self._left_gradients and self.masters is not None:
            self.masters.drop_own_gradients()
        self._left_gradients = False

    def _plan(self, fused: FusedStep) -> tuple[FusedStep, Plan, Rows] | None:
        """What the kernels are to do, or None if the class's own step has to."""
        rows = rows_of(self.optimizer, self.masters)
        copies = None if self.masters is None else rows.copies
        plan = fused.plan(rows.weights, rows.gradients, copies, rows.known)
        return None if plan is None else (fused, plan, rows)

    def _step_fused(
        self, fused: FusedStep, plan: Plan, rows: Rows, flags: list[Tensor], weight_copies: WeightCopies | None
    ) -> None:
        """Pass 2: unscale, clip, step and write the model's weights in one go; nothing if one of `flags` is != 0."""
        found_inf = None
        for flag in flags:
            found_inf = flag if found_inf is None else torch.maximum(found_inf, moved(flag, found_inf.device))
        unscaling = rows.unscaling
        one = self._pass_one if fused.rule.reads_sums else None
        whole = one is not None and not one.plain and one.holds(self.optimizer, self.masters)
        fused.step(
            plan,
            None if weight_copies is None else weight_copies.copies(rows.weights),
            rows.scaled,
            inv_scale=None if unscaling is None else unscaling.inv_scale,
            found_inf=found_inf,
            norm=None if unscaling is None else unscaling.norm,
            max_norm=math.inf if unscaling is None else unscaling.max_norm,
            checks=one.checked.checks if whole and one is not None else None,
        )
        if weight_copies is not None:
            weight_copies.written(rows.weights)
        if self.masters is not None:
            self.masters.mark_in_sync()

    def _step_unfused(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The optimizer's own step, on gradients that it finds where it looks for them."""
        if self.masters is not None:
            self.masters.materialize()
        try:
            with foreach_as_by_default(optimizer):
                unhooked_step(optimizer)(optimizer, *args[1:], **kwargs)
        finally:
            # Also after an exception: a parameter never disagrees with its master.
            if self.masters is not None:
                self.masters.write_back()

    def refuse_foreign_scaler(self) -> None:
        """Raise AmpStateError where torch.amp.GradScaler is to step gradients that never reached the masters."""
        if self.masters is not None and not self.backward_seen:
            strays.refuse_foreign_scaler(self.optimizer, self.masters)
