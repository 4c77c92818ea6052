"""Gradients as seen at one moment, to tell later if they were touched, and gradients that a step has spent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import and_, or_
from typing import NamedTuple

import torch
from torch import Tensor, nn

from amp_engine.stepping import arithmetic
from amp_engine.stepping.master_parameter import GRAD, HOLDING


class Seen(NamedTuple):
    """A parameter's gradient as seen at one moment, to tell later if it was touched."""

    param: nn.Parameter
    grad: Tensor | None
    version: int

    def is_untouched(self) -> bool:
        """True if the gradient is the same object with the same version."""
        return self.param.grad is self.grad and _version(self.grad) == self.version

    def is_zeroed(self) -> bool:
        """True if the gradient went, or was written and is 0 now, as after `zero_grad`. May wait if written."""
        if self.param.grad is None:
            return self.grad is not None
        return not self.is_untouched() and not bool(arithmetic.values(self.param.grad).any())


def seen(param: nn.Parameter) -> Seen:
    """Return the present gradient of `param`, or the fact that it has none, as Seen."""
    return Seen(param, param.grad, _version(param.grad))


def _version(grad: Tensor | None) -> int:
    return 0 if grad is None else grad._version


_SPENT = 1  # a step discarded the gradient
_ZERO = 2  # a step discarded the gradient, and it was zeroed in place since
_AS_SPENT = bytes([0]) + bytes([_SPENT]) * 255
_AS_ZERO = bytes([0]) + bytes([_ZERO]) * 255


class Spent:
    """The rows whose gradient a step discarded, while torch would keep it until it is zeroed or discarded.

    A gradient that is zeroed in place is 0 and is stepped. `zero_grad` zeroes the gradients that it finds, so from a
    step to the next backward the smallest of these masters shows a tiny gradient, which clipping does not make 0, and
    the smallest parameter shows one of 0.

    Args:
        states: n; one for each row.
    """

    def __init__(self, states: bytes = b"") -> None:
        self.states = bytearray(states)
        self.is_zeroed_in_place = False  # True if that is the last thing that was done to the gradients
        self._sentinels: list[Seen] = []
        self._chosen_for = b""
        self._shown: list[Seen] = []  # the sentinels of `_chosen_for`
        self._look()

    def __del__(self) -> None:
        HOLDING.discard(id(self))

    def _look(self) -> None:
        """Have masters ask their owners for gradients while some gradients are 0."""
        (HOLDING.add if _ZERO in self.states else HOLDING.discard)(id(self))

    @property
    def is_shown(self) -> bool:
        """True if gradients are there for `zero_grad` to find."""
        return bool(self._sentinels)

    def zero_rows(self) -> list[int]:
        """Return the rows whose gradient is 0, unless the row has one by now."""
        return [row for row, state in enumerate(self.states) if state == _ZERO] if _ZERO in self.states else []

    def is_zero(self, row: int) -> bool:
        """True if the gradient of a row is 0, unless the row has one by now."""
        return self.states[row] == _ZERO

    def discard(self, row: int) -> None:
        """Forget the gradient of a row, which was discarded or replaced."""
        self.states[row] = 0

    def discard_all(self) -> None:
        """Forget all gradients, which were discarded."""
        self.restore(bytes(len(self.states)))

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
        spent, earlier = had.translate(_AS_SPENT), self.states.translate(_AS_SPENT)
        if spent != earlier:
            spent = _bitwise(or_, _bitwise(and_, spent, masters), earlier)
        self.states = bytearray(spent)
        self._look()

    def rearranged(self, rows: Sequence[int | None]) -> Spent:
        """Return the states in new rows; `rows` gives the present row of each, or None."""
        self.hear()
        result = Spent(bytes(0 if row is None else self.states[row] for row in rows))
        result.is_zeroed_in_place = self.is_zeroed_in_place
        return result

    def show(self, choose: Callable[[], Sequence[nn.Parameter]]) -> None:
        """Put tiny gradients on the parameters of `choose`, which is called when the spent rows have changed."""
        if self.states != self._chosen_for:
            self._choose(choose)
        try:
            self._show()
        except RuntimeError:  # other shape, type or device: the memory of a parameter was replaced
            self.hide()
            self._choose(choose)
            self._show()

    def _choose(self, choose: Callable[[], Sequence[nn.Parameter]]) -> None:
        with torch.inference_mode(False):
            shown = [(p, torch.full_like(p, _tiny(p), requires_grad=False)) for p in choose()]
        self._chosen_for, self._shown = bytes(self.states), [Seen(p, grad, _version(grad)) for p, grad in shown]

    def _show(self) -> None:
        self._sentinels = []
        for one in self._shown:
            if GRAD.__get__(one.param) is None:
                GRAD.__set__(one.param, one.grad)
                self._sentinels.append(one)

    def watch(self, sentinel: Seen | None) -> None:
        """Watch a gradient that stays, instead of shown ones, for a `zero_grad`."""
        self._sentinels = [] if sentinel is None else [sentinel]

    def hide(self) -> None:
        """Take the shown gradients away until the next step."""
        for one in self._sentinels:
            GRAD.__set__(one.param, None)
        self._sentinels = []

    def hear(self) -> bool:
        """Take the shown gradients away, and heed a `zero_grad` since. False if none was shown. May wait if zeroed."""
        sentinels, self._sentinels = self._sentinels, []
        if not sentinels:
            return False
        is_gone = any(GRAD.__get__(one.param) is None for one in sentinels)
        is_zeroed = [one.is_zeroed() for one in sentinels]
        for one, zeroed in zip(sentinels, is_zeroed, strict=True):
            if zeroed or one.is_untouched() or _is_tiny(one.param):
                GRAD.__set__(one.param, None)  # else an unscaled backward added to it
            if _version(one.grad) != one.version:
                self._chosen_for = b""
        if is_gone:
            self.is_zeroed_in_place = False
            self.discard_all()
        elif any(is_zeroed):
            self.is_zeroed_in_place = True
            self.zero_all()
        return True


def _tiny(param: Tensor) -> float:
    # A master's shown gradient is never used. An unscaled backward may add to a parameter's.
    return 1e-30 if param.dtype == torch.float32 else 0.0


def _is_tiny(param: Tensor) -> bool:
    grad = param.grad
    return grad is not None and bool((arithmetic.values(grad).abs() <= _tiny(param)).all())


def _bitwise(operator: Callable[[int, int], int], a: bytes | bytearray, b: bytes | bytearray) -> bytes:
    """Return `operator` of two byte strings of one length, bit by bit."""
    return operator(int.from_bytes(a, "little"), int.from_bytes(b, "little")).to_bytes(len(a), "little")
