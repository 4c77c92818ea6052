"""One optimizer: its window around a backward, and its step, skipped or done with masters kept."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_engine import kernels
from amp_engine.errors import AmpStateError
from amp_engine.ground import devices
from amp_engine.ground.devices import moved
from amp_engine.ground.dtypes import is_low_precision
from amp_engine.kernels import tensor_lists
from amp_engine.optimizers.fused_step import FusedStep, StepInput, fused_step_of, release_fused_step
from amp_engine.scaling.losses import Scaling
from amp_engine.scaling.scaler import LossScaler
from amp_engine.scaling.snapshot import ScaleSnapshot
from amp_engine.stepping import arithmetic, gradient_warnings, shards
from amp_engine.stepping.backward import Backward
from amp_engine.stepping.columns import Columns
from amp_engine.stepping.events import Events
from amp_engine.stepping.own_step import foreach_as_by_default, unhooked_step
from amp_engine.stepping.pending import Pending, Skip
from amp_engine.stepping.ranks import Ranks
from amp_engine.stepping.reduction import agree
from amp_engine.stepping.rows import Rows
from amp_engine.stepping.slots import clip_factor
from amp_engine.stepping.window import Window


class Casts(Protocol):
    """The function casts of an engine, which make copies of FP32 parameters in low precision."""

    def off(self) -> AbstractContextManager[None] | None:
        """A context without them in this thread; None where there are none."""

    def after_backward(self) -> None:
        """Keep no copy: a backward is over, and anybody may have written any weight."""

    def copies(self, weights: Sequence[Tensor]) -> Sequence[Tensor | None] | None:
        """The copies that a step is to write beside the weights; None where there are no casts."""

    def written(self, weights: Sequence[Tensor]) -> None:
        """Keep the copies: a step wrote these weights and their copies, and no other weight."""


class Stepper:
    """One optimizer in the care of an engine.

    Args:
        optimizer: its groups hold what `rows` says.
        rows: what it steps.
        scaling: has the scaler of gradients that nobody said the scaler of.
        pending: decides whether a step is skipped.
        events: whose observers hear of masters that were written outside of steps.
        ranks: with whom; None: those of a DistributedDataParallel.
        check: given this object before its first `scale_loss` or step; raises AmpStateError.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        rows: Rows,
        scaling: Scaling,
        pending: Pending,
        events: Events,
        ranks: Ranks | None = None,
        check: Callable[[Stepper], None] | None = None,
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.rows = rows
        self.window = Window(rows)
        self.pending = pending
        self.backward_seen = False  # since the last step
        self._events = events
        self._check = check
        # Told what joined with a gradient, where others are scaled; raises AmpStateError.
        self.check_gathered: Callable[[Optimizer, Sequence[nn.Parameter]], None] = lambda optimizer, joined: None
        self.adopts_next = False  # whether the next backward looks for writes through `param.data`
        self.needs_kernels = False  # whether what it steps, or keeps, is nothing that its class can step
        self._scaling = scaling
        self._is_wrapped = False
        self._is_captured = False  # whether a backward of these gradients is in a CUDA graph
        self._with_masters: tuple[Columns, Tensor] | None = None
        self._unchecked: Sequence[nn.Parameter] = ()  # whose gradients another loss left
        self._has_left = False  # whether the last step, which may have been skipped, left those of the model
        self._written_gradients = gradient_warnings.WrittenGradients()
        self._written_parameters = gradient_warnings.WrittenParameters()
        self.missing_gradients = gradient_warnings.MissingGradients()
        self._is_clipped = False  # in earlier iterations
        self._clipping = kernels.ListCheck()  # of its own: on a GPU what it has uploaded stays
        self.ranks = Ranks(rows) if ranks is None else ranks
        self._left_gradients = False  # whether masters still have those of the last step, for a wrapper to see

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer, which outlives every call that needs it."""
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    @property
    def is_pending(self) -> bool:
        """Whether a backward since the last step has something to say about the next one."""
        return bool(self.pending.backwards) or not self.window.is_closed

    def wrapped_by(self, wrapper: Optimizer) -> None:
        """Leave gradients after a step, and expect masters to be written, as `wrapper`, which calls `step`, may do."""
        self._is_wrapped = True
        self.rows.wrapped_by(wrapper)

    def adopt_data_writes_next(self, is_wanted: bool) -> None:
        """Have the next backward take writes through `param.data` over into masters, or not."""
        self.adopts_next = is_wanted

    def require_kernels(self, moment_dtype: torch.dtype) -> None:
        """Have only the kernels do the step, with moments in `moment_dtype`."""
        fused = fused_step_of(self.optimizer)
        assert fused is not None, "checked with the request"
        fused.require(moment_dtype)
        self.needs_kernels = True

    def check_first_use(self) -> None:
        """Before a `scale_loss` or step: raise AmpStateError if something that has happened since forbids the first."""
        if self._check is not None:
            self._check(self)
            self._check = None

    # Around a backward.

    def enter_backward(self, backward: Backward, waits: bool = False, scale: ScaleSnapshot | None = None) -> None:
        """Entry of `scale_loss`: look for new parameters and foreign writes, open the window, or enter it again.

        Args:
            backward: the scale of what is to come.
            waits: whether the window is told when a backward begins.
            scale: of gradients that low-precision parameters gathered before they had masters; None: 1.
        """
        if self.window.is_in_body:
            raise AmpStateError(
                f"scale_loss() was entered again for {type(self.optimizer).__name__} inside of its own body.  Leave "
                "the first `with amp.scale_loss(...)` before the next one, or call scale_loss once on the sum."
            )
        self.ranks.enter(not self.backward_seen, self.window.is_left_open)
        self._begin()
        self._check_gathered(backward.snapshot)
        self.join_open_window(scale)
        if self.rows.joined:
            self._take_gathered(backward.scaler, scale)
        if self._is_captured:
            self._is_captured = self._has_gradients()
        self.window.open(backward, waits, not self.backward_seen or bool(self._unchecked))

    def _has_gradients(self) -> bool:
        """True if a next backward is added to what earlier ones left."""
        is_held = self.rows.slots.count > 0 or self.window.is_left_open
        return is_held or tensor_lists.any_gradient(self.rows.columns.weight_handle)

    def join_open_window(self, scale: ScaleSnapshot | None) -> None:
        """Have what parameters gathered before they came be scaled as the rest of a window that was left open is.

        Args:
            scale: of what low-precision parameters gathered before they had masters; None: 1. All else is unscaled.
        """
        if not self.window.is_left_open:
            return
        self.rows.scan()
        self._check_gathered(self.window.backward.snapshot)
        joined, self.rows.joined = self.rows.joined, []
        own = self.window.backward.snapshot
        for p in joined:
            grad, earlier = p.grad, None if self.rows.master_of(p) is None else scale
            if grad is None or (earlier is not None and earlier.equals(own)):
                continue
            factor = own.scale if earlier is None else own.scale * earlier.inv_scale
            p.grad = arithmetic.times(grad, moved(factor, grad.device), grad.dtype)

    def _check_gathered(self, snapshot: ScaleSnapshot) -> None:
        if self.rows.joined and not snapshot.is_identity:
            self.check_gathered(self.optimizer, [p for p in self.rows.joined if p.grad is not None])

    def close_window(self, backward: Backward, check: bool, unscaled: set[int] | None = None) -> None:
        """Exit of `scale_loss`: unscale and check, but what another optimizer of it did. No host sync."""
        self.window.close(backward, check, unscaled)
        if self._is_clipped and (found := self.rows.slots.check) is not None and found.unscaled is not None:
            found.unscaled.watch()
        self._unchecked, self._has_left = (), False
        self._is_captured |= devices.is_capturing(backward.snapshot.scale.device)
        self.ranks.close()
        self.backward_seen = True
        self._written_gradients.note(self.rows)

    def look_for_parameters(self) -> None:
        """Give new parameters masters, and take foreign writes over into masters."""
        self.rows.scan()
        self.rows.judge_half()
        self.rows.refresh(self.adopts_next)
        self.adopts_next = False

    def is_given_gradients(self) -> None:
        """The backward of a loss that this optimizer is not listed in left gradients: look at them before a step."""
        self._unchecked = self.rows.columns.plain

    def has_gathered(self, is_stepping: bool = False) -> bool:
        """True if there is a gradient that no check of this optimizer saw. Looks for new parameters.

        Args:
            is_stepping: whether it is stepped next: what a skipped step left counts then, for nobody zeroed it.
        """
        self.rows.scan()
        if is_stepping and self._has_left and tensor_lists.any_gradient(self.rows.columns.plain_handle):
            return True
        return any(p.grad is not None for p in self._unchecked) or bool(self.rows.joined)

    def _take_gathered(self, scaler: LossScaler, scale: ScaleSnapshot | None) -> None:
        """Give new masters what their parameters gathered, and count an overflow of it. No host sync."""
        joined, self.rows.joined = self.rows.joined, []
        for p in joined:
            grad, master = p.grad, self.rows.master_of(p)
            if grad is not None and master is not None and is_low_precision(grad):
                inv_scale = torch.ones((), device="cpu") if scale is None else scale.inv_scale
                master.weight.grad = arithmetic.times(grad, moved(inv_scale, grad.device), torch.float32)
                for flags in arithmetic.nonfinite([grad]):
                    scaler.record_(flags)
        self._unchecked = self.rows.columns.plain

    def shares_parameters_with(self, other: Stepper) -> bool:
        """Whether a parameter is stepped by both."""
        ids = {id(p) for p in other.rows.columns.params}
        return any(id(p) in ids for p in self.rows.columns.params)

    def _begin(self) -> None:
        self.pending.hear(wait=False)
        self._discard_left_gradients()
        self.rows.slots.check = None
        if not self.rows.written_outside and self.rows.written():
            gradient_warnings.warn_of_written_masters(self.optimizer)
            self.rows.written_outside = True
            for tell in self._events.masters_written.observers:
                tell()
        self.look_for_parameters()

    # Around a backward in somebody's own `scale_loss`, who names the scaler in the end, and decides on the skip.

    def prepare_backward(self) -> None:
        """Entry: open the window, or enter it again."""
        if self.window.is_in_body:
            raise AmpStateError(
                f"_prepare_amp_backward() was called for {type(self.optimizer).__name__} inside of an `with "
                "amp.scale_loss(...)`, which did it at its entry.  Leave out one of the two."
            )
        self._begin()
        self.window.prepare(self._stand_in(), not self.backward_seen or bool(self._unchecked))

    def post_backward(self, scaler: LossScaler) -> None:
        """Exit: unscale by `scaler`, and record in it what was not finite. No host sync but `scaler.to`'s."""
        self._adopt_gradients()
        for weight in self.rows.columns.weights[:1]:
            scaler.to(weight.device)
        self.window.claim(Backward(scaler, 0, scaler.snapshot()))
        self.close_window(self.window.backward, True)
        agree(self.ranks.groups(), scaler.found_inf)  # whoever called this looks at it next

    def set_left_open(self, value: bool) -> None:
        """Declare the gradients that are there scaled, or not, without looking at them."""
        if value and not self.window.is_in_body:
            self._adopt_gradients()
            if not self.window.is_left_open:
                self.window.leave_open()
        elif not value and self.window.is_left_open:
            self.window.close_as_is()

    def skipped_by_caller(self) -> None:
        """The step was skipped without us, and all that was decided about it is past."""
        self.pending.skipped_by_caller()
        self.backward_seen = False
        self._has_left = True
        self.rows.spend_gradients()

    def forget_backwards(self) -> None:
        """Discard what backwards since the last step left, and what they decided."""
        if not self.window.is_closed:
            self.window.discard()
        self.pending.forget()
        self.backward_seen = False
        self.rows.discard_gradients()
        tensor_lists.discard_gradients(self.rows.columns.plain)

    def _adopt_gradients(self) -> None:
        """Have an open window, if need be one around the gradients that are there."""
        if self.window.is_closed:
            self._discard_left_gradients()
            self.rows.slots.check = None
            self.look_for_parameters()
            self.window.adopt(self._stand_in())

    def _stand_in(self) -> Backward:
        scaler = self._scaling.default()
        return Backward(scaler, 0, scaler.snapshot())

    # Clipping.

    def grad_norm(self, norm_type: float) -> Tensor | None:
        """Norm of all unscaled gradients: float32, shape []. No host sync.

        It is the one that the last backward's check took where nobody wrote gradients since. Held ones are nobody
        else's. Those of rows without masters are watched from the second call on, where torch tells of writes; else
        they are read once more, since collectives, NumPy and writes through `.data` move no version.

        None if something else than that backward is in the gradients by now, or for another norm than 2 and infinity.
        """
        if self.rows.makes_masters:
            self.rows.scan()  # parameters may have come, or left the groups, since
        check = self.rows.whole_check()
        if check is None or self.rows.slots.norm is not None or norm_type not in (2.0, math.inf):
            return None
        found, norm, inv_scale = check.checked.checks, check.norm, check.scale.inv_scale.double
        self._is_clipped = True
        if check.unscaled is None or check.unscaled.is_unwritten():
            if norm_type == math.inf:
                return (found.largest.max().double() * inv_scale()).float()
            return tensor_lists.copy(norm)  # the caller's to write to
        ignored, norm = torch.zeros_like(norm), torch.empty_like(norm)
        now = self._clipping.run(check.unscaled.grads, None, torch.ones_like(norm), ignored, norm)
        if self.rows.slots.count == 0:
            return now.largest.max() if norm_type == math.inf else norm
        held = self._held_rows(norm.device)
        if norm_type == math.inf:
            return torch.maximum((found.largest[held].max().double() * inv_scale()).float(), now.largest.max())
        return (found.sum_squares[held].sum() * inv_scale().square() + now.sum_squares.sum()).sqrt().float()

    def _held_rows(self, device: torch.device) -> Tensor:
        """Where there are masters: int64, on `device`; found once for each arrangement of rows."""
        columns = self.rows.columns
        if self._with_masters is None or self._with_masters[0] is not columns:
            rows = [row for row, is_plain in enumerate(columns.plain_mask) if not is_plain]
            self._with_masters = columns, moved(torch.tensor(rows, dtype=torch.int64, device="cpu"), device)
        return self._with_masters[1]

    def clip_grads_with_norm_(self, norm: Tensor, max_norm: float) -> None:
        """Multiply the gradients by `min(1, max_norm / (norm + 1e-6))`: masters' in the step. After `grad_norm`."""
        slots = self.rows.slots
        slots.clip(tensor_lists.copy(norm), max_norm)
        if slots.check is not None and slots.check.unscaled is not None:
            self._clipping.multiply_(slots.check.unscaled.grads, clip_factor(norm, max_norm).float())

    # The step.

    def look_at_gradients(self) -> None:
        """Before a step: discard what an earlier step left, and say what never reaches the masters.

        Raises AmpStateError where torch.amp.GradScaler is to step such gradients.
        """
        if self._left_gradients and not self.backward_seen and self.rows.has_parameter_gradients():
            self._discard_left_gradients()  # a backward that we did not see: nothing of an earlier one stands for it
        self.hide_spent()
        self.pending.hear(wait=False)
        if hasattr(self.optimizer, "found_inf"):
            self.refuse_foreign_scaler()
        if self.backward_seen:
            self._written_gradients.warn(self.optimizer, self.rows)

    def hide_spent(self) -> None:
        """Take back, from hooks and the step, the gradients that were shown for `zero_grad` to find."""
        if not self._left_gradients:
            self.rows.spent.hear()

    def refuse_foreign_scaler(self) -> None:
        """Raise AmpStateError where torch.amp.GradScaler is to step gradients that never reached the masters."""
        if not self.backward_seen:
            gradient_warnings.refuse_foreign_scaler(self.optimizer, self.rows)

    def step(self, args: tuple[Any, ...], kwargs: dict[str, Any], fused: FusedStep | None, casts: Casts) -> None:
        """Skip, or step: fused, or as the class does it on FP32 gradients. Gradients are unscaled by now.

        Args:
            args, kwargs: what the optimizer's `step` was called with, the optimizer first.
            fused: what can step its class, or None.
            casts: their copies of FP32 parameters are for a fused step to write.

        Waits for the device if the host has to decide and does not know yet.
        """
        rows = self.rows
        rows.scan()
        rows.judge_half()
        rows.follow()
        self._written_parameters.warn(self.optimizer, rows)
        # Planned once, before the decision: a group that came between two plans could be stepped on inf.
        planned = None if fused is None else self._plan(fused)
        if planned is None or not planned.is_current:  # somebody may have called model.half()
            rows.look_at_types()
            rows.judge_half()
        if planned is None and self.needs_kernels:
            gradient_warnings.refuse_own_step(self.optimizer, fused, rows.step_input())
        self._refuse_half_a_capture()
        if planned is None or self._is_wrapped:
            self._refuse_capture()
        backward_seen, self.backward_seen, self._is_captured = self.backward_seen, False, False
        streams = rows.slots.streams
        # A wrapper goes on after this step by what it finds, so the host decides.
        decision = self.pending.decide(on_device=planned is not None and not self._is_wrapped)
        try:
            if isinstance(decision, Skip) or decision.flags:
                self._has_left = True  # the model's own gradients stay, which may not be finite
            if isinstance(decision, Skip):
                self._skip()
                return
            if not backward_seen:
                gradient_warnings.warn_of_unseen_gradients(self.optimizer, rows)
            if fused is not None and planned is not None:
                self._step_fused(fused, planned, decision.flags, casts)
            else:
                self._step_unfused(args, kwargs)
            devices.wait_for_readers(streams)
            rows.spend_gradients(keeps_masters=self._is_wrapped)
            self._left_gradients = self._is_wrapped
        finally:
            rows.slots.check = None

    def _refuse_capture(self) -> None:
        """Raise AmpStateError in a CUDA graph's capture: here the host decides, and a replay would not ask it."""
        weights = self.rows.columns.weights
        if self.pending.backwards and weights and devices.is_capturing(weights[0].device):
            raise AmpStateError(
                f"{type(self.optimizer).__name__}.step() is captured in a CUDA graph, but whether it is skipped is "
                "decided on the host: only exactly Adam, AdamW, SGD of torch.optim and the fused optimizers, not "
                "wrapped by another, on dense gradients skip on the GPU.  Leave scale_loss and step() out of the "
                "capture: torch.cuda.make_graphed_callables captures the model's forward and backward alone."
            )

    def _refuse_half_a_capture(self) -> None:
        """Raise AmpStateError outside of the CUDA graph that has the backward: a replay tells the host of none."""
        if not (self.backward_seen and self._is_captured):
            return
        weights = self.rows.columns.weights
        if weights and not devices.is_capturing(weights[0].device):
            raise AmpStateError(
                f"The backward is in a CUDA graph, and {type(self.optimizer).__name__}.step() is not: no replay tells "
                "the host of its gradients, which steps would miss, or take where they are not finite.  Nothing was "
                "stepped.  Capture step() in the same graph, or leave scale_loss out of it as well: "
                "torch.cuda.make_graphed_callables captures the model's forward and backward alone."
            )

    def _skip(self) -> None:
        """Do nothing but discard what the step would have."""
        self.rows.spend_gradients()
        if self._is_wrapped:  # nothing for a wrapper to go by
            self.rows.spent.hide()
            tensor_lists.discard_gradients(self.rows.columns.plain)

    def _discard_left_gradients(self) -> None:
        """Discard the gradients of the last step that a wrapper was to see."""
        if self._left_gradients:
            self.rows.spent.hear()
            self.rows.discard_master_gradients()
        self._left_gradients = False

    def _plan(self, fused: FusedStep) -> StepInput | None:
        """What the kernels are to do, or None if the class's own step has to."""
        step = self.rows.step_input()
        return shards.plan(fused, step) if self.rows.columns.has_shards else fused.plan(step)

    def _step_fused(self, fused: FusedStep, step: StepInput, flags: Sequence[Tensor], casts: Casts) -> None:
        """Pass 2: unscale, clip, step and write the model's weights in one go; nothing if one of `flags` is != 0."""
        found_inf = None
        for flag in flags:
            found_inf = flag if found_inf is None else torch.maximum(found_inf, moved(flag, found_inf.device))
        slots, has_copies = self.rows.slots, self.rows.writes_parameters or self.rows.columns.has_shards
        copies = None if has_copies else casts.copies(step.weights)
        check = self.rows.whole_check() if fused.rule.reads_sums else None
        fused.step(
            step,
            copies,
            inv_scale=slots.inv_scale,
            found_inf=found_inf,
            norm=slots.norm if slots.count > 0 else None,
            max_norm=slots.max_norm,
            checks=check.checked.checks if check is not None and check.unscaled is None else None,
        )
        if copies is not None:
            casts.written(step.weights)
        if self.rows.columns.has_shards:
            shards.mark_written(step.params)
        self.rows.mark_in_sync()

    def _step_unfused(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The optimizer's own step, on gradients that it finds where it looks for them."""
        optimizer = self.optimizer
        self.rows.materialize(zeros=True)
        try:
            with foreach_as_by_default(optimizer):
                unhooked_step(optimizer)(optimizer, *args[1:], **kwargs)
        finally:
            # Also after an exception: a parameter never disagrees with its master.
            self.rows.write_back()

    # The end.

    def release(self) -> None:
        """Give the optimizer its own parameters back. Its hooks are gone by now."""
        if not self.window.is_closed:
            self.window.discard()
        self.pending.hear(wait=True)
        self._discard_left_gradients()
        release_fused_step(self.optimizer)
        if self.pending.overflowed() or (self._has_left and self.pending.skipped):
            for group in self.optimizer.param_groups:
                for p in group["params"]:
                    p.grad = None  # not finite, and nobody is left to skip the step
        self.rows.release()
