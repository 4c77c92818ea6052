"""A function that a user registered for casts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Registration:
    """A function that a user registered for casts: `module.name`, as "half", "float" or "promote".

    Raises ValueError if there is no such function.
    """

    kind: str
    module: Any
    name: str

    def __post_init__(self) -> None:
        if not hasattr(self.module, self.name):
            raise ValueError(f"No function named {self.name} in module {self.module}.")
