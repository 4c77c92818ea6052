"""The gradient of a master: held in half after a backward, made in float32 when it is read."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from amp_engine.ground.torch_private import TensorBase
from amp_engine.kernels import tensor_lists


class Owner(Protocol):
    """The interface of the object that a master parameter asks for its gradient."""

    def materialize(self) -> None:
        """Make the float32 gradient from the held one, or from zeros that stand for one, if any."""

    def discard_held(self) -> None:
        """Discard the held gradient, or the zeros that stand for one, if any."""

    def wants_gradient(self) -> bool:
        """Return the `requires_grad` that was written last, to the master or to its parameter."""

    def want_gradient(self, value: bool) -> None:
        """Set `requires_grad` of the parameter, too."""


# Id of a master weight -> its owner. Not an attribute of the weight, which would be pickled with it.
_OWNERS: dict[int, weakref.ref[Owner]] = {}

HOLDING: set[int] = set()
"""Ids of objects that keep gradients. While it is empty, as from a step to the next backward, no owner is asked."""

GRAD: Any = torch.Tensor.grad
"""torch's own `.grad`, which bypasses properties of subclasses."""


_DATA: Any = TensorBase.data

REQUIRES_GRAD: Any = TensorBase.requires_grad
"""torch's own `.requires_grad`, which bypasses properties of subclasses."""


# Keys whose owner has ended. Their entries go with the next owner, not when the garbage collector runs: torch.compile
# walks this dictionary while it traces the reading of a gradient.
_ENDED: list[int] = []


def own(weight: MasterParameter, owner: Owner) -> None:
    """Have `weight` ask `owner` for its gradient, while `owner` lives."""
    while _ENDED:
        if (ended := _OWNERS.get(key := _ENDED.pop())) is not None and ended() is None:
            del _OWNERS[key]
    ref = _OwnerRef(owner, _OwnerRef.ended)
    ref.key = id(weight)
    _OWNERS[ref.key] = ref


class _OwnerRef(weakref.ref[Owner]):
    __slots__ = ("key",)
    key: int

    def ended(self) -> None:
        _ENDED.append(self.key)


def _owner(key: int) -> Owner | None:
    ref = _OWNERS.get(key)
    return None if ref is None else ref()


_MARK = "_amp_is_copied_master"  # an attribute of copies of masters, unpickled ones included
_COPIES: weakref.WeakValueDictionary[int, nn.Parameter] = weakref.WeakValueDictionary()
_PICKLED: list[bool] = []  # not empty if a master was pickled


def is_copied_master(param: Any) -> bool:
    """True for a copy of a master, made by deepcopy or through a pickle: no model follows it."""
    return _MARK in getattr(param, "__dict__", ())


def copied_masters(optimizer: Any) -> str:
    """Return the warning that an optimizer steps copies of masters."""
    name = type(optimizer).__name__
    return (
        f"This {name} is a copy, made while amp looked after its origin: it steps copies of FP32 masters, and no model "
        f"follows them.  To train a copied model make it a new optimizer, {name}(copied_model.parameters(), ...), pass "
        "both to amp.initialize, then call load_state_dict(origin.state_dict()) on it; or make the copies after "
        "amp.close()."
    )


def has_copied_masters() -> bool:
    """True if copies of masters may exist."""
    return bool(_COPIES or _PICKLED)


def _gradient(weight: Tensor) -> Tensor | None:
    key = id(weight)  # before the branch: id() ends a trace of torch.compile, which makes gradients as it traces
    if HOLDING and (owner := _owner(key)) is not None:
        owner.materialize()
    return GRAD.__get__(weight)


def _set_gradient(weight: Tensor, value: Tensor | None) -> None:
    GRAD.__set__(weight, value)  # raises if it cannot be a gradient of this parameter
    if (owner := _owner(id(weight))) is not None:
        owner.discard_held()


class MasterParameter(nn.Parameter):
    """A float32 parameter whose `.grad` is made when it is read.

    After a backward the half gradient is held unchanged, and the step reads it. Reading `.grad` unscales it into
    4 bytes an element; assigning to `.grad` discards the held gradient. Copies and pickles are plain parameters. Writes
    through `.data` move the version, like all other writes, so that the model can follow them.
    """

    grad = property(
        tensor_lists.gradient_getter(HOLDING, _gradient),  # fast, since `zero_grad` reads it of each master
        _set_gradient,
        lambda weight: _set_gradient(weight, None),
        "The unscaled float32 gradient, or None.",
    )

    @property
    def data(self) -> Tensor:
        """The values, outside of autograd."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        _DATA.__set__(self, value)

    @property
    def requires_grad(self) -> bool:
        """True if a backward is to compute the gradient of the model's parameter."""
        owner = _owner(id(self))
        return REQUIRES_GRAD.__get__(self) if owner is None else owner.wants_gradient()

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        REQUIRES_GRAD.__set__(self, value)
        if (owner := _owner(id(self))) is not None:
            owner.want_gradient(value)

    def requires_grad_(self, requires_grad: bool = True) -> MasterParameter:
        """Set `requires_grad`."""
        self.requires_grad = requires_grad
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            twin = nn.Parameter(self.detach().clone(memory_format=torch.preserve_format), self.requires_grad)
            vars(twin)[_MARK] = True
            _COPIES[id(twin)] = memo[id(self)] = twin
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        _PICKLED[:] = [True]
        twin = nn.Parameter(self.detach(), self.requires_grad)
        vars(twin).update(vars(self), **{_MARK: True})
        return twin.__reduce_ex__(protocol)
