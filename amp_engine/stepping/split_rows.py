"""Rows whose masters are in two halves: the bfloat16 parameter itself, and the 16 bits that rounding took from it.

The optimizer's groups keep the model's own parameters, and there is no FP32 tensor: the kernels join both halves in
registers. After a foreign write that moved its version, a parameter is the master. After a write through `.data`,
which moves no version, the master still rounds to the parameter.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from amp_engine import kernels
from amp_engine.errors import AmpStateError
from amp_engine.ground.dtypes import followed, is_low_precision
from amp_engine.kernels import halves, tensor_lists
from amp_engine.optimizers.fused_step import StepInput
from amp_engine.stepping.exact import Exact, discard_exact, exact_of, keep_exact, places_moved
from amp_engine.stepping.rows import Rows


class Remainder(Exact):
    """The lower half of one parameter's master.

    Args:
        param: bfloat16, dense.
        exact_f32: float32, rounds to `param`; None if the parameter is the master.
    """

    __slots__ = ("_marks", "_place", "bits")

    def __init__(self, param: nn.Parameter, exact_f32: Tensor | None) -> None:
        super().__init__(param)
        self.bits = torch.zeros_like(param, dtype=halves.REMAINDER, requires_grad=False)
        self._marks, self._place = tensor_lists.marks([param]), 0
        if exact_f32 is not None:
            self.take(exact_f32)
        keep_exact(self)

    def in_sync(self) -> bool:
        """True if no other code wrote the parameter since the remainder was taken."""
        return not self._marks.has_moved(self._place)

    def enter(self, marks: tensor_lists.Marks, place: int) -> None:
        """Move the mark of the parameter to `marks`."""
        marks.take(place, self._marks, self._place)
        self._marks, self._place = marks, place

    def value(self) -> Tensor:
        """Return the master. After a write through `.data` it keeps the old remainder, below half a bfloat16 unit."""
        return followed(halves.joined(self.param, self.bits), self.param.detach())

    @torch.no_grad()
    def take(self, value_f32: Tensor | None) -> None:
        """Take the lower half of `value_f32`, which has been rounded into the parameter; None sets it to 0."""
        param = self.param
        if self.bits.device != param.device or not kernels.same_layout(self.bits, param):
            self.bits = torch.zeros_like(param, dtype=halves.REMAINDER, requires_grad=False)
        if value_f32 is None:
            self.bits.zero_()
        else:
            laid_out = torch.empty_like(param, dtype=torch.float32, requires_grad=False).copy_(value_f32)
            self.bits.copy_(halves.split(laid_out)[1])
        places_moved()
        self._marks.mark_at(self._place)


class SplitRows(Rows):
    """The rows of one optimizer whose bfloat16 parameters have remainders.

    Args:
        optimizer: keeps its groups; moments that it loads stay float32, where torch would round them to its parameters'
            type.
        exact: id of a parameter -> its float32 value from before the model was cast.
    """

    splits = True

    def __init__(self, optimizer: Optimizer, exact: Mapping[int, Tensor]) -> None:
        super().__init__(optimizer)
        self._exact = exact
        self._by_row: list[Remainder | None] = []
        self._marks = tensor_lists.marks([])  # of the parameters that have a remainder
        self._seen: tuple[nn.Parameter, ...] = ()  # the weights as of the last scan
        self._is_doubted = False
        self._incoming: dict[str, Any] = {}
        self._hooks: list[RemovableHandle] = []

    def keep(self) -> None:
        """Keep remainders, until `release`."""
        super().keep()
        optimizer = self._live_optimizer()
        weakref.finalize(optimizer, _discard_all, weakref.ref(self)).atexit = False
        self._hooks.append(optimizer.register_load_state_dict_pre_hook(self._before_load))
        self._hooks.append(optimizer.register_load_state_dict_post_hook(self._after_load))

    @property
    def remainders(self) -> list[Tensor]:
        """The lower halves, as of the last scan: int16, each of its parameter's shape."""
        return [one.bits for one in self._by_row if one is not None]

    def scan(self) -> None:
        """Update the rows to the present groups; new parameters without an exact value get a remainder of 0.

        Raises AmpStateError, before anything is changed, for a parameter that cannot have one.
        """
        super().scan()
        weights = self.columns.weights
        if tensor_lists.same_objects(weights, self._seen):
            return
        known = {id(one.param): one for one in self._by_row if one is not None}
        for p in weights:
            if is_low_precision(p) and id(p) not in known:
                _check(p)
        self._by_row = [
            (known.pop(id(p), None) or Remainder(p, self._exact.get(id(p)))) if is_low_precision(p) else None
            for p in weights
        ]
        for gone in known.values():
            discard_exact(gone)
        remainders = [one for one in self._by_row if one is not None]
        self._marks = tensor_lists.marks([one.param for one in remainders])
        for place, one in enumerate(remainders):
            one.enter(self._marks, place)
        self._seen = weights

    def doubt(self, numel: int) -> None:
        """Drop all remainders, if a broadcast of `numel` elements may have carried the largest parameter."""
        largest = max((one.bits.numel() for one in self._by_row if one is not None), default=0)
        self._is_doubted |= numel >= largest

    def refresh(self, adopt_data_writes: bool = False) -> None:
        """Zero the remainder of every parameter that other code wrote."""
        self.scan()
        is_first = self._is_fresh
        super().refresh(adopt_data_writes)
        if self._is_doubted or self._marks.have_moved():
            for one in self._by_row:
                if one is not None and (self._is_doubted or not one.in_sync()):
                    one.take(None)
            self.was_rounded |= not (is_first or self._is_doubted)
            self._is_doubted = False

    def mark_in_sync(self) -> None:
        """Declare that remainders and parameters agree."""
        super().mark_in_sync()
        self._marks.mark()

    def step_input(self) -> StepInput:
        """Return the input of the next step: parameters, with remainders beside them."""
        step = super().step_input()
        step.copies = [None if one is None else one.bits for one in self._by_row]
        return step

    def release(self) -> None:
        """Give the parameters their masters' float32 values."""
        super().release()
        for hook in self._hooks:
            hook.remove()
        for one in self._by_row:
            if one is None:
                continue
            param, value = one.param, one.value() if one.in_sync() else one.param.detach().float()
            grad, param.grad = param.grad, None
            param.data = value
            param.grad = None if grad is None else grad.to(param.grad_dtype or torch.float32)
            discard_exact(one)
        self._by_row = []

    def _before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        self._incoming = state_dict

    def _after_load(self, optimizer: Optimizer) -> None:
        """Set the moments, which torch has rounded, to the saved float32 values."""
        saved, self._incoming = self._incoming, {}
        indices = [i for group in saved["param_groups"] for i in group["params"]]
        own = [p for group in optimizer.param_groups for p in group["params"]]
        for index, param in zip(indices, own, strict=True):
            for name, value in saved["state"].get(index, {}).items():
                is_moment = isinstance(value, Tensor) and value.is_floating_point() and name != "step"
                if is_moment and is_low_precision(param):
                    optimizer.state[param][name] = value.to(param.device, torch.float32, copy=True)


def _discard_all(rows: weakref.ref[SplitRows]) -> None:
    """Unregister the remainders of an optimizer that was freed, whose rows may live until a garbage collection."""
    for one in () if (live := rows()) is None else live._by_row:
        if one is not None:
            discard_exact(one)


def _check(param: nn.Parameter) -> None:
    if param.dtype is not torch.bfloat16 or not kernels.is_dense(param):
        raise AmpStateError(
            f"A parameter of shape {tuple(param.shape)}, {param.dtype} and strides {param.stride()} has no split "
            "master: it must be bfloat16 and without gaps in memory.  Use master_weights=True."
        )
    if next(exact_of(param), None) is not None:
        raise AmpStateError(
            f"A parameter of shape {tuple(param.shape)} is stepped by two optimizers, and has one remainder.  "
            "Use master_weights=True."
        )
