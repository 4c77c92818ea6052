"""The gradients of one backward as the next step will read them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from amp_engine.ground.distributed import local_of
from amp_engine.stepping import arithmetic
from amp_engine.stepping.rows import Rows


class ClosedGradient(NamedTuple):
    """One parameter's gradient.

    Attributes:
        param: the model's own parameter.
        values: the stored values of its gradient, unscaled, on this rank; complex ones as pairs of reals.
    """

    param: Tensor
    values: Tensor


def closed_gradients(rows: Sequence[Rows]) -> Iterator[ClosedGradient]:
    """Yield each gradient once, at the exit of a `scale_loss`.

    After several backwards a gradient is their sum. No host sync.
    """
    seen: set[int] = set()
    for one in rows:
        for param in one.columns.params:
            grad = param.grad
            if id(param) not in seen and grad is not None:
                seen.add(id(param))
                yield ClosedGradient(param, arithmetic.reals(arithmetic.values(local_of(grad.detach()))))
