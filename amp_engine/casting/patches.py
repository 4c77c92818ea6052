"""The only file that assigns to attributes of modules that are not ours. Every patch is undone exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from amp_engine.errors import AmpTypeError

_IMMUTABLE_TYPE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE


class Patches:
    """Assignments to attributes of foreign objects, and calls that undo them.

    A fork may come between any two statements, so each undo is noted before its assignment, and may run twice.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set `owner.name` to `value` until `undo`, which deletes a name that `owner` had inherited."""
        was_own = name in vars(owner)
        original = vars(owner).get(name)

        def put_back() -> None:
            if was_own:
                setattr(owner, name, original)
            elif name in vars(owner):
                delattr(owner, name)

        self._undo.append(put_back)
        try:
            setattr(owner, name, value)
        except Exception:  # not a KeyboardInterrupt, which may come after the assignment
            self._undo.pop()
            raise

    def on_undo(self, call: Callable[[], Any]) -> None:
        """Have `undo` call `call`, perhaps twice. Register `call` before the change that it undoes."""
        self._undo.append(call)

    def undo(self) -> None:
        """Undo everything, the last patch first."""
        while self._undo:
            try:
                self._undo[-1]()
            except Exception:
                self._undo.pop()  # it would fail again; only a KeyboardInterrupt keeps it for the next `undo`
                raise
            self._undo.pop()


def is_patchable(owner: Any) -> bool:
    """True if attributes of `owner` can be assigned: it is neither a class written in C nor an object with slots."""
    is_immutable = isinstance(owner, type) and bool(owner.__flags__ & _IMMUTABLE_TYPE)
    return hasattr(owner, "__dict__") and not is_immutable


def check_patchable(owner: Any, name: str) -> None:
    """Raise AmpTypeError if `owner.name` cannot be assigned."""
    if not is_patchable(owner):
        raise AmpTypeError(
            f"{name} of {owner!r} cannot be replaced; functions of modules and Python classes can.  Give the name that "
            "it is called by, such as (torch.Tensor, 'softmax'), or decorate with amp.half_function what calls it."
        )
