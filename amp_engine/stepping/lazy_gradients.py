"""The gradient of a master: kept in half after a backward, made in float32 when somebody looks at it."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from amp_engine.devices import moved
from amp_engine.torch_private import TensorBase


class Owner(Protocol):
    """What a master parameter asks about its gradient."""

    def materialize(self) -> None:
        """Make the float32 gradient from the kept one, if there is one."""

    def forget_kept(self) -> None:
        """Drop the kept gradient, if there is one."""


# Id of a master weight -> its owner. Not an attribute of the weight, which would be pickled with it.
_OWNERS: dict[int, weakref.ref[Owner]] = {}

# Ids of the `Kept` that keep something. While there is none, as from each step to the next backward, looking at `.grad`
# asks no owner.
_KEEPING: set[int] = set()

GRAD: Any = torch.Tensor.grad
"""The slot behind `.grad`, past any property."""


_DATA: Any = TensorBase.data


def own(weight: MasterParameter, owner: Owner) -> None:
    """Have `weight` ask `owner`, for as long as that lives, about its gradient."""
    ref = _OwnerRef(owner, _OwnerRef.ended)
    ref.key = id(weight)
    _OWNERS[ref.key] = ref


class _OwnerRef(weakref.ref[Owner]):
    __slots__ = ("key",)
    key: int

    def ended(self) -> None:
        _OWNERS.pop(self.key, None)


def _owner(key: int) -> Owner | None:
    ref = _OWNERS.get(key)
    return None if ref is None else ref()


class Unscaling:
    """What the kept gradients of one backward are still to be multiplied by: 1 / scale, and a clip factor.

    Args:
        inv_scale: gives it, float32, shape []; asked late, since the scale's update computes it on the way.
    """

    def __init__(self, inv_scale: Callable[[], Tensor]) -> None:
        self._inv_scale = inv_scale
        self.norm: Tensor | None = None
        self.max_norm = math.inf

    @property
    def inv_scale(self) -> Tensor:
        """1 / scale: float32, shape []."""
        return self._inv_scale()

    def clip(self, norm: Tensor, max_norm: float) -> None:
        """Multiply by `min(1, max_norm / (norm + 1e-6))` as well, torch's clip_grad_norm_'s factor.

        Args:
            norm: of all unscaled gradients; float32, shape [].
            max_norm: in the same unit.
        """
        self.norm, self.max_norm = norm, max_norm

    def factor(self) -> Tensor:
        """The product: float64, rounded once to float32, shape [], as the kernels have it. No host sync."""
        factor = self.inv_scale.double()
        if self.norm is not None:
            factor = factor * clip_factor(self.norm, self.max_norm)
        return factor.float()

    def unscaled(self, grad: Tensor) -> Tensor:
        """A kept gradient as float32 gradient, of the same shape and strides."""
        return grad.to(torch.float32, copy=True).mul_(moved(self.factor(), grad.device))


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """torch.nn.utils.clip_grad_norm_'s factor, float64, shape []. No host sync."""
    return (max_norm / (norm.double() + 1e-6)).clamp(max=1.0)


class Kept:
    """Low-precision, still scaled gradients of one backward, which stand for the float32 gradients of masters.

    Attributes:
        grads: n, one for each of the optimizer's parameters.
        held: n; not 0 where a gradient is kept; what `grads` has elsewhere is not to be used.
        count: how many are kept.
        unscaling: what they are still to be multiplied by.
        is_whole: whether everything is kept that was in the beginning.
    """

    def __init__(self, grads: Sequence[Tensor | None], held: bytes | bytearray, unscaling: Unscaling) -> None:
        self.grads = grads
        self.held = bytearray(held)
        self.count = len(held) - held.count(0)
        self.unscaling = unscaling
        self.is_whole = True
        if self.count > 0:
            _KEEPING.add(id(self))

    def __del__(self) -> None:
        _KEEPING.discard(id(self))

    def take(self, row: int) -> Tensor | None:
        """Hand a gradient over, low-precision and scaled; None if none is kept."""
        if not self.held[row]:
            return None
        grad = self.grads[row]
        self.held[row] = 0
        self.count -= 1
        self.is_whole = False
        if self.count == 0:
            self.drop()
        return grad

    def drop(self) -> None:
        """Keep nothing any more."""
        self.grads = [None] * len(self.held)
        self.held = bytearray(len(self.held))
        self.count = 0
        self.is_whole = False
        _KEEPING.discard(id(self))

    def rearranged(self, rows: Sequence[int | None]) -> Kept:
        """What is kept, in other rows: of each the present one, or None. This keeps nothing afterwards."""
        held = bytes(0 if row is None else self.held[row] for row in rows)
        grads = [self.grads[row] if row is not None and h else None for row, h in zip(rows, held, strict=True)]
        result = Kept(grads, held, self.unscaling)
        result.is_whole = self.is_whole
        self.drop()
        return result


class MasterParameter(nn.Parameter):
    """A float32 parameter whose `.grad` is made when somebody looks at it.

    After a backward the half gradient is kept as it is, and the step reads that. Looking at `.grad` unscales it
    into 4 bytes an element; assigning to `.grad` drops what is kept. Copies and pickles are plain parameters. Writes
    through `.data` move the version, as all others do, so that the model can follow them.
    """

    @property
    def grad(self) -> Tensor | None:
        """The unscaled float32 gradient, or None."""
        key = id(self)  # before the branch: here torch.compile, which makes gradients as it traces, gives up tracing
        if _KEEPING and (owner := _owner(key)) is not None:
            owner.materialize()
        return GRAD.__get__(self)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        GRAD.__set__(self, value)  # raises for what is no gradient of this parameter
        key = id(self)
        if _KEEPING and (owner := _owner(key)) is not None:
            owner.forget_kept()

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def data(self) -> Tensor:
        """The values, outside of autograd."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        _DATA.__set__(self, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(memory_format=torch.preserve_format), self.requires_grad)
        return memo[id(self)]
