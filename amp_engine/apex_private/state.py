"""apex's state object, `_amp_state`, as scripts read and write it: views of an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from amp_engine.apex_private.handle import Handle
from amp_engine.apex_private.views import Properties
from amp_engine.errors import AmpStateError

if TYPE_CHECKING:
    from amp_engine.engine import Engine


class AmpState:
    """An engine, under the names of apex's state object.

    `opt_properties`, `loss_scalers`, `min_loss_scale` and `max_loss_scale` exist once `initialize` was called,
    `handle` while functions are cast. All belong to the engine: a write to an attribute of a scaler applies from then
    on.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @property
    def allow_incoming_model_not_fp32(self) -> bool:
        """True if `initialize` accepts half weights without masters where a level's weights are FP32."""
        return self.engine.allow_incoming_model_not_fp32

    @allow_incoming_model_not_fp32.setter
    def allow_incoming_model_not_fp32(self, value: bool) -> None:
        self.engine.allow_incoming_model_not_fp32 = value

    @property
    def hard_override(self) -> bool:
        """True if complaints about properties that do not fit the level are printed, not raised."""
        return self.engine.hard_override

    @hard_override.setter
    def hard_override(self, value: bool) -> None:
        self.engine.hard_override = value

    @property
    def verbosity(self) -> int:
        """0 silent, 1 messages, 2 every cast."""
        return self.engine.reporter.verbosity

    @verbosity.setter
    def verbosity(self, value: int) -> None:
        self.engine.reporter.verbosity = value

    def __getattr__(self, name: str) -> Any:
        engine: Engine | None = self.__dict__.get("engine")
        if engine is not None and engine.policy is not None:
            if name == "opt_properties":
                return Properties(engine.policy)
            if engine.policy.enabled and name in ("min_loss_scale", "max_loss_scale"):
                return getattr(engine, name)
            if engine.policy.enabled and name == "loss_scalers":
                return engine.scalers
        if engine is not None and engine.function_casts.casts is not None and name == "handle":
            return Handle(engine)
        raise AttributeError(f"'AmpState' object has no attribute '{name}'")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("opt_properties", "handle", "loss_scalers", "min_loss_scale", "max_loss_scale"):
            raise AmpStateError(
                f"_amp_state.{name} shows what amp.initialize decided, and cannot be replaced.  Call amp.close() and "
                "amp.initialize() with other arguments, or write to attributes, such as "
                "_amp_state.loss_scalers[0]._loss_scale = 2.0**16."
            )
        super().__setattr__(name, value)
