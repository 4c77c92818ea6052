"""`apex.amp.compat`: of its helpers for old versions of torch, the one that is of use with any."""

from collections.abc import Iterable
from typing import Any


def filter_attrs(module: Any, attrs: Iterable[str]) -> list[str]:
    """Those names in `attrs` that `module` has."""
    return [name for name in attrs if hasattr(module, name)]
