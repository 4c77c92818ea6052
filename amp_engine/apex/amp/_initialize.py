"""`apex.amp._initialize`."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from amp_engine.ground.containers import map_tensors


def applier(value: Any, fn: Callable[[Tensor], Any]) -> Any:
    """`value` with `fn` applied to every tensor in it.

    Walked are lists, tuples, named tuples, deques, mappings, dataclass instances and objects with a `to` method; see
    `amp_engine.ground.containers`. Containers keep their types, and the one handed in is not changed.
    """
    return map_tensors(value, fn)
