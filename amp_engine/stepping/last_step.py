"""The result of the last step, read on demand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from amp_engine.ground.devices import moved
from amp_engine.scaling.outcome import Outcome


class LastStep:
    """The last `optimizer.step()`, as `amp.last_step(optimizer)` returns it. Later steps do not change it.

    Args:
        outcomes: outcomes of the backwards that decided the step, oldest first; none if nothing was scaled or checked.
        squares: sums of squares of the scaled gradients that the step took; None if unknown.
        of_loss: the outcome that has scale and value of the last loss, if that is not the last of `outcomes`.
    """

    def __init__(
        self,
        outcomes: Sequence[Outcome] = (),
        squares: Sequence[Tensor] | None = None,
        of_loss: Outcome | None = None,
    ) -> None:
        self._outcomes = outcomes
        self._squares = squares
        self._of_loss = outcomes[-1] if of_loss is None and outcomes else of_loss

    @property
    def is_known(self) -> bool:
        """True if the host knows whether the step was skipped, so that no property waits to learn it."""
        return all(outcome.is_known() for outcome in self._outcomes)

    @property
    def skipped(self) -> bool:
        """True if the step was skipped. Waits for the device until that is known."""
        return any(one.skips and one.overflowed() for one in self._outcomes)

    @property
    def flag(self) -> Tensor:
        """True if the step was skipped, as a tensor on the device: bool, shape []. No host sync."""
        if not self._outcomes:
            return torch.tensor(False, device="cpu")
        device = self._outcomes[-1].flag.device
        skipped = torch.zeros((), dtype=torch.bool, device=device)
        for outcome in self._outcomes:
            if outcome.skips:
                skipped = skipped | (moved(outcome.flag, device) != 0)
        return skipped

    @property
    def loss_scale(self) -> float:
        """The loss scale of its last backward; 1.0 if nothing was scaled. Waits until the host knows."""
        return 1.0 if self._of_loss is None else self._of_loss.scale()

    @property
    def loss(self) -> float | None:
        """The loss of its last backward, before scaling, or the sum of several losses; None if unknown."""
        return None if self._of_loss is None else self._of_loss.loss()

    @property
    def norm(self) -> float | None:
        """2-norm of the optimizer's unscaled gradients before any clipping. Waits for the device.

        Computed by the check: the root of the sum of squares in float64, divided by the scale. None without a check,
        after several backwards, whose sum is not checked, and for shards, whose squares are not summed.
        If ranks agreed on an overflow, the norm is inf on all of them.
        """
        if self._squares is None or not self._outcomes:
            return None
        if any(one.is_agreed and one.overflowed() for one in self._outcomes):
            return math.inf
        if not self._squares:
            return None
        total = sum(float(one.sum()) for one in self._squares) ** 0.5 / self._outcomes[-1].scale()
        return None if math.isnan(total) and not self.flag else total

    def __repr__(self) -> str:
        if not self.is_known:
            return "<LastStep: not known yet>"
        what = "skipped" if self.skipped else "taken"
        return f"<LastStep: {what}, loss scale {self.loss_scale:g}>"
