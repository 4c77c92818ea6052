"""One optimizer of an engine: its window around each backward, and its step, which is taken or skipped."""

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
from amp_engine.stepping.window import Window


class WeightCopies(Protocol):
    """Low-precision copies of FP32 parameters that live across steps."""

    def copies(self, weights: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Return the copies that a step must write along with the weights."""

    def written(self, weights: Sequence[Tensor]) -> None:
        """Keep the copies of these weights: a step wrote these weights with their copies, and no other weights."""


class Casts(Protocol):
    """The function casts of an engine, which make copies of FP32 parameters in low precision."""

    def off(self) -> AbstractContextManager[None] | None:
        """Return a context that turns the casts off in this thread; None if there are none."""

    def after_backward(self) -> None:
        """Discard all copies: after a backward any weight may have been written."""

    @property
    def weight_copies(self) -> WeightCopies | None:
        """The copies that live across steps; None if none do."""


class Stepper:
    """One optimizer of an engine.

    Args:
        optimizer: its groups have the weights of `rows`.
        scaling: gives the scaler of gradients without a named scaler.
        events: notify observers of skipped steps, and of masters that were written outside of steps.
        ranks: the ranks that train with this one; if None, found from the rows.
        check: called with this object before its first `scale_loss` or step; may raise AmpStateError.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        rows: Rows,
        scaling: Scaling,
        events: Events,
        ranks: Ranks | None = None,
        check: Callable[[Stepper], None] = lambda _: None,
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.rows = rows
        rows.scan()
        self.window = Window(rows)
        self.pending = Pending(events)
        self.backward_seen = False  # True if there was a backward since the last step
        self._events = events
        self._check: Callable[[Stepper], None] | None = check  # None after the first use
        # Called with parameters that joined with a gradient while the scale is not 1; may raise AmpStateError.
        self.check_gathered: Callable[[Optimizer, Sequence[nn.Parameter]], None] = lambda optimizer, joined: None
        # Gives the scale of gradients that low-precision parameters gathered before they had masters; None for 1. All
        # other gathered gradients are unscaled.
        self.gathered_scale: Callable[[], ScaleSnapshot | None] = lambda: None
        self.adopts_next = False  # True if the next backward looks for writes through `param.data`
        self.needs_kernels = False  # True if only the kernels can do its step (split masters, bfloat16 moments)
        self._scaling = scaling
        self._is_wrapped = False
        self._is_captured = False  # True if a CUDA graph has a backward that left present gradients
        self._with_masters: tuple[Columns, Tensor] | None = None
        self._ids: tuple[Columns, frozenset[int]] | None = None
        self._unchecked: Sequence[nn.Parameter] = ()  # parameters that may have gradients that no check saw
        # Gradients that a check saw, and which code may write until the step; kept alive, as marks need.
        self._checked: tuple[tensor_lists.GradientMarks, Sequence[Tensor | None]] | None = None
        self.passed: Backward | None = None  # of a loss whose gradients no check saw
        self._has_left = False  # True if the last step may have been skipped, which leaves the model's gradients
        self._written_gradients = gradient_warnings.WrittenGradients()
        self._written_parameters = gradient_warnings.WrittenParameters()
        self.missing_gradients = gradient_warnings.MissingGradients()
        self._is_clipped = False  # True if gradients were clipped in an earlier iteration
        self._clipping = kernels.ListCheck()  # not shared, so that its uploads stay on the GPU
        self.ranks = Ranks(rows) if ranks is None else ranks
        self._left_gradients = False  # True if masters still have gradients of the last step, for a wrapper to read

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer. Callers keep it alive."""
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    @property
    def is_pending(self) -> bool:
        """True if a backward since the last step counts for the next step."""
        return bool(self.pending.backwards) or not self.window.is_closed

    def wrapped_by(self, wrapper: Optimizer) -> None:
        """Let `wrapper`, which calls `step`, read masters' gradients after a step and write masters outside of it."""
        self._is_wrapped = True
        self.rows.wrapped_by(wrapper)

    def adopt_data_writes_next(self, is_wanted: bool) -> None:
        """Set if the next backward copies writes through `param.data` into masters."""
        self.adopts_next = is_wanted

    def require_kernels(self, moment_dtype: torch.dtype) -> None:
        """Require that the kernels do each step, with moments in `moment_dtype`."""
        fused = fused_step_of(self.optimizer)
        assert fused is not None, "checked with the request"
        fused.require(moment_dtype)
        self.needs_kernels = True

    def check_first_use(self) -> None:
        """Before the first `scale_loss` or step: raise AmpStateError if a change since the creation forbids it."""
        if self._check is not None:
            self.rows.look_at_types()  # model.half() may have been called
            self._check(self)
            self._check = None

    # Around a backward.

    def enter_backward(self, backward: Backward, waits: bool = False) -> None:
        """Entry of `scale_loss`: look for new parameters and foreign writes, then open or re-enter the window.

        Raises AmpStateError inside of a body, before anything is changed.

        Args:
            backward: has the scale of the gradients to come.
            waits: True if `window.begin` will be called when a backward begins.
        """
        if self.window.is_in_body:
            raise AmpStateError(
                f"scale_loss() was entered again for {type(self.optimizer).__name__} inside of its own body.  Leave "
                "the first `with amp.scale_loss(...)` before the next one, or call scale_loss once on the sum."
            )
        self.ranks.enter(not self.backward_seen, self.window.is_left_open)
        self._begin()
        if self.rows.joined:
            self._check_gathered(backward.snapshot)
            if self.window.is_left_open:
                self.join_open_window()
            else:
                self._take_gathered(backward.scaler)
        if self._is_captured:
            self._is_captured = self._has_gradients()
        self.window.open(backward, waits, not self.backward_seen or bool(self._unchecked))

    # Around a backward at a scale of 1 without masters, whose gradients stay where they are.

    def enter_passed(self) -> None:
        """Entry of `scale_loss`: report earlier steps, and note DistributedDataParallel under `no_sync`."""
        self.pending.hear(wait=False)
        if self._has_moved():
            self.rows.ledger.slots.check = self._checked = None  # which keep discarded gradients alive
        if not tensor_lists.any_gradient(self.rows.columns.plain_handle):
            self.passed = None
        self.ranks.enter(True, False)

    def leave_passed(self, backward: Backward) -> None:
        """Exit of `scale_loss`: keep the backward for the check, unless the loss of an earlier one was not finite."""
        if self.passed is None or not self.passed.has_bad_loss():
            backward.micro_batches = 1, backward.micro_batches[1]
            self.passed = backward

    def can_look(self) -> bool:
        """True if all present gradients can be checked."""
        self.rows.scan()
        found = tensor_lists.gradients(self.rows.columns.plain_handle)
        both = zip(found.tensors, found.accesses, strict=True) if tensor_lists.OTHER in found.accesses else ()
        return all(grad is None or how != tensor_lists.OTHER or arithmetic.can_be_read(grad) for grad, how in both)

    def has_unseen(self, is_stepping: bool) -> bool:
        """True if there is a gradient that came, or was written, since the last check. Call after a scan.

        Args:
            is_stepping: True if a step comes next; then gradients that a skipped step left also count.
        """
        has_any = tensor_lists.any_gradient(self.rows.columns.plain_handle)
        return has_any and ((is_stepping and self._has_left) or self._has_moved())

    def _has_moved(self) -> bool:
        """True if the present gradients are not those that were checked."""
        marks = None if self._checked is None else self._checked[0]
        return marks is None or marks.params is not self.rows.columns.plain_handle or marks.have_moved()

    def note_seen(self, is_stepping: bool = False) -> None:
        """Note that the present gradients were checked, or are checked ones that were clipped."""
        handle = self.rows.columns.plain_handle
        grads = () if is_stepping else tensor_lists.gradients(handle).tensors
        self._checked = tensor_lists.gradient_marks(handle), grads
        self.passed = None

    def note_clipped(self) -> None:
        """Note that checked gradients were multiplied or clamped by finite numbers: all stay finite."""
        if self._checked is not None:
            self.note_seen()

    def taken_unseen(self) -> None:
        """Record a step that the class's own `step` takes, whatever the gradients are."""
        self.rows.judge_half()
        self.pending.taken_unseen()
        self._checked = self.passed = None

    def _has_gradients(self) -> bool:
        """True if the next backward adds to gradients of earlier ones."""
        is_held = self.rows.ledger.slots.count > 0 or self.window.is_left_open
        return is_held or tensor_lists.any_gradient(self.rows.columns.weight_handle)

    def join_open_window(self) -> None:
        """If the window was left open, scale the gradients of joined parameters by the scale of its gradients."""
        if not self.window.is_left_open:
            return
        self.rows.scan()
        self._check_gathered(self.window.backward.snapshot)
        joined, self.rows.joined = self.rows.joined, []
        own, scale = self.window.backward.snapshot, self.gathered_scale() if joined else None
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
        """Exit of `scale_loss`: unscale and check gradients, except of parameters in `unscaled`. No host sync."""
        self.window.close(backward, check, unscaled)
        if self._is_clipped and (found := self.rows.ledger.slots.check) is not None and found.unscaled is not None:
            found.unscaled.watch()
        self._unchecked, self._has_left = (), False
        self._is_captured |= devices.is_capturing(backward.snapshot.scale.device)
        self.ranks.close()
        self.backward_seen = True
        self._written_gradients.note(self.rows)

    def look_for_parameters(self) -> None:
        """Give new parameters masters, and copy foreign writes into masters."""
        self.rows.scan()
        self.rows.judge_half()
        self.rows.refresh(self.adopts_next)
        self.adopts_next = False

    def is_given_gradients(self) -> None:
        """Note that a loss which does not list this optimizer left gradients, to be checked before a step."""
        self._unchecked = self.rows.columns.plain

    def has_gathered(self, is_stepping: bool = False) -> bool:
        """True if there is a gradient that no check of this optimizer saw, as of the last scan.

        Args:
            is_stepping: True if a step comes next; then gradients that a skipped step left, and that were not zeroed,
                also count.
        """
        if is_stepping and self._has_left and tensor_lists.any_gradient(self.rows.columns.plain_handle):
            return True
        for p in self._unchecked:  # not any(): runs before each step, and a generator is slower
            if p.grad is not None:
                return True
        return bool(self.rows.joined)

    def _take_gathered(self, scaler: LossScaler) -> None:
        """Give new masters the gradients that their parameters gathered, and record an overflow. No host sync."""
        joined, self.rows.joined = self.rows.joined, []
        scale = self.gathered_scale()
        for p in joined:
            grad, master = p.grad, self.rows.master_of(p)
            if grad is not None and master is not None:
                inv_scale = torch.ones((), device="cpu") if scale is None else scale.inv_scale
                master.weight.grad = arithmetic.times(grad, moved(inv_scale, grad.device), torch.float32)
                for flags in arithmetic.nonfinite([grad]):
                    scaler.record_(flags)
        self._unchecked = self.rows.columns.plain

    def shares_parameters_with(self, other: Stepper) -> bool:
        """True if both optimizers step a common parameter."""
        return not self.param_ids().isdisjoint(other.param_ids())

    def param_ids(self) -> frozenset[int]:
        """Return the ids of the model's parameters in the groups, into which a backward accumulates."""
        self.rows.scan()
        columns = self.rows.columns
        if self._ids is None or self._ids[0] is not columns:
            self._ids = columns, frozenset(map(id, columns.params))
        return self._ids[1]

    @property
    def has_shards(self) -> bool:
        """True if a forward computes with other tensors than the parameters in the groups."""
        return self.rows.columns.has_shards or self.ranks.in_flat_shards

    def _begin(self) -> None:
        self.pending.hear(wait=False)
        self._written_gradients.warn_of_discarded(self.optimizer, self.rows)
        self._discard_left_gradients()
        self.rows.ledger.slots.check = None
        if not self.rows.written_outside and self.rows.written():
            gradient_warnings.warn_of_written_masters(self.optimizer)
            self.rows.written_outside = True
            for tell in self._events.masters_written.observers:
                tell()
        self.look_for_parameters()

    # Around a backward in a foreign `scale_loss`, which names the scaler at its exit, and decides itself on the skip.

    def prepare_backward(self) -> None:
        """Entry: open or re-enter the window. Raises AmpStateError inside of a body."""
        if self.window.is_in_body:
            raise AmpStateError(
                f"_prepare_amp_backward() was called for {type(self.optimizer).__name__} inside of an `with "
                "amp.scale_loss(...)`, which did it at its entry.  Leave out one of the two."
            )
        self._begin()
        self.window.prepare(self._stand_in(), not self.backward_seen or bool(self._unchecked))

    def post_backward(self, scaler: LossScaler) -> None:
        """Exit: unscale by `scaler`, and record overflows in it. No host sync but that of `scaler.to`."""
        self._adopt_gradients()
        for weight in self.rows.columns.weights[:1]:
            scaler.to(weight.device)
        self.window.claim(Backward(scaler, 0, scaler.snapshot()))
        self.close_window(self.window.backward, True)
        agree(self.ranks.groups(), scaler.found_inf)  # the caller reads found_inf next

    def set_left_open(self, value: bool) -> None:
        """Declare the present gradients scaled or unscaled, without a check."""
        if value and not self.window.is_in_body:
            self._adopt_gradients()
            if not self.window.is_left_open:
                self.window.leave_open()
        elif not value and self.window.is_left_open:
            self.window.close_as_is()

    def skipped_by_caller(self) -> None:
        """Record a step that the caller skipped, and spend its gradients."""
        self.pending.skipped_by_caller()
        self.backward_seen = False
        self._checked = self.passed = None
        self._has_left = True
        self.rows.spend_gradients()

    def forget_backwards(self) -> None:
        """Discard the gradients and outcomes of backwards since the last step."""
        if not self.window.is_closed:
            self.window.discard()
        self.pending.forget()
        self.backward_seen = False
        self._checked = self.passed = None
        self.rows.discard_gradients()
        tensor_lists.discard_gradients(self.rows.columns.plain)

    def _adopt_gradients(self) -> None:
        """If the window is closed, open it around the present gradients, as scaled ones."""
        if self.window.is_closed:
            self._discard_left_gradients()
            self.rows.ledger.slots.check = None
            self.look_for_parameters()
            self.window.adopt(self._stand_in())

    def _stand_in(self) -> Backward:
        scaler = self._scaling.default()
        return Backward(scaler, 0, scaler.snapshot())

    # Clipping.

    def grad_norm(self, norm_type: float) -> Tensor | None:
        """Return the norm of all unscaled gradients, which the caller must not write: float32, shape []. No host sync.

        The norm comes from the last backward's check if no gradient was written since. No other code can write held
        gradients. Gradients of rows without masters are watched from the second call on, if torch reports writes;
        else they are read again, since collectives, NumPy and writes through `.data` move no version.

        Returns None if the gradients are not exactly those of that backward, or if `norm_type` is neither 2 nor
        infinity. Call after a scan.
        """
        check = self.rows.whole_check()
        if check is None or self.rows.ledger.slots.norm is not None or norm_type not in (2.0, math.inf):
            return None
        found, norm, inv_scale = check.checked.checks, check.norm, check.scale.inv_scale.double
        self._is_clipped = True
        if check.unscaled is None or check.unscaled.is_unwritten():
            if norm_type == math.inf:
                return (found.largest.max().double() * inv_scale()).float()
            return norm
        ignored, norm = torch.zeros_like(norm), torch.empty_like(norm)
        now = self._clipping.run(check.unscaled.grads, None, torch.ones_like(norm), ignored, norm)
        if self.rows.ledger.slots.count == 0:
            return now.largest.max() if norm_type == math.inf else norm
        held = self._held_rows(norm.device)
        if norm_type == math.inf:
            return torch.maximum((found.largest[held].max().double() * inv_scale()).float(), now.largest.max())
        return (found.sum_squares[held].sum() * inv_scale().square() + now.sum_squares.sum()).sqrt().float()

    def _held_rows(self, device: torch.device) -> Tensor:
        """Return the rows with masters: int64, on `device`; computed once for each Columns."""
        columns = self.rows.columns
        if self._with_masters is None or self._with_masters[0] is not columns:
            rows = [row for row, is_plain in enumerate(columns.plain_mask) if not is_plain]
            self._with_masters = columns, moved(torch.tensor(rows, dtype=torch.int64, device="cpu"), device)
        return self._with_masters[1]

    def clip_grads_with_norm_(self, norm: Tensor, max_norm: float) -> None:
        """Multiply gradients by `min(1, max_norm / (norm + 1e-6))`, held ones in the step. Call after `grad_norm`.

        Nothing may write `norm` before the step.
        """
        slots = self.rows.ledger.slots
        slots.clip(norm, max_norm)
        if slots.check is not None and slots.check.unscaled is not None:
            self._clipping.clip_(slots.check.unscaled.grads, norm, max_norm)

    # The step.

    def look_at_gradients(self, optimizer: Optimizer) -> None:
        """Before a step: discard gradients of an earlier step, and warn of gradients that never reach the masters.

        Raises AmpStateError if torch.amp.GradScaler is about to step such gradients.
        """
        if self._left_gradients and not self.backward_seen and self.rows.has_parameter_gradients():
            self._discard_left_gradients()  # else they would pass for the gradients of this unseen backward
        if hasattr(optimizer, "found_inf"):
            self.refuse_foreign_scaler()
        if self.backward_seen:
            self._written_gradients.warn(optimizer, self.rows)

    def hide_spent(self) -> None:
        """Remove the gradients that are shown for `zero_grad`, so that hooks and the step do not see them."""
        if not self._left_gradients:
            self.rows.ledger.spent.hear()

    def refuse_foreign_scaler(self) -> None:
        """Raise AmpStateError if torch.amp.GradScaler is about to step gradients that never reached the masters."""
        if not self.backward_seen:
            gradient_warnings.refuse_foreign_scaler(self.optimizer, self.rows)

    def step(self, args: tuple[Any, ...], kwargs: dict[str, Any], fused: FusedStep | None, casts: Casts) -> None:
        """Skip the step, or do it by the kernels or by the class's own step on FP32 gradients. Call after a scan.

        Args:
            args, kwargs: the arguments of the optimizer's `step`, the optimizer first.
            fused: the fused step of its class, or None.
            casts: a fused step writes their copies of FP32 parameters.

        Waits for the device if the host must decide and does not know the flags yet. Raises AmpStateError if the
        kernels are needed and cannot do the step, for a low-precision weight that is refused, and for a CUDA graph
        whose replay would miss the decision.
        """
        optimizer, rows = args[0], self.rows
        rows.judge_half()  # a weight that was frozen may be trained now, with the tables of the last step
        rows.follow()
        self._written_parameters.warn(optimizer, rows)
        # Plan once, before the decision: a group that joins between two plans could be stepped on inf.
        planned = None
        if fused is not None:
            step = rows.step_input()
            planned = shards.plan(fused, step) if rows.columns.has_shards else fused.plan(step)
        if planned is None or not planned.is_current:  # model.half() may have been called
            rows.look_at_types()
            rows.judge_half()
        if planned is None and self.needs_kernels:
            gradient_warnings.refuse_own_step(optimizer, fused, rows.step_input())
        if self._is_captured and self.backward_seen:
            self._refuse_half_a_capture()
        if planned is None or self._is_wrapped:
            self._refuse_capture()
        streams = rows.ledger.slots.streams
        # A wrapper continues after this step with the gradients that it finds, so the host must decide.
        decision = self.pending.decide(on_device=planned is not None and not self._is_wrapped)
        may_be_bad = isinstance(decision, Skip) or bool(decision.flags)
        if may_be_bad:
            self._has_left = True  # the model's own gradients stay, which may not be finite
        else:
            self.pending.conclude()  # before the step, as reports look at weights
        try:
            if isinstance(decision, Skip):
                self._skip()
            else:
                if not self.backward_seen:
                    gradient_warnings.warn_of_unseen_gradients(optimizer, rows)
                if fused is not None and planned is not None:
                    self._step_fused(fused, planned, decision.flags, casts)
                else:
                    self._step_unfused(args, kwargs)
                devices.wait_for_readers(streams)
                rows.spend_gradients(planned, keeps_masters=self._is_wrapped)
                self._left_gradients = self._is_wrapped
        finally:
            rows.ledger.slots.check = None
        self.backward_seen = self._is_captured = False
        # For a clipping of what a skipped step left. Marks alone miss a new gradient in the place of an old one.
        self._checked = (self._checked[0], ()) if self._checked is not None and may_be_bad else None
        self.passed = None
        if may_be_bad:
            self.pending.conclude()  # when no gradient is left, as a report may raise

    def _refuse_capture(self) -> None:
        """Raise AmpStateError in the capture of a CUDA graph: the host decides here, and a replay skips the host."""
        weights = self.rows.columns.weights
        if self.pending.backwards and weights and devices.is_capturing(weights[0].device):
            raise AmpStateError(
                f"{type(self.optimizer).__name__}.step() is captured in a CUDA graph, but whether it is skipped is "
                "decided on the host: only exactly Adam, AdamW, SGD of torch.optim and the fused optimizers, not "
                "wrapped by another, on dense gradients skip on the GPU.  Leave scale_loss and step() out of the "
                "capture: torch.cuda.make_graphed_callables captures the model's forward and backward alone."
            )

    def _refuse_half_a_capture(self) -> None:
        """Raise AmpStateError if a CUDA graph has the backward and not the step: a replay does not tell the host."""
        weights = self.rows.columns.weights
        if weights and not devices.is_capturing(weights[0].device):
            raise AmpStateError(
                f"The backward is in a CUDA graph, and {type(self.optimizer).__name__}.step() is not: no replay tells "
                "the host of its gradients, which steps would miss, or take where they are not finite.  Nothing was "
                "stepped.  Capture step() in the same graph, or leave scale_loss out of it as well: "
                "torch.cuda.make_graphed_callables captures the model's forward and backward alone."
            )

    def _skip(self) -> None:
        """Discard the gradients that a taken step would discard, and do nothing else."""
        self.rows.spend_gradients()
        if self._is_wrapped:  # a wrapper must find no gradients
            self.rows.ledger.spent.hide()
            tensor_lists.discard_gradients(self.rows.columns.plain)

    def _discard_left_gradients(self) -> None:
        """Discard the gradients of the last step that were kept for a wrapper."""
        if self._left_gradients:
            self.rows.ledger.spent.hear()
            self.rows.discard_master_gradients()
        self._left_gradients = False

    def _step_fused(self, fused: FusedStep, step: StepInput, flags: Sequence[Tensor], casts: Casts) -> None:
        """Pass 2: unscale, clip, step and write the model's parameters; do nothing if one of `flags` is != 0."""
        found_inf = None
        for flag in flags:
            found_inf = flag if found_inf is None else torch.maximum(found_inf, moved(flag, found_inf.device))
        slots, has_shards = self.rows.ledger.slots, self.rows.columns.has_shards
        kept = None if step.copies is not None or has_shards else casts.weight_copies
        check = self.rows.whole_check() if fused.rule.reads_sums else None
        fused.step(
            step,
            None if kept is None else kept.copies(step.weights),
            inv_scale=slots.inv_scale,
            found_inf=found_inf,
            norm=slots.norm if slots.count > 0 else None,
            max_norm=slots.max_norm,
            checks=check.checked.checks if check is not None and check.unscaled is None else None,
        )
        if kept is not None:
            kept.written(step.weights)
        if has_shards:
            shards.mark_written(step.params)
        self.rows.mark_in_sync()

    def _step_unfused(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Call the optimizer's own step, with FP32 gradients in `.grad`."""
        optimizer = self.optimizer
        self.rows.materialize(zeros=True)
        try:
            with foreach_as_by_default(optimizer):
                unhooked_step(optimizer)(optimizer, *args[1:], **kwargs)
        finally:
            # Also after an exception: a parameter must always agree with its master.
            self.rows.write_back()

    # The end.

    def may_have_overflowed(self) -> bool:
        """True if present gradients may not be finite. Waits for the device; an error if ranks cannot agree."""
        self.pending.hear(wait=True)
        return self.pending.overflowed() or (self._has_left and self.pending.skipped)

    def release(self, may_be_bad: bool) -> None:
        """Put the model's parameters back into the optimizer's groups. Call after its hooks were removed.

        A call that was interrupted can be repeated.

        Args:
            may_be_bad: True to discard all gradients, since no later step will be skipped.
        """
        if not self.window.is_closed:
            self.window.discard()
        self._discard_left_gradients()
        release_fused_step(self.optimizer)
        if may_be_bad:
            for group in self.optimizer.param_groups:
                for p in group["params"]:
                    p.grad = None
        self.rows.release()
