"""Whether somebody touched a gradient."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from amp_engine.stepping import arithmetic


class Seen(NamedTuple):
    """A parameter's gradient as it was, to tell later whether somebody touched it."""

    param: nn.Parameter
    grad: Tensor | None
    version: int

    def is_untouched(self) -> bool:
        """Whether the gradient is the same object with the same version."""
        return self.param.grad is self.grad and _version(self.grad) == self.version

    def is_zeroed(self) -> bool:
        """Whether the gradient went, or was written and is 0 now, as `zero_grad` does. May wait if written."""
        if self.param.grad is None:
            return self.grad is not None
        return not self.is_untouched() and not bool(arithmetic.values(self.param.grad).any())


def seen(param: nn.Parameter) -> Seen:
    """The gradient that `param` has now, or that it has none."""
    return Seen(param, param.grad, _version(param.grad))


def _version(grad: Tensor | None) -> int:
    return 0 if grad is None else grad._version
