"""The compiled loops over parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from amp_engine.kernels.backend import Gradients


class NativeTensorLists:
    """The loops of the native module: its very functions, since a call of Python's around one costs as much as it."""

    def __init__(self, module: Any) -> None:
        self._gradients = module.gradients
        self._watch_collectives = module.watch_collectives
        self.params = module.Params
        self.marks = module.Marks
        self.gradient_marks = module.GradientMarks
        self.copies = module.copies
        self.watch_gradients = module.watch_gradients
        self.are_gradients_unwritten = module.are_gradients_unwritten
        self.either = module.either
        self.any_gradient = module.any_gradient
        self.same_objects = module.same_objects
        self.same_entries = module.same_entries
        self.discard_gradients = module.discard_gradients

    def gradients(self, params: Sequence[Tensor]) -> Gradients:
        """The gradient of each parameter."""
        return Gradients._make(self._gradients(params))

    def watch_collectives(
        self, writing: Sequence[str], reading: Sequence[str], listener: Callable[[list[Tensor], bool], None]
    ) -> bool:
        """Have operators of c10d find memory that was asked for, and tell what they write."""
        self._watch_collectives(list(writing), list(reading), listener)
        return True
