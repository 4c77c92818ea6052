"""What scripts change of apex's private state after `initialize`."""

from __future__ import annotations

from collections.abc import Sequence

from amp_engine.engine import Engine
from amp_engine.errors import AmpStateError, AmpTypeError
from amp_engine.levels.policy import Policy
from amp_engine.scaling.scaler import LossScaler, check_bounds


class EnginePolicy:
    """The policy of an engine, as `_amp_state.opt_properties` shows it.

    Args:
        engine: `initialize` of which was called.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def policy(self) -> Policy | None:
        """As it is now."""
        return self._engine.policy

    def set_policy(self, policy: Policy) -> None:
        """Change it.

        `enabled` decides what `scale_loss` does from now on; `patch_torch_functions=False` takes the function casts
        away. The other properties were decided with the model: AmpStateError for what would change them.
        """
        engine = self._engine
        if engine.policy is None:
            raise AmpStateError(
                "opt_properties was written after amp.close().  Call model, optimizer = amp.initialize(model, "
                "optimizer, opt_level=...) first."
            )
        before, after = engine.policy.properties(), policy.properties()
        for name in [name for name in after if after[name] != before[name]]:
            can_change = {"enabled": bool(engine.scalers), "patch_torch_functions": not policy.patch_torch_functions}
            if not can_change.get(name, False):
                hint = "_amp_state.loss_scalers[0]._loss_scale = 2.0**16, or " if name == "loss_scale" else ""
                raise AmpStateError(
                    f"{name} is {before[name]!r} since amp.initialize, which has acted on it.  Call {hint}amp.close() "
                    f"and amp.initialize(..., {name}={after[name]!r})."
                )
        if before["patch_torch_functions"] and not policy.patch_torch_functions:
            engine.function_casts.remove()
        engine.policy = policy


def replace_scalers(engine: Engine, scalers: Sequence[LossScaler]) -> None:
    """Use other loss scalers from the next `scale_loss` on. Raises AmpTypeError for what are none."""
    if not isinstance(scalers, (list, tuple)) or not all(isinstance(scaler, LossScaler) for scaler in scalers):
        raise AmpTypeError("loss_scalers is a list of LossScaler.  Use for example [LossScaler('dynamic')].")
    engine.scalers = list(scalers)


def bound_scales(engine: Engine, min_loss_scale: float | None, max_loss_scale: float) -> None:
    """Keep dynamic scales within these bounds from their next update on. Raises AmpValueError, as `initialize`."""
    check_bounds(min_loss_scale, max_loss_scale)
    engine.min_loss_scale, engine.max_loss_scale = min_loss_scale, max_loss_scale
    for scaler in engine.scalers:
        scaler.bound(min_loss_scale, max_loss_scale)
