"""The gradient of a script's first backward at O0, and its relative error at a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from amp_engine.tools.diagnosis.recorder import places_in
from amp_engine.tools.recipes import RECIPES
from amp_engine.tools.telemetry.compare_levels import compared_gradients
from amp_engine.tools.telemetry.emulation import Emulation


class FirstGradient:
    """Writes the gradient of the first backward at O0 to a file, or compares a recipe's gradient with the file.

    Args:
        level: O0 or a recipe, which is emulated from `begin` to `end`.
    """

    def __init__(self, level: str, path: str) -> None:
        self._recipe = RECIPES.get(level)
        self._path = path
        self._emulated = ExitStack()

    def begin(self, models: Sequence[nn.Module]) -> None:
        """Emulate the recipe, if there is one, in all operations of this thread."""
        if self._recipe is not None:
            emulation = Emulation(models, self._recipe)
            self._emulated.callback(emulation.end)
            self._emulated.enter_context(emulation.following())

    def end(self, models: Sequence[nn.Module]) -> float | None:
        """Write the gradient, or return its relative error at the recipe. Waits for the device."""
        self._emulated.close()
        places = places_in(models)
        params = [p for model in models for p in model.parameters()]
        gradients: dict[str, Tensor] = {places[id(p)].parameter: p.grad for p in params if p.grad is not None}
        if self._recipe is None:
            torch.save(gradients, self._path)
            return None
        return compared_gradients(gradients, torch.load(self._path, "cpu", weights_only=True))[1].relative
