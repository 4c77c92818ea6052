"""The gradients of one optimizer around a backward: set aside, check, unscale, accumulate.

`scale_loss` opens a window at its entry and closes it at its exit; `delay_unscale=True` leaves it open for the
next. While it is open, `.grad` holds nothing but scaled gradients of this window.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_engine import kernels
from amp_engine.devices import moved
from amp_engine.master_weights import Master, MasterWeights
from amp_engine.scaler import LossScaler, ScaleSnapshot


class Checked(NamedTuple):
    """Parameters whose gradients arrived, and which of them are not finite: bool tensor of shape [n]."""

    params: list[nn.Parameter]
    nonfinite: Tensor


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
        return not self.is_untouched() and not bool(_values(self.param.grad).any())


class GradientWindow:
    """Scaled gradients of one optimizer, from entry to exit of `scale_loss`.

    Args:
        optimizer: its groups name the parameters.
        masters: its FP32 masters, or None.
        scaler: what every loss of this window is scaled by,
        loss_id: under which number,
        snapshot: and with which scale.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        masters: MasterWeights | None,
        scaler: LossScaler,
        loss_id: int,
        snapshot: ScaleSnapshot,
    ) -> None:
        self.scaler = scaler
        self.loss_id = loss_id
        self.snapshot = snapshot
        self.loss = torch.zeros((), device="cpu")  # the last one that was left open with
        self._optimizer = weakref.ref(optimizer)
        self._masters = masters
        # Unscaled gradients of earlier backwards, by id of the parameter that the optimizer steps.
        self._earlier: dict[int, Tensor] = {}
        # While left open: what plain parameters hold, and a gradient of ours on one master.
        self._left: list[Seen] = []
        self._sentinel: Seen | None = None
        # Since re-entered: what a backward would add to.
        self._reentered: list[Seen] = []

        for master in self._master_list():
            master.param.grad = None  # of an earlier step, still scaled
        for p in self._plain_params():
            if p.grad is not None:
                self._earlier[id(p)] = _own_memory(p.grad)
                p.grad = None

    def leave_open(self, loss: Tensor) -> None:
        """Exit with `delay_unscale`: gradients stay scaled and go on accumulating in place."""
        self.loss = loss
        self._reentered = []
        self._left = [seen for seen in map(_seen, self._plain_params()) if seen.grad is not None]
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
        self._reentered = [_seen(p) for p in self._written_params()]

    def close(self, check: bool, unscaled: set[int]) -> Checked:
        """Exit: afterwards `.grad` of every stepped parameter is unscaled, in its own type.

        Only gradients of this window are checked, not those that they are added to. No host sync.

        Args:
            check: without it nothing is reported as non-finite.
            unscaled: ids of parameters whose gradients another optimizer of this backward has unscaled in
                place; those that are done here are added.
        """
        self._take_back()
        masters = [m for m in self._master_list() if m.param.grad is not None]
        plain = [p for p in self._plain_params() if p.grad is not None and id(p) not in unscaled]
        arrived: list[nn.Parameter] = []
        flags: list[Tensor] = []
        if check:
            for batch in _batches([*(m.param for m in masters), *plain]):
                arrived += batch
                flags.append(moved(_nonfinite(batch), self.snapshot.inv_scale.device))

        # What may fail for want of memory comes first: until the last line nothing is added to a master.
        widened = [self._widened(batch) for batch in _batches([m.param for m in masters])]
        grads_f32 = {id(p): g for batch in widened for p, g in batch}
        if not self.snapshot.is_identity:
            for batch in _batches(plain):
                self._unscale_(batch)
        unscaled |= {id(p) for p in plain}
        self._restore_earlier(add=True)
        _accumulate([(m.weight, grads_f32[id(m.param)]) for m in masters])
        nothing = torch.zeros(0, dtype=torch.bool, device=self.snapshot.inv_scale.device)
        return Checked(arrived, torch.cat(flags) if flags else nothing)

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

    def discard(self) -> None:
        """Drop the window's gradients and put back those of earlier backwards."""
        self._take_back()
        for p in self._written_params():
            p.grad = None
        self._restore_earlier(add=False)

    def _take_back(self) -> None:
        """Undo what `leave_open` set up, and heed a `zero_grad` since then."""
        for seen in self._left:
            if seen.is_zeroed():
                self._earlier.pop(id(seen.param), None)
        self._left = []
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

    def _stepped_params(self) -> Iterator[nn.Parameter]:
        optimizer = self._optimizer()
        for group in [] if optimizer is None else optimizer.param_groups:
            yield from group["params"]

    def _plain_params(self) -> Iterator[nn.Parameter]:
        """What the optimizer steps without a master."""
        for p in self._stepped_params():
            if self._masters is None or self._masters.find(p) is None:
                yield p

    def _written_params(self) -> Iterator[nn.Parameter]:
        """What a backward accumulates into: the model's own parameters."""
        yield from (master.param for master in self._master_list())
        yield from self._plain_params()

    def _widened(self, batch: list[nn.Parameter]) -> list[tuple[nn.Parameter, Tensor]]:
        """Unscaled float32 copies of the gradients, which share device, type and layout."""
        grads = [_grad(p) for p in batch]
        inv_scale = moved(self.snapshot.inv_scale, grads[0].device)
        if grads[0].is_sparse:
            grads_f32 = [_map_values(g, lambda v: v.float() * inv_scale) for g in grads]
        else:
            grads_f32 = kernels.unscaled(grads, inv_scale)
        return list(zip(batch, grads_f32, strict=True))

    def _unscale_(self, batch: list[nn.Parameter]) -> None:
        grads = [_grad(p) for p in batch]
        inv_scale = moved(self.snapshot.inv_scale, grads[0].device)
        if not grads[0].is_sparse:
            kernels.unscale_(grads, inv_scale)
            return
        for p, g in zip(batch, grads, strict=True):
            p.grad = _map_values(g, lambda v: (v.float() * inv_scale).to(v.dtype))

    def _restore_earlier(self, add: bool) -> None:
        both = []
        for p in self._stepped_params():
            earlier = self._earlier.pop(id(p), None)
            if earlier is None:
                continue
            if add and p.grad is not None:
                both.append((p, p.grad))
            p.grad = earlier
        self._earlier.clear()
        _accumulate(both)


def _seen(param: nn.Parameter) -> Seen:
    return Seen(param, param.grad, _version(param.grad))


def _version(grad: Tensor | None) -> int:
    return 0 if grad is None else grad._version


def _grad(param: nn.Parameter) -> Tensor:
    grad = param.grad
    assert grad is not None
    # One entry an index, so that values that overflow together are seen to.
    return grad.coalesce() if grad.is_sparse else grad


def _nonfinite(batch: Sequence[nn.Parameter]) -> Tensor:
    return kernels.nonfinite([_values(_grad(p)) for p in batch])


def _values(grad: Tensor) -> Tensor:
    return grad.coalesce().values() if grad.is_sparse else grad


@torch.no_grad()
def _accumulate(pairs: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
    """`param.grad += grad` for each pair; where there is no gradient yet, it is `grad` itself."""
    totals, grads = [], []
    for param, grad in pairs:
        if param.grad is None:
            param.grad = grad
        elif param.grad.is_sparse or grad.is_sparse:
            param.grad = param.grad + grad
        else:
            totals.append(param.grad)
            grads.append(grad)
    kernels.accumulate_(totals, grads)


def _map_values(sparse: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
    with torch.no_grad():
        return torch.sparse_coo_tensor(
            sparse.indices(), f(sparse.values()), sparse.shape, is_coalesced=True, check_invariants=False
        )


def _own_memory(grad: Tensor) -> Tensor:
    # DDP's gradient_as_bucket_view makes gradients views of a bucket that the next backward overwrites.
    if grad.is_sparse:
        return grad
    shared = grad._is_view() or grad.untyped_storage().nbytes() > grad.numel() * grad.element_size()
    return grad.clone() if shared else grad


def _batches(params: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """`params` grouped by device, type and layout of their gradients."""
    groups: dict[object, list[nn.Parameter]] = {}
    for p in params:
        assert p.grad is not None
        groups.setdefault((p.grad.device, p.grad.dtype, p.grad.layout), []).append(p)
    yield from groups.values()
