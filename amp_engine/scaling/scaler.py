"""The loss scale of one loss: static, or dynamic with its state in 0-d device tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp_engine import kernels
from amp_engine.errors import AmpStateError, AmpValueError
from amp_engine.ground import devices
from amp_engine.ground.devices import moved
from amp_engine.levels.policy import LOWEST_SCALE, LossScale, parse_loss_scale
from amp_engine.levels.scale_rule import DEFAULT_MAX_LOSS_SCALE, DEFAULT_MIN_LOSS_SCALE, DynamicLossScale
from amp_engine.scaling.auto import AUTO_MEMORY, FIRST_SCALE, AutoScale
from amp_engine.scaling.snapshot import ScaleSnapshot

MEMORY = (*AUTO_MEMORY, "overflows_left")
"""The keys that `LossScaler.memory` may have."""


class ScaleUpdate(NamedTuple):
    """The update of a loss scale after one backward.

    Attributes:
        given: the positional arguments of `kernels.update_scale_`.
        outcome, inv_scale: tensors that the update writes.
        closed: the snapshot that gets `inv_scale`; None if there is none, or the scale has changed since.
    """

    given: tuple[Any, ...]
    outcome: Tensor
    inv_scale: Tensor
    closed: ScaleSnapshot | None


class LossScaler:
    """Multiplies a loss, records whether gradients overflowed, and adjusts its scale.

    Dynamic, once per backward (see `kernels.update_scale_` for the formula): halve on overflow, double
    after `scale_window` clean backwards in a row, stay within [min_loss_scale, max_loss_scale].
    "auto": see `AutoScale`. Static: the scale stays, the count of clean backwards goes on.

    Args:
        loss_scale: "dynamic", a DynamicLossScale, whose numbers replace the next arguments, "auto", or a static scale.
        init_scale: first dynamic scale; `max_loss_scale` if that is lower.
        scale_factor: growth factor and inverse of the backoff factor, above 1.
        scale_window: clean backwards between two growths.
        min_loss_scale: floor; None means 2**-24.
        max_loss_scale: ceiling.

    Raises AmpValueError for values out of range.
    """

    _next: ScaleSnapshot | None = (
        None  # the snapshot of the next backward, from the last update or, of a static scale, the last backward
    )
    _was_captured = False  # True once an update is in a CUDA graph, whose replays the host does not see

    def __init__(
        self,
        loss_scale: LossScale,
        init_scale: float = DynamicLossScale.init_scale,
        scale_factor: float = DynamicLossScale.growth_factor,
        scale_window: int = DynamicLossScale.growth_interval,
        min_loss_scale: float | None = None,
        max_loss_scale: float = DEFAULT_MAX_LOSS_SCALE,
    ) -> None:
        loss_scale = parse_loss_scale(loss_scale)
        self.auto: AutoScale | None = AutoScale() if loss_scale == "auto" else None
        self._backoff_factor: float | None = None  # 1 / scale_factor
        self._hysteresis = 1
        if isinstance(loss_scale, DynamicLossScale):
            rule, loss_scale = loss_scale, "dynamic"
            init_scale, scale_factor, scale_window = rule.init_scale, rule.growth_factor, rule.growth_interval
            self._backoff_factor = rule.backoff_factor
            self._hysteresis = rule.hysteresis
            min_loss_scale = min_loss_scale if rule.min_loss_scale is None else rule.min_loss_scale
            max_loss_scale = max_loss_scale if rule.max_loss_scale is None else rule.max_loss_scale
        self._min_loss_scale, self._max_loss_scale = check_bounds(min_loss_scale, max_loss_scale)
        # Exact; a float32 device scalar would round 0.1.
        self._static_scale = None if isinstance(loss_scale, str) else loss_scale
        self.dynamic = self._static_scale is None
        self._init_scale = FIRST_SCALE if self.auto is not None else init_scale
        self.scale_factor = scale_factor
        self._scale_seq_len = scale_window
        first = self.bounded(self._init_scale) if self._static_scale is None else self._static_scale
        self.scale = torch.tensor(first, dtype=torch.float32, device="cpu")
        self.unskipped = torch.tensor(0, dtype=torch.int32, device="cpu")
        self._overflows_left = torch.tensor(self._hysteresis, dtype=torch.int32, device="cpu")  # 0: `scale` falls
        self.found_inf = torch.tensor(0.0, dtype=torch.float32, device="cpu")
        self._last_outcome: Tensor | None = None  # of the last update: its first number is the flag
        self._owed: Callable[[], None] | None = None  # an update that waits for other ranks

    def __repr__(self) -> str:
        kind = "auto" if self.auto is not None else "dynamic" if self.dynamic else self._static_scale
        return f"<LossScaler: {kind}>"  # the present scale is on the device

    @property
    def is_identity(self) -> bool:
        """True if the scale is, and stays, 1."""
        return self._static_scale == 1.0

    @property
    def backoff_factor(self) -> float:
        """The factor of a dynamic scale after an overflow."""
        return self._backoff_factor or 1.0 / self.scale_factor

    def owe(self, update: Callable[[], None]) -> None:
        """Call `update`, which waits for other ranks, before the scaler's state is next read or written."""
        self.settle()
        self._owed = update

    def settle(self) -> None:
        """Call the owed update, if there is one. Waits for other ranks, as its collective does."""
        owed, self._owed = self._owed, None
        if owed is not None:
            try:
                owed()
            except BaseException:  # such as KeyboardInterrupt: the next step must not pass for one without overflow
                self._owed = owed
                raise

    def loss_scale(self) -> float:
        """The scale that the next backward uses. Waits for the device if dynamic."""
        self.settle()
        return float(self.scale) if self._static_scale is None else self._static_scale

    def to(self, device: torch.device) -> None:
        """Move the state to `device`, where the losses are. Waits only if `device` is the CPU.

        Raises AmpStateError during the capture of a CUDA graph, which such a copy would break.
        """
        if self.scale.device != device:
            self.settle()
            if devices.is_capturing(device):
                raise AmpStateError(
                    f"scale_loss() is captured in a CUDA graph, but its loss scale is on {self.scale.device} still.  "
                    "Run at least one iteration (scale_loss, backward, step, zero_grad) outside of the capture first."
                )
            self.scale = moved(self.scale, device)
            self.unskipped = moved(self.unskipped, device)
            self.found_inf = moved(self.found_inf, device)
            self._overflows_left = moved(self._overflows_left, device)
            if self.auto is not None:
                self.auto.to(device)

    def snapshot(self) -> ScaleSnapshot:
        """Return a copy of the scale for one backward. No host sync."""
        self.settle()
        is_captured = devices.is_capturing(self.scale.device)
        if self._next is not None and self._next.is_still(self.scale) and not is_captured:
            return self._next
        snapshot = ScaleSnapshot(self.scale, self._static_scale)
        if self._static_scale is not None and not is_captured:  # no replay of a CUDA graph changes it
            self._next = snapshot
        return snapshot

    def record_(self, nonfinite: Tensor) -> None:
        """Record if a gradient was not finite: OR of `nonfinite` (bool, any shape, any device)."""
        self.settle()
        bad = moved(nonfinite.any().float(), self.found_inf.device)
        self.found_inf.copy_(torch.maximum(self.found_inf, bad))

    def begin_update(self, closed: ScaleSnapshot | None, loss: Tensor | None) -> ScaleUpdate:
        """Return the update after one backward, which `kernels.update_scale_(*given)` or a check executes.

        Args:
            closed: the snapshot of this backward, which gets its inverse from the update, unless another backward, a
                checkpoint or a write has changed the scale since.
            loss: the loss before scaling, to send to the host; float32, shape [], on the device of the scale.
        """
        inv_scale = torch.empty_like(self.scale)
        outcome = self.scale.new_empty(4)
        # Positional, as pybind looks each name up, which takes twice as long as the update.
        given = (
            self.scale,
            self.unskipped,
            self.found_inf,
            self.scale_factor,
            self.backoff_factor,
            self._scale_seq_len,
            self._min_loss_scale,
            self._max_loss_scale,
            self._overflows_left if self._hysteresis > 1 else None,
            self._hysteresis,
            self.dynamic and self.auto is None,
            inv_scale,
            outcome,
            None if closed is None else closed.scale,
            loss,
        )
        is_still = closed is not None and closed.is_still(self.scale)
        return ScaleUpdate(given, outcome, inv_scale, closed if is_still else None)

    def end_update(self, update: ScaleUpdate, largest: Tensor | None = None, bad_loss: Tensor | None = None) -> Tensor:
        """Take over the results of an executed update. No host sync.

        Args:
            largest: the largest magnitude of the backward's scaled gradients, float32, shape []; for "auto".
            bad_loss: != 0 if the loss was not finite before scaling, float32, shape []; for "auto".

        Returns:
            The numbers of an `Outcome`.
        """
        outcome = self._last_outcome = update.outcome
        next_scale = outcome[1]
        if update.closed is not None:
            update.closed.inv_scale = update.inv_scale
        if self.auto is not None:
            found_inf, low, high = outcome[0], self._min_loss_scale, self._max_loss_scale
            self.auto.update_(self.scale, outcome[2], found_inf, largest, bad_loss, low, high)
            self.unskipped.mul_(found_inf == 0)
            next_scale.copy_(self.scale)
            outcome = torch.cat([outcome, self.auto.flushed.view(1)])
        self._was_captured |= devices.is_capturing(self.scale.device)
        is_kept = not self._was_captured and not next_scale.is_inference()
        self._next = ScaleSnapshot(self.scale, self._static_scale, next_scale) if is_kept else None
        return outcome

    def update_(
        self,
        closed: ScaleSnapshot | None = None,
        largest: Tensor | None = None,
        bad_loss: Tensor | None = None,
        loss: Tensor | None = None,
    ) -> Tensor:
        """Adjust the scale after one backward, and discard the overflow. See `begin_update` and `end_update`.

        Returns:
            The numbers of an `Outcome`. No host sync.
        """
        self.settle()
        update = self.begin_update(closed, loss)
        kernels.update_scale_(*update.given)
        return self.end_update(update, largest, bad_loss)

    def restart(self) -> None:
        """Go back to the first scale, within the present bounds, and count from 0. No host sync."""
        self.settle()
        self.scale.fill_(self.bounded(self._init_scale) if self._static_scale is None else self._static_scale)
        self.unskipped.zero_()
        self._overflows_left.fill_(self._hysteresis)
        if self.auto is not None:
            self.auto.restart()

    def bounded(self, scale: float) -> float:
        """Return `scale`, clamped to the bounds of dynamic scales."""
        return max(self._min_loss_scale, min(self._max_loss_scale, scale))

    def clear_overflow_state(self) -> None:
        """Discard the overflow that `record_` recorded, and the one that the last update found."""
        self.settle()
        self.found_inf.zero_()
        self._last_outcome = None

    def update_scale(self) -> bool:
        """`update_`; True if the step should be skipped. Waits for the device."""
        self.settle()
        # A flag that was written through `_overflow_buf` is a denormal number, which a processor may take for 0.
        self.found_inf.copy_(self._overflow_buf[0] != 0)
        outcome = self.update_()
        return self.dynamic and bool(outcome[0] != 0)

    def state_dict(self) -> dict[str, float | int]:
        """`{"loss_scale": float, "unskipped": int}`, apex's format. Waits for the device."""
        self.settle()
        return {"loss_scale": self.loss_scale(), "unskipped": int(self.unskipped)}

    def memory(self) -> dict[str, float]:
        """Return the numbers besides `state_dict` that decide the next scales; most have none. Waits for the device."""
        self.settle()
        known = {} if self.auto is None else self.auto.memory()
        if self._hysteresis == 1:
            return known
        # The count goes on below 0, with the same effect as 0: the next overflow lowers the scale.
        return {**known, "overflows_left": max(0.0, float(self._overflows_left))}

    def remember(self, memory: Mapping[str, float]) -> None:
        """Load the numbers of `memory` that a scaler of this kind has."""
        self.settle()
        if self.auto is not None:
            self.auto.remember(memory)
        if self._hysteresis > 1:
            self._overflows_left.fill_(int(memory.get("overflows_left", self._hysteresis)))

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        """Load scale and count; the scaler stays static or dynamic.

        Raises AmpValueError if an entry is missing or the scale is not a positive finite number.
        """
        try:
            loss_scale, unskipped = float(state["loss_scale"]), int(state["unskipped"])
        except (KeyError, TypeError, ValueError) as e:
            raise AmpValueError(
                f'A loss scaler\'s state is {{"loss_scale": float, "unskipped": int}}, not {state!r}.'
            ) from e
        self._put(loss_scale, unskipped)

    def _put(self, loss_scale: float, unskipped: int | None = None) -> None:
        """Set the scale, and the count if it is given."""
        scale = parse_loss_scale(loss_scale)
        if not isinstance(scale, float):
            raise AmpValueError("_loss_scale is a number.  Use for example _loss_scale = 2.0**16.")
        self.settle()
        if not self.dynamic:
            self._static_scale = scale
        self.scale.fill_(scale)
        if unskipped is not None:
            self.unskipped.fill_(unskipped)

    # The names that scripts read and write (`loss_scalers[0]._loss_scale = 2**20`).

    @property
    def _loss_scale(self) -> float:
        return self.loss_scale()

    @_loss_scale.setter
    def _loss_scale(self, value: float) -> None:
        self._put(value)

    @property
    def _unskipped(self) -> int:
        self.settle()
        return int(self.unskipped)

    @_unskipped.setter
    def _unskipped(self, value: int) -> None:
        self.settle()
        self.unskipped.fill_(value)

    @property
    def _has_overflow(self) -> bool:
        self.settle()
        last = self._last_outcome
        return bool(self._overflow_buf != 0) or (last is not None and bool(last[0] != 0))

    @_has_overflow.setter
    def _has_overflow(self, value: bool) -> None:
        self.clear_overflow_state()
        self.found_inf.fill_(float(value))

    @property
    def _overflow_buf(self) -> Tensor:
        """The flag in the form of apex's kernels: int32, shape [1], in the memory of `found_inf`."""
        self.settle()
        return self.found_inf.view(torch.int32).view(1)

    @_overflow_buf.setter
    def _overflow_buf(self, value: Tensor) -> None:
        self.settle()
        self.found_inf.copy_((value != 0).any())

    def __getstate__(self) -> dict[str, Any]:
        self.settle()
        return {name: value for name, value in vars(self).items() if name != "_next"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_loss_scale" not in state:
            self.__dict__.update(state)
            return
        # apex's attributes: the FP16_Optimizer of apex.fp16_utils saved its scaler as an object.
        dynamic, scale = state["dynamic"], float(state["_loss_scale"])
        LossScaler.__init__(
            self,
            "dynamic" if dynamic else scale,
            scale_window=state["_scale_seq_len"],
            min_loss_scale=state["_min_loss_scale"],
            max_loss_scale=state["_max_loss_scale"],
        )
        self._put(max(scale, self._min_loss_scale) if dynamic else scale, state["_unskipped"])  # apex's could sink to 0
        self.found_inf.fill_(float(state["_has_overflow"]))


def check_bounds(min_loss_scale: object, max_loss_scale: object) -> tuple[float, float]:
    """Return floor and ceiling as floats; None: the defaults 2**-24 and 2**24.

    Raises AmpValueError unless 0 <= floor <= ceiling.
    """
    try:
        low = DEFAULT_MIN_LOSS_SCALE if min_loss_scale is None else float(min_loss_scale)  # type: ignore[arg-type]
        high = DEFAULT_MAX_LOSS_SCALE if max_loss_scale is None else float(max_loss_scale)  # type: ignore[arg-type]
        valid = 0.0 <= low <= high < float("inf") and high > 0.0
    except (TypeError, ValueError, OverflowError):
        valid = False
    if not valid:
        raise AmpValueError(
            f"min_loss_scale={min_loss_scale!r}, max_loss_scale={max_loss_scale!r}: expected two finite numbers "
            "with 0 <= min_loss_scale <= max_loss_scale.  Use for example min_loss_scale=1.0, "
            "max_loss_scale=2.0**24, or leave them out for 2**-24 and 2**24."
        )
    return max(low, LOWEST_SCALE), high  # 0 means the lowest scale
