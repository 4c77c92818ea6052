"""apex's `_amp_state.opt_properties`, as scripts read it, and the `Properties()` that they set."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from amp_engine.errors import AmpStateError
from amp_engine.levels.policy import Policy


class Properties:
    """A policy as attributes, and as the mapping `options`.

    Args:
        decided: the policy of an engine, which stays as it is; None: the properties before `initialize`, to be set.
    """

    _policy: Policy
    _is_decided: bool

    def __init__(self, decided: Policy | None = None) -> None:
        vars(self).update(_policy=decided or Policy(), _is_decided=decided is not None)

    @property
    def options(self) -> Mapping[str, Any]:
        """apex's seven properties in print order, to read."""
        return MappingProxyType(self._policy.properties())

    def become(self, policy: Policy) -> None:
        """Set every property."""
        for name, value in policy.properties().items():
            self._check(name, value)
        vars(self)["_policy"] = policy

    def __getattr__(self, name: str) -> Any:
        if name in Policy().properties():
            return self.options[name]
        raise AttributeError(f"'Properties' object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        """Raises AmpStateError, AmpTypeError or AmpValueError for a value that does not fit, or is set too late."""
        changed = self._policy.with_property(name, value)
        self._check(name, value)
        vars(self)["_policy"] = changed

    def _check(self, name: str, value: Any) -> None:
        if self._is_decided and value != self.options[name]:
            hint = "_amp_state.loss_scalers[0]._loss_scale = 2.0**16, or " if name == "loss_scale" else ""
            raise AmpStateError(
                f"{name} is {self.options[name]!r} since amp.initialize, which has acted on it.  Call {hint}"
                f"amp.close() and amp.initialize(..., {name}={value!r})."
            )
