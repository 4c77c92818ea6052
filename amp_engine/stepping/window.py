"""The window of one optimizer around a backward: sets earlier gradients aside; checks, unscales and accumulates.

`scale_loss` opens a window at its entry. Its exit closes the window, or with `delay_unscale=True` leaves it open for
the next `scale_loss`. While a backward runs in a window, `.grad` holds only scaled gradients of this window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum

import torch
from torch import Tensor, nn

from amp_engine import kernels
from amp_engine.errors import AmpStateError
from amp_engine.ground.devices import current_streams, moved
from amp_engine.ground.distributed import is_sharded, local_gradient
from amp_engine.kernels import tensor_lists
from amp_engine.scaling.scaler import LossScaler
from amp_engine.stepping import arithmetic
from amp_engine.stepping.backward import Backward
from amp_engine.stepping.columns import Columns
from amp_engine.stepping.master import Master
from amp_engine.stepping.rows import Rows
from amp_engine.stepping.slots import NO_SLOTS, Checked, Slots, Unscaled, WholeCheck
from amp_engine.stepping.spent import Sentinel, Zeroed


class State(Enum):
    """State of a window. Closing puts gradients into the slots; the window may open again before the step."""

    CLOSED = "closed"
    OPEN = "open"  # the body of a `scale_loss` runs, whose exit will close the window or leave it open
    PREPARED = "prepared"  # a foreign `scale_loss` runs, whose exit may never come
    LEFT_OPEN = "left open"  # between two bodies

    # Enum's own hash is Python code, which is slow: states are hashed four times an iteration.
    __hash__ = object.__hash__


_OTHER = tensor_lists.OTHER

_NEXT = {
    State.CLOSED: {State.OPEN, State.PREPARED},
    State.OPEN: {State.CLOSED, State.LEFT_OPEN},
    State.PREPARED: {State.CLOSED, State.LEFT_OPEN},
    State.LEFT_OPEN: {State.CLOSED, State.OPEN, State.PREPARED},
}


class Window:
    """The window of one optimizer, closed at first."""

    def __init__(self, rows: Rows) -> None:
        self.state = State.CLOSED
        self._rows = rows
        self._backward: Backward | None = None  # None while the window is closed
        # True if the backward of these gradients is known. If not, `_backward` stands in until `claim`.
        self._is_claimed = False
        self._list_check = kernels.ListCheck()
        # Unscaled gradients of earlier backwards, by id of the weight.
        self._earlier: dict[int, Tensor] = {}
        self._looks_at_earlier = False  # True if a check since the last step may have missed some of `_earlier`
        # While left open: `_left` has gradients of plain parameters; `_showing` has plain parameters that show a
        # gradient from before the window, which zero_grad can then reach; `_sentinel` is the smallest master.
        self._left: list[Sentinel] = []
        self._showing: list[nn.Parameter] = []
        self._sentinel: Sentinel | None = None
        # After re-entry: marks of the gradients that a backward would add to.
        self._reentered: tensor_lists.GradientMarks | None = None
        # In a body, until a backward of its loss begins: `_waits` is True, and `_at_entry` has marks of the model's
        # gradients. Until then gradients from before the entry stay in `.grad`, where `zero_grad()` can reach them.
        self._waits = False
        self._at_entry: tensor_lists.GradientMarks | None = None
        self._is_reentered = False  # True if this body continues a window that was left open
        # In a body, to detect a `zero_grad()` after a backward: `_mark` is the smallest master, and `_ended` has marks
        # of the model's gradients at the end of a backward whose gradients will be added to earlier ones.
        self._mark: Sentinel | None = None
        self._ended: tensor_lists.GradientMarks | None = None
        self._smallest: tuple[Columns, Sentinel] | None = None

    @property
    def is_closed(self) -> bool:
        """True if the window is closed: `.grad` holds unscaled gradients, if any."""
        return self.state is State.CLOSED

    @property
    def is_left_open(self) -> bool:
        """True if the window is left open: scaled gradients wait for another body, or for the step."""
        return self.state is State.LEFT_OPEN

    @property
    def is_in_body(self) -> bool:
        """True while the body of a `scale_loss` runs."""
        return self.state is State.OPEN

    @property
    def backward(self) -> Backward:
        """The backward of the present gradients, with their scale. Raises AmpStateError if the window is closed."""
        if self._backward is None:
            raise AmpStateError("A window that is closed has no backward.")
        return self._backward

    def may_belong_to(self, scaler: LossScaler) -> bool:
        """False if the backward is only a stand-in with another scaler; else gradients may be of a loss of `scaler`."""
        return self._is_claimed or self.backward.scaler is scaler

    def open(self, backward: Backward, waits: bool = False, looks_at_earlier: bool = False) -> None:
        """Entry of `scale_loss`: set present gradients aside, or continue a window that was left open.

        Raises AmpStateError inside of a body.

        Args:
            backward: has the scale of the gradients to come. A window that was left open keeps the scale of its own
                backward, and takes all else from this one, since `initialize` may have made a new scaler.
            waits: True if `begin` will be called when a backward begins. Nothing is set aside before that.
            looks_at_earlier: True to also check the gradients that are set aside, when new ones are added to them.
        """
        self._enter(State.OPEN, backward, waits, looks_at_earlier)
        self.claim(backward)

    def begin(self) -> bool:
        """At the start of a backward into this window: set present gradients aside, unless that was done.

        Returns:
            True if its gradients will be added to earlier ones; then `end` must be called.
        """
        if not self._waits:
            self._rows.ledger.spent.hear()
            self._heed_zero_grad()
        else:
            self._set_out()
        has_earlier = bool(self._earlier) or self._rows.has_master_gradients()
        if self._rows.masters:
            self._mark_smallest()
        return has_earlier

    def end(self) -> None:
        """At the end of that backward: from now on a `zero_grad` also affects the gradients that were set aside."""
        if self.is_in_body and not self._waits:
            self._ended = tensor_lists.gradient_marks(self._rows.columns.param_handle)

    def _set_out(self) -> None:
        at_entry = self._end_wait()
        if self._rows.ledger.spent.hear():
            at_entry = None  # a step discarded all gradients of masters
        if self._is_reentered:
            self._take_back()
            self._reentered = tensor_lists.gradient_marks(self._rows.columns.param_handle)
            return
        if self._rows.masters and (moved := self._moved(at_entry)):
            self._heed_zeros(moved)
        self._set_aside()

    def _end_wait(self) -> tensor_lists.GradientMarks | None:
        at_entry, self._waits, self._at_entry = self._at_entry, False, None
        return at_entry

    def _moved(self, marks: tensor_lists.GradientMarks | None) -> list[tuple[int, bool]]:
        """Return rows whose gradients moved since `marks`, each with True if it had one; [] if the rows are others."""
        if marks is None or marks.params is not self._rows.columns.param_handle or not marks.have_moved():
            return []
        return marks.moved()

    def has_arrived(self) -> bool:
        """True if a backward has added to gradients since `begin`. Call in a body only."""
        if self._is_reentered:
            return self._reentered is not None and self._reentered.have_moved()
        return not self._waits and tensor_lists.any_gradient(self._rows.columns.param_handle)

    def has_arrived_unseen(self) -> bool:
        """True if gradients came or were written in a body without a backward of its loss. Waits for the device."""
        if self._is_reentered:
            return False  # `.grad` also has gradients of an earlier body
        columns = self._rows.columns
        if not self._waits:
            return tensor_lists.any_gradient(columns.param_handle)
        moved = self._moved(self._at_entry)
        zeroed = set(self._zeroed(moved))
        return any(row not in zeroed and columns.params[row].grad is not None for row, _ in moved)

    def prepare(self, stand_in: Backward, looks_at_earlier: bool = False) -> None:
        """Entry of a foreign `scale_loss`, whose exit calls `claim`. Raises AmpStateError inside of a body."""
        self._enter(State.PREPARED, stand_in, looks_at_earlier=looks_at_earlier)

    def adopt(self, stand_in: Backward) -> None:
        """Take the present gradients into this window as scaled ones. Raises AmpStateError inside of a body."""
        self._rows.ledger.spent.hear()
        self._rows.materialize()
        self._become(State.PREPARED)
        self._backward, self._is_claimed = stand_in, False

    def _enter(self, state: State, backward: Backward, waits: bool = False, looks_at_earlier: bool = False) -> None:
        if self.state is State.PREPARED:
            self.discard()  # the foreign `scale_loss` raised, and never closed it
        is_reentered = self.state is State.LEFT_OPEN
        if not is_reentered:
            self._rows.materialize()  # new gradients will be added to these
        self._become(state)
        self._is_reentered = is_reentered
        self._waits, self._at_entry = True, None
        if not is_reentered:
            self._backward, self._is_claimed = backward, False
            self._looks_at_earlier = looks_at_earlier
            columns = self._rows.columns
            if not (columns.asks or tensor_lists.any_gradient(columns.param_handle)):
                self._waits = False  # there is nothing to set aside
            elif waits and not columns.asks:
                self._at_entry = tensor_lists.gradient_marks(columns.param_handle)
                return
        if not waits and self._waits:
            self._set_out()

    def _set_aside(self) -> None:
        columns = self._rows.columns
        self._rows.discard_parameter_gradients()  # they are of an earlier step, and still scaled
        for p in columns.plain if columns.asks or tensor_lists.any_gradient(columns.plain_handle) else ():
            if p.grad is not None:
                self._earlier[id(p)] = arithmetic.own_memory(p.grad)
                p.grad = None

    def _heed_zeros(self, moved: list[tuple[int, bool]]) -> None:
        """Discard masters' gradients where parameters' were zeroed in the body: `model.zero_grad()` applies to both."""
        for row in self._zeroed(moved):
            self._heed_zero_of(row)

    def _heed_zero_of(self, row: int) -> None:
        param, master = self._rows.columns.params[row], self._rows.columns.masters[row]
        if master is None:
            self._earlier.pop(id(param), None)
        else:
            master.weight.grad = None
            self._rows.ledger.spent.zero([] if param.grad is None else [row])

    def _zeroed(self, moved: list[tuple[int, bool]]) -> list[int]:
        grads = [(row, self._rows.columns.params[row].grad) for row, was_there in moved if was_there]
        return [row for row, grad in grads if grad is None or arithmetic.is_zero(grad)]

    def _mark_smallest(self) -> None:
        """Have the smallest master show a gradient, to detect a zero_grad(), which misses the parameters' gradients."""
        columns = self._rows.columns
        if self._smallest is None or self._smallest[0] is not columns:
            self._smallest = columns, Sentinel(_smallest_of(self._rows.masters))
        self._mark = self._smallest[1]
        self._mark.show()

    def _heed_zero_grad(self) -> None:
        """Apply a `zero_grad()` since the last backward of this body to all gradients that it should have reached."""
        (mark, ended), self._mark, self._ended = (self._mark, self._ended), None, None
        heard = Zeroed.NO if mark is None else mark.hear()
        if heard is Zeroed.GONE:
            self._rows.discard_parameter_gradients()
            self._rows.ledger.spent.discard_all()
        elif heard is Zeroed.IN_PLACE:
            torch._foreach_zero_([m.param.grad for m in self._rows.masters if m.param.grad is not None])
            self._rows.ledger.spent.zero_all()
        if ended is None:
            return
        columns, is_of_masters = self._rows.columns, heard is not Zeroed.NO
        zeroed = self._zeroed(self._moved(ended))
        # The optimizer's zero_grad() has already made masters' gradients 0 or None.
        zeroed = [row for row in zeroed if columns.masters[row] is None or not is_of_masters]
        for row in zeroed:
            self._heed_zero_of(row)
        rows = columns.plain_rows if is_of_masters else range(len(columns.params))
        if zeroed and not any(columns.params[row].grad is not None for row in set(rows).difference(zeroed)):
            # All were zeroed, so this applies to earlier gradients that this body has not reached, too.
            is_in_place = any(columns.params[row].grad is not None for row in zeroed)
            self._earlier = {key: torch.zeros_like(g) for key, g in self._earlier.items()} if is_in_place else {}
            if not is_of_masters:
                self._rows.discard_master_gradients()

    def _stop_waiting(self) -> None:
        """Stop waiting at the end of a body. If no backward of its loss was seen, moved gradients count as arrived."""
        if not self._waits:
            self._heed_zero_grad()
            return
        if self._is_reentered:
            self._set_out()
            return
        params = self._rows.columns.params
        has_stepped = self._rows.ledger.spent.hear()
        moved = self._moved(self._end_wait())
        if not has_stepped:
            self._heed_zeros(moved)
        arrived = [(params[row], params[row].grad) for row, _ in moved]
        for p, _ in arrived:
            p.grad = None
        self._set_aside()
        for p, grad in arrived:
            p.grad = grad

    def claim(self, backward: Backward) -> None:
        """Set the backward, whose scaler records overflows. A window that has a known scale keeps it."""
        if self._is_claimed:
            earlier, backward = self.backward, Backward(backward.scaler, backward.loss_id, self.backward.snapshot)
            earlier.give_loss(backward)
        self._backward, self._is_claimed = backward, True

    def _become(self, state: State) -> None:
        if state not in _NEXT[self.state]:
            raise AmpStateError(f"A window that is {self.state.value} cannot become {state.value}.")
        self.state = state
        self._reentered = None
        self._is_reentered = False
        if state is State.CLOSED:
            self._backward = None

    def leave_open(self, last: Backward | None = None) -> None:
        """Exit with `delay_unscale`: gradients stay scaled and accumulate in place.

        Args:
            last: the backward of this body; None if unknown.
        """
        self._stop_waiting()
        self._become(State.LEFT_OPEN)
        if last is not None:
            last.give_loss(self.backward)
        columns = self._rows.columns
        self._left = [Sentinel(p) for p in columns.plain if p.grad is not None]
        self._showing = [p for p in columns.plain if p.grad is None and id(p) in self._earlier]
        for p in self._showing:
            p.grad = self._earlier.pop(id(p))
        masters = [m for m in self._rows.masters if m.param.grad is not None]
        for master in masters:
            if master.weight.grad is not None:
                self._earlier[id(master.weight)] = master.weight.grad
                master.weight.grad = None
        if masters:
            # torch's zero_grad() reaches the masters, not the model's own gradients.
            self._sentinel = Sentinel(_smallest_of(masters))
            self._sentinel.show()

    def close(self, backward: Backward, check: bool, unscaled: set[int] | None = None) -> None:
        """Exit: from now on `.grad` of every weight is, or makes when read, the unscaled gradient in the weight's type.

        Checks the gradients of this window, and earlier ones if a check may have missed some. Puts the checks into
        `backward`, and held gradients into the slots of the rows. No host sync.

        Args:
            backward: shared by all optimizers of this `scale_loss`.
            check: False to record no overflow in the scaler.
            unscaled: ids of parameters whose gradients another optimizer of this backward has unscaled in
                place; the ids of those that are unscaled here are added. None if there is no other optimizer.
        """
        self._stop_waiting()
        self._take_back()
        columns, snapshot, totals = self._rows.columns, backward.snapshot, self._rows.totals()
        own, accesses, devices, held = tensor_lists.gradients(columns.param_handle, self._to_hold(columns, totals))
        done = [row for row in columns.plain_rows if id(columns.params[row]) in unscaled] if unscaled else []
        if done:
            own, accesses = arithmetic.without(done, own, accesses)
        others = _others(accesses)
        if unscaled is not None:
            unscaled |= {id(columns.params[row]) for row in columns.plain_rows if accesses[row] != tensor_lists.NONE}
        if others and columns.has_shards:
            own, accesses = arithmetic.with_shards(columns.params, others, own, accesses)
            others = _others(accesses)
        if others:
            own, accesses = arithmetic.without(others, own, accesses)
        grads = own if held is None else held.beside(own)
        if done or columns.has_shards:
            devices = tensor_lists.devices_of(grads, accesses)
        first = not self._earlier and not totals

        is_checked_later = check and self._looks_at_earlier and bool(self._earlier)
        is_only = len(devices) == 1
        updates = backward.may_update and is_only and not others and not is_checked_later
        looks = [self._look(columns, grads, accesses, device, backward, check, is_only, updates) for device in devices]
        if others:
            both = [(columns.params[row], columns.masters[row]) for row in others]
            backward.checked.append(self._close_others(both, backward, check))
        whole = None
        if first and len(looks) == 1 and not others and not done and not columns.has_shards:
            in_place = None
            if columns.plain and any(accesses[row] for row in columns.plain_rows):  # stops at the first; NONE is 0
                unmastered = tensor_lists.where(columns.plain_mask, own)
                in_place = Unscaled(unmastered, tensor_lists.gradient_marks(columns.plain_handle))
            whole = WholeCheck(*looks[0], snapshot, columns.weights, in_place)
        self._rows.ledger.slots = Slots(held, snapshot, whole, () if held is None else current_streams(devices))
        if is_checked_later:
            for flags in arithmetic.nonfinite(list(self._earlier.values())):
                backward.scaler.record_(flags)
        self._restore_earlier(add=True)
        if totals:
            self._add_to(totals, grads, devices, backward)
        self._become(State.CLOSED)
        if self._rows.ledger.slots.count == 0 and not totals:
            self._rows.show_spent()  # no gradient came, so a `zero_grad` would be of the last step's

    def _look(
        self,
        columns: Columns,
        grads: Sequence[Tensor | None],
        accesses: bytes,
        device: torch.device,
        backward: Backward,
        check: bool,
        is_only: bool,
        updates: bool,
    ) -> tuple[Checked, Tensor]:
        """Check the gradients on one device, and unscale in place those of rows without a master.

        Args:
            updates: True to also update the scale, if it is on this device.
        """
        if not is_only:
            elsewhere = [row for row, g in enumerate(grads) if g is not None and g.device != device]
            grads, accesses = arithmetic.without(elsewhere, grads, accesses)
        outputs, scaler = None, backward.scaler
        if not backward.snapshot.is_identity and len(columns.plain) > 0:
            outputs = tensor_lists.where(columns.plain_mask, grads)
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
        checked = Checked(columns.params, accesses, checks)
        backward.checked.append(checked)
        return checked, norm

    def _to_hold(self, columns: Columns, totals: Mapping[int, Tensor]) -> bytes | None:
        """Return a mask of rows whose gradients to hold: those of masters without a gradient; None without masters.

        Clipping, zeroing or discarding the parameters' gradients does not change held gradients, as in apex.
        """
        if not totals:
            return columns.master_mask if self._rows.masters else None
        return bytes(0 if row in totals else has for row, has in enumerate(columns.master_mask))

    def _add_to(
        self,
        totals: Mapping[int, Tensor],
        grads: Sequence[Tensor | None],
        devices: Sequence[torch.device],
        backward: Backward,
    ) -> None:
        """Unscale gradients, and add them to the gradients that the masters of the same rows have already."""
        added = [(row, total, g) for row, total in totals.items() if (g := grads[row]) is not None]
        for device in devices:
            inv_scale = moved(backward.snapshot.inv_scale, device)
            alike: list[tuple[int, Tensor, Tensor]] = []
            others: list[tuple[int, Tensor, Tensor]] = []
            for row, total, g in added:
                if g.device == device:
                    fits = kernels.is_dense(total) and kernels.same_layout(total, g)
                    (alike if fits else others).append((row, total, g))
            if alike:
                _, sums, grads_here = zip(*alike, strict=True)
                kernels.axpby_(sums, grads_here, sums, inv_scale, None)
            for row, _, g in others:  # their layout comes from user code
                arithmetic.accumulate(
                    [(self._rows.columns.weights[row], arithmetic.times(g, inv_scale, torch.float32))]
                )

    def _close_others(
        self, arrived: list[tuple[nn.Parameter, Master | None]], backward: Backward, check: bool
    ) -> Checked:
        """Close gradients that the kernels do not take (sparse, negative views, other types) by torch's operations."""
        snapshot = backward.snapshot
        device = snapshot.inv_scale.device
        looks: list[Tensor] = []  # largest magnitude, sum of squares
        for param, master in arrived:
            shard = local_gradient(param) if is_sharded(param) else None
            grad = arithmetic.readable(param) if shard is None else shard
            looks.append(moved(arithmetic.largest_and_squares(arithmetic.values(grad)), device))
            inv_scale = moved(snapshot.inv_scale, grad.device)
            if master is not None:
                arithmetic.accumulate([(master.weight, arithmetic.times(grad, inv_scale, torch.float32))])
            elif not snapshot.is_identity:
                unscaled = arithmetic.times(grad, inv_scale, grad.dtype)
                if shard is None:
                    param.grad = unscaled
                else:
                    shard.copy_(unscaled)
        largest, squares = torch.stack(looks).unbind(1)
        flags = ~largest.isfinite()
        if check:
            backward.scaler.record_(flags)
        return Checked(
            [param for param, _ in arrived],
            bytes([tensor_lists.OTHER]) * len(arrived),
            kernels.Checks(flags, squares, largest.float()),
        )

    def discard_backward(self) -> None:
        """After the body of a `scale_loss` raised: put back the gradients from its entry.

        A window that was left open stays open if this body ran no backward. If part of a backward was added to the
        gradients of such a window, they cannot be separated again, and all are discarded. If the body ran no backward,
        its edits and zeroing of gradients stay.
        """
        if self._is_reentered and self._waits:
            self._end_wait()
            self._become(State.LEFT_OPEN)
        elif self._waits and (moved := self._edited()) is not None:
            self._end_wait()
            has_stepped = self._rows.ledger.spent.hear()
            if not has_stepped:
                self._heed_zeros(moved)
            self._rows.discard_parameter_gradients()
            self._become(State.CLOSED)
            if has_stepped:
                self._rows.show_spent()
        elif self._reentered is not None and not self._reentered.have_moved():
            self.leave_open()
        elif not self.is_closed:
            self.discard()

    def _edited(self) -> list[tuple[int, bool]] | None:
        """Return the rows whose gradients moved since the entry; None if a row without a gradient got one."""
        moved = self._moved(self._at_entry)
        return None if any(not was_there for _, was_there in moved) else moved

    def close_as_is(self) -> None:
        """Close the window, and neither unscale nor check its gradients."""
        self._stop_waiting()
        self._take_back()
        self._restore_earlier(add=True)
        self._become(State.CLOSED)

    def discard(self) -> None:
        """Close the window, discard its gradients, and put back those of earlier backwards."""
        self._stop_waiting()
        self._take_back()
        self._rows.ledger.slots = NO_SLOTS
        for p in self._rows.columns.params:
            p.grad = None
        self._restore_earlier(add=False)
        self._become(State.CLOSED)
        self._rows.show_spent()

    def _take_back(self) -> None:
        """Undo what `leave_open` set up, and apply a `zero_grad` since then."""
        for one in self._left:
            if one.hear() is not Zeroed.NO:
                self._earlier.pop(id(one.param), None)
        self._left = []
        for p in self._showing:
            if p.grad is not None:
                self._earlier[id(p)] = p.grad
                p.grad = None
        self._showing = []
        if self._sentinel is None:
            return
        heard = self._sentinel.hear()
        self._sentinel.hide()
        self._sentinel = None
        had = []
        for master in self._rows.masters:
            earlier = self._earlier.pop(id(master.weight), None)
            if master.row is not None and (earlier is not None or master.param.grad is not None):
                had.append(master.row)
            if heard is not Zeroed.NO:
                master.param.grad = None
            elif earlier is not None:
                master.weight.grad = earlier
        if heard is Zeroed.GONE:
            self._rows.ledger.spent.discard_all()
        elif heard is Zeroed.IN_PLACE:
            self._rows.ledger.spent.zero_all(had)

    def _restore_earlier(self, add: bool) -> None:
        if not self._earlier:
            return
        both = []
        for p in self._rows.columns.weights:
            earlier = self._earlier.pop(id(p), None)
            if earlier is None:
                continue
            if add and p.grad is not None:
                both.append((p, p.grad))
            p.grad = earlier
        self._earlier.clear()
        arithmetic.accumulate(both)


def _others(accesses: bytes) -> list[int]:
    return [row for row, how in enumerate(accesses) if how == _OTHER] if _OTHER in accesses else []


def _smallest_of(masters: Sequence[Master]) -> nn.Parameter:
    return min((master.weight for master in masters), key=Tensor.numel)
