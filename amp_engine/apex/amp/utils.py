"""`apex.amp.utils`."""

from typing import Any

from torch import Tensor


def is_fp_tensor(x: Any) -> bool:
    """Whether `x` is a floating tensor, or a list or tuple of nothing else."""
    if isinstance(x, (list, tuple)):
        return all(map(is_fp_tensor, x))
    return isinstance(x, Tensor) and x.is_floating_point()
