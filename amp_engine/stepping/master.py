"""A low-precision parameter and its float32 master.

Marks of both are taken whenever we write either, and later tell which of them other code wrote.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from amp_engine import kernels
from amp_engine.errors import AmpValueError
from amp_engine.ground.distributed import has_ranks
from amp_engine.ground.dtypes import followed, is_low_precision
from amp_engine.kernels import tensor_lists
from amp_engine.stepping.exact import Exact, exact_of, exact_value, keep_exact, places_moved
from amp_engine.stepping.master_parameter import GRAD, REQUIRES_GRAD, MasterParameter, own
from amp_engine.stepping.slots import NO_SLOTS, Slots
from amp_engine.stepping.spent import Spent


class Ledger:
    """The marks and gradients of all masters of an optimizer, in one place.

    Args:
        params, weights: parameters and their masters, in the same order.
        slots: has the held gradients.
        spent: has the masters whose gradient a step discarded.

    Attributes:
        params, weights: marks of parameters and masters, taken when each pair agreed.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        weights: Sequence[Tensor],
        slots: Slots | None = None,
        spent: Spent | None = None,
    ) -> None:
        self.params = tensor_lists.marks(params)
        self.weights = tensor_lists.marks(weights)
        self.slots = slots or NO_SLOTS
        self.spent = spent or Spent()


class Master(Exact):
    """One low-precision parameter of a model and its float32 master, of equal shape and strides.

    Where the parameter has gaps in memory, the master has none.

    Args:
        value_f32: float32; becomes the master's memory.
    """

    __slots__ = ("_ledger", "_place", "_seen_to_want", "is_doubted", "row", "weight")
    _ledger: Ledger
    _place: int

    def __init__(self, param: nn.Parameter, value_f32: Tensor) -> None:
        super().__init__(param)
        self.weight = MasterParameter(value_f32, requires_grad=True)
        self._seen_to_want = param.requires_grad  # of the parameter, when it was last set through a master
        own(self.weight, self)
        # Optimizers read attributes that users set on parameters (`p.no_decay = True`).
        self.weight.__dict__.update(param.__dict__)
        self.row: int | None = None  # as of the last scan; None while the master is in no ledger
        # True if a broadcast may have been copied into `param.data`, unnoticed, since master and parameter agreed.
        self.is_doubted = False
        keep_exact(self)

    def gradient(self) -> Tensor | None:
        """Return the master's float32 gradient if it has one; a held gradient stays held."""
        return GRAD.__get__(self.weight)

    def total(self) -> Tensor | None:
        """Like `gradient`, but in memory of its own, which the kernels can add to."""
        grad = self.gradient()
        if grad is not None and kernels.is_lazy(grad):
            grad = grad.clone()
            GRAD.__set__(self.weight, grad)
        return grad

    def is_held(self) -> bool:
        """True if a held gradient stands for the master's own."""
        return self.row is not None and self._ledger.slots.holds(self.row)

    def discard_held(self) -> None:
        """Discard the held gradient, or the zeros that stand for one, if any."""
        if self.row is not None:
            self._ledger.slots.empty(self.row)
            self._ledger.spent.discard(self.row)

    def materialize(self) -> None:
        """Make the float32 gradient from the held one, or from zeros that stand for one, if any."""
        if self.row is None:
            return
        if self._ledger.slots.holds(self.row):
            materialize_held(self._ledger.slots, [self])
        if self._ledger.spent.is_zero(self.row) and self.gradient() is None:
            with torch.inference_mode(False):
                GRAD.__set__(self.weight, torch.zeros_like(self.weight, requires_grad=False))

    def wants_gradient(self) -> bool:
        """Return the `requires_grad` that was written last, to the master or to its parameter."""
        wants = self.param.requires_grad
        return REQUIRES_GRAD.__get__(self.weight) if wants == self._seen_to_want else wants

    def want_gradient(self, value: bool) -> None:
        """Set `requires_grad` of the parameter; its other masters keep the value that they have."""
        others = [one for one in masters_of(self.param) if one is not self]
        for one in others:
            REQUIRES_GRAD.__set__(one.weight, one.wants_gradient())
        self.param.requires_grad_(value)
        for one in (self, *others):
            one._seen_to_want = value

    def in_sync(self) -> bool:
        """True if no other code moved the parameter since it was last marked."""
        return self.row is None or not self._ledger.params.has_moved(self._place)

    def counts(self) -> bool:
        """True if each element of the parameter that was not written since was rounded from the master.

        True after `param.data = x`, too, but not with several ranks, where `x` may differ between them.
        """
        if self.in_sync():
            return True
        if has_ranks() or self.was_written() or self.param.shape != self.weight.shape:
            return False
        return self._ledger.params.has_other_memory(self._place)

    def was_written(self) -> bool:
        """True if other code wrote the master since it last agreed with the parameter."""
        return self.row is not None and self._ledger.weights.has_moved(self._place)

    def mark_in_sync(self) -> None:
        """Declare that master and parameter agree."""
        self.is_doubted = False
        places_moved()
        if self.row is not None:
            self._ledger.params.mark_at(self._place)
            self._ledger.weights.mark_at(self._place)

    def mark_weight(self) -> None:
        """Mark the master as it is now, and leave the mark of the parameter."""
        if self.row is not None:
            self._ledger.weights.mark_at(self._place)

    def enter(self, ledger: Ledger, place: int, row: int) -> None:
        """Move to `ledger`, which takes over the marks from an earlier ledger, and has the held gradient."""
        if self.row is not None:
            ledger.params.take(place, self._ledger.params, self._place)
            ledger.weights.take(place, self._ledger.weights, self._place)
        self._ledger, self._place, self.row = ledger, place, row

    @torch.no_grad()
    def take(self, value_f32: Tensor) -> None:
        """Set the master to `value_f32`, which has been rounded into the parameter already."""
        self.weight.copy_(value_f32)
        self.mark_in_sync()

    def memory(self) -> Tensor:
        """Return the master itself."""
        return self.weight

    @torch.no_grad()
    def refresh(self) -> bool:
        """Take the parameter's value if other code moved it; the exact value, if a master of the parameter `counts`.

        Returns True if the value is rounded, and was written outside of steps.
        """
        if self.in_sync() and not self.is_doubted:
            return False
        value_f32 = None if self.is_doubted else exact_value(self.param)
        if value_f32 is None:
            value_f32 = self.param.detach()
        if self.weight.device == self.param.device and is_laid_out_as(self.param, self.weight):
            self.weight.copy_(value_f32)
        else:
            self.weight.data = laid_out_as(self.param, value_f32.to(self.param.device, torch.float32, copy=True))
        is_rounded = not self.is_doubted and is_low_precision(value_f32)
        self.mark_in_sync()
        return is_rounded

    @torch.no_grad()
    def write_back_if_moved(self) -> None:
        """Round the master into the parameter if other code wrote the master, but not the parameter."""
        if self.was_written() and self.in_sync():
            self.param.copy_(self.weight)
            self.mark_in_sync()

    @torch.no_grad()
    def adopt(self) -> None:
        """Take those elements of the parameter that differ from the rounded master.

        Finds writes through `.data`, which move no version. Costs one more read of parameter and master.
        """
        self.weight.copy_(followed(self.weight, self.param))

    @torch.no_grad()
    def value(self) -> Tensor:
        """Return the master if other code wrote it; else the parameter, with master elements where they round to it."""
        weight = self.weight.detach()
        return weight.clone() if self.was_written() else followed(weight, self.param.detach())


def materialize_held(slots: Slots, masters: Sequence[Master]) -> None:
    """Make float32 gradients from the held ones of `masters`, and add to each what autograd wrote meanwhile.

    Raises AmpStateError if one is lost.
    """
    # The first reader may be in inference mode; the gradients must serve later readers, too.
    with torch.no_grad(), torch.inference_mode(False):
        by_row = {master.row: master for master in masters if master.row is not None}
        for row, unscaled in slots.take(by_row).items():
            written = by_row[row].gradient()
            GRAD.__set__(by_row[row].weight, unscaled if written is None else unscaled.add_(written))


@torch.no_grad()
def rounds_to_params(masters: Sequence[Master]) -> list[bool]:
    """Return True for each master that rounds to its parameter, or was written and will be rounded into it.

    False where the parameter was written through `.data`. Masters must be in sync. Waits for each device once.
    """
    places = [i for i, master in enumerate(masters) if not master.was_written()]
    flags: dict[torch.device, list[Tensor]] = {}
    for i in places:
        param, rounded = masters[i].param, masters[i].weight.to(masters[i].param.dtype)
        same = (param == rounded) | (param.isnan() & rounded.isnan())
        flags.setdefault(param.device, []).append(same.all())
    found = {device: iter(torch.stack(of_device).tolist()) for device, of_device in flags.items()}
    answers = [True] * len(masters)
    for i in places:
        answers[i] = next(found[masters[i].param.device])
    return answers


def masters_of(param: nn.Parameter) -> Iterator[Master]:
    """Yield every live master of `param`: one for each optimizer that owns it."""
    return (one for one in exact_of(param) if isinstance(one, Master))


def follow_own_masters(module: nn.Module, args: Any) -> None:
    """Forward pre-hook: round masters that other code wrote into the parameters of `module` itself.

    Does nothing in a graph: the hook of the model ran before it.
    """
    if torch.compiler.is_compiling():
        return
    for param in module._parameters.values():
        if param is not None:
            for master in masters_of(param):
                master.write_back_if_moved()


@torch.no_grad()
def write_back_all(masters: Sequence[Master]) -> None:
    """Round masters into their parameters. Moves the versions of the parameters, like any optimizer."""
    try:
        kernels.cast_copy_([m.param for m in masters], [m.weight for m in masters])
    except AmpValueError:  # gaps in memory, another order there, several devices: nothing was written
        for master in masters:
            master.param.copy_(master.weight)


def is_laid_out_as(param: Tensor, value: Tensor) -> bool:
    """True if `value` is dense, and has the order in memory of `param` unless `param` has gaps."""
    is_strided = value.layout is param.layout is torch.strided
    if is_strided and value.shape == param.shape and value.is_contiguous() and param.is_contiguous():
        return True  # the quick way for nearly all tensors, of which up to 50,000 come at once
    return (
        kernels.is_dense(value)
        and value.shape == param.shape
        and (not kernels.is_dense(param) or kernels.same_layout(value, param))
    )


def laid_out_as(param: Tensor, value_f32: Tensor) -> Tensor:
    """Return `value_f32`, or a copy in the order in memory of `param`, without its gaps."""
    if is_laid_out_as(param, value_f32):
        return value_f32
    return torch.empty_like(param, dtype=torch.float32, requires_grad=False).copy_(value_f32)


def take_state(master: Master, states: Iterable[dict[Any, Any]]) -> None:
    """Move the optimizer state of the parameter to its master, in each of `states`."""
    for state in states:
        if master.param in state:
            state[master.weight] = _widened(state[master.param])
            del state[master.param]


def _widened(state: Any) -> Any:
    """Return optimizer state with low precision cast to float32; widening is exact."""
    if isinstance(state, Tensor):
        return state.float() if is_low_precision(state) else state
    if isinstance(state, dict):
        return {key: _widened(value) for key, value in state.items()}
    return state
