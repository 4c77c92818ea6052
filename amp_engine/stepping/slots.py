"""The gradients of one optimizer after a backward: a slot for each of its rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor, nn

from amp_engine import kernels
from amp_engine.ground.devices import moved
from amp_engine.kernels import tensor_lists
from amp_engine.scaling.snapshot import ScaleSnapshot
from amp_engine.stepping.master_parameter import HOLDING


class Slot(IntEnum):
    """What a step finds as the gradient of a row."""

    EMPTY = 0
    HELD = 1  # the model's low-precision gradient, still scaled, which stands for its master's
    OWN = 2  # the weight's own `.grad`, unscaled, as the kernels take it
    FOREIGN = 3  # the weight's own, which they may not take: sparse, or of another type, class or layout


# From how the kernels can access a gradient of a weight's own.
OWN_SLOTS = bytes.maketrans(
    bytes([tensor_lists.NONE, tensor_lists.OWN, tensor_lists.SHARED, tensor_lists.OTHER]),
    bytes([Slot.EMPTY, Slot.OWN, Slot.OWN, Slot.FOREIGN]),
)

# From how the kernels can access a parameter's gradient that is held now.
_HELD_SLOTS = bytes.maketrans(
    bytes([tensor_lists.NONE, tensor_lists.OWN, tensor_lists.SHARED]), bytes([Slot.EMPTY, Slot.HELD, Slot.HELD])
)


class Checked(NamedTuple):
    """What one look at a list of gradients found.

    Attributes:
        params: n; the model's parameters.
        arrived: n; 0 where no gradient was looked at.
        checks: of the gradients as they arrived, still scaled; 0 where none did.
    """

    params: Sequence[nn.Parameter]
    arrived: bytes
    checks: kernels.Checks


class Unscaled(NamedTuple):
    """Gradients of parameters without masters, which were unscaled in place, as they were then.

    Attributes:
        param_handle: the parameters, as `Columns` has them.
        grads: their gradients, alive, so that no other tensor is taken for one of them; None elsewhere.
        marks: of these.
    """

    param_handle: Sequence[Tensor]
    grads: Sequence[Tensor | None]
    marks: tensor_lists.GradientMarks

    def is_untouched(self) -> bool:
        """Whether each gradient is the same object with the same version."""
        return not self.marks.have_moved()

    def watch(self) -> None:
        """Have torch tell of those who write them past their versions: collectives, NumPy, `.data`."""
        tensor_lists.watch_gradients(self.param_handle)

    def is_unwritten(self) -> bool:
        """True if nobody wrote them since `watch`, in any way."""
        return tensor_lists.are_gradients_unwritten(self.param_handle)


class WholeCheck(NamedTuple):
    """What a check found that saw all gradients of an optimizer.

    Attributes:
        checked: one entry for each row.
        norm: of all unscaled gradients; float32, shape [].
        scale: that they had.
        weights: what the optimizer stepped at that time.
        unscaled: gradients of rows without masters; None if there are none.
    """

    checked: Checked
    norm: Tensor
    scale: ScaleSnapshot
    weights: Sequence[nn.Parameter]
    unscaled: Unscaled | None


class Slots:
    """What one backward left for the step of one optimizer.

    Only HELD gradients are held here. What a weight has by itself stays in its `.grad`, where anybody may write, and is
    asked for at the step.

    Args:
        gradients: n, one for each row; low-precision and scaled where they are held.
        accesses: n; how the kernels can access each, `tensor_lists.NONE` where it is not held.
        scale: of the held ones.
        streams: that made the held ones, on GPUs.

    Attributes:
        states: n; HELD or EMPTY.
        count: how many are held.
        is_whole: whether everything is held that was in the beginning.
        norm, max_norm: held gradients are still to be clipped by this norm; None: they are not.
        check: what the check found, if it saw all that was in the gradients after the backward.
    """

    def __init__(
        self,
        gradients: Sequence[Tensor | None] = (),
        accesses: bytes = b"",
        scale: ScaleSnapshot | None = None,
        check: WholeCheck | None = None,
        streams: Sequence[torch.cuda.Stream] = (),
    ) -> None:
        self.gradients = gradients
        self.states = bytearray(accesses.translate(_HELD_SLOTS))
        self.count = len(accesses) - accesses.count(Slot.EMPTY)
        self.is_whole = True
        self.norm: Tensor | None = None
        self.max_norm = math.inf
        self.check = check
        self.streams = streams
        self._scale = scale
        if self.count > 0:
            HOLDING.add(id(self))

    def __del__(self) -> None:
        HOLDING.discard(id(self))

    @property
    def inv_scale(self) -> Tensor | None:
        """What held gradients are to be multiplied by: float32, shape []; None where there are none."""
        return None if self._scale is None or self.count == 0 else self._scale.inv_scale

    def clip(self, norm: Tensor, max_norm: float) -> None:
        """Multiply held gradients by `min(1, max_norm / (norm + 1e-6))` as well, torch's clip_grad_norm_'s factor.

        Args:
            norm: of all unscaled gradients; float32, shape [].
            max_norm: in the same unit.
        """
        self.norm, self.max_norm = norm, max_norm

    def holds(self, row: int) -> bool:
        """Whether a gradient is held for a row."""
        return self.count > 0 and self.states[row] == Slot.HELD

    def take(self, row: int) -> Tensor | None:
        """Empty a slot, and give its gradient in float32, unscaled and clipped; None if none is held."""
        grad = self._emptied(row)
        return None if grad is None else grad.to(torch.float32, copy=True).mul_(moved(self._factor(), grad.device))

    def empty(self, row: int) -> None:
        """Discard the gradient of a row, if one is held."""
        self._emptied(row)

    def discard(self) -> None:
        """Keep nothing any more."""
        self.gradients = [None] * len(self.states)
        self.states = bytearray(len(self.states))
        self.count = 0
        self.is_whole = False
        HOLDING.discard(id(self))

    def rearranged(self, rows: Sequence[int | None]) -> Slots:
        """What is held, in other rows: of each the present one, or None. This keeps nothing afterwards."""
        states = bytes(Slot.EMPTY if row is None else self.states[row] for row in rows)
        gradients = [
            self.gradients[row] if row is not None and s else None for row, s in zip(rows, states, strict=True)
        ]
        result = Slots(
            gradients,
            bytes(tensor_lists.OWN if s else tensor_lists.NONE for s in states),
            self._scale,
            None,
            self.streams,
        )
        result.norm, result.max_norm = self.norm, self.max_norm
        result.is_whole = self.is_whole
        self.discard()
        return result

    def _emptied(self, row: int) -> Tensor | None:
        if not self.holds(row):
            return None
        grad = self.gradients[row]
        self.states[row] = Slot.EMPTY
        self.count -= 1
        self.is_whole = False
        if self.count == 0:
            self.discard()
        return grad

    def _factor(self) -> Tensor:
        """1 / scale and the clip factor: float64, rounded once to float32, as the kernels have it. No host sync."""
        assert self._scale is not None, "nothing is held without a scale"
        factor = self._scale.inv_scale.double()
        if self.norm is not None:
            factor = factor * clip_factor(self.norm, self.max_norm)
        return factor.float()


NO_SLOTS = Slots()
"""Of an optimizer before a backward, and after a step."""


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """torch.nn.utils.clip_grad_norm_'s factor, float64, shape []. No host sync."""
    return (max_norm / (norm.double() + 1e-6)).clamp(max=1.0)
