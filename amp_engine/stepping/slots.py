"""The gradients of one optimizer after a backward: a slot for each of its rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor, nn

from amp_engine import kernels
from amp_engine.errors import AmpStateError
from amp_engine.ground.devices import moved
from amp_engine.kernels import tensor_lists
from amp_engine.scaling.snapshot import ScaleSnapshot
from amp_engine.stepping.master_parameter import HOLDING


class Slot(IntEnum):
    """The kind of gradient that a step finds in a row."""

    EMPTY = 0
    HELD = 1  # the model's low-precision gradient, still scaled, stands for the master's
    OWN = 2  # the weight's own `.grad`, unscaled, in a form that the kernels take
    FOREIGN = 3  # the weight's own `.grad`, perhaps sparse or of a type, class or layout that the kernels do not take


# Translates the access of a weight's own gradient into its Slot.
OWN_SLOTS = bytes.maketrans(
    bytes([tensor_lists.NONE, tensor_lists.OWN, tensor_lists.SHARED, tensor_lists.OTHER]),
    bytes([Slot.EMPTY, Slot.OWN, Slot.OWN, Slot.FOREIGN]),
)


class Checked(NamedTuple):
    """The result of one check of a list of gradients.

    Attributes:
        params: n; the model's parameters.
        arrived: n; 0 where no gradient was checked.
        checks: checks of the gradients as they arrived, still scaled; 0 where none arrived.
    """

    params: Sequence[nn.Parameter]
    arrived: bytes
    checks: kernels.Checks


class Unscaled(NamedTuple):
    """Gradients of parameters without masters, right after they were unscaled in place.

    Attributes:
        grads: n; the gradients, kept alive so that no new tensor is mistaken for one of them; None in other rows.
        marks: marks of these gradients.
    """

    grads: Sequence[Tensor | None]
    marks: tensor_lists.GradientMarks

    def is_untouched(self) -> bool:
        """True if each gradient is the same object with the same version."""
        return not self.marks.have_moved()

    def watch(self) -> None:
        """Watch for writes that move no version: by collectives, NumPy, `.data`."""
        tensor_lists.watch_gradients(self.marks.params)

    def is_unwritten(self) -> bool:
        """True if the gradients were not written in any way since `watch`."""
        return tensor_lists.are_gradients_unwritten(self.marks.params)


class WholeCheck(NamedTuple):
    """The result of a check of all gradients of an optimizer.

    Attributes:
        checked: one entry for each row.
        norm: the norm of all unscaled gradients; float32, shape [].
        scale: the scale that the gradients had.
        weights: the weights of the optimizer at that time.
        unscaled: gradients of rows without masters; None if there are none.
    """

    checked: Checked
    norm: Tensor
    scale: ScaleSnapshot
    weights: Sequence[nn.Parameter]
    unscaled: Unscaled | None


class Slots:
    """The gradients that one backward left for the step of one optimizer.

    Only HELD gradients are kept here. A weight's own gradient stays in its `.grad`, where any code may write, and is
    read at the step.

    Args:
        held: n rows of low-precision, scaled gradients; None if there are none.
        scale: the scale of the held gradients.
        streams: the streams that made the held gradients, on GPUs.

    Attributes:
        held: the held gradients; None if there are none.
        states: n; HELD or EMPTY.
        count: number of held gradients.
        is_whole: True if every gradient that was held at first is still held.
        norm, max_norm: the step clips held gradients from this norm to this maximum; not clipped if `norm` is None.
        check: the result of the check, if it covered all gradients after the backward.
    """

    def __init__(
        self,
        held: tensor_lists.Held | None = None,
        scale: ScaleSnapshot | None = None,
        check: WholeCheck | None = None,
        streams: Sequence[torch.cuda.Stream] = (),
    ) -> None:
        self.held = held
        self.states = bytearray() if held is None else bytearray(held.states())
        self.count = self.states.count(Slot.HELD)
        self.is_whole = True
        self.norm: Tensor | None = None
        self.max_norm = math.inf
        self.check = check
        self.streams = streams
        self._scale = scale
        if self.count > 0:
            HOLDING.add(id(self))

    def __del__(self) -> None:
        if self.count > 0:
            HOLDING.discard(id(self))

    @property
    def inv_scale(self) -> Tensor | None:
        """The factor that unscales held gradients: float32, shape []; None if none are held."""
        return None if self._scale is None or self.count == 0 else self._scale.inv_scale

    def clip(self, norm: Tensor, max_norm: float) -> None:
        """Have the step multiply held gradients by `min(1, max_norm / (norm + 1e-6))`, as torch's clip_grad_norm_ does.

        Args:
            norm: the norm of all unscaled gradients; float32, shape [].
            max_norm: the largest norm, also of unscaled gradients.
        """
        self.norm, self.max_norm = norm, max_norm

    def holds(self, row: int) -> bool:
        """True if a gradient is held for a row."""
        return self.count > 0 and self.states[row] == Slot.HELD

    def take(self, rows: Iterable[int]) -> dict[int, Tensor]:
        """Empty slots, and return the gradients that were held in them, by row: float32, unscaled and clipped.

        Raises AmpStateError if one is lost; its slot is empty then, and the others are as they were.
        """
        grads, by_device = dict[int, Tensor](), dict[torch.device, list[int]]()
        for row in rows:
            try:
                grad = self.held[row] if self.held is not None and self.holds(row) else None
            except AmpStateError:
                self.empty(row)
                raise
            if grad is not None:
                grads[row] = grad
                by_device.setdefault(grad.device, []).append(row)
        unscaled = {row: torch.empty_like(grad, dtype=torch.float32) for row, grad in grads.items()}
        for device, held in by_device.items():
            outputs = [unscaled[row] for row in held]
            kernels.cast_copy_(outputs, [grads[row] for row in held])
            torch._foreach_mul_(outputs, moved(self._factor(), device))
        for row in grads:
            self.empty(row)
        return unscaled

    def empty(self, row: int) -> None:
        """Discard the gradient of a row, if one is held."""
        if self.held is None or not self.holds(row):
            return
        self.held.discard(row)
        self.states[row] = Slot.EMPTY
        self.count -= 1
        self.is_whole = False
        if self.count == 0:
            self.discard()

    def discard(self) -> None:
        """Discard all held gradients."""
        self.held = None
        self.states = bytearray(len(self.states))
        self.count = 0
        self.is_whole = False
        HOLDING.discard(id(self))

    def rearranged(self, rows: Sequence[int | None]) -> Slots:
        """Return the held gradients in new rows, and keep none here; `rows` gives the present row of each, or None."""
        held = None if self.held is None else self.held.rearranged([-1 if row is None else row for row in rows])
        result = Slots(held, self._scale, None, self.streams)
        result.norm, result.max_norm = self.norm, self.max_norm
        result.is_whole = self.is_whole
        self.discard()
        return result

    def _factor(self) -> Tensor:
        """Return 1 / scale times the clip factor: float64, rounded once to float32, as in the kernels. No host sync."""
        assert self._scale is not None, "nothing is held without a scale"
        factor = self._scale.inv_scale.double()
        if self.norm is not None:
            factor = factor * kernels.clip_factor(self.norm, self.max_norm)
        return factor.float()


NO_SLOTS = Slots()
"""The slots of an optimizer before a backward, and after a step."""
