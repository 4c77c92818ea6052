"""The scale of one backward."""

from __future__ import annotations

from functools import cached_property

from torch import Tensor


class ScaleSnapshot:
    """The scale of one backward, which later updates do not change: float32 tensors of shape [].

    Args:
        current: the scaler's own tensor.
        static: the scale as a number, if it is static.
        copy: a copy of `current` that nothing writes; None to make one.

    Attributes:
        is_identity: True if the host knows that the scale is 1.
    """

    def __init__(self, current: Tensor, static: float | None, copy: Tensor | None = None) -> None:
        self.scale = current.clone() if copy is None else copy
        self._static = static
        self.is_identity = static == 1.0
        self._taken_from = current
        self._version = -1 if current.is_inference() else current._version  # an inference tensor has none

    def is_still(self, current: Tensor) -> bool:
        """True if `current`, the scaler's own tensor, was not written since this snapshot. No host sync."""
        return current is self._taken_from and self._version >= 0 and current._version == self._version

    def equals(self, other: ScaleSnapshot) -> bool:
        """True if the host knows that both scales are equal. No host sync, so updates that cancel out go unseen."""
        if self._static is not None:
            return self._static == other._static
        return self is other or (
            self._taken_from is other._taken_from and self._version == other._version and self._version >= 0
        )

    @cached_property
    def inv_scale(self) -> Tensor:
        """1 / scale, computed in float64 and rounded once, as a static scale need not be a power of two.

        Computed at the first read, unless the kernel that adjusted the scale has given it.
        """
        return self.scale.double().reciprocal().float()
