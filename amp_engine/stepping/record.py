"""The record of one optimizer: its gradients around a backward, what a check found of them, how they are clipped.

A parameter's `.grad` is its gradient, and nothing else holds one. Outside of the body of a `scale_loss` it is unscaled;
only `delay_unscale` leaves it scaled, until the next body or the step, and `initialize(gradients="half")` half ones
beside masters, until the step. Beside a master it may be half, as the backward left it at a scale of 1, or float32.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_engine import kernels
from amp_engine.errors import AmpStateError
from amp_engine.ground.devices import is_capturing, moved
from amp_engine.ground.distributed import is_sharded, local_gradient
from amp_engine.ground.dtypes import is_low_precision
from amp_engine.kernels import tensor_lists
from amp_engine.optimizers.fused_step import fused_step_of
from amp_engine.scaling.snapshot import ScaleSnapshot
from amp_engine.stepping import arithmetic
from amp_engine.stepping.backward import Backward, Checked
from amp_engine.stepping.beside import Master, Remainder24, masters_of
from amp_engine.stepping.gradient_warnings import MissingGradients, WrittenParameters
from amp_engine.stepping.pending import Pending
from amp_engine.stepping.ranks import Ranks
from amp_engine.stepping.rows import Columns, Rows


class State(Enum):
    """The unit of the gradients in `.grad`."""

    IDLE = "idle"  # unscaled, but for `Kept`
    BODY = "body"  # the body of a `scale_loss` runs: from its first backward on, scaled
    DELAYED = "delayed"  # scaled: `delay_unscale` left them between two bodies


class Found(NamedTuple):
    """The result of the last check, valid for the gradients that it saw.

    Attributes:
        marks: of these gradients; they tell which were written, replaced or zeroed since.
        grads: the gradients, kept alive so that no new tensor is mistaken for one of them.
        norm: their 2-norm: float32, shape []; None if the check did not cover all of them in one pass.
        checks: what it found in each, if `norm` is not None.
        snapshot: the scale that gradients had in `checks`; None for 1.
        are_taken: True if the kernels can take all of `grads`, and there is one.
    """

    marks: tensor_lists.GradientMarks
    grads: Sequence[Tensor | None]
    norm: Tensor | None = None
    checks: kernels.Checks | None = None
    snapshot: ScaleSnapshot | None = None
    are_taken: bool = False


class Clip(NamedTuple):
    """A clipping that the step does: gradients beside masters are multiplied by `min(1, max_norm / (norm + 1e-6))`.

    Attributes:
        columns: of the scan before it.
        marks: of the gradients, when they were clipped.
        norm: of all unscaled gradients: float32, shape [].
        max_norm: the largest norm.
    """

    columns: Columns
    marks: tensor_lists.GradientMarks
    norm: Tensor
    max_norm: float


class Kept(NamedTuple):
    """Half gradients beside masters that stay scaled until the step, with `initialize(gradients="half")`.

    Attributes:
        marks: of the gradients, when they were checked.
        snapshot: their scale.
    """

    marks: tensor_lists.GradientMarks
    snapshot: ScaleSnapshot


class Foreign(NamedTuple):
    """Scaled gradients that a loss left which did not list the optimizer.

    Attributes:
        marks: of the gradients, when that loss was left.
        rows: of these gradients.
    """

    marks: tensor_lists.GradientMarks
    rows: Sequence[int]


class Record:
    """One optimizer of an engine.

    Args:
        optimizer: its groups have the parameters of `rows`.
        rows: the parameters, and what lies beside them.
        pending: the backwards that decide its next step.
        ranks: the ranks that train with this one; None: found from the rows.
        check: called with this object before its first `scale_loss` or step; may raise AmpStateError.
        keeps_half: True if the step unscales half gradients beside masters, and discards them.
        is_later: True if the optimizer was made after `initialize`.

    Attributes:
        state: the unit of the gradients.
        delayed: the backward of gradients that `delay_unscale` left scaled; None unless the state is DELAYED.
        passed: the last backward at a scale of 1 whose gradients no check saw; None if there is none.
        needs_kernels: True if only the kernels can step it (narrow moments, released gradients, masters on the CPU).
        releases: True if backwards step the parameters, see release.py.
        is_stepped_ahead: True if one has, since the last step.
        has_left: True if the last step may have been skipped, so that gradients are left which may not be finite.
        backward_seen: True if there was a backward since the last step.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        rows: Rows,
        pending: Pending,
        ranks: Ranks | None = None,
        check: Callable[[Record], None] | None = None,
        keeps_half: bool = False,
        is_later: bool = False,
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        rows.scan()
        self.rows = rows
        self.pending = pending
        self.ranks = Ranks(rows) if ranks is None else ranks
        self.state = State.IDLE
        self.delayed: Backward | None = None
        self.passed: Backward | None = None
        self.needs_kernels = self.releases = self.is_stepped_ahead = False
        self.is_later = is_later
        self.has_left = False
        self.backward_seen = False
        self.is_captured = False  # True if a CUDA graph has a backward that left present gradients
        self.found: Found | None = None
        self.clip: Clip | None = None
        self._keeps_half = keeps_half
        self.kept: Kept | None = None
        self.missing_gradients = MissingGradients()
        self.written_parameters = WrittenParameters()
        self._check: Callable[[Record], None] | None = check  # None after the first use
        self._foreign: Foreign | None = None
        self._handed: list[tuple[Master, Tensor | None]] = []  # masters that show gradients, which others may write
        self._ids: tuple[Columns, frozenset[int]] | None = None
        self._list_check = kernels.ListCheck()
        # In a body.
        self._was_delayed = False  # True if gradients were scaled at the entry
        self._has_begun = False  # True once a backward of the scaled loss has begun
        self._at_entry: tensor_lists.GradientMarks | None = None  # None if there was no gradient
        self._at_begin: tensor_lists.GradientMarks | None = None  # None if there was no gradient, or no backward
        self._earlier: list[tuple[nn.Parameter, Tensor]] = []  # gradients that were set aside
        self._views: list[tuple[nn.Parameter, Tensor]] = []  # those that are views of a buffer of other code
        self._checks_earlier = False  # True if no check saw them

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer. Callers keep it alive."""
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    @property
    def columns(self) -> Columns:
        """The columns of the last scan."""
        return self.rows.columns

    @property
    def is_in_body(self) -> bool:
        """True while the body of a `scale_loss` runs."""
        return self.state is State.BODY

    def param_ids(self) -> frozenset[int]:
        """Return the ids of the parameters in the groups."""
        self.rows.scan()
        columns = self.rows.columns
        if self._ids is None or self._ids[0] is not columns:
            self._ids = columns, frozenset(map(id, columns.params))
        return self._ids[1]

    def shares_parameters_with(self, other: Record) -> bool:
        """True if both optimizers step a common parameter."""
        return not self.param_ids().isdisjoint(other.param_ids())

    @property
    def has_shards(self) -> bool:
        """True if a forward computes with other tensors than the parameters in the groups."""
        return self.rows.columns.has_shards or self.ranks.in_flat_shards

    def has_gradients(self) -> bool:
        """True if a parameter has a gradient, as of the last scan."""
        return tensor_lists.any_gradient(self.rows.columns.handle)

    def check_first_use(self) -> None:
        """Before the first `scale_loss` or step: raise AmpStateError if a change since the creation forbids it."""
        if self._check is not None:
            self.rows.look_at_types()  # model.half() may have been called
            self._check(self)
            self._check = None

    def settle(self) -> None:
        """Put back what a step of the class's own has left that raised."""
        self.rows.settle()

    def look_for_parameters(self) -> None:
        """Take new parameters in.

        Not what other code wrote into known ones, which it may take back before the step: SAM does.
        """
        self.settle()
        self.take_gradients()
        self.rows.scan()
        self.rows.judge_half()

    def follow_writes(self, rounds: bool = True) -> None:
        """Take new parameters and foreign writes in; see `Rows.follow`."""
        self.look_for_parameters()
        self.rows.follow(rounds)

    def refuse_joined(self, is_scaled: bool) -> None:
        """Raise AmpStateError for parameters that joined with a gradient, but of 0, whose scale nobody knows."""
        joined = self.rows.joined
        if not joined:
            return
        if is_scaled and (left := [p for p in joined if p.grad is not None and not arithmetic.is_zero(p.grad)]):
            raise AmpStateError(
                f"A parameter of shape {tuple(left[0].shape)} joined {type(self.optimizer).__name__} with a gradient, "
                "which scaled losses may have left in it.  Nothing was stepped.  Set its `.grad` to None before "
                "add_param_group(), or zero it before the next backward."
            )
        joined.clear()

    # Around a backward.

    def enter(self) -> None:
        """Entry of a `scale_loss`. Changes no gradient. Raises AmpStateError inside of another body."""
        if self.is_in_body:
            raise AmpStateError(
                f"scale_loss() was entered again for {type(self.optimizer).__name__} inside of its own body.  Leave "
                "the first `with amp.scale_loss(...)` before the next one, or call scale_loss once on the sum."
            )
        self._was_delayed = self.state is State.DELAYED
        self.ranks.enter(not self.backward_seen, self._was_delayed)
        self.pending.hear(wait=False)
        self.look_for_parameters()
        has_gradients = self.has_gradients()
        if not has_gradients:
            self.forget_found()
            self.passed = None
        if self.is_captured:
            self.is_captured = has_gradients
        self._has_begun, self._at_begin = False, None
        self._earlier, self._views, self._checks_earlier = [], [], False
        self._at_entry = tensor_lists.gradient_marks(self.rows.columns.handle) if has_gradients else None
        self.state = State.BODY

    def enter_unscaled(self) -> None:
        """Entry of a `scale_loss` at a scale of 1: make earlier half gradients beside masters float32.

        Gradients that other code refers to stay as they are, since it may read or zero them. All do under
        DistributedDataParallel, whose buckets take gradients of their parameters' type.
        """
        self.pending.hear(wait=False)
        self.look_for_parameters()
        self.rows.joined = []
        if not self.has_gradients():
            self.forget_found()
            self.passed = None
        else:
            if self._has_moved():
                self.found = None  # which keeps discarded gradients alive
            if self.ranks.has_wrappers():
                self.complete_gradients()
                self.fit_wrappers()
            elif self.rows.makes_masters:
                self.complete_gradients()
                self._widen_gradients()
        self.ranks.enter(True, False)

    def _widen_gradients(self) -> None:
        """Make half gradients beside masters float32, but for those that other code refers to."""
        self.found = None  # which refers to them, too
        for one in self.columns.beside:
            if isinstance(one, Master) and one.param.grad is not None and is_low_precision(one.param.grad):
                is_referenced = arithmetic.is_referenced(one.param)
                one.param.grad = one.param.grad if is_referenced else one.param.grad.float()

    def leave_unscaled(self, backward: Backward | None) -> None:
        """Exit of a `scale_loss` at a scale of 1: keep the backward for the check, unless an earlier loss was bad."""
        if backward is not None and (self.passed is None or not self.passed.has_bad_loss()):
            backward.micro_batches = 1, backward.micro_batches[1]
            self.passed = backward

    def can_look(self) -> bool:
        """True if all present gradients can be checked. Call after a scan."""
        handle = self.rows.columns.handle
        if not tensor_lists.any_other(handle):
            return True
        both = zip(self.rows.columns.params, tensor_lists.gradients(handle).accesses, strict=True)
        return all(how != tensor_lists.OTHER or p.grad is None or arithmetic.can_be_read(p.grad) for p, how in both)

    def begin(self) -> None:
        """At the start of a backward of the scaled loss: set earlier, unscaled gradients aside."""
        if not self._has_begun:
            self._has_begun = True
            if not self._was_delayed:
                self.take_gradients()
                self._set_aside(range(len(self.rows.columns.params)))
            else:
                self._at_begin = tensor_lists.gradient_marks(self.rows.columns.handle)

    def _set_aside(self, rows: Sequence[int]) -> None:
        if not self.has_gradients():
            self.pending.forget_backwards()
            return
        self.refuse_foreign()
        self.complete_gradients()
        self._checks_earlier = self.is_unseen()
        if self._checks_earlier:
            self.pending.forget_backwards()  # what was found of gradients before they were written decides no more
        params = self.rows.columns.params
        has_buckets = self.ranks.has_wrappers()  # which the backward overwrites, and has views of again
        for row in rows:
            if (grad := params[row].grad) is not None:
                own = arithmetic.own_memory(params[row], grad)
                self._earlier.append((params[row], own))
                if own is not grad and not has_buckets:
                    self._views.append((params[row], grad))
                params[row].grad = None

    def _write_views(self) -> None:
        """Write gradients into the buffers of which they were views, and have them be views again.

        Gradients that are float32 now stay apart from a half buffer, and so do those that torch cannot write there.
        """
        views, self._views = self._views, []
        with torch.no_grad():
            for param, view in views:
                if param.grad is not None and param.grad.dtype == view.dtype and not view.requires_grad:
                    with suppress(RuntimeError):  # elements of the view share memory
                        param.grad = view.copy_(param.grad)

    def _arrived_unseen(self) -> list[int]:
        """Return rows whose gradients came, or were written, in a body that saw no backward of its loss."""
        params = self.rows.columns.params
        if self._at_entry is None or self._at_entry.params is not self.rows.columns.handle:
            return [row for row, p in enumerate(params) if p.grad is not None] if self.has_gradients() else []
        moved = self._at_entry.moved() if self._at_entry.have_moved() else []
        return [row for row, _ in moved if params[row].grad is not None]

    def has_arrived(self) -> bool:
        """True if a backward has left gradients since `begin`. Call in a body."""
        if not self._has_begun:
            return False
        return self.has_gradients() if self._at_begin is None else self._at_begin.have_moved()

    def has_arrived_unseen(self) -> bool:
        """True if gradients came or were written in a body without a backward of its loss. Waits for the device."""
        if self._has_begun or self._was_delayed:
            return False
        return any(not arithmetic.is_zero(self.rows.columns.params[row].grad) for row in self._arrived_unseen())

    def has_earlier(self) -> bool:
        """At the exit of a body: True if there are unscaled gradients, to which scaled ones cannot be added.

        Those of 0 are none, and go back to where no gradient came. May wait for the device.
        """
        self._end_of_backward()
        earlier = self._earlier
        if earlier and is_capturing(earlier[0][1].device):
            return True
        if not all(arithmetic.is_zero(grad) for _, grad in earlier):
            return True
        for param, grad in earlier:
            if param.grad is None:
                param.grad = grad.to(param.dtype)  # as buckets of a DistributedDataParallel take it
        self._earlier, self._views = [], []
        return False

    def refuse_graph(self) -> None:
        """Raise AmpStateError for gradients with a graph: what is computed from them would not be unscaled."""
        if tensor_lists.any_graph(self.rows.columns.handle):
            raise AmpStateError(
                "backward(create_graph=True) left gradients with a graph, which the exit of scale_loss cannot "
                "unscale.  Take gradients by torch.autograd.grad(amp.scale(loss), params, create_graph=True) "
                "and amp.unscale(gradients), compute the penalty from those, and call backward() on the sum."
            )

    def leave_delayed(self, backward: Backward) -> None:
        """Exit with `delay_unscale`, without earlier gradients: leave gradients scaled."""
        self.state, self.delayed = State.DELAYED, backward
        self.found = self.clip = self.kept = None

    def _end_of_backward(self) -> None:
        """If no backward of the loss was seen, take what arrived in the body for its gradients."""
        if not (self._has_begun or self._was_delayed) and self._at_entry is not None:
            arrived = set(self._arrived_unseen())
            self._set_aside([row for row in range(len(self.rows.columns.params)) if row not in arrived])
            self._has_begun = True

    def close(
        self, backward: Backward, check: bool, unscaled: set[int] | None = None, keeps: bool = False
    ) -> list[Checked]:
        """Exit: check gradients, unscale them, add those that were set aside. No host sync.

        At a scale of 1 gradients stay as they are. At another, half ones beside a master become float32, and all others
        are unscaled in place.

        Args:
            backward: shared by all optimizers of this `scale_loss`; gets the checks.
            check: False to record no overflow in the scaler.
            unscaled: ids of parameters whose gradients another optimizer of this backward has unscaled; the ids of
                those that are unscaled here are added. None if no other one has a parameter in common.
            keeps: True if half gradients may stay scaled until the step, where the user asked for it.

        Returns:
            The checks of this optimizer's gradients.
        """
        if self.is_in_body:
            self._end_of_backward()
        checked = self._look(backward, check, unscaled, keeps and self._keeps_half)
        self.state, self.delayed = State.IDLE, None
        if self._earlier:
            self._add_earlier(backward if check and self._checks_earlier else None)
        self.ranks.close()
        self.backward_seen, self.has_left = True, False
        return checked

    def look(self, backward: Backward) -> list[Checked]:
        """Check the present gradients, which are unscaled and stay as they are. No host sync."""
        self.take_gradients()
        self._complete_clip()
        self.pending.forget_backwards()  # what was found of gradients before decides no more
        checked = self._look(backward, True, None, keeps=False)
        self.passed, self.has_left = None, False
        return checked

    def _look(self, backward: Backward, check: bool, unscaled: set[int] | None, keeps: bool) -> list[Checked]:
        columns, snapshot = self.rows.columns, backward.snapshot
        if unscaled is None and not columns.has_shards and (checked := self._look_at_once(backward, check, keeps)):
            return [checked]
        if backward.refuses_graph:
            self.refuse_graph()
        before = len(backward.checked)
        own, accesses, devices = tensor_lists.gradients(columns.handle)
        done = [row for row, p in enumerate(columns.params) if id(p) in unscaled] if unscaled else []
        if done:
            own, accesses = arithmetic.without(done, own, accesses)
        if unscaled is not None:
            unscaled |= {id(p) for p, how in zip(columns.params, accesses, strict=True) if how != tensor_lists.NONE}
        others = _others(accesses)
        if others and columns.has_shards:
            own, accesses = arithmetic.with_shards(columns.params, others, own, accesses)
            others = _others(accesses)
        if others:
            own, accesses = arithmetic.without(others, own, accesses)
        if done or columns.has_shards:
            devices = tensor_lists.devices_of(own, accesses)
        is_only = len(devices) == 1 and not others
        updates = backward.may_update and is_only and not self._earlier
        keeps = keeps and is_only and not (snapshot.is_identity or self._earlier) and self._are_half(own)
        outputs = None
        if keeps:
            outputs = tensor_lists.where(columns.plain_mask, own) if columns.has_plain else None
        elif not snapshot.is_identity:
            outputs = tensor_lists.unscaled_outputs(columns.plain_mask, own)
        norm, checks = None, None
        for device in devices:
            grads, here = own, accesses
            written: Sequence[Tensor | None] | None = outputs
            if len(devices) > 1:
                elsewhere = [row for row, g in enumerate(own) if g is not None and g.device != device]
                grads, here = arithmetic.without(elsewhere, own, accesses)
                written = None if outputs is None else arithmetic.without(elsewhere, outputs, accesses)[0]
            norm, checks = self._look_on(device, grads, here, written, backward, check, updates)
        if others:
            backward.checked.append(self._close_others(others, backward, check))
        if outputs is not None and not keeps:
            tensor_lists.replace_gradients(columns.handle, own, outputs)
        is_whole = is_only and not done and not self._earlier and not columns.has_shards
        self.clip = None
        self.found = Found(
            tensor_lists.gradient_marks(columns.handle),
            own if outputs is None or keeps else outputs,
            norm if is_whole else None,
            checks if is_whole else None,
            None if snapshot.is_identity else snapshot,
        )
        self.kept = Kept(self.found.marks, snapshot) if keeps else None
        return backward.checked[before:]

    def _look_at_once(self, backward: Backward, check: bool, keeps: bool) -> Checked | None:
        """Do `_look` in one call, if the kernels can take all gradients on the device of the scale; else do nothing."""
        columns, snapshot, scaler = self.rows.columns, backward.snapshot, backward.scaler
        found_inf = scaler.found_inf if check else torch.zeros_like(scaler.found_inf)
        norm, is_whole, update = torch.empty_like(found_inf), not self._earlier, None
        if check and backward.may_update and is_whole:
            update = scaler.begin_update(snapshot, backward.loss_to_send())
        looked = self._list_check.look(
            columns.handle,
            columns.plain_mask,
            not snapshot.is_identity,
            keeps and is_whole,
            snapshot.scale,
            found_inf,
            norm,
            None if update is None else update.given,
        )
        if looked is None:
            return None
        backward.update = update
        checked = Checked(columns.params, looked.accesses, looked.checks)
        backward.checked.append(checked)
        self.clip = None
        self.found = Found(
            looked.marks,
            looked.gradients,
            norm if is_whole else None,
            looked.checks if is_whole else None,
            None if snapshot.is_identity else snapshot,
            are_taken=True,
        )
        self.kept = Kept(looked.marks, snapshot) if looked.is_kept else None
        return checked

    def _are_half(self, grads: Sequence[Tensor | None]) -> bool:
        """True if all gradients beside masters are half."""
        plain = self.rows.columns.plain_mask
        return all(is_plain or g is None or is_low_precision(g) for is_plain, g in zip(plain, grads, strict=True))

    def _found_now(self) -> Found:
        handle = self.rows.columns.handle
        return Found(tensor_lists.gradient_marks(handle), tensor_lists.gradients(handle).tensors)

    def _look_on(
        self,
        device: torch.device,
        grads: Sequence[Tensor | None],
        accesses: bytes,
        outputs: Sequence[Tensor | None] | None,
        backward: Backward,
        check: bool,
        updates: bool,
    ) -> tuple[Tensor, kernels.Checks]:
        """Check the gradients on one device; write those that have an output, unscaled, into it.

        Args:
            updates: True to also update the scale, if it is on this device.
        """
        scaler = backward.scaler
        found_inf = scaler.found_inf
        if not check or found_inf.device != device:
            found_inf = torch.zeros((), dtype=torch.float32, device=device)
        if updates and found_inf is scaler.found_inf:
            backward.update = scaler.begin_update(backward.snapshot, backward.loss_to_send())
        given = None if backward.update is None else backward.update.given
        norm, scale = torch.empty_like(found_inf), moved(backward.snapshot.scale, device)
        checks = self._list_check.run(grads, outputs, scale, found_inf, norm, given)
        if check and found_inf is not scaler.found_inf:
            scaler.record_(found_inf != 0)
        backward.checked.append(Checked(self.rows.columns.params, accesses, checks))
        return norm, checks

    def _close_others(self, rows: Sequence[int], backward: Backward, check: bool) -> Checked:
        """Check and unscale gradients that the kernels do not take (sparse, negative views, other types)."""
        snapshot, columns = backward.snapshot, self.rows.columns
        device = snapshot.scale.device
        looks: list[Tensor] = []  # largest magnitude, sum of squares
        for row in rows:
            param = columns.params[row]
            shard = local_gradient(param) if is_sharded(param) else None
            grad = arithmetic.readable(param) if shard is None else shard
            looks.append(moved(arithmetic.largest_and_squares(arithmetic.values(grad)), device))
            if snapshot.is_identity:
                continue
            inv_scale = moved(snapshot.inv_scale, grad.device)
            is_wide = columns.plain_mask[row] or not is_low_precision(grad)
            unscaled = arithmetic.times(grad, inv_scale, grad.dtype if is_wide else torch.float32)
            if shard is None:
                param.grad = unscaled
            else:
                shard.copy_(unscaled)
        largest, squares = torch.stack(looks).unbind(1)
        flags = ~largest.isfinite()
        if check:
            backward.scaler.record_(flags)
        return Checked(
            [columns.params[row] for row in rows],
            bytes([tensor_lists.OTHER]) * len(rows),
            kernels.Checks(flags, squares, largest.float()),
        )

    def _add_earlier(self, checking: Backward | None) -> None:
        """Add the gradients that were set aside; record in the scaler of `checking` if one of them is not finite."""
        earlier, self._earlier = self._earlier, []
        self._list_check.forget_gradients()  # those of this exit are added to the earlier ones, which have their own
        if checking is not None:
            for flags in arithmetic.nonfinite([grad for _, grad in earlier]):
                checking.scaler.record_(flags)
        added = []
        with torch.no_grad():
            for param, grad in earlier:
                arrived, param.grad = param.grad, None
                has_master = next(masters_of(param), None) is not None
                param.grad = grad.float() if has_master and is_low_precision(grad) else grad
                if arrived is not None:
                    added.append((param, arrived))
            arithmetic.accumulate(added)
        self._write_views()
        self.found = self._found_now()

    def _as_float32(self, row: int, grad: Tensor) -> Tensor:
        """Return a gradient, unscaled and clipped, in the type in which gradients are added up."""
        is_half = not self.rows.columns.plain_mask[row] and is_low_precision(grad)
        factor = None if self.clip is None else kernels.clip_factor(self.clip.norm, self.clip.max_norm)
        if self.kept is not None and is_half:
            inv_scale = self.kept.snapshot.inv_scale.double()
            factor = inv_scale if factor is None else factor * inv_scale
        if factor is None or self.rows.columns.plain_mask[row]:
            return grad.float() if is_half else grad
        factor = moved(factor.float(), grad.device)
        return arithmetic.times(grad, factor, torch.float32 if is_half else grad.dtype)

    def put_back(self) -> None:
        """After a body or its exit raised: put back the gradients from the entry.

        What a body without a backward wrote stays. Gradients that were scaled at the entry, and to which part of a
        backward was added, are discarded.
        """
        if not self.is_in_body:
            return
        self.state = State.DELAYED if self._was_delayed else State.IDLE
        if not self._has_begun:
            for row in self._arrived_unseen():
                if self._was_delayed or self._at_entry is None or _is_new(self._at_entry, row):
                    self.rows.columns.params[row].grad = None
            return
        if self._was_delayed and not self.has_arrived():
            return
        tensor_lists.discard_gradients(self.rows.columns.handle)
        self.state, self.delayed = State.IDLE, None
        for param, grad in self._earlier:
            param.grad = grad
        self._earlier = []
        self._write_views()
        self.found = None

    def discard(self) -> None:
        """Discard all gradients, and what is known of them."""
        self.state, self.delayed, self.passed = State.IDLE, None, None
        self._earlier, self._views, self._handed = [], [], []
        for one in self.rows.masters:
            one.weight.grad = None
        tensor_lists.discard_gradients(self.rows.columns.handle)
        self.forget_found()
        self.backward_seen = False

    def forget_found(self) -> None:
        """Forget what was found: the gradients are gone."""
        self.pending.forget()
        self.found = self.clip = self.kept = None

    def forget_gone(self) -> None:
        """Forget what was found of gradients that are all gone. A rank that never had any keeps to the others."""
        found = self.found
        if found is None or found.marks.params is not self.rows.columns.handle or self.has_gradients():
            return
        if any(was_there for _, was_there in found.marks.moved()):
            self.forget_found()

    # What other code did to gradients.

    def refuse_written_kept(self) -> None:
        """Raise AmpStateError if half gradients were written while they are scaled. May wait for the device."""
        kept = self.kept
        if kept is None or not kept.marks.have_moved() or kept.marks.params is not self.rows.columns.handle:
            return
        params, plain = self.rows.columns.params, self.rows.columns.plain_mask
        for row, was_there in kept.marks.moved():
            grad = params[row].grad
            if was_there and not plain[row] and grad is not None and not arithmetic.is_zero(grad):
                raise AmpStateError(
                    f"A gradient of {type(self.optimizer).__name__} was written after scale_loss, which leaves "
                    'gradients half and scaled with gradients="half".  Nothing was stepped.  Clip by '
                    "amp.clip_grad_norm_(optimizer, max_norm), write to `.grad` of what amp.master_params(optimizer) "
                    "gives, or leave out gradients=."
                )

    def is_unseen(self, is_stepping: bool = False) -> bool:
        """True if there is a gradient that came, or was written, since the last check. Call after a scan.

        Args:
            is_stepping: True if a step comes next; then gradients that a skipped step left also count.
        """
        self.refuse_written_kept()
        return self.has_gradients() and ((is_stepping and self.has_left) or self._has_moved())

    def _has_moved(self) -> bool:
        found = self.found
        return found is None or found.marks.params is not self.rows.columns.handle or found.marks.have_moved()

    def taken_gradients(self) -> Sequence[Tensor | None] | None:
        """Return the gradients that the last check saw, if none was written since and the kernels can take each."""
        found = self.found
        return found.grads if found is not None and found.are_taken and not self._has_moved() else None

    def has_foreign(self, before: tensor_lists.GradientMarks) -> bool:
        """True if gradients came since `before`, and not in a body inside of that one, which listed this optimizer."""
        has_moved = before.params is self.rows.columns.handle and before.have_moved()
        return has_moved and self.state is State.IDLE and self._has_moved()

    def note_foreign(self, before: tensor_lists.GradientMarks, ours: set[int]) -> None:
        """Note the gradients that a scaled loss left here since `before`, except of parameters with ids in `ours`."""
        if not self.has_foreign(before):
            return
        params = self.rows.columns.params
        rows = [row for row, _ in before.moved() if id(params[row]) not in ours and params[row].grad is not None]
        if rows:
            self._foreign = Foreign(tensor_lists.gradient_marks(self.rows.columns.handle), rows)

    def refuse_foreign(self) -> None:
        """Raise AmpStateError if scaled gradients are there of a loss that did not list this optimizer."""
        foreign = self._foreign
        if foreign is None:
            return
        gone = {row for row, _ in foreign.marks.moved()} if foreign.marks.params is self.rows.columns.handle else set()
        params = self.rows.columns.params
        left = [row for row in foreign.rows if row not in gone and row < len(params) and params[row].grad is not None]
        if not left or foreign.marks.params is not self.rows.columns.handle:
            self._foreign = None
            return
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise AmpStateError(
            f"{type(self.optimizer).__name__} has scaled gradients of a loss that did not list it (parameter "
            f"{left[0]}{more}).  Nothing was stepped.  Call its zero_grad() first, or list both optimizers: "
            "amp.scale_loss(loss, [optimizer, other])."
        )

    def refuse_unscaled(self) -> None:
        """Raise AmpStateError for half gradients that no scaled backward left, at a level that scales.

        Exits and clippings leave float32 gradients beside masters, so half ones are of another backward.
        """
        self._complete_clip()
        mask = self.rows.columns.plain_mask
        for row, p in enumerate(self.rows.columns.params):
            if not mask[row] and p.grad is not None and is_low_precision(p.grad) and not arithmetic.is_zero(p.grad):
                raise AmpStateError(
                    f"{type(self.optimizer).__name__} has {p.grad.dtype} gradients of a backward() outside of "
                    "amp.scale_loss, where small ones are 0, or that were written in half after it.  Nothing was "
                    "stepped.  Use `with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`, "
                    "write float32 gradients, or take opt_level='O5', which needs no loss scale."
                )

    # Clipping.

    def whole_norm(self, norm_type: float) -> Tensor | None:
        """Return the norm of all gradients, which the caller must not write: float32, shape []. No host sync.

        None if gradients were written since the check, or the check did not cover them all, or for other norms than 2
        and infinity. Call after a scan.
        """
        found = self.found
        if found is None or found.norm is None or self.clip is not None or self._has_moved():
            return None
        if norm_type == 2.0:
            return found.norm
        if norm_type == math.inf and found.checks is not None:
            largest = found.checks.largest.max()
            scale = found.snapshot
            return largest if scale is None else (largest.double() * scale.inv_scale.double()).float()
        return None

    def can_clip_in_step(self) -> bool:
        """True if the step can clip all gradients beside masters, of which some are half. Call after a scan."""
        columns = self.rows.columns
        found = tensor_lists.gradients(columns.handle)
        if 0 not in columns.plain_mask or columns.has_shards or tensor_lists.OTHER in found.accesses:
            return False
        return len(found.devices) == 1 and any(
            not plain and grad is not None and is_low_precision(grad)
            for plain, grad in zip(columns.plain_mask, found.tensors, strict=True)
        )

    def clip_whole(self, norm: Tensor, max_norm: float, is_seen: bool) -> None:
        """Multiply gradients by `min(1, max_norm / (norm + 1e-6))`, those beside masters in the step.

        Call after `whole_norm` or `can_clip_in_step`; nothing may write `norm` before the step.

        Args:
            is_seen: True if `norm` is from `whole_norm`, so that no gradient was written since the check.
        """
        columns = self.rows.columns
        if self.found is None or not is_seen:
            self.found = self._found_now()
        if columns.has_plain:
            grads = tensor_lists.where(columns.plain_mask, self.found.grads)
            self._list_check.clip_(grads, norm, max_norm)
            marks = tensor_lists.gradient_marks(columns.handle)
            self.found = Found(marks, self.found.grads, are_taken=self.found.are_taken)
        if 0 in columns.plain_mask:
            self.clip = Clip(columns, self.found.marks, norm, max_norm)

    def note_clipped(self) -> None:
        """Note that checked gradients were multiplied or clamped by finite numbers: all stay finite."""
        if self.found is not None:
            self.found = self._found_now()

    def refuse_written_after_clip(self, is_clipping: bool = False) -> None:
        """Raise AmpStateError if a gradient that the step is to clip was written since, as another backward does.

        Args:
            is_clipping: True before another clipping, where another tensor is the gradient of another backward.
        """
        if self._is_written_after_clip(or_replaced=not is_clipping):
            raise AmpStateError(
                f"Gradients of {type(self.optimizer).__name__} were written after amp.clip_grad_norm_(), which clips "
                "them in the step.  Nothing was stepped.  Write them before, or clip by "
                "torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm), which clips at once."
            )

    def _is_written_after_clip(self, or_replaced: bool = True) -> bool:
        clip, found = self.clip, self.found
        if clip is None or not clip.marks.have_moved():
            return False
        params, plain = clip.columns.params, clip.columns.plain_mask
        rows = (row for row, was in clip.marks.moved() if was and not plain[row] and params[row].grad is not None)
        return any(or_replaced or (found is not None and found.grads[row] is params[row].grad) for row in rows)

    def _complete_clip(self) -> None:
        """Clip now what the step was to clip, where parameters left or joined since."""
        if self.clip is not None and not self._is_written_after_clip():
            self.complete_gradients()

    def complete_gradients(self) -> None:
        """Unscale and clip now what the step was to unscale and clip."""
        if self.clip is not None or self.kept is not None:
            self.give_gradients()
            self.take_gradients()

    # Masters' gradients.

    def give_gradients(self) -> None:
        """Make the gradients beside masters float32 and clipped, and have masters show them: the same tensors."""
        self.settle()
        self.take_gradients()
        self.refuse_written_kept()
        is_seen, norm = not self._has_moved(), None if self.found is None else self.found.norm
        columns, was_clipped = self.rows.columns, self.clip is not None
        with torch.no_grad():
            for row, one in enumerate(columns.beside):
                if not isinstance(one, Master):
                    continue
                grad = one.param.grad
                if grad is not None and (was_clipped or is_low_precision(grad)):
                    one.param.grad = None
                    one.param.grad = self._as_float32(row, grad)
                one.weight.grad = one.param.grad
                self._handed.append((one, one.weight.grad))
        self.clip = self.kept = None
        if is_seen and self.found is not None:
            found = self._found_now()
            self.found = found if was_clipped else found._replace(norm=norm)

    @contextmanager
    def lent_gradients(self) -> Iterator[None]:
        """A context for a step of the class's own: masters show gradients, float32 and clipped.

        At the end a half gradient that other code holds, as a buffer that it writes, is `.grad` again, with what is in
        the float32 one. Scaled ones, of `gradients="half"`, are left float32.
        """
        lent: list[tuple[nn.Parameter, Tensor]] = []
        for one in self.rows.masters if self.kept is None else ():
            if one.param.grad is not None and is_low_precision(one.param.grad) and arithmetic.is_held(one.param):
                lent.append((one.param, one.param.grad))
        self.give_gradients()
        given = [param.grad for param, _ in lent]
        try:
            yield
        finally:
            self.take_gradients()
            for (param, grad), wide in zip(lent, given, strict=True):
                if param.grad is wide and wide is not None:
                    with suppress(RuntimeError), torch.no_grad():  # of inference mode: the float32 one stays
                        grad.copy_(wide)
                        param.grad = grad

    def hand_out(self) -> None:
        """Have masters show their gradients to the user, who may write both until the step."""
        if self.rows.makes_masters and not self.rows.is_shown and not self.is_in_body:
            self.give_gradients()

    def take_gradients(self) -> None:
        """Take what other code did to the gradients of masters, and have masters show none."""
        if not self._handed or self.rows.is_shown:
            return
        handed, self._handed = self._handed, []
        for one, given in handed:
            own, shown = one.param.grad, one.weight.grad
            if shown is not given and (own is given or own is None):
                one.param.grad = shown
            one.weight.grad = None

    def fit_wrappers(self) -> None:
        """Give gradients beside masters the type of their parameters where a DistributedDataParallel reduces them.

        At a scale of 1 the next backward adds to them, and the wrapper's buckets take no other type.
        """
        for one in self.rows.columns.beside if self.rows.makes_masters and self.ranks.has_wrappers() else ():
            if isinstance(one, Master) and one.param.grad is not None:
                one.param.grad = one.param.grad.to(one.param.dtype)

    # The end of a step.

    def use_kernels(self, moment_dtype: torch.dtype, needs_kernels: bool) -> None:
        """Have the kernels keep moments in `moment_dtype`, and a count of steps where they round by chance.

        Args:
            needs_kernels: True if they must do each step.
        """
        self.needs_kernels = needs_kernels
        rounds_by_chance = moment_dtype is not torch.float32 or self.rows.kind is Remainder24
        if (fused := fused_step_of(self.optimizer)) is not None:
            fused.keep_moments_in(moment_dtype, counts=rounds_by_chance)

    def stepped(self, may_be_left: bool) -> None:
        """Note that the step was taken or skipped; gradients stay, and are checked again before another step.

        Half ones that are still scaled go, as nobody could tell their scale later.
        """
        if self.kept is not None:
            self.kept = None
            tensor_lists.discard_gradients([p for p in self.rows.columns.copies or () if p is not None])
        self.found = self.clip = None
        self.passed = None
        self.has_left = may_be_left
        self.backward_seen = self.is_captured = False

    def may_have_overflowed(self) -> bool:
        """True if present gradients may not be finite. Waits for the device; an error if ranks cannot agree."""
        self.pending.hear(wait=True)
        return self.pending.overflowed() or (self.has_left and self.pending.skipped)

    def release(self, may_be_bad: bool) -> list[tuple[nn.Parameter, torch.dtype | None]]:
        """Give parameters their own types and values again, see `Rows.release`. Call after hooks were removed.

        Args:
            may_be_bad: True to discard all gradients, since no later step will be skipped.
        """
        self.settle()
        self.put_back()
        self.take_gradients()
        if may_be_bad or self.state is State.DELAYED:
            self.discard()
        else:
            self.complete_gradients()
        return self.rows.release()

    def leave(self) -> None:
        """Let another optimizer have the parameters, with their gradients; values stay beside them."""
        self.settle()
        self.take_gradients()
        self.complete_gradients()
        self.rows.leave()


def _others(accesses: bytes) -> list[int]:
    if tensor_lists.OTHER not in accesses:
        return []
    return [row for row, how in enumerate(accesses) if how == tensor_lists.OTHER]


def _is_new(marks: tensor_lists.GradientMarks, row: int) -> bool:
    """True if the row had no gradient when it was marked."""
    return any(place == row and not was_there for place, was_there in marks.moved())
