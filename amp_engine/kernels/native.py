"""The compiled kernels as a backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from amp_engine.errors import AmpValueError
from amp_engine.kernels.backend import Checks, Gradients, TensorList
from amp_engine.kernels.formulas import Formula


def _call(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` of the native module, whose refusals become ours."""
    try:
        return function(*args)
    except ValueError as e:
        raise AmpValueError(str(e)) from e


class NativeBackend:
    """The operations of the native module."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def check(self, tensors: Sequence[Tensor]) -> Checks:
        """Look at every element once."""
        return Checks._make(_call(self._module.check, tensors))

    def l2norm(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """2-norm over all of them, and of each of them."""
        norms: tuple[Tensor, Tensor] = _call(self._module.l2norm, tensors)
        return norms

    def unscaled(self, tensors: Sequence[Tensor], inv_scale: Tensor) -> list[Tensor]:
        """`[t.float() * inv_scale for t in tensors]`."""
        copies = [torch.empty_like(t, dtype=torch.float32, requires_grad=False) for t in tensors]
        _call(self._module.check, tensors, copies, inv_scale)
        return copies

    def unscale_(self, tensors: Sequence[Tensor], inv_scale: Tensor) -> Checks:
        """`t *= inv_scale` for each."""
        return Checks._make(_call(self._module.check, tensors, tensors, inv_scale))

    def scale_(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], factor: Tensor) -> Checks:
        """`output[...] = input * factor` pairwise."""
        return Checks._make(_call(self._module.check, inputs, outputs, factor))

    def axpby_(
        self,
        outputs: Sequence[Tensor],
        xs: Sequence[Tensor],
        ys: Sequence[Tensor],
        a: Tensor | None,
        b: Tensor | None,
    ) -> Checks:
        """`output[...] = fma(a, x, b * y)` triple by triple."""
        return Checks._make(_call(self._module.axpby, outputs, xs, ys, a, b))

    def cast_copy_(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """`output[...] = input` pairwise."""
        _call(self._module.cast_copy, outputs, inputs)

    def update_scale_(
        self,
        scale: Tensor,
        growth_tracker: Tensor,
        found_inf: Tensor,
        hysteresis_tracker: Tensor | None,
        inv_scale_used: Tensor | None,
        found_inf_used: Tensor | None,
        growth_factor: float,
        backoff_factor: float,
        growth_interval: int,
        hysteresis: int,
        min_scale: float,
        max_scale: float,
        dynamic: bool,
    ) -> None:
        """Adjust a loss scale after one backward."""
        try:
            self._module.update_scale(
                scale,
                growth_tracker,
                hysteresis_tracker,
                found_inf,
                inv_scale_used,
                growth_factor,
                backoff_factor,
                growth_interval,
                hysteresis,
                min_scale,
                max_scale,
                dynamic,
                found_inf_used,
            )
        except ValueError as e:
            raise AmpValueError(str(e)) from e

    def repeated_check(self) -> NativeCheck:
        """One for a list that is checked again and again."""
        return NativeCheck(self._module.ListOperation())

    def built_table(
        self,
        formula: str,
        weights: Sequence[Tensor],
        copies: TensorList,
        state1: TensorList,
        state2: TensorList,
        groups: Sequence[int],
        steps: Tensor,
        norms: Tensor | None,
    ) -> NativeTable:
        """The table of one optimizer's tensors."""
        table = _call(self._module.StepTable, formula, weights, copies, state1, state2, groups, steps, norms)
        return NativeTable(table)


class NativeCheck:
    """`check` and `unscale_` over one list in one pass; on a GPU what did not change since the last run stays there."""

    def __init__(self, operation: Any) -> None:
        self._check, self._multiply = operation.check, operation.multiply

    def run(
        self, tensors: TensorList, outputs: TensorList | None, scale: Tensor, found_inf: Tensor, norm: Tensor
    ) -> Checks:
        """See `kernels.ListCheck.run`."""
        return Checks._make(_call(self._check, tensors, outputs, scale, True, found_inf, norm, scale))

    def multiply_(self, tensors: TensorList, factor: Tensor) -> None:
        """See `kernels.ListCheck.multiply_`."""
        _call(self._multiply, tensors, factor)


class NativeTable:
    """The tensors of one optimizer, as a table in the kernels' form."""

    def __init__(self, table: Any) -> None:
        self._step = table.step
        self.is_current: Callable[[], bool] = table.is_current

    def step(
        self,
        grads: TensorList,
        scaled: Sequence[bool],
        groups: Sequence[Formula],
        inv_scale: Tensor | None,
        found_inf: Tensor | None,
        norm: Tensor | None,
        max_norm: float,
        checks: Checks | None,
        gradient_norm: Tensor | None,
    ) -> None:
        """See `kernels.StepTable.step`."""
        _, sum_squares, largest = (None, None, None) if checks is None else checks
        try:
            self._step(grads, scaled, groups, inv_scale, found_inf, norm, max_norm, sum_squares, largest, gradient_norm)
        except ValueError as e:
            raise AmpValueError(str(e)) from e


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
