"""The hot path behind the steps: the tensors of one optimizer as a table, built once and used each step."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from amp_engine.kernels.backend import Checks, TensorList
from amp_engine.kernels.choice import backend_for
from amp_engine.kernels.formulas import Formula


class StepTable:
    """The tensors of one optimizer, stepped together.

    Args:
        formula: a key of `kernels.FORMULAS`: "adam", "sgd", "adagrad", "novograd" or "lamb".
        weights: n masters (float32), or parameters (of any of the three types).
        copies: n low-precision parameters that the new weights are rounded into, or None; of a bfloat16 weight also its
            remainder, int16: the two are stepped as the float32 that they are halves of (halves.py).
        state1: n, float32: exp_avg, momentum buffer or sum; None where the optimizer keeps none. Of "adam" also
            bfloat16, which is rounded by chance.
        state2: n, as state1: exp_avg_sq; None where the optimizer keeps none.
        groups: n places in the list of groups that `step` is given.
        steps: float32, shape [n], contiguous: how many steps each tensor has had.
        norms: float32, shape [n], contiguous: NovoGrad's norms.
    """

    def __init__(
        self,
        formula: str,
        weights: Sequence[Tensor],
        copies: TensorList,
        state1: TensorList,
        state2: TensorList,
        groups: Sequence[int],
        steps: Tensor,
        norms: Tensor | None = None,
    ) -> None:
        backend = backend_for(steps.device)
        self._table = backend.built_table(formula, weights, copies, state1, state2, groups, steps, norms)

    def is_current(self) -> bool:
        """Whether every tensor still has the memory that the table points to."""
        return self._table.is_current()

    def step(
        self,
        grads: TensorList,
        scaled: Sequence[bool],
        groups: Sequence[Formula],
        *,
        inv_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        norm: Tensor | None = None,
        max_norm: float = math.inf,
        checks: Checks | None = None,
        gradient_norm: Tensor | None = None,
    ) -> None:
        """One step of every tensor that has a gradient; of none, counts included, where `found_inf != 0`. No host sync.

        Args:
            grads: n, of the weights' shapes and strides, or None. Not written.
            scaled: n: which of them are multiplied by `inv_scale * min(1, max_norm / (norm + 1e-6))`.
            groups: hyperparameters of each group, of the formula's class in formulas.py.
            inv_scale: float32, shape []; None is 1.
            found_inf: float32, shape []; None is 0.
            norm: float32, shape []: of all unscaled gradients. None: not clipped.
            checks: of exactly these gradients; None: LAMB and NovoGrad read them once more.
            gradient_norm: float32, shape []: LAMB clips by it; None: by that over all gradients of this call.
        """
        self._table.step(grads, scaled, groups, inv_scale, found_inf, norm, max_norm, checks, gradient_norm)
