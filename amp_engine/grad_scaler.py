"""The interface of torch.amp.GradScaler to an engine, for loops and libraries that take such an object."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer

from amp_engine.engine import Engine
from amp_engine.errors import AmpStateError, AmpTypeError
from amp_engine.optimizers import LARC, inner_of
from amp_engine.saving import scaler_state
from amp_engine.scaling.scaler import LossScaler
from amp_engine.stepping.reached import reached_by


class GradScaler:
    """The methods of torch.amp.GradScaler, for one loss of an engine.

    Args:
        engine: returns the engine; every method calls it, so that `initialize` may be called later.
        optimizers: the optimizers that losses may reach; if empty, all initialized optimizers.
        loss_id: the index of the loss's scaler.
    """

    def __init__(self, engine: Callable[[], Engine], optimizers: Sequence[Optimizer | LARC], loss_id: int) -> None:
        for one in optimizers:
            if not isinstance(one, (Optimizer, LARC)):
                raise AmpTypeError(
                    f"GradScaler() takes optimizers, not a {type(one).__name__}: device and numbers of the scale are "
                    "the engine's.  Type amp.GradScaler(), and amp.initialize(..., loss_scale=amp.DynamicLossScale("
                    "init_scale=..., growth_interval=...))."
                )
        self._engine, self._optimizers, self._loss_id = engine, [*map(inner_of, optimizers)], loss_id
        self._body: AbstractContextManager[Tensor] | None = None  # of the `scale_loss` whose backward comes next

    def scale(self, outputs: Tensor) -> Tensor:
        """`outputs.float() * scale`, a loss to call `backward()` on.

        Raises AmpStateError if it reaches no parameter of the optimizers, AmpTypeError for several losses. No host
        sync.
        """
        self._leave_body()
        if not isinstance(outputs, Tensor):
            raise AmpTypeError(
                f"GradScaler.scale() takes one loss, not a {type(outputs).__name__}.  Type "
                "scaler.scale(loss).backward() for each of several losses, or for their sum."
            )
        body = self._engine().scale_loss(outputs, self._reached_by(outputs), self._loss_id, delay_unscale=True)
        with ExitStack() as undo:
            undo.callback(setattr, self, "_body", None)
            scaled_loss = undo.enter_context(body)
            self._body = body
            undo.pop_all()
        return scaled_loss

    def unscale_(self, optimizer: Optimizer | LARC) -> None:
        """Unscale the gradients of the loss now, to clip them; otherwise `step` does. A second call has no effect.

        No host sync.
        """
        self._leave_body()
        self._engine().records.close_loss(self._loss_id)

    def step(self, optimizer: Optimizer | LARC, *args: Any, **kwargs: Any) -> Any:
        """Call `optimizer.step(*args, **kwargs)`, which does nothing where gradients overflowed; returns its result."""
        self.unscale_(optimizer)
        return optimizer.step(*args, **kwargs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Set the scale to `new_scale` if it is given; it was already adjusted when gradients were unscaled."""
        self._leave_body()
        if new_scale is not None and self.is_enabled():
            self._scaler().load_state_dict({"loss_scale": float(new_scale), "unskipped": 0})

    def get_scale(self) -> float:
        """The present scale; 1.0 if not enabled. Waits for the device."""
        return self._scaler().loss_scale() if self.is_enabled() else 1.0

    def get_growth_factor(self) -> float:
        """The scale is multiplied by this after `get_growth_interval()` clean steps."""
        return self._scaler().scale_factor

    def get_backoff_factor(self) -> float:
        """The scale is multiplied by this at an overflow."""
        return self._scaler().backoff_factor

    def get_growth_interval(self) -> int:
        """The number of clean steps in a row after which the scale grows."""
        return self._scaler()._scale_seq_len

    def is_enabled(self) -> bool:
        """False after `initialize(enabled=False)`."""
        policy = self._engine().policy
        return policy is None or policy.enabled

    def state_dict(self) -> dict[str, Any]:
        """Return a state with the keys of torch.amp.GradScaler, which loads it, and of an entry of `amp.state_dict()`.

        Empty if not enabled. Waits for the device.
        """
        if not self.is_enabled():
            return {}
        torchs = scaler_state.pack_scalers([self._scaler()], None, None, "torch")
        return {**torchs, **self._engine().state_dict()[f"loss_scaler{self._loss_id}"]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state from `state_dict`, torch.amp.GradScaler or `amp.state_dict`, as `amp.load_state_dict` does."""
        if not self.is_enabled():
            return
        if "loss_scale" in state_dict:
            state_dict = {"loss_scaler0": state_dict}
        reporter = self._engine().reporter
        scaler_state.unpack_scalers([self._scaler()], state_dict, lambda text: reporter.say(text, rank0=True))

    def _scaler(self) -> LossScaler:
        self._engine().get_scale(self._loss_id)  # raises if there is no scaler
        return self._engine().scalers[self._loss_id]

    def _reached_by(self, loss: Tensor) -> list[Optimizer] | Literal["reached"]:
        if not self._optimizers:
            return "reached"
        records = self._engine().records
        own = [one for each in self._optimizers if (one := records.get(each)) is not None]
        found = [one.optimizer for one in reached_by(loss, own)]
        if own and not found:
            names = ", ".join(type(one.optimizer).__name__ for one in own)
            raise AmpStateError(
                f"GradScaler.scale(loss) was called on a loss that reaches no parameter of its optimizers: {names}.  "
                "Type amp.GradScaler() for all that are initialized, or amp.GradScaler(optimizer, ...) with those of "
                "this loss."
            )
        return found or self._optimizers

    def _leave_body(self) -> None:
        body, self._body = self._body, None
        if body is not None:
            body.__exit__(None, None, None)
