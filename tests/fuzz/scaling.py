"""The reference's loss scales, and gradients that are still scaled."""

from __future__ import annotations

from dataclasses import dataclass, field

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
    bad: bool = False  # True if earlier ones, which nobody had looked at, are not finite
