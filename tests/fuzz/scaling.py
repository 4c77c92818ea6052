"""The reference's loss scales, and gradients that are still scaled."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Scaler:
    """One loss's scale and the rule that moves it."""

    scale: float
    dynamic: bool
    window: int
    ceiling: float
    unskipped: int = 0
    overflowed: bool = False  # in a backward that was not checked yet
    writes: int = 0  # of a dynamic scale, to the same value too: only the device could tell these apart

    def set(self, scale: float) -> None:
        self.scale, self.writes = scale, self.writes + 1

    def update(self, overflowed: bool) -> None:
        self.writes += self.dynamic
        self.unskipped = 0 if overflowed and self.dynamic else self.unskipped + 1
        if self.dynamic and overflowed:
            self.scale = max(self.scale / 2, 2.0**-24)
        elif self.dynamic and self.unskipped >= self.window:
            self.scale, self.unskipped = min(self.scale * 2, self.ceiling), 0


@dataclass
class Window:
    """Gradients that are still scaled, and those of before, which they will be added to."""

    scale: float
    loss_id: int
    writes: int  # what the scaler had seen when it opened
    earlier: dict[str, Tensor] = field(default_factory=dict)
    zeroed: bool = False  # through the masters, whose parameters still show their gradients
    in_place: bool = False  # and then their gradient is 0

    def zero(self, names: list[str], params: Any, set_to_none: bool) -> None:
        """Earlier gradients, too. What is untouched in the window shows its own."""
        for name in [name for name in names if name in self.earlier]:
            if not set_to_none and params[name].grad is None:
                self.earlier[name] = torch.zeros_like(self.earlier[name])
            else:
                del self.earlier[name]
