"""apex's `_amp_state.opt_properties`, as scripts read and write it: views of the engine's policy."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

from amp_engine.errors import AmpStateError
from amp_engine.levels.policy import Policy

if TYPE_CHECKING:
    from amp_engine.engine import Engine


class Draft:
    """The policy of a `Properties()` without an engine, as in apex before `initialize`."""

    def __init__(self) -> None:
        self.policy: Policy | None = Policy()

    def set_policy(self, policy: Policy) -> None:
        """Replace the policy."""
        self.policy = policy


class Options(MutableMapping[str, Any]):
    """`opt_properties.options`: apex's seven properties in print order, to read and to write."""

    def __init__(self, holder: Engine | Draft) -> None:
        self._holder = holder

    def __getitem__(self, name: str) -> Any:
        return self._policy.properties()[name]

    def __setitem__(self, name: str, value: Any) -> None:
        """Raises AmpStateError, AmpTypeError or AmpValueError for a value that does not fit, or is set too late."""
        self._holder.set_policy(self._policy.with_property(name, value))

    def __delitem__(self, name: str) -> None:
        raise AmpStateError(f"opt_properties.options[{name!r}] cannot be deleted.  Assign a value to it instead.")

    def __iter__(self) -> Iterator[str]:
        return iter(self._policy.properties())

    def __len__(self) -> int:
        return len(self._policy.properties())

    def __repr__(self) -> str:
        return repr(self._policy.properties())

    @property
    def _policy(self) -> Policy:
        return self._holder.policy or Policy()


class Properties:
    """`_amp_state.opt_properties`: a policy as attributes, and as the mapping `options`.

    Args:
        holder: an Engine, whose policy it shows; without one it has a policy of its own, as before `initialize`.
    """

    _holder: Engine | Draft

    def __init__(self, holder: Engine | None = None) -> None:
        self.__dict__["_holder"] = Draft() if holder is None else holder

    @property
    def options(self) -> Options:
        """The properties as a mapping."""
        return Options(self._holder)

    def become(self, policy: Policy) -> None:
        """Set every property."""
        self._holder.set_policy(policy)

    def __getattr__(self, name: str) -> Any:
        if name in Policy().properties():
            return self.options[name]
        raise AttributeError(f"'Properties' object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        self.options[name] = value
