"""Steps of optimizers by the compiled kernels: of a table of tensors that is stepped many times, or of tensors once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from amp_engine.errors import AmpStateError, AmpValueError
from amp_engine.kernels.backend import Checks, TensorList
from amp_engine.kernels.choice import NATIVE, missing
from amp_engine.kernels.formulas import FORMULAS, Formula
from amp_engine.kernels.library import call_operator, define, fake_nothing, is_traced


class StepTable(Protocol):
    """The tensors of one optimizer, stepped together by the compiled kernels."""

    def is_current(self) -> bool:
        """True if every tensor still has the memory that the table points to."""
        ...

    def step(
        self,
        grads: TensorList,
        scaled: Sequence[int],
        groups: Sequence[Formula],
        inv_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        norm: Tensor | None = None,
        max_norm: float = math.inf,
        checks: Checks | None = None,
        gradient_norm: Tensor | None = None,
    ) -> None:
        """Step every tensor that has a gradient; change none, counts included, if `found_inf != 0`. No host sync.

        Args:
            grads: n, of the weights' shapes and strides, or None. Not written.
            scaled: n; 1 for gradients that are multiplied by `inv_scale * min(1, max_norm / (norm + 1e-6))`.
            groups: hyperparameters of each group, of the formula's class in formulas.py.
            inv_scale: float32, shape []; None is 1.
            found_inf: float32, shape []; None is 0.
            norm: float32, shape []: the norm of all unscaled gradients; None does not clip.
            max_norm: the norm that gradients are clipped to.
            checks: findings about exactly these gradients; None: LAMB and NovoGrad read the gradients once more.
            gradient_norm: float32, shape []: the norm by which LAMB clips; None: the norm of this call's gradients.

        Raises:
            AmpValueError: for tensors that cannot be stepped together; nothing is written.
            AmpTypeError: for hyperparameters of another formula.
        """
        ...


def step_table(
    formula: str,
    weights: TensorList,
    copies: TensorList,
    state1: TensorList,
    state2: TensorList,
    groups: Sequence[int],
    steps: Tensor,
    norms: Tensor | None = None,
    adopts: bool = False,
) -> StepTable:
    """Build the table of one optimizer's tensors on the device of `steps`.

    Args:
        formula: a key of `kernels.FORMULAS`: "adam", "sgd", "adagrad", "novograd" or "lamb".
        weights: n masters (float32), or parameters (of any of the three types).
        copies: n low-precision parameters that the new weights are rounded into, or None. The entry of a bfloat16
            weight may be its remainder, int16 or uint8: the step then updates what the two hold (halves.py).
        state1: n, float32: exp_avg, momentum buffer or sum; None if the optimizer keeps none. "adam" and "sgd" also
            take bfloat16, or uint8 in blocks (blocks.py), which are rounded stochastically.
        state2: n, like state1: exp_avg_sq; None if the optimizer keeps none.
        groups: n places in the list of groups that `step` gets.
        steps: float32, shape [n], contiguous: the number of steps that each tensor has had.
        norms: float32, shape [n], contiguous: NovoGrad's norms.
        adopts: True if other code may write copies of masters: elements that are not the master rounded replace it.

    Raises:
        AmpValueError: for tensors that cannot be stepped together.
        AmpStateError: if no compiled kernels compute on that device.
    """
    reason = missing(steps.device)
    if reason is not None:
        raise AmpStateError(f"A step of {formula} by amp_engine needs compiled kernels: {reason}.")
    kind = NATIVE[steps.device.type].StepTable
    table: StepTable = kind(formula, weights, copies, state1, state2, groups, steps, norms, adopts)
    return table


def step_once(
    formula: Formula,
    grads: TensorList,
    params: Sequence[Tensor],
    state1: Sequence[Tensor] | None,
    state2: Sequence[Tensor] | None,
    steps: Tensor,
    norms: Tensor | None = None,
    copies: TensorList | None = None,
    *,
    inv_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    gradient_norm: Tensor | None = None,
) -> None:
    """Step tensors once; the arguments are those of `step_table` and its `step`.

    Args:
        state1, state2: None if the formula has no such state.
        copies: None if there are none.
    """
    name = type(formula).__name__.lower()
    if copies and len(copies) != len(params):
        raise AmpValueError(
            f"{name}_: copies has {len(copies)} entries, but params has {len(params)}.  "
            "All lists of one call are of one length."
        )
    arguments: tuple[Any, ...] = (
        grads,
        params,
        # No torch that we support can trace a list that is written and holds None.
        [copy for copy in copies or () if copy is not None],
        [i for i, copy in enumerate(copies or ()) if copy is not None],
        state1 or [],
        state2 or [],
        steps,
        norms,
        inv_scale,
        found_inf,
        gradient_norm,
        *((formula.lr, 0.0) if isinstance(formula.lr, Tensor) else (None, formula.lr)),
    )
    hyperparameters = {field.name: getattr(formula, field.name) for field in fields(formula) if field.name != "lr"}
    if is_traced(steps):
        call_operator(f"{name}_", *arguments, **hyperparameters)
    else:
        _step(name, *arguments, **hyperparameters)


def _step(
    name: str,
    grads: TensorList,
    params: Sequence[Tensor],
    copies: Sequence[Tensor],
    rows_with_copy: Sequence[int],
    state1: Sequence[Tensor],
    state2: Sequence[Tensor],
    steps: Tensor,
    norms: Tensor | None,
    inv_scale: Tensor | None,
    found_inf: Tensor | None,
    gradient_norm: Tensor | None,
    lr_tensor: Tensor | None,
    lr: float,
    **hyperparameters: Any,
) -> None:
    n = len(params)
    formula = FORMULAS[name](lr=lr if lr_tensor is None else lr_tensor, **hyperparameters)
    by_row = dict(zip(rows_with_copy, copies, strict=True))
    none: list[Tensor | None] = [None] * n
    table = step_table(
        name, params, [by_row.get(i) for i in range(n)], state1 or none, state2 or none, [0] * n, steps, norms
    )
    table.step(grads, [True] * n, [formula], inv_scale=inv_scale, found_inf=found_inf, gradient_norm=gradient_norm)


for _name, _formula in FORMULAS.items():
    _hyperparameters = ", ".join(f"{f.type} {f.name}={f.default}" for f in fields(_formula) if f.name != "lr")
    define(
        f"{_name}_",
        partial(_step, _name),
        "(Tensor?[] grads, Tensor(a!)[] params, Tensor(b!)[] copies, int[] rows_with_copy, Tensor(c!)[] state1, "
        "Tensor(d!)[] state2, Tensor(e!) steps, Tensor(f!)? norms, Tensor? inv_scale, Tensor? found_inf, "
        f"Tensor? gradient_norm, Tensor? lr_tensor, float lr, *, {_hyperparameters}) -> ()",
        fake_nothing,
    )
