"""The outcome of one scaled backward, on its way to the host."""

from __future__ import annotations

import torch
from torch import Tensor

from amp_engine.ground.devices import HostNumbers


class Outcome(HostNumbers):
    """The flag, the scales and the loss of one backward, on their way to the host in one message.

    A method that says "Waits" waits until the numbers have arrived.

    Args:
        numbers: float32, shape [4]: != 0 if there was an overflow, the scale after the backward, the scale that the
            loss had, and the loss before scaling if it `travels`. At an "auto" scale shape [5], last: != 0 if all
            gradients were 0 because the scale was too low.
        value: the loss before scaling, if the host knows it.
        loss: the loss before scaling, of any shape, if the host does not know it; None if it was not given.
        skips: True if an overflow skips the step; False if it is only reported.
        is_agreed: True if several ranks agreed on the flag.
    """

    def __init__(
        self,
        numbers: Tensor,
        *,
        value: float | None = None,
        loss: Tensor | None = None,
        skips: bool = True,
        is_agreed: bool = False,
    ) -> None:
        super().__init__(numbers)
        self.numbers = numbers
        self.skips = skips
        self.is_agreed = is_agreed
        self._value = value
        self._loss = loss if value is None else None
        self._has_loss = self._loss is not None and travels(self._loss, numbers.device)
        self.keeps_loss = self._loss is not None and not self._has_loss  # True if memory of a loss lives with this

    @property
    def flag(self) -> Tensor:
        """!= 0 if the gradients are not finite: float32, shape [], on the device."""
        return self.numbers[0]

    def overflowed(self) -> bool:
        """True if the gradients are not finite. Waits."""
        return self.read() != 0

    def next_scale(self) -> float:
        """The scale after this backward. Waits."""
        return self.read(1)

    def scale(self) -> float:
        """The scale that the loss had. Waits."""
        return self.read(2)

    def number(self) -> float | None:
        """The loss before scaling, if it is one number that is known or was sent. Waits if it was sent."""
        return self.read(3) if self._has_loss else self._value

    def loss(self) -> float | None:
        """The loss before scaling, or the sum of several; None if it is not known. Waits if it is not a number."""
        number = self.number()
        return float(self._loss.float().sum()) if number is None and self._loss is not None else number

    def has_flushed(self) -> bool:
        """True if all gradients were 0 at an "auto" scale that was too low. Waits."""
        return self.count > 4 and self.read(4) != 0


def travels(loss: Tensor, device: torch.device) -> bool:
    """True if `loss` is sent to the host with the other numbers of a backward, which are on `device`."""
    return is_number(loss) and loss.device == device


def is_number(loss: Tensor) -> bool:
    """True if `loss` is one number, in a plain tensor: reading it needs no collective and no mode of torch."""
    return type(loss) is Tensor and loss.numel() == 1
