"""What some loss scales remember: "auto" the largest gradient that was seen, hysteresis the overflows it forgave."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from amp_engine.devices import moved

LARGEST = 65504.0
"""The largest float16. Gradients of a backward in bfloat16 could be larger, and need not."""

FIRST_SCALE = 2.0**8  # of one backward: the next one knows more
HEADROOM = 2.0**3
"""What may lie between the largest gradient of a weight, which is seen, and that of an activation, which is not."""
_FORGET_SEEN = 2.0 ** (-1 / 64)  # a clean backward
_FORGET_OVERFLOW = 2.0 ** (-1 / 8000)  # a clean backward: a dynamic scale tries again after 2000
_BACKOFF = 2.0**-8
_CLIMB = 2.0 ** (1 / 8)  # a clean backward, once something has overflowed
_LONGEST_SHOT = 2.0**12  # of the largest activation's gradient over the largest weight's, that an overflow can suggest


class AutoScale:
    """Chooses the largest power of two at which gradients like those seen do not overflow. All in device tensors.

    The rule, with S the scale and M the largest unscaled magnitude among the gradients of weights:
    after a clean backward `seen = max(M, seen * 2**(-1/64))`, and S is the largest power of two for which
    `seen * 2**3 * S` and `2 * limit * S` are not above 65504; `limit` halves in 8000 clean backwards.
    After an overflow `limit = max(limit, 65504 / S)`, since something of that size was there, and S is divided by 2**8.
    From there it doubles in 8 clean backwards, so that what is too large, and no weight shows, is met once from below.
    A limit that is more than 2**12 above what is seen was no gradient's: NaN data, say. The rule and its constants
    are ours.

    Attributes:
        seen: float32, shape []; 0 before the first.
        limit: float32, shape []; 0 where nothing has overflowed.
        reach: float32, shape []; how far the scale has climbed since; it is the power of two below.
    """

    def __init__(self) -> None:
        self.seen = torch.tensor(0.0, dtype=torch.float32, device="cpu")
        self.limit = torch.tensor(0.0, dtype=torch.float32, device="cpu")
        self.reach = torch.tensor(0.0, dtype=torch.float32, device="cpu")

    def to(self, device: torch.device) -> None:
        """Move the state."""
        self.seen, self.limit = moved(self.seen, device), moved(self.limit, device)
        self.reach = moved(self.reach, device)

    def memory(self) -> dict[str, float]:
        """What decides of the next moves. Waits for the device."""
        return {"seen": float(self.seen), "limit": float(self.limit), "reach": float(self.reach)}

    def remember(self, memory: Mapping[str, float]) -> None:
        """Take over what `memory` gave."""
        for name, mine in (("seen", self.seen), ("limit", self.limit), ("reach", self.reach)):
            mine.fill_(memory.get(name, 0.0))

    def restart(self) -> None:
        """Know nothing again."""
        self.seen.zero_()
        self.limit.zero_()
        self.reach.zero_()

    def update_(
        self, scale: Tensor, used: Tensor, found_inf: Tensor, largest: Tensor | None, low: float, high: float
    ) -> None:
        """Move `scale`, in place. No host sync.

        Args:
            scale: float32, shape [].
            used: the scale that the backward had; float32, shape [].
            found_inf: float32, shape []: != 0 is an overflow.
            largest: of the scaled gradients' magnitudes; float32, shape []. None: nobody looked, and only overflows
                move the scale.
            low, high: bounds of the scale.
        """
        overflowed = found_inf != 0
        limit = torch.maximum(self.limit, LARGEST / used)
        lowered = scale * _BACKOFF
        if largest is None:
            seen, kept, reach, raised = self.seen, self.limit, self.reach, scale
        else:
            magnitude = largest / used
            seen = torch.maximum(magnitude, self.seen * _FORGET_SEEN)
            kept = torch.minimum(self.limit, seen * _LONGEST_SHOT) * _FORGET_OVERFLOW
            needed = torch.maximum(seen * HEADROOM, kept * 2.0)
            highest = (LARGEST / needed).clamp(low, high)
            reach = torch.where(kept > 0, torch.minimum(highest, self.reach * _CLIMB), highest)
            # Where all gradients are 0 the scale stays. log2 and exp2 are exact for powers of two, but not on each
            # device for what lies next to them: frexp is.
            _, exponent = torch.frexp(reach)
            raised = torch.where(needed > 0, torch.ldexp(torch.ones_like(scale), exponent - 1), scale)
        self.seen.copy_(torch.where(overflowed, self.seen, seen))
        self.limit.copy_(torch.where(overflowed, limit, kept))
        self.reach.copy_(torch.where(overflowed, lowered, reach).clamp(low, high))
        scale.copy_(torch.where(overflowed, lowered, raised).clamp(low, high))


class Forgiving:
    """Overflows that do not lower the scale yet.

    Attributes:
        hysteresis: the how-manieth since the last clean backward lowers it.
        left: int32, shape []: counts down from there.
    """

    def __init__(self, hysteresis: int) -> None:
        self.hysteresis = hysteresis
        self.left = torch.tensor(hysteresis, dtype=torch.int32, device="cpu")

    def to(self, device: torch.device) -> None:
        """Move the count."""
        self.left = moved(self.left, device)

    def restart(self) -> None:
        """Count from the beginning."""
        self.left.fill_(self.hysteresis)
