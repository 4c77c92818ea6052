"""Loss scales for programs that keep FP32 masters themselves: plain numbers on the host."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class LossScaler:
    """A static loss scale, which never checks for overflows."""

    def __init__(self, scale: float = 1) -> None:
        self.cur_scale: float = scale

    @property
    def loss_scale(self) -> float:
        """`cur_scale`."""
        return self.cur_scale

    def has_overflow(self, params: Iterable[nn.Parameter]) -> bool:
        """Return False: a static scale does not check gradients."""
        del params
        return False

    def update_scale(self, overflow: bool) -> None:
        """Leave the scale as it is."""
        del overflow

    def scale_gradient(
        self, module: nn.Module, grad_in: tuple[Tensor | None, ...], grad_out: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, ...]:
        """Scale the gradients that a module passes on: for `register_full_backward_hook`."""
        del module, grad_out
        return tuple(None if grad is None else self.loss_scale * grad for grad in grad_in)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Run `(loss * loss_scale).backward()`."""
        (loss * self.loss_scale).backward(retain_graph=retain_graph)


class DynamicLossScaler(LossScaler):
    """A loss scale that falls with every overflow, not below 1, and grows while there are none.

        cur_scale = max(cur_scale / scale_factor, 1), if there was an overflow, else
        cur_scale *= scale_factor, at every scale_window-th iteration since the last overflow

    Args:
        init_scale: the first scale.
        scale_factor: above 1.
        scale_window: iterations without an overflow between two growths.

    Attributes:
        cur_iter: the number of calls of `update_scale`.
        last_overflow_iter: the iteration of the last overflow; -1 at first.
    """

    def __init__(self, init_scale: float = 2**32, scale_factor: float = 2.0, scale_window: int = 1000) -> None:
        super().__init__(init_scale)
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor = scale_factor
        self.scale_window = scale_window

    def has_overflow(self, params: Iterable[nn.Parameter]) -> bool:
        """Return True if a gradient of `params` holds an inf or a NaN. Waits once per device.

        Tests every element: the sum, which apex tested, is infinite for some finite gradients.
        """
        by_device: dict[torch.device, list[Tensor]] = {}
        for param in params:
            if param.grad is not None:
                grad = param.grad.detach()
                values = grad.coalesce().values() if grad.is_sparse else grad
                by_device.setdefault(values.device, []).append(values)
        finite = (torch.stack([values.isfinite().all() for values in grads]) for grads in by_device.values())
        return not all(bool(of_device.all()) for of_device in finite)

    def update_scale(self, overflow: bool) -> None:
        """Adjust the scale after one iteration, with or without an overflow."""
        if overflow:
            self.cur_scale = max(self.cur_scale / self.scale_factor, 1)
            self.last_overflow_iter = self.cur_iter
        elif (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
            self.cur_scale *= self.scale_factor
        self.cur_iter += 1
