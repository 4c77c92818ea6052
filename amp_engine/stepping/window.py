"""The gradients of one optimizer around a backward: set aside, check, unscale, accumulate.

`scale_loss` opens a window at its entry and closes it at its exit; `delay_unscale=True` leaves it open for the
next. While it is open, `.grad` holds nothing but scaled gradients of this window.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_engine import kernels
from amp_engine.devices import moved
from amp_engine.kernels import walk
from amp_engine.scaler import LossScaler, ScaleSnapshot
from amp_engine.stepping import arithmetic
from amp_engine.stepping.backward import NO_LOSS, Checked, PassOne, Unscaled
from amp_engine.stepping.lazy_gradients import Kept, Unscaling
from amp_engine.stepping.master import Master
from amp_engine.stepping.master_weights import MasterWeights
from amp_engine.stepping.roster import NO_ROSTER, Roster, roster_of


class Seen(NamedTuple):
    """A parameter's gradient as it was, to tell later whether somebody touched it."""

    param: nn.Parameter
    grad: Tensor | None
    version: int

    def is_untouched(self) -> bool:
        """Whether the gradient is the same object with the same version."""
        return self.param.grad is self.grad and _version(self.grad) == self.version

    def is_zeroed(self) -> bool:
        """Whether the gradient went, or was written and is 0 now, as `zero_grad` does. May wait if written."""
        if self.param.grad is None:
            return self.grad is not None
        return not self.is_untouched() and not bool(arithmetic.values(self.param.grad).any())


class GradientWindow:
    """Scaled gradients of one optimizer, from entry to exit of `scale_loss`.

    Args:
        optimizer: its groups name the parameters.
        masters: its FP32 masters, or None.
        scaler: what every loss of this window is scaled by,
        loss_id: under which number,
        snapshot: and with which scale.
        is_claimed: whether these three are known. If not, they stand until `claim`.
        is_entered: whether the backward is still to come. If not, `.grad` holds its gradients already.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        masters: MasterWeights | None,
        scaler: LossScaler,
        loss_id: int,
        snapshot: ScaleSnapshot,
        *,
        is_claimed: bool = True,
        is_entered: bool = True,
    ) -> None:
        self.scaler = scaler
        self.loss_id = loss_id
        self.snapshot = snapshot
        self.is_claimed = is_claimed
        self.is_left_open = False
        self.loss = NO_LOSS  # the last one that was left open with
        self._optimizer = weakref.ref(optimizer)
        self._masters = masters
        # Unscaled gradients of earlier backwards, by id of the parameter that the optimizer steps.
        self._earlier: dict[int, Tensor] = {}
        # While left open: what plain parameters hold, those that show a gradient of before the window meanwhile, for
        # zero_grad to reach, and a gradient of ours on one master.
        self._left: list[Seen] = []
        self._showing: list[nn.Parameter] = []
        self._sentinel: Seen | None = None
        # Since re-entered: what a backward would add to.
        self._reentered: list[Seen] = []

        roster = self._roster()
        if masters is not None:
            masters.materialize()  # this backward is to be added to
        if not is_entered:
            return
        if masters is not None:
            walk.drop_gradients(masters.params)  # of an earlier step, still scaled
        for p in roster.plain if roster.asks or walk.any_gradient(roster.plain_handle) else ():
            if p.grad is not None:
                self._earlier[id(p)] = arithmetic.own_memory(p.grad)
                p.grad = None

    def claim(self, scaler: LossScaler, loss_id: int, snapshot: ScaleSnapshot) -> None:
        """Say which scaler is to hear of an overflow and, unless it is known, what the losses are scaled by.

        The scaler may be another one than in an earlier body of this window: `initialize` makes new ones.
        """
        self.scaler, self.loss_id = scaler, loss_id
        if not self.is_claimed:
            self.snapshot = snapshot
            self.is_claimed = True

    def leave_open(self, loss: Tensor) -> None:
        """Exit with `delay_unscale`: gradients stay scaled and go on accumulating in place."""
        self.is_left_open = True
        self.loss = loss
        self._reentered = []
        self._left = [seen for seen in map(_seen, self._roster().plain) if seen.grad is not None]
        self._showing = [p for p in self._roster().plain if p.grad is None and id(p) in self._earlier]
        for p in self._showing:
            p.grad = self._earlier.pop(id(p))
        masters = [m for m in self._master_list() if m.param.grad is not None]
        for master in masters:
            if master.weight.grad is not None:
                self._earlier[id(master.weight)] = master.weight.grad
                master.weight.grad = None
        if masters:
            # torch's zero_grad() reaches the masters, not the model's own gradients. One master gets a gradient
            # that only zero_grad() makes 0: clipping does not, and hardly counts it.
            smallest = min((m.weight for m in masters), key=Tensor.numel)
            smallest.grad = torch.full_like(smallest, 1e-30)
            self._sentinel = _seen(smallest)

    def reenter(self) -> None:
        """Next entry into a window that was left open."""
        self._take_back()
        self.is_left_open = False
        self._reentered = [_seen(p) for p in self._written_params()]

    def close(
        self, check: bool, unscaled: set[int], list_check: kernels.ListCheck
    ) -> tuple[list[Checked], PassOne | None]:
        """Exit: afterwards `.grad` of every stepped parameter is, or gives, the unscaled gradient in its own type.

        Only gradients of this window are checked, not those that they are added to. No host sync.

        Args:
            check: without it no overflow is recorded in the scaler.
            unscaled: ids of parameters whose gradients another optimizer of this backward has unscaled in
                place; those that are done here are added.
            list_check: the optimizer's own.

        Returns:
            What was found, and if nothing but this backward is in the gradients: pass 1 of the step.
        """
        self._take_back()
        roster = self._roster()
        grads, walks, devices = walk.gradients(roster.param_handle)
        done = [row for row in roster.plain_rows if id(roster.params[row]) in unscaled] if unscaled else []
        if done:
            grads, walks = arithmetic.without(done, grads, walks)
            devices = walk.devices_of(grads, walks)
        others = [row for row, how in enumerate(walks) if how == walk.OTHER] if walk.OTHER in walks else []
        arrived = [row for row in roster.plain_rows if walks[row] != walk.NONE]
        if others:
            grads, walks = arithmetic.without(others, grads, walks)
        totals: dict[int, Tensor] = {}  # of masters, by row
        if self._masters is not None and walk.any_gradient(self._masters.weights):
            found = ((row, m.total()) for row, m in enumerate(roster.masters) if m is not None)
            totals = {row: total for row, total in found if total is not None}
        first = not self._earlier and not totals

        looks = [self._look(roster, grads, walks, device, check, list_check, len(devices) == 1) for device in devices]
        checked = [look for look, _ in looks]
        if others:
            checked.append(self._close_others([(roster.params[row], roster.masters[row]) for row in others], check))
        plain = None
        if arrived:
            unmastered = walk.either(roster.plain_mask, grads)
            plain = Unscaled(roster.plain_handle, unmastered, walk.gradient_stamps(roster.plain_handle))
        unscaled |= {id(roster.params[row]) for row in arrived}
        snapshot = self.snapshot
        unscaling = Unscaling(lambda: snapshot.inv_scale)
        kept = self._keep(roster, grads, walks, totals, unscaling)
        self._restore_earlier(add=True)
        self._add_to(totals, grads, devices)
        if not first or len(looks) != 1 or others or done:
            return checked, None
        return checked, PassOne(*looks[0], unscaling, roster.weights, kept, plain)

    def _look(
        self,
        roster: Roster,
        grads: Sequence[Tensor | None],
        walks: bytes,
        device: torch.device,
        check: bool,
        list_check: kernels.ListCheck,
        is_only: bool,
    ) -> tuple[Checked, Tensor]:
        """Check what arrived on one device and unscale, in place, what has no master."""
        if not is_only:
            elsewhere = [row for row, g in enumerate(grads) if g is not None and g.device != device]
            grads, walks = arithmetic.without(elsewhere, grads, walks)
        outputs = None
        if not self.snapshot.is_identity and len(roster.plain) > 0:
            outputs = walk.either(roster.plain_mask, grads)
        found_inf = self.scaler.found_inf
        if not check or found_inf.device != device:
            found_inf = torch.zeros((), dtype=torch.float32, device=device)
        norm = torch.empty((), dtype=torch.float32, device=device)
        checks = list_check.run(grads, outputs, moved(self.snapshot.scale, device), found_inf, norm)
        if check and found_inf is not self.scaler.found_inf:
            self.scaler.record_(found_inf != 0)
        return Checked(roster.params, walks, checks), norm

    def _keep(
        self,
        roster: Roster,
        grads: Sequence[Tensor | None],
        walks: bytes,
        totals: Iterable[int],
        unscaling: Unscaling,
    ) -> Kept | None:
        """Keep the gradients of masters that have none yet, as copy-on-write clones of the model's own.

        Whoever clips, zeroes or drops the model's gradients then changes nothing of ours, as in apex.
        """
        if self._masters is None:
            return None
        held = bytearray(walks)
        for row in (*roster.plain_rows, *totals):
            held[row] = walk.NONE
        kept = Kept(walk.copies(grads, bytes(held)), held, unscaling)
        self._masters.keep(kept)
        return kept

    def _add_to(
        self, totals: Mapping[int, Tensor], grads: Sequence[Tensor | None], devices: Sequence[torch.device]
    ) -> None:
        """Unscale gradients, and add them to what masters have already: to that of the same row."""
        added = [(row, total, g) for row, total in totals.items() if (g := grads[row]) is not None]
        for device in devices if added else ():
            inv_scale = moved(self.snapshot.inv_scale, device)
            alike: list[tuple[int, Tensor, Tensor]] = []
            others: list[tuple[int, Tensor, Tensor]] = []
            for row, total, g in added:
                if g.device == device:
                    fits = kernels.is_dense(total) and kernels.same_layout(total, g)
                    (alike if fits else others).append((row, total, g))
            if alike:
                _, sums, grads_here = zip(*alike, strict=True)
                kernels.axpby_(sums, grads_here, sums, inv_scale, None)
            for row, _, g in others:  # a user's own
                arithmetic.accumulate([(self._roster().weights[row], arithmetic.times(g, inv_scale, torch.float32))])

    def _close_others(self, arrived: list[tuple[nn.Parameter, Master | None]], check: bool) -> Checked:
        """Sparse gradients, negative views, and types that the kernels do not walk, by PyTorch's own operations."""
        nonfinite = []
        for param, master in arrived:
            grad = arithmetic.readable(param)
            bad = kernels.nonfinite([arithmetic.values(grad)])
            nonfinite.append(moved(bad, self.snapshot.inv_scale.device))
            inv_scale = moved(self.snapshot.inv_scale, grad.device)
            if master is not None:
                arithmetic.accumulate([(master.weight, arithmetic.times(grad, inv_scale, torch.float32))])
            elif not self.snapshot.is_identity:
                param.grad = arithmetic.times(grad, inv_scale, grad.dtype)
        flags = torch.cat(nonfinite)
        if check:
            self.scaler.record_(flags)
        nothing = torch.zeros(len(arrived), dtype=torch.float64, device=flags.device)
        return Checked(
            [param for param, _ in arrived],
            bytes([walk.OTHER]) * len(arrived),
            kernels.Checks(flags, nothing, nothing.float()),
        )

    def abandon(self) -> bool:
        """The body of `scale_loss` raised: put back what was there at its entry.

        Returns whether the window stays open: it was, and this body ran no backward. What half a backward
        adds to the gradients of an open window cannot be told apart again; then they are dropped.
        """
        if self._reentered and all(seen.is_untouched() for seen in self._reentered):
            self.leave_open(self.loss)
            return True
        self.discard()
        return False

    def forget(self) -> None:
        """Close the window with gradients as they are, neither unscaled nor checked."""
        self._take_back()
        self._restore_earlier(add=True)

    def discard(self) -> None:
        """Drop the window's gradients and put back those of earlier backwards."""
        self._take_back()
        if self._masters is not None:
            self._masters.drop_kept()
        for p in self._written_params():
            p.grad = None
        self._restore_earlier(add=False)

    def _take_back(self) -> None:
        """Undo what `leave_open` set up, and heed a `zero_grad` since then."""
        for seen in self._left:
            if seen.is_zeroed():
                self._earlier.pop(id(seen.param), None)
        self._left = []
        for p in self._showing:
            if p.grad is not None:
                self._earlier[id(p)] = p.grad
                p.grad = None
        self._showing = []
        if self._sentinel is None:
            return
        zeroed = self._sentinel.is_zeroed()
        self._sentinel.param.grad = None
        self._sentinel = None
        for master in self._master_list():
            if zeroed:
                master.param.grad = None
                self._earlier.pop(id(master.weight), None)
            else:
                master.weight.grad = self._earlier.pop(id(master.weight), master.weight.grad)

    def _master_list(self) -> list[Master]:
        return [] if self._masters is None else self._masters.in_groups

    def _roster(self) -> Roster:
        optimizer = self._optimizer()
        if optimizer is None:
            return NO_ROSTER
        return roster_of(optimizer, self._masters)

    def _written_params(self) -> Iterator[nn.Parameter]:
        """What a backward accumulates into: the model's own parameters."""
        yield from (master.param for master in self._master_list())
        yield from self._roster().plain

    def _restore_earlier(self, add: bool) -> None:
        if not self._earlier:
            return
        both = []
        for p in self._roster().weights:
            earlier = self._earlier.pop(id(p), None)
            if earlier is None:
                continue
            if add and p.grad is not None:
                both.append((p, p.grad))
            p.grad = earlier
        self._earlier.clear()
        arithmetic.accumulate(both)


def _seen(param: nn.Parameter) -> Seen:
    return Seen(param, param.grad, _version(param.grad))


def _version(grad: Tensor | None) -> int:
    return 0 if grad is None else grad._version
