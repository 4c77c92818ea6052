"""Says that gradients overflowed, in apex's words, and hands each overflow to what explains it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn

from amp_engine.levels.report import (
    Reporter,
    flushed_message,
    overflow_message,
    released_message,
    static_overflow_message,
)
from amp_engine.scaling.losses import Scaling
from amp_engine.stepping.backward import Backward


class Explains(Protocol):
    """Explains overflows after their messages."""

    def begin_row(self) -> None:
        """A step was skipped after one that was not."""

    def skipped(self, backward: Backward, skips_in_a_row: int, is_told: bool, is_last: bool) -> None:
        """A step was skipped.

        Args:
            is_told: True if this rank has said so.
            is_last: False if another loss made the step skip, too, and follows.
        """

    def taken(self, backward: Backward, is_told: bool, in_a_row: int) -> None:
        """A step was taken on an overflow, or on a loss that is not finite, the number `in_a_row` of such losses.

        Args:
            is_told: True if this rank tells of it.
        """

    def unchecked(self, backward: Backward, value: float, in_a_row: int, loss: Tensor | None) -> None:
        """A loss is not finite, the number `in_a_row` of such losses, and its gradients are not checked.

        Args:
            loss: as it is before its backward; None if it came from a GPU.
        """


class OverflowMessages:
    """Turns overflows into messages.

    Args:
        reporter: prints the messages.
        scaling: notes which static scales were reported.
        explains: called at each overflow for what explains it, which the first one loads.
    """

    def __init__(self, reporter: Reporter, scaling: Scaling, explains: Callable[[], Explains]) -> None:
        self._reporter = reporter
        self._scaling = scaling
        self._explains = explains
        self._left_out = 0  # how many steps left parameters out

    def skipped(self, skips_in_a_row: int, backwards: Sequence[Backward]) -> None:
        """Say that a step was skipped. `backwards` must not be empty."""
        if skips_in_a_row == 1:
            self._explains().begin_row()
        for loss_id, b in {b.loss_id: b for b in backwards}.items():
            is_told = self._reporter.says(b.is_first)
            if is_told:
                scale = b.outcome.next_scale() if b.scaler.dynamic else b.scaler.loss_scale()
                is_lowered = b.scaler.auto is None or scale < b.outcome.scale()
                text = overflow_message(loss_id, scale, b.scaler.dynamic, is_lowered)
                self._reporter.say(text, amp_loss_id=loss_id, amp_loss_scale=scale)
            self._explains().skipped(b, skips_in_a_row, is_told, b is backwards[-1])

    def stepped_on(self, backward: Backward, in_a_row: int) -> None:
        """Say that a step was taken at a scale that overflowed or was too low, or on a loss that is not finite."""
        if backward.outcome.has_flushed():
            loss_id, scale = backward.loss_id, backward.outcome.scale()
            text = flushed_message(loss_id, scale, backward.outcome.next_scale())
            if self._reporter.says(backward.is_first):
                self._reporter.say(text, level=logging.WARNING, amp_loss_id=loss_id, amp_loss_scale=scale)
            return
        if not backward.outcome.overflowed():
            self._explains().taken(backward, self._reporter.says(backward.is_first), in_a_row)
            return
        if backward.loss_id not in self._scaling.reported:
            self._scaling.reported.add(backward.loss_id)
            loss_id, scale = backward.loss_id, backward.scaler.loss_scale()
            text = static_overflow_message(loss_id, scale)
            self._reporter.say(text, level=logging.WARNING, amp_loss_id=loss_id, amp_loss_scale=scale)
            self._explains().taken(backward, True, in_a_row)

    def left_out(self, names: Callable[[], Mapping[int, str]], count: int, param: nn.Parameter, is_all: bool) -> None:
        """Say that released gradients were not finite: at the 1st, 10th, 100th step with such.

        Args:
            names: of parameters, by id.
            count: of such gradients since the step before; `param` had one of them.
            is_all: True if there was no other gradient.
        """
        self._left_out += 1
        if self._left_out == 10 ** (len(str(self._left_out)) - 1):
            name = names().get(id(param), f"a parameter of shape {tuple(param.shape)}")
            self._reporter.say(released_message(name, count, self._left_out, is_all), rank0=True, level=logging.WARNING)

    def unchecked(self, backward: Backward, value: float, in_a_row: int, loss: Tensor | None) -> None:
        """Hand on a loss that is not finite if gradients are not checked."""
        self._explains().unchecked(backward, value, in_a_row, loss)
