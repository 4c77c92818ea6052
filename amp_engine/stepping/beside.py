"""Float32 values of low-precision parameters: a master, or the 16 bits that rounding took from the parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from amp_engine import kernels
from amp_engine.errors import AmpStateError, AmpValueError
from amp_engine.ground.distributed import has_other_ranks, is_sharded
from amp_engine.ground.dtypes import followed
from amp_engine.kernels import halves, tensor_lists
from amp_engine.kernels.formulas import Sgd
from amp_engine.stepping.exact import Exact, discard_exact, exact_of, keep_exact


class Pairs:
    """Marks of parameters and of their masters, taken when each pair agreed.

    Args:
        params: n.
        weights: n masters in the same order, or none.
    """

    def __init__(self, params: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        self.params = tensor_lists.marks(params)
        self.weights = tensor_lists.marks(weights)
        self._has_weights = len(weights) > 0
        self._share: bool | None = None  # True if parameters share a version, as views of one tensor do

    def mark(self) -> None:
        """Declare that all pairs agree."""
        self.params.mark()
        if self._has_weights:
            self.weights.mark()

    def bump(self) -> None:
        """Declare that all pairs agree, as they did until the kernels wrote each tensor once."""
        if self._share:
            self.params.mark()
        else:
            self.params.bump()
        if self._share is None:
            self._share = self.params.have_moved()
            if self._share:
                self.params.mark()
        if self._has_weights:
            self.weights.bump()

    def mark_at(self, place: int) -> None:
        """Declare that one pair agrees."""
        self.params.mark_at(place)
        if self._has_weights:
            self.weights.mark_at(place)

    def take(self, place: int, other: Pairs, other_place: int) -> None:
        """Take the marks that `other` has of the same pair."""
        self.params.take(place, other.params, other_place)
        if self._has_weights:
            self.weights.take(place, other.weights, other_place)


class Beside(Exact):
    """Keeps the float32 value of one low-precision parameter.

    Attributes:
        plural: what messages call several of this kind.
        last_dtype: the type of the parameter when it last agreed with the value; `model.float()` gives it another.
        owner: gives the optimizer that steps it; None, or gives None, if that is gone or was replaced.
        is_loaded: True if a checkpoint, or an earlier optimizer, gave its value before the first step.
        chosen_grad_dtype: the type that the user chose for the gradient of the parameter; None: the parameter's.
    """

    __slots__ = ("_pairs", "_place", "chosen_grad_dtype", "is_loaded", "last_dtype", "owner")
    plural = "FP32 masters"
    _pairs: Pairs
    _place: int

    def __init__(self, param: nn.Parameter) -> None:
        super().__init__(param)
        self.last_dtype = param.dtype
        self.owner: Callable[[], object | None] | None = None
        self.is_loaded = False
        self.chosen_grad_dtype: torch.dtype | None = None

    @property
    def stepped(self) -> nn.Parameter:
        """The tensor that the kernels step."""
        return self.param

    @property
    def copy(self) -> Tensor:
        """The tensor that they write beside it."""
        raise NotImplementedError

    def is_owned(self) -> bool:
        """True if an optimizer steps it."""
        return self.owner is not None and self.owner() is not None

    def give_back(self) -> None:
        """Give the parameter the value, and its gradient that type: the end of this object."""
        param, grad = self.param, self.param.grad
        value = self.value() if self.in_sync() or self.counts() else param.detach().float()
        param.data = value.to(param.device)
        # torch's own: gradients have the type of the parameter.
        param.grad_dtype = None
        param.grad = None if grad is None else grad.to(torch.float32)
        discard_exact(self)

    def forget(self) -> None:
        """Leave the parameter as it is, with a gradient in its own type: the end of this object."""
        param, grad = self.param, self.param.grad
        param.grad = None
        param.grad_dtype = self.chosen_grad_dtype or param.dtype
        param.grad = None if grad is None else grad.to(param.grad_dtype)
        discard_exact(self)

    def enter(self, pairs: Pairs, place: int) -> None:
        """Move the marks to `pairs`."""
        pairs.take(place, self._pairs, self._place)
        self._pairs, self._place = pairs, place

    def in_sync(self) -> bool:
        """True if no other code moved the parameter since it was last marked."""
        return not self._pairs.params.has_moved(self._place)

    def was_written(self) -> bool:
        """True if other code wrote the master since it last agreed with the parameter."""
        return False

    def mark(self) -> None:
        """Declare that parameter and value agree."""
        self._pairs.mark_at(self._place)

    def check_type(self) -> None:
        """Raise AmpStateError if other code gave the parameter a type that it cannot be stepped in."""

    def differs(self, count: int | None = None) -> Tensor:
        """Return a bool of shape []: True if other code wrote another value into the parameter. No host sync.

        Args:
            count: the number of elements that are looked at where it is contiguous; None: all.
        """
        return torch.ones((), dtype=torch.bool, device=self.param.device)

    def follow(self, is_whole: bool) -> None:
        """Take what other code wrote into the parameter: elements that differ from the value rounded, or all."""
        raise NotImplementedError


class Master(Beside):
    """One low-precision parameter and its float32 master, of equal shape and strides.

    Where the parameter has gaps in memory, the master has none.

    Args:
        value_f32: becomes the master's memory if it is float32, and `laid_out_as` returns it. None: the master is the
            parameter, widened.
    """

    __slots__ = ("weight",)

    def __init__(self, param: nn.Parameter, value_f32: Tensor | None) -> None:
        super().__init__(param)
        value = param.detach().to(torch.float32, copy=True) if value_f32 is None else value_f32.detach().float()
        self.weight = nn.Parameter(laid_out_as(param, tensor_lists.written_out(value)))
        # Optimizers read attributes that users set on parameters (`p.no_decay = True`).
        vars(self.weight).update(vars(param))
        self._pairs, self._place = Pairs([param], [self.weight]), 0
        keep_exact(self)

    @property
    def stepped(self) -> nn.Parameter:
        """The master."""
        return self.weight

    @property
    def copy(self) -> Tensor:
        """The parameter."""
        return self.param

    def was_written(self) -> bool:
        """True if other code wrote the master since it last agreed with the parameter."""
        return self._pairs.weights.has_moved(self._place)

    @torch.no_grad()
    def value(self) -> Tensor:
        """Return the master if only it was written; else the parameter, with master elements where they round to it."""
        weight = self.weight.detach()
        is_written = self.was_written() and self.in_sync()
        return weight.clone() if is_written else followed(weight, self.param.detach(), self.last_dtype)

    def differs(self, count: int | None = None) -> Tensor:
        """Return a bool of shape []: True if other code wrote another value into the parameter. No host sync.

        Args:
            count: the number of elements that are looked at where it is contiguous; None: all.
        """
        weight, param = self.weight.detach(), self.param.detach()
        if weight.device != param.device or weight.shape != param.shape:
            return super().differs()
        if count is not None and param.is_contiguous() and weight.is_contiguous():
            weight, param = weight.view(-1)[:count], param.view(-1)[:count]
        differ = param != weight.to(self.last_dtype).to(param.dtype)
        return (differ & (param == param)).any()  # a NaN that a step left is no write

    def counts(self) -> bool:
        """True if each element of the parameter that was not written since was rounded from the value."""
        weight, param = self.weight, self.param
        return self.in_sync() or not (has_other_ranks() or weight.shape != param.shape or weight.device != param.device)

    @torch.no_grad()
    def take(self, value_f32: Tensor) -> None:
        """Set the master to `value_f32`, which has been rounded into the parameter already."""
        self.last_dtype = self.param.dtype
        self.weight.copy_(value_f32)
        self.is_loaded = True
        self.mark()

    @torch.no_grad()
    def follow(self, is_whole: bool) -> None:
        """Take what other code wrote into the parameter: elements that differ from the master rounded, or all.

        A parameter that was converted, as by `model.float()`, takes the elements when masters are next rounded.
        """
        param, weight = self.param.detach(), self.weight.detach()
        is_same_place = weight.device == param.device and weight.shape == param.shape
        is_converted = param.dtype is not self.last_dtype
        if is_same_place and not is_whole:
            param = followed(weight, param, self.last_dtype)
        self.last_dtype = self.param.dtype
        if is_same_place and is_laid_out_as(self.param, weight):
            self.weight.copy_(param)
        else:
            self.weight.data = laid_out_as(self.param, param.to(self.param.device, torch.float32, copy=True))
        self.mark()
        if is_converted and not is_whole:
            self.weight.mul_(1.0)  # moves its version


class Remainder(Beside):
    """The lower half of one parameter's master, or of 24 bits of it: the parameter itself is the upper half.

    After a write that moved its version a parameter is the master. After one through `.data`, which moves no version,
    the master still rounds to the parameter.

    Args:
        param: bfloat16, dense.
        value_f32: float32, rounds to `param`; None if the parameter is the master.

    Raises AmpStateError for a parameter that cannot have one.

    Attributes:
        weight: the master and its gradient in float32, while it is widened for a step of the class's own. Before and
            after that without memory; None before the first.
    """

    __slots__ = ("bits", "weight")
    dtype = halves.REMAINDER

    def __init__(self, param: nn.Parameter, value_f32: Tensor | None) -> None:
        _check_can_split(param)
        super().__init__(param)
        self.bits = torch.zeros_like(param, dtype=self.dtype, requires_grad=False)
        self.weight: nn.Parameter | None = None
        self._pairs, self._place = Pairs([param], []), 0
        if value_f32 is not None:
            self._split(value_f32)
        keep_exact(self)

    @property
    def copy(self) -> Tensor:
        """The remainder."""
        return self.bits

    def counts(self) -> bool:
        """True if each element of the parameter that was not written since was rounded from the value.

        True after `param.data = x`, too, but not with several ranks, where `x` may differ between them.
        """
        if self.in_sync():
            return True
        if has_other_ranks() or self.param.shape != self.bits.shape:
            return False
        return self.param.dtype is not self.last_dtype or self._pairs.params.has_other_memory(self._place)

    @torch.no_grad()
    def value(self) -> Tensor:
        """Return the master. After a write through `.data` it keeps the old remainder, below half a bfloat16 unit."""
        if self.weight is not None and self.is_wide:  # a step of the class's own was interrupted
            return self.weight.detach().clone()
        param = self.param.detach()
        return followed(halves.joined(param.to(torch.bfloat16), self.bits), param, torch.bfloat16)

    def take(self, value_f32: Tensor) -> None:
        """Take the lower half of `value_f32`, which has been rounded into the parameter."""
        self.free()
        self._split(value_f32)
        self.is_loaded = True
        self.mark()

    @torch.no_grad()
    def _split(self, value_f32: Tensor) -> None:
        laid_out = torch.empty_like(self.param, dtype=torch.float32, requires_grad=False).copy_(value_f32)
        self._renew()
        self.bits.copy_(self._remainder(laid_out))

    def _remainder(self, value_f32: Tensor) -> Tensor:
        return halves.split(value_f32)[1]

    def check_type(self) -> None:
        """Raise AmpStateError if other code gave the parameter a type that it cannot be stepped in."""
        if self.param.dtype is not self.last_dtype:
            raise AmpStateError(
                f"A parameter of shape {tuple(self.param.shape)} became {self.param.dtype} after amp.initialize, and "
                "its split master lies beside bfloat16.  Leave the conversion out: model.state_dict() is FP32 as it is."
            )

    def check_can_widen(self) -> None:
        """Raise AmpStateError if other code gave the parameter another type, or gaps in memory."""
        _check_can_split(self.param)

    @property
    def is_wide(self) -> bool:
        """True if `weight` is the master."""
        return self.weight is not None and self.weight.shape == self.param.shape

    @torch.no_grad()
    def widen(self) -> nn.Parameter:
        """Return `weight`, with the value and the gradient: the same object each time. Other memory than before."""
        if self.weight is None:
            self.weight = nn.Parameter(torch.empty(0, dtype=torch.float32, device=self.param.device))
            vars(self.weight).update(vars(self.param))
        param = self.param.detach()
        value = torch.empty_like(param, dtype=torch.float32)
        for _, of_value, of_param, of_bits in _blocks(value, param, self.bits):
            of_value.copy_(followed(halves.joined(of_param, of_bits), of_param))
        self.weight.data = value
        self.weight.grad = None if self.param.grad is None else self.param.grad.float()
        return self.weight

    @torch.no_grad()
    def narrow(self, step: int) -> None:
        """Round `weight` and its gradient into what they were widened from, and free them.

        Args:
            step: the number of this rounding, from 1.
        """
        weight = self.weight
        if weight is None or not self.is_wide:
            return
        self._renew()
        value = laid_out_as(self.param, weight.detach())
        for first, of_value, of_param, of_bits in _blocks(value, self.param.detach(), self.bits):
            rounded, bits = self._rounded(of_value, step, first)
            of_param.copy_(rounded)
            of_bits.copy_(bits)
        self._take_gradient(weight.grad)
        self.mark()
        self.free()

    def free(self) -> None:
        """Free `weight` and its gradient."""
        if self.weight is not None:
            self.weight.grad = None
            self.weight.data = torch.empty(0, dtype=torch.float32, device=self.param.device)

    def _take_gradient(self, wide: Tensor | None) -> None:
        own = self.param.grad
        if own is None or wide is None:
            self.param.grad = None if wide is None else wide.to(self.param.grad_dtype or self.param.dtype)
        elif own is not wide:
            try:
                own.copy_(wide)
            except RuntimeError:  # expanded, of inference mode, or of another layout
                self.param.grad = wide.to(own.dtype)

    def _rounded(self, value_f32: Tensor, step: int, first: int) -> tuple[Tensor, Tensor]:
        return halves.split(value_f32)

    @torch.no_grad()
    def follow(self, is_whole: bool) -> None:
        """Let the parameter be the master where other code wrote it."""
        self._renew()
        self.bits.zero_()
        self.mark()

    def _renew(self) -> None:
        if self.bits.device != self.param.device or not kernels.same_layout(self.bits, self.param):
            # The same tensor, which the columns of the rows have too.
            self.bits.data = torch.zeros_like(self.param, dtype=self.dtype, requires_grad=False)


class Remainder24(Remainder):
    """The next 8 bits of one parameter's master, which has 24."""

    __slots__ = ()
    plural = "masters of 24 bits"
    dtype = halves.REMAINDER24

    def _remainder(self, value_f32: Tensor) -> Tensor:
        return halves.remainder24(value_f32, self.param)

    def _rounded(self, value_f32: Tensor, step: int, first: int) -> tuple[Tensor, Tensor]:
        return halves.split24(value_f32, step, first)


class HostMaster(Beside):
    """One low-precision parameter and its float32 master, which is in the memory of the host.

    There the kernels step it, from a gradient that has travelled to the host, and write the parameter's value into
    `copy`, which travels back. What other code writes into the parameter moves its version, or a step undoes it.

    Args:
        param: dense.
        value_f32: float32, rounds to `param`; None if the parameter is the master.

    Raises AmpStateError for a parameter with gaps in memory.
    """

    __slots__ = ("_copy", "_gradients", "weight")
    plural = "FP32 masters on the CPU"

    def __init__(self, param: nn.Parameter, value_f32: Tensor | None) -> None:
        if not kernels.is_dense(param):
            raise AmpStateError(
                f"A parameter of shape {tuple(param.shape)} and strides {param.stride()} has no master on the CPU: it "
                "has gaps in memory.  Make it contiguous, or leave out masters_on."
            )
        super().__init__(param)
        self.weight = nn.Parameter(host_like(param, torch.float32))
        self._copy = host_like(param, param.dtype)
        self._gradients: dict[torch.dtype, Tensor] = {}
        vars(self.weight).update(vars(param))
        self._pairs, self._place = Pairs([param], []), 0
        self._set(param.detach() if value_f32 is None else value_f32.detach())
        keep_exact(self)

    @property
    def stepped(self) -> nn.Parameter:
        """The master."""
        return self.weight

    @property
    def copy(self) -> Tensor:
        """The value of the parameter, on the host."""
        return self._copy

    def counts(self) -> bool:
        """True if each element of the parameter that was not written since was rounded from the value."""
        return self.in_sync() or not (has_other_ranks() or self.weight.shape != self.param.shape)

    @torch.no_grad()
    def value(self) -> Tensor:
        """Return the master, with elements of the parameter where it does not round to them; on the host."""
        return followed(self.weight.detach(), self.param.detach().to(self.weight.device), self.last_dtype)

    def take(self, value_f32: Tensor) -> None:
        """Set the master to `value_f32`, which has been rounded into the parameter already."""
        self._set(value_f32)
        self.is_loaded = True
        self.mark()

    def follow(self, is_whole: bool) -> None:
        """Take what other code wrote into the parameter: elements that differ from the master rounded, or all."""
        is_same = self.weight.shape == self.param.shape and kernels.same_layout(self._copy, self.param)
        value = self.value() if is_same and not is_whole else self.param.detach()
        if not is_same:
            self.weight.data = host_like(self.param, torch.float32)
            self._copy.data = host_like(self.param, self.param.dtype)
            self._gradients.clear()
        self._set(value)
        self.mark()

    @torch.no_grad()
    def _set(self, value: Tensor) -> None:
        self.weight.copy_(value)
        self._copy.copy_(self.weight)

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the master into the parameter. Moves its version."""
        self._copy.copy_(self.weight)
        self.param.copy_(self._copy)

    def gradient_of(self, dtype: torch.dtype) -> Tensor:
        """Memory of the host for a gradient, the same at each step."""
        if dtype not in self._gradients:
            self._gradients = {dtype: host_like(self.param, dtype)}
        return self._gradients[dtype]


def host_like(param: Tensor, dtype: torch.dtype) -> Tensor:
    """Return memory of the host in the shape and order of a dense tensor, from which copies to a GPU need no wait."""
    return torch.empty_like(
        param, dtype=dtype, device="cpu", requires_grad=False, pin_memory=param.device.type == "cuda"
    )


_BLOCK = 1 << 21  # elements


def _blocks(*dense: Tensor) -> Iterator[tuple[Any, ...]]:
    """Yield the first place and the elements, in the order of memory, of a block of each of some dense tensors.

    They have one layout. A block's integers take some thirty bytes an element for a while.
    """
    flat = [t.as_strided((t.numel(),), (1,)) for t in dense]
    for first in range(0, flat[0].numel(), _BLOCK):
        yield first, *(t[first : first + _BLOCK] for t in flat)


def _check_can_split(param: nn.Parameter) -> None:
    if param.dtype is not torch.bfloat16 or not kernels.is_dense(param):
        raise AmpStateError(
            f"A parameter of shape {tuple(param.shape)}, {param.dtype} and strides {param.stride()} has no split "
            "master: it must be bfloat16 and without gaps in memory.  Use master_weights=True."
        )


def masters_of(param: nn.Parameter) -> Iterator[Master]:
    """Yield the live master of `param`, if it has one."""
    return (one for one in exact_of(param) if isinstance(one, Master))


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


class Adoption:
    """Has masters take the elements of their parameters that are not the master rounded, in one pass.

    It is a step of SGD with a rate of 0, of which the kernels write only what they adopt.

    Raises AmpValueError for tensors that the kernels cannot take together, or that are where nothing is compiled.
    """

    def __init__(self, masters: Sequence[Master]) -> None:
        if (reason := kernels.missing(masters[0].weight.device)) is not None:
            raise AmpValueError(reason)
        weights, params = [m.weight for m in masters], [m.param for m in masters]
        zeros = torch.zeros(max(w.numel() for w in weights), dtype=torch.float32, device=weights[0].device)
        none: list[Tensor | None] = [None] * len(weights)
        steps = torch.zeros(len(weights), dtype=torch.float32, device=weights[0].device)
        self._gradients = [zeros.as_strided(w.shape, w.stride()) for w in weights]
        self._table = kernels.step_table("sgd", weights, params, none, none, [0] * len(weights), steps, adopts=True)

    def is_current(self) -> bool:
        """True if all tensors still have the memory that they had."""
        return self._table.is_current()

    def run(self) -> None:
        """Compare, and write masters. Moves the versions of masters and parameters. No host sync."""
        self._table.step(self._gradients, bytes(len(self._gradients)), [Sgd(lr=0.0)])


@torch.no_grad()
def round_all(masters: Sequence[Master]) -> None:
    """Round masters into their parameters. Moves the versions of the parameters, like any optimizer."""
    try:
        kernels.cast_copy_([m.param for m in masters], [m.weight for m in masters])
    except AmpValueError:  # gaps in memory, another order there, several devices: nothing was written
        for master in masters:
            master.param.copy_(master.weight)


def is_laid_out_as(param: Tensor, value: Tensor) -> bool:
    """True if `value` is dense, and has the order in memory of `param` unless `param` has gaps."""
    return (
        kernels.is_dense(value)
        and value.shape == param.shape
        and (not kernels.is_dense(param) or kernels.same_layout(value, param))
    )


def laid_out_as(param: Tensor, value_f32: Tensor) -> Tensor:
    """Return `value_f32`, or a copy in the order in memory of `param`, without its gaps.

    A view that begins at no multiple of 16 bytes is copied, such as a weight in a flat buffer: the kernels would take
    twice the time.
    """
    if is_sharded(param) or (is_laid_out_as(param, value_f32) and value_f32.storage_offset() % 4 == 0):
        return value_f32
    return torch.empty_like(param, dtype=torch.float32, requires_grad=False).copy_(value_f32)
