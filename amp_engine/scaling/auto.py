"""The rule of loss_scale="auto", which follows the largest gradient of the run."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from amp_engine.ground.devices import moved

LARGEST = 65504.0
"""The largest float16. In bfloat16 gradients could be larger, but need not be."""

FIRST_SCALE = 2.0**8  # only for one backward, which shows the sizes of gradients
HEADROOM = 2.0**3
"""Factor between the largest gradient of a weight, which is observed, and that of an activation, which is not."""
_FORGET_SEEN = 2.0 ** (-1 / 64)  # per clean backward
_FORGET_OVERFLOW = 2.0 ** (-1 / 8000)  # per clean backward: a dynamic scale tries again after 2000
_BACKOFF = 2.0**-8  # at each of the first _STEEP overflows in a row
_STEEP = 2
_PATIENCE = 16
"""Overflows in a row after which each one halves the scale: a dynamic scale halves at each, and is as low by then."""
_CLIMB = 2.0 ** (1 / 8)  # per clean backward, after an overflow
_LONGEST_SHOT = 2.0**12  # the largest ratio of activations' to weights' gradients that an overflow can suggest

AUTO_MEMORY = ("seen", "limit", "reach", "overflows_in_a_row")
"""The keys of `AutoScale.memory`."""


class AutoScale:
    """Chooses the largest power of two at which gradients of the observed sizes do not overflow, in device tensors.

    The rule, with S the scale and M the largest unscaled magnitude among the gradients of weights:
    after a clean backward `seen = max(M, seen * 2**(-1/64))`, and S is the largest power of two for which
    `seen * 2**3 * S` and `2 * limit * S` are not above 65504; `limit` halves in 8000 clean backwards.
    After an overflow S is divided by 2**8, and by 2**8 after a second in a row. S then stays for 14 more overflows,
    since NaN data is likelier by now than gradients that have grown 2**16-fold, and halves at each further one. The
    first in a row shows a value of size 65504 / S: `limit = max(limit, 65504 / S)`. An overflow with a loss that is
    not finite tells nothing about the scale, and changes nothing.
    A limit more than 2**12 times `seen` did not come from a gradient. So a clean backward brings S back at once to a
    scale at which a value of 2**12 times `seen` would not overflow, also if all its gradients are 0. From there S
    doubles in 8 clean backwards, so that it reaches a too large value that no weight shows only once, from below. We
    chose the rule and its constants.

    Attributes:
        seen: float32, shape []; 0 before the first backward.
        limit: float32, shape []; 0 before the first overflow.
        reach: float32, shape []; the scale before it is rounded down to a power of two.
        overflows_in_a_row: float32, shape [].
        flushed: float32, shape []; != 0 if all gradients of the last backward were 0, and the scale was raised.
    """

    def __init__(self) -> None:
        self.seen = torch.tensor(0.0, dtype=torch.float32, device="cpu")
        self.limit = torch.tensor(0.0, dtype=torch.float32, device="cpu")
        self.reach = torch.tensor(0.0, dtype=torch.float32, device="cpu")
        self.overflows_in_a_row = torch.tensor(0.0, dtype=torch.float32, device="cpu")
        self.flushed = torch.tensor(0.0, dtype=torch.float32, device="cpu")

    def to(self, device: torch.device) -> None:
        """Move the state."""
        self.seen, self.limit = moved(self.seen, device), moved(self.limit, device)
        self.reach, self.flushed = moved(self.reach, device), moved(self.flushed, device)
        self.overflows_in_a_row = moved(self.overflows_in_a_row, device)

    def memory(self) -> dict[str, float]:
        """Return the numbers that decide the next scales. Waits for the device."""
        return {name: float(getattr(self, name)) for name in AUTO_MEMORY}

    def remember(self, memory: Mapping[str, float]) -> None:
        """Load the numbers that `memory` returned."""
        for name in AUTO_MEMORY:
            getattr(self, name).fill_(memory.get(name, 0.0))

    def restart(self) -> None:
        """Set the numbers to 0."""
        self.remember({})

    def update_(
        self,
        scale: Tensor,
        used: Tensor,
        found_inf: Tensor,
        largest: Tensor | None,
        bad_loss: Tensor | None,
        low: float,
        high: float,
    ) -> None:
        """Adjust `scale` in place. No host sync.

        Args:
            scale: float32, shape [].
            used: the scale of the backward; float32, shape [].
            found_inf: float32, shape []: != 0 is an overflow.
            largest: the largest magnitude of the scaled gradients; float32, shape []. None: not known, and only
                overflows change the scale.
            bad_loss: float32, shape []: != 0 if the loss itself was not finite. None: not known.
            low, high: bounds of the scale.
        """
        overflowed = found_inf != 0
        blamed = overflowed if bad_loss is None else overflowed & (bad_loss == 0)
        in_a_row = self.overflows_in_a_row
        limit = torch.where(in_a_row == 0, torch.maximum(self.limit, LARGEST / used), self.limit)
        lowered = scale * torch.where(in_a_row < _STEEP, _BACKOFF, torch.where(in_a_row < _PATIENCE, 1.0, 0.5))
        if largest is None:
            seen, kept, reach, raised = self.seen, self.limit, self.reach, scale
            flushed = torch.zeros_like(scale)
        else:
            magnitude = largest / used
            seen = torch.maximum(magnitude, self.seen * _FORGET_SEEN)
            longest = torch.where(seen > 0, seen * _LONGEST_SHOT, self.limit)
            kept = torch.minimum(self.limit, longest) * _FORGET_OVERFLOW
            needed = torch.maximum(seen * HEADROOM, kept * 2.0)
            highest = (LARGEST / needed).clamp(low, high)
            climbed = torch.maximum(self.reach * _CLIMB, LARGEST / (seen * _LONGEST_SHOT))
            reach = torch.where(kept > 0, torch.minimum(highest, climbed), highest)
            # The scale stays if all gradients so far were 0. frexp is exact. log2 and exp2 are exact for powers of two,
            # but not on each device for numbers next to them.
            _, exponent = torch.frexp(reach)
            raised = torch.where(needed > 0, torch.ldexp(torch.ones_like(scale), exponent - 1), scale)
            flushed = ((largest == 0) & ~overflowed & (raised.clamp(low, high) > used)).float()
        self.seen.copy_(torch.where(overflowed, self.seen, seen))
        self.limit.copy_(torch.where(blamed, limit, torch.where(overflowed, self.limit, kept)))
        reach = torch.where(blamed, lowered, reach).clamp(low, high)
        spared = overflowed & ~blamed
        self.reach.copy_(torch.where(spared, self.reach, reach))
        scale.copy_(torch.where(spared, scale, torch.where(blamed, lowered, raised).clamp(low, high)))
        self.overflows_in_a_row.copy_(torch.where(blamed, in_a_row + 1, in_a_row * spared))
        self.flushed.copy_(flushed)
