"""Gradients as they were, to tell later if they were touched, and those that a step has spent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from amp_engine.stepping import arithmetic
from amp_engine.stepping.master_parameter import GRAD, HOLDING


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


def seen(param: nn.Parameter) -> Seen:
    """The gradient that `param` has now, or that it has none."""
    return Seen(param, param.grad, _version(param.grad))


def _version(grad: Tensor | None) -> int:
    return 0 if grad is None else grad._version


_SPENT = 1  # a step discarded the gradient
_ZERO = 2  # which somebody has zeroed in place since
_AS_SPENT = bytes([0]) + bytes([_SPENT]) * 255
_AS_ZERO = bytes([0]) + bytes([_ZERO]) * 255


class Spent:
    """The rows whose gradient was discarded by a step, where torch keeps it until somebody zeroes or discards it.

    One that is zeroed in place is a gradient of 0 and is stepped. `zero_grad` zeroes what it finds, so the smallest of
    these masters shows a tiny gradient, which clipping does not make 0, and the smallest parameter one of 0, from a
    step to the next backward.

    Args:
        states: n; of rows.
    """

    def __init__(self, states: bytes = b"") -> None:
        self.states = bytearray(states)
        self.is_zeroed_in_place = False  # whether the last that was done to them is that
        self._sentinels: list[Seen] = []
        self._chosen_for = b""
        self._shown: list[Seen] = []  # the sentinels of `_chosen_for`
        self._look()

    def __del__(self) -> None:
        HOLDING.discard(id(self))

    def _look(self) -> None:
        """Have masters be asked for gradients while some of them are 0."""
        (HOLDING.add if _ZERO in self.states else HOLDING.discard)(id(self))

    @property
    def is_shown(self) -> bool:
        """True if gradients are there for `zero_grad` to find."""
        return bool(self._sentinels)

    def zero_rows(self) -> list[int]:
        """Where the gradient is 0, unless there is one."""
        return [row for row, state in enumerate(self.states) if state == _ZERO] if _ZERO in self.states else []

    def is_zero(self, row: int) -> bool:
        """True if the gradient of a row is 0, unless it has one."""
        return self.states[row] == _ZERO

    def discard(self, row: int) -> None:
        """Forget the gradient of a row, which was discarded or replaced."""
        self.states[row] = 0

    def discard_all(self) -> None:
        """Forget all gradients, which were discarded."""
        self.restore(bytes(len(self.states)))

    def restore(self, states: bytes) -> None:
        """Have these states, as `states` was."""
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

    def spend(self, states: bytes) -> None:
        """A step discards gradients: `states` is not 0 where there was one."""
        spent, earlier = states.translate(_AS_SPENT), self.states.translate(_AS_SPENT)
        self.states = bytearray(spent if spent == earlier else _either(spent, earlier))
        self._look()

    def rearranged(self, rows: Sequence[int | None]) -> Spent:
        """These states in other rows: `rows` has the present place of each, or None."""
        self.hear()
        result = Spent(bytes(0 if row is None else self.states[row] for row in rows))
        result.is_zeroed_in_place = self.is_zeroed_in_place
        return result

    def show(self, choose: Callable[[], Sequence[nn.Parameter]]) -> None:
        """Put tiny gradients where `choose` says, which is asked when other rows were spent than the last time."""
        if self.states != self._chosen_for:
            self._choose(choose)
        try:
            self._show()
        except RuntimeError:  # of another shape, type or device: somebody replaced the memory of a parameter
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
        """Have this one, which stays, be the gradient that somebody zeroes."""
        self._sentinels = [] if sentinel is None else [sentinel]

    def hide(self) -> None:
        """Show nothing until the next step."""
        for one in self._sentinels:
            GRAD.__set__(one.param, None)
        self._sentinels = []

    def hear(self) -> bool:
        """Take back what was shown, and heed a `zero_grad` since. False if nothing was shown. May wait if zeroed."""
        sentinels, self._sentinels = self._sentinels, []
        if not sentinels:
            return False
        is_gone = any(GRAD.__get__(one.param) is None for one in sentinels)
        is_zeroed = [one.is_zeroed() for one in sentinels]
        for one, zeroed in zip(sentinels, is_zeroed, strict=True):
            if zeroed or one.is_untouched() or _is_tiny(one.param):
                GRAD.__set__(one.param, None)  # else a backward that nobody scaled added to it
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
    # A master's counts for nothing. A backward that nobody scaled may add to a parameter's.
    return 1e-30 if param.dtype == torch.float32 else 0.0


def _is_tiny(param: Tensor) -> bool:
    grad = param.grad
    return grad is not None and bool((arithmetic.values(grad).abs() <= _tiny(param)).all())


def _either(a: bytes | bytearray, b: bytes | bytearray) -> bytes:
    """The bits of both, in bytes."""
    return (int.from_bytes(a, "little") | int.from_bytes(b, "little")).to_bytes(len(a), "little")
