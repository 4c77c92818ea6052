"""The gradients of one backward as the next step will read them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from amp_engine.ground.distributed import local_of
from amp_engine.stepping import arithmetic
from amp_engine.stepping.backward import Backward
from amp_engine.stepping.rows import Rows


class ClosedGradient(NamedTuple):
    """One parameter's gradient.

    Attributes:
        param: the model's own parameter.
        values: the stored values of its gradient, on this rank; complex ones as pairs of reals.
        is_scaled: True if `values` still have the loss scale, as half gradients of masters do.
    """

    param: Tensor
    values: Tensor
    is_scaled: bool


def closed_gradients(rows: Sequence[Rows], backward: Backward | None) -> Iterator[ClosedGradient]:
    """Yield each gradient once, at the exit of a `scale_loss`; without a Backward nothing is scaled.

    After several backwards a gradient is their sum. No host sync.
    """
    seen: set[int] = set()
    for one in rows:
        columns, totals = one.columns, one.totals()
        for row, (param, master) in enumerate(zip(columns.params, columns.masters, strict=True)):
            total = totals.get(row)
            grad = param.grad if total is None else total
            if id(param) in seen or grad is None:
                continue
            seen.add(id(param))
            is_scaled = master is not None and total is None and backward is not None
            values = arithmetic.reals(arithmetic.values(local_of(grad.detach())))
            yield ClosedGradient(param, values, is_scaled)
