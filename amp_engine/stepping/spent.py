"""Gradients that detect a `zero_grad()`, and gradients that a step discarded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from amp_engine.ground.torch_private import disable_dynamo, without_subclasses
from amp_engine.stepping import arithmetic
from amp_engine.stepping.master_parameter import GRAD, HOLDING


class Zeroed(Enum):
    """The effect of a `zero_grad()`, if one was called."""

    NO = "no"
    IN_PLACE = "in place"
    GONE = "gone"


class _Tiny(Tensor):
    """A tiny gradient that notes when it is zeroed: a read would wait for a GPU. Operations give plain Tensors."""

    zeroed_at = -1  # its version when it was last zeroed

    @classmethod
    @disable_dynamo
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with without_subclasses():
            result = func(*args, **(kwargs or {}))
        if func in _ZEROING:
            for zeroed in args[0] if isinstance(args[0], list | tuple) else args[:1]:
                if isinstance(zeroed, _Tiny):
                    zeroed.zeroed_at = zeroed._version
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = twin = self.clone()  # a plain tensor
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)


_ZEROING = (Tensor.zero_, torch._foreach_zero_)


class Sentinel:
    """The gradient that a parameter has, or a tiny one that it shows, which detects a `zero_grad()`.

    A master shows a gradient that clipping does not make 0, and that no step uses. A low-precision parameter shows a
    gradient of 0, since an unscaled backward may add to it.
    """

    def __init__(self, param: nn.Parameter) -> None:
        self.param = param
        self._tiny: Tensor | None = None  # a _Tiny, unless the parameter is of a Tensor subclass
        self._filled: Tensor | None = None  # its memory and version, read without _Tiny's __torch_function__
        self._fresh = 0  # the version of `_tiny` when it was made
        self._look()

    def _look(self) -> None:
        self._grad = GRAD.__get__(self.param)
        self._plain: Any = self._filled if self._grad is self._tiny else self._grad
        self._version = 0 if self._plain is None else self._plain._version

    def show(self) -> bool:
        """Have the parameter show a tiny gradient unless it has a gradient. Returns True if it shows one.

        Raises RuntimeError if the memory of the parameter was replaced by one of another shape, type or device.
        """
        if GRAD.__get__(self.param) is not None:
            self._look()
            return False
        if self._filled is None or self._filled._version != self._fresh:
            with torch.inference_mode(False):
                dtype = self.param.grad_dtype or self.param.dtype
                self._filled = torch.full_like(self.param, _tiny(self.param), dtype=dtype, requires_grad=False)
                self._tiny = self._filled.as_subclass(_Tiny) if type(self._filled) is Tensor else self._filled
            self._fresh = self._filled._version
        GRAD.__set__(self.param, self._tiny)
        self._grad, self._plain, self._version = self._tiny, self._filled, self._fresh
        return True

    def hear(self) -> Zeroed:
        """Remove the tiny gradient, and return the effect of a `zero_grad()` since `show`. Waits after other writes."""
        now = GRAD.__get__(self.param)
        if now is None:
            return Zeroed.GONE
        is_untouched = now is self._grad and self._plain._version == self._version
        is_zeroed = not is_untouched and (_notes_zero(now) or arithmetic.is_zero(now))
        if self._grad is self._tiny and (is_untouched or is_zeroed or _is_tiny(now, self.param)):
            self.hide()  # else an unscaled backward added to it
        return Zeroed.IN_PLACE if is_zeroed else Zeroed.NO

    def hide(self) -> None:
        """Remove the gradient."""
        GRAD.__set__(self.param, None)


def _notes_zero(grad: Tensor) -> bool:
    return isinstance(grad, _Tiny) and grad.zeroed_at == grad._version


def _tiny(param: Tensor) -> float:
    return 1e-30 if param.dtype == torch.float32 else 0.0


def _is_tiny(grad: Tensor, param: Tensor) -> bool:
    return bool((arithmetic.values(grad).abs() <= _tiny(param)).all())


_SPENT = 1  # a step discarded the gradient
_ZERO = 2  # a step discarded the gradient, and it was zeroed in place since
_AS_SPENT = bytes([0]) + bytes([_SPENT]) * 255
_AS_ZERO = bytes([0]) + bytes([_ZERO]) * 255
_bits = partial(int.from_bytes, byteorder="little")  # of the states of all rows, as one number


class Spent:
    """The rows whose gradient a step discarded; torch would keep the gradient until it is zeroed or discarded.

    A gradient that is zeroed in place becomes 0 and is stepped. `zero_grad` zeroes only gradients that exist, so from a
    step to the next backward the smallest of these masters shows a tiny gradient, which clipping does not make 0, and
    the smallest parameter shows a gradient of 0.

    Args:
        states: n; one for each row.
    """

    def __init__(self, states: bytes = b"") -> None:
        self.states = bytearray(states)
        self.is_zeroed_in_place = False  # True if the last `zero_grad` zeroed the gradients in place
        self._sentinels: list[Sentinel] = []
        self._chosen_for = b""
        self._chosen: list[Sentinel] = []  # for `_chosen_for`
        self._look()

    def __del__(self) -> None:
        HOLDING.discard(id(self))

    def _look(self) -> None:
        """Have masters ask their owners for gradients while some gradients are 0."""
        (HOLDING.add if _ZERO in self.states else HOLDING.discard)(id(self))

    def zero_rows(self) -> list[int]:
        """Return the rows whose gradient is 0 unless they got a new one since."""
        return [row for row, state in enumerate(self.states) if state == _ZERO] if _ZERO in self.states else []

    def is_zero(self, row: int) -> bool:
        """True if the gradient of a row is 0 unless the row got a new one since."""
        return self.states[row] == _ZERO

    def discard(self, row: int) -> None:
        """Forget the gradient of a row, which was discarded or replaced."""
        self.states[row] = 0

    def discard_all(self) -> None:
        """Forget all gradients, which were discarded."""
        self.states = bytearray(len(self.states))
        HOLDING.discard(id(self))

    def restore(self, states: bytes) -> None:
        """Set the states to an earlier copy of `states`."""
        self.states = bytearray(states)
        self._look()

    def zero(self, rows: Iterable[int]) -> None:
        """Note that the gradients of `rows` were zeroed in place."""
        for row in rows:
            self.states[row] = _ZERO
        self._look()

    def zero_all(self, rows: Iterable[int] = ()) -> None:
        """Note that all gradients, those of `rows` among them, were zeroed in place."""
        self.states = bytearray(self.states.translate(_AS_ZERO))
        self.zero(rows)

    def spend(self, had: bytes, masters: bytes) -> None:
        """Note that a step discards the gradients of masters.

        Args:
            had: n; not 0 in rows that had a gradient.
            masters: n; 1 in the rows of masters, else 0.
        """
        spent = _bits(had.translate(_AS_SPENT)) & _bits(masters) | _bits(self.states.translate(_AS_SPENT))
        self.states = bytearray(spent.to_bytes(len(had), "little"))
        HOLDING.discard(id(self))

    def rearranged(self, rows: Sequence[int | None]) -> Spent:
        """Return the states in new rows; `rows` gives the present row of each, or None. Call after `hear`."""
        result = Spent(bytes(0 if row is None else self.states[row] for row in rows))
        result.is_zeroed_in_place = self.is_zeroed_in_place
        return result

    def show(self, choose: Callable[[], Sequence[nn.Parameter]]) -> None:
        """Put tiny gradients on the parameters of `choose`, which is called when the spent rows have changed."""
        if self.states != self._chosen_for:
            self._choose(choose)
        try:
            self._sentinels = [one for one in self._chosen if one.show()]
        except RuntimeError:  # the memory of a parameter was replaced
            for one in self._chosen:
                one.hide()
            self._choose(choose)
            self._sentinels = [one for one in self._chosen if one.show()]

    def _choose(self, choose: Callable[[], Sequence[nn.Parameter]]) -> None:
        self._chosen_for, self._chosen = bytes(self.states), [Sentinel(p) for p in choose()]

    def watch(self, param: nn.Parameter | None) -> None:
        """Detect a `zero_grad` by the gradient that `param` has and keeps, instead of by shown ones."""
        self._sentinels = [] if param is None else [Sentinel(param)]

    def hide(self) -> None:
        """Remove the shown gradients until the next step."""
        for one in self._sentinels:
            one.hide()
        self._sentinels = []

    def hear(self) -> bool:
        """Remove the shown gradients, and apply a `zero_grad` since. False if none was shown. May wait if zeroed."""
        if not self._sentinels:
            return False
        sentinels, self._sentinels = self._sentinels, []
        heard = [one.hear() for one in sentinels]
        if Zeroed.GONE in heard:
            self.is_zeroed_in_place = False
            self.discard_all()
        elif Zeroed.IN_PLACE in heard:
            self.is_zeroed_in_place = True
            self.zero_all()
        return True
