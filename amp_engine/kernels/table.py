"""The hot path behind the steps: the tensors of one optimizer as a table, built once and walked each step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from amp_engine.errors import AmpValueError
from amp_engine.kernels import _native, reference
from amp_engine.kernels.hyperparameters import Hyperparameters
from amp_engine.kernels.reference import Checks
from amp_engine.kernels.refusals import TensorList


def native_for(device: torch.device) -> Any:
    """The native module if it computes on `device`, else None."""
    module = _native.module
    if module is None or device.type == "cpu":
        return module
    return module if device.type == "cuda" and module.has_cuda else None


def has_native(device: torch.device) -> bool:
    """Whether tensors on `device` are computed by the compiled kernels."""
    return native_for(device) is not None


def native_call(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` of the native module, whose refusals become ours."""
    try:
        return function(*args)
    except ValueError as e:
        raise AmpValueError(str(e)) from e


class StepTable:
    """The tensors of one optimizer, stepped together: native where that is possible, else `reference.StepTable`.

    Arguments, methods and what they raise are `reference.StepTable`'s.
    """

    def __init__(
        self,
        kind: str,
        weights: Sequence[Tensor],
        copies: TensorList,
        state1: TensorList,
        state2: TensorList,
        groups: Sequence[int],
        steps: Tensor,
        norms: Tensor | None = None,
    ) -> None:
        self._native: Any = None
        self._reference: reference.StepTable | None = None
        native = native_for(steps.device)
        if native is None:
            self._reference = reference.StepTable(kind, weights, copies, state1, state2, groups, steps, norms)
        else:
            self._native = native_call(native.StepTable, kind, weights, copies, state1, state2, groups, steps, norms)

    def is_current(self) -> bool:
        """Whether every tensor still has the memory that the table points to."""
        return self._native.is_current() if self._reference is None else self._reference.is_current()

    def step(
        self,
        grads: TensorList,
        scaled: Sequence[bool],
        groups: Sequence[Hyperparameters],
        *,
        inv_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        norm: Tensor | None = None,
        max_norm: float = math.inf,
        checks: Checks | None = None,
        gradient_norm: Tensor | None = None,
    ) -> None:
        """One step of every tensor that has a gradient, see `reference.StepTable.step`. No host sync."""
        if self._reference is not None:
            self._reference.step(
                grads,
                scaled,
                groups,
                inv_scale=inv_scale,
                found_inf=found_inf,
                norm=norm,
                max_norm=max_norm,
                checks=checks,
                gradient_norm=gradient_norm,
            )
            return
        native_call(
            self._native.step,
            grads,
            scaled,
            groups,
            inv_scale,
            found_inf,
            norm,
            max_norm,
            None if checks is None else checks.sum_squares,
            None if checks is None else checks.largest,
            gradient_norm,
        )
