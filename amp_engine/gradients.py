"""The gradients of one optimizer around a backward: set aside, check, unscale, accumulate.

`scale_loss` opens a window at its entry and closes it at its exit; `delay_unscale=True` leaves it open for the
next. While it is open, `.grad` holds nothing but scaled gradients of this window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_engine import kernels
from amp_engine.master_weights import Master, MasterWeights
from amp_engine.scaler import ScaleSnapshot

T = TypeVar("T")


class Checked(NamedTuple):
    """Parameters whose gradients arrived, and which of them are not finite: bool tensor of shape [n]."""

    params: list[nn.Parameter]
    nonfinite: Tensor


class GradientWindow:
    """Scaled gradients of one optimizer, from entry to exit of `scale_loss`.

    Args:
        optimizer: its groups name the parameters.
        masters: its FP32 masters, or None.
        snapshot: the scale that every loss of this window is multiplied with.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        masters: MasterWeights | None,
        snapshot: ScaleSnapshot,
        loss_id: int,
    ) -> None:
        self.snapshot = snapshot
        self.loss_id = loss_id
        self._optimizer = optimizer
        self._masters = masters
        # Unscaled gradients of earlier backwards, by id of the parameter that the optimizer steps.
        self._earlier: dict[int, Tensor] = {}
        # While the window is left open: a gradient of ours, whose loss or change tells of a zero_grad().
        self._sentinel: tuple[nn.Parameter, Tensor, int] | None = None
        # Gradients as they were when last left or entered, to see what was done to them since.
        self._left: list[tuple[nn.Parameter, Tensor, int]] = []
        self._entered: list[tuple[nn.Parameter, Tensor | None, int]] | None = None
        self._open()

    def _open(self) -> None:
        for master in self._master_list():
            master.param.grad = None  # of an earlier step, still scaled
        for p in self._plain_params():
            if p.grad is not None:
                self._earlier[id(p)] = _own_memory(p.grad)
                p.grad = None

    def leave_open(self) -> None:
        """Exit with `delay_unscale`: gradients stay scaled and go on accumulating in place."""
        self._left = [(p, p.grad, p.grad._version) for p in self._plain_params() if p.grad is not None]
        masters = [m for m in self._master_list() if m.param.grad is not None]
        if not masters:
            return
        for master in masters:
            if master.weight.grad is not None:
                self._earlier[id(master.weight)] = master.weight.grad
                master.weight.grad = None
        smallest = min(masters, key=lambda m: m.weight.numel()).weight
        smallest.grad = torch.zeros_like(smallest)
        self._sentinel = (smallest, smallest.grad, smallest.grad._version)

    def reenter(self) -> None:
        """Next entry into a window that was left open; notice if the user zeroed gradients in between."""
        for p, grad, version in self._left:
            if p.grad is None or (grad._version != version and not p.grad.any()):
                self._earlier.pop(id(p), None)
        self._left = []
        self._read_sentinel()
        self._entered = [(p, p.grad, _version(p.grad)) for p in self._written_params()]

    def _read_sentinel(self) -> None:
        if self._sentinel is None:
            return
        param, grad, version = self._sentinel
        self._sentinel = None
        # torch's zero_grad() reaches the masters, not the model's own gradients.
        zeroed = param.grad is not grad or grad._version != version
        param.grad = None
        for master in self._master_list():
            if zeroed:
                master.param.grad = None
                self._earlier.pop(id(master.weight), None)
            else:
                master.weight.grad = self._earlier.pop(id(master.weight), master.weight.grad)

    def close(self, check: bool, unscaled: set[int]) -> Checked:
        """Exit: afterwards `.grad` of every stepped parameter is unscaled, in its own type.

        Only gradients of this window are checked, not those that they are added to. No host sync.

        Args:
            check: without it nothing is reported as non-finite.
            unscaled: ids of parameters whose gradients another optimizer of this backward has unscaled in
                place; those that are done here are added.
        """
        self.reenter()
        inv_scale = self.snapshot.inv_scale
        arrived: list[nn.Parameter] = []
        flags: list[Tensor] = []

        masters = [m for m in self._master_list() if m.param.grad is not None]
        for batch in _batches(masters, key=lambda m: m.param.grad):
            grads = [_grad(m.param) for m in batch]
            if check:
                arrived += [m.param for m in batch]
                flags.append(_nonfinite(grads))
            self._add_to_masters(batch, grads, inv_scale)

        params = [p for p in self._plain_params() if p.grad is not None and id(p) not in unscaled]
        unscaled |= {id(p) for p in params}
        for plain in _batches(params, key=lambda p: p.grad):
            grads = [_grad(p) for p in plain]
            if check:
                arrived += plain
                flags.append(_nonfinite(grads))
            if not self.snapshot.is_identity:
                _unscale_(plain, grads, inv_scale)
        self._restore_earlier(add=True)
        device = inv_scale.device
        nonfinite = [f.to(device, non_blocking=True) for f in flags]
        return Checked(
            arrived,
            torch.cat(nonfinite) if nonfinite else torch.zeros(0, dtype=torch.bool, device=device),
        )

    def abandon(self) -> bool:
        """The body of `scale_loss` raised: put back what was there, drop what half a backward left.

        Returns whether the window stays open: it had gradients of earlier backwards, and this body ran none.
        What half a backward adds to them cannot be told apart again: then they are dropped.
        """
        if self._entered is not None and all(
            p.grad is grad and _version(grad) == version for p, grad, version in self._entered
        ):
            self.leave_open()
            return True
        for master in self._master_list():
            master.param.grad = None
        for p in self._plain_params():
            p.grad = None
        self._restore_earlier(add=False)
        return False

    def _master_list(self) -> list[Master]:
        return [] if self._masters is None else self._masters.in_groups

    def _plain_params(self) -> Iterator[nn.Parameter]:
        for group in self._optimizer.param_groups:
            for p in group["params"]:
                if self._masters is None or self._masters.find(p) is None:
                    yield p

    def _written_params(self) -> Iterator[nn.Parameter]:
        """The parameters that a backward accumulates into: the model's own."""
        yield from (master.param for master in self._master_list())
        yield from self._plain_params()

    def _add_to_masters(self, batch: list[Master], grads: list[Tensor], inv_scale: Tensor) -> None:
        inv_scale = inv_scale.to(grads[0].device, non_blocking=True)
        if grads[0].is_sparse:
            grads_f32 = [_map_values(g, lambda v: v.float() * inv_scale) for g in grads]
        else:
            grads_f32 = kernels.unscaled(grads, inv_scale)
        for master, grad_f32 in zip(batch, grads_f32, strict=True):
            _accumulate(master.weight, grad_f32)

    def _restore_earlier(self, add: bool) -> None:
        by_id = {id(p): p for group in self._optimizer.param_groups for p in group["params"]}
        for key, earlier in self._earlier.items():
            param = by_id.get(key)
            if param is None:
                continue
            if add and param.grad is not None:
                earlier, param.grad = param.grad, earlier
                _accumulate(param, earlier)
            else:
                param.grad = earlier
        self._earlier.clear()


def _grad(param: nn.Parameter) -> Tensor:
    grad = param.grad
    assert grad is not None
    # One entry an index, so that values that overflow together are seen to.
    return grad.coalesce() if grad.is_sparse else grad


def _version(grad: Tensor | None) -> int:
    return 0 if grad is None else grad._version


def _accumulate(param: nn.Parameter, grad: Tensor) -> None:
    with torch.no_grad():
        if param.grad is None:
            param.grad = grad
        elif param.grad.is_sparse or grad.is_sparse:
            param.grad = param.grad + grad
        else:
            param.grad.add_(grad)


def _unscale_(params: list[nn.Parameter], grads: list[Tensor], inv_scale: Tensor) -> None:
    inv_scale = inv_scale.to(grads[0].device, non_blocking=True)
    if not grads[0].is_sparse:
        kernels.unscale_(grads, inv_scale)
        return
    for p, g in zip(params, grads, strict=True):
        p.grad = _map_values(g, lambda v: (v.float() * inv_scale).to(v.dtype))


def _nonfinite(grads: list[Tensor]) -> Tensor:
    return kernels.nonfinite([g.values() if g.is_sparse else g for g in grads])


def _map_values(sparse: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
    with torch.no_grad():
        return torch.sparse_coo_tensor(
            sparse.indices(),
            f(sparse.values()),
            sparse.shape,
            is_coalesced=True,
            check_invariants=False,
        )


def _own_memory(grad: Tensor) -> Tensor:
    # DDP's gradient_as_bucket_view makes gradients views of a bucket that the next backward overwrites.
    shared = not grad.is_sparse and grad.untyped_storage().nbytes() > grad.numel() * grad.element_size()
    return grad.clone() if shared else grad


def _batches(items: Iterable[T], key: Callable[[T], Tensor | None]) -> Iterator[list[T]]:
    """`items` grouped by device, type and layout of their gradient."""
    groups: dict[object, list[T]] = {}
    for item in items:
        grad = key(item)
        assert grad is not None
        groups.setdefault((grad.device, grad.dtype, grad.layout), []).append(item)
    yield from groups.values()
