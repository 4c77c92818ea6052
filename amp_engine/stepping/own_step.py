"""Calls an optimizer's own step, where the kernels cannot do it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from amp_engine.stepping.master_parameter import MasterParameter


def unhooked_step(optimizer: Optimizer) -> Callable[..., Any]:
    """Return the class's own `step`, without the wrapper in which torch runs the hooks."""
    step: Any = type(optimizer).step
    while hasattr(step, "hooked"):
        step = step.__wrapped__
    return step


@contextmanager
def foreach_as_by_default(optimizer: Optimizer) -> Iterator[None]:
    """Have torch.optim choose its foreach variant on a GPU for masters, too, and not only for exact Parameters."""
    groups = [
        group
        for group in optimizer.param_groups
        if group.get("foreach", False) is None
        and not group.get("fused")
        and not group.get("differentiable")
        and all(isinstance(p, MasterParameter) or type(p) is nn.Parameter for p in group["params"])
        and any(isinstance(p, MasterParameter) for p in group["params"])
        and all(p.is_cuda for p in group["params"])
    ]
    for group in groups:
        group["foreach"] = True
    try:
        yield
    finally:
        for group in groups:
            group["foreach"] = None
