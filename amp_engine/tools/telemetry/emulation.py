"""Emulates matrix products in the formats of a recipe: operands are rounded, and multiplied in their own type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from amp_engine.casting.keep_float import is_kept
from amp_engine.ground.torch_private import is_in_backward, newest_node, running_node
from amp_engine.tools.diagnosis.recorder import Recorder, tensors_in
from amp_engine.tools.narrow_formats import quantize
from amp_engine.tools.recipes import Recipe

# Operands by position, and the dimension that the product sums over.
_MATRICES = dict.fromkeys(("mm", "bmm"), ((0, -1), (1, -2)))
_MATRICES |= dict.fromkeys(("addmm", "addmm_", "baddbmm", "baddbmm_", "addbmm", "addbmm_"), ((1, -1), (2, -2)))
_CONVOLUTIONS = {"convolution": ((0, 1), (1, 1)), "convolution_backward": ((0, 1), (1, 1), (2, 1))}


class Emulation(Recorder):
    """While `following`, rounds the operands of matrix products, in the forward and the backward.

    These are the operations that linear layers, matmul and einsum call. Fused attention, fused recurrent layers,
    products with vectors, and operations of kept modules are unchanged.

    Each of the three products of a layer rounds both of its operands, along the dimension that the product sums over.

    Args:
        models: the models, whose kept modules stay unchanged.
    """

    sees_operations = True

    def __init__(self, models: Sequence[nn.Module], recipe: Recipe) -> None:
        super().__init__(models)
        self._recipe = recipe
        self._places = _MATRICES | (_CONVOLUTIONS if recipe.has_convolutions else {})
        self._kept = {name for module, name in self.modules.items() if is_kept(module)}
        self._nodes: set[int] = set()  # nodes of the graph whose forward was emulated
        self._gradients: set[int] = set()  # storages that a backward has made

    def type_of(self, operation: str) -> str | None:
        """The type of the operands of an operation that has just run; None if it was not emulated."""
        return self._recipe.operands.element.name if operation in self._places and not self._is_kept else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        places = self._places.get(func.overloadpacket.__name__, ())
        # The recomputation of an activation checkpoint counts as a forward.
        is_backward = is_in_backward() and not torch.is_grad_enabled()
        is_emulated = running_node() in self._nodes if is_backward else not self._is_kept
        if places and is_emulated and all(_is_dense(args[place]) for place, _ in places):
            if torch.is_grad_enabled() and any(args[place].requires_grad for place, _ in places):
                self._nodes.add(newest_node())
            args = [*args]
            for place, dim in places:
                args[place] = self._rounded(args[place], dim)
        result = func(*args, **kwargs)
        if is_in_backward():
            made = _memory_of(result) - _memory_of((args, kwargs))
            self._gradients = self._gradients | made if is_backward else self._gradients - made
        return result

    @property
    def _is_kept(self) -> bool:
        return any(module in self._kept for module in self.running)

    def _rounded(self, operand: Tensor, dim: int) -> Tensor:
        is_gradient = operand.untyped_storage()._cdata in self._gradients
        form = self._recipe.gradients if is_gradient else self._recipe.operands
        return quantize(operand, form, dim).to(operand.dtype)


def _is_dense(operand: Any) -> bool:
    return isinstance(operand, Tensor) and operand.layout is torch.strided and operand.is_floating_point()


def _memory_of(values: Any) -> set[int]:
    return {one.untyped_storage()._cdata for one in tensors_in(values) if _is_dense(one)}
