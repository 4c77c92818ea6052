"""timm: `AmpScaler()` in the place of `timm.utils.NativeScaler()`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from amp_engine import amp
from amp_engine.integrations.extras import needs

with needs("timm"):
    from timm.utils import NativeScaler
    from timm.utils.clip_grad import dispatch_clip_grad


class AmpScaler(NativeScaler):
    """timm's loss scaler for a model and an optimizer that `amp.initialize` took, at any level.

    Args:
        device: ignored; NativeScaler takes it.
    """

    def __init__(self, device: Any = None) -> None:
        self._scaler = amp.GradScaler()

    def __call__(
        self,
        loss: Tensor,
        optimizer: Optimizer,
        clip_grad: float | None = None,
        clip_mode: str = "norm",
        parameters: Iterable[Tensor] | None = None,
        create_graph: bool = False,
        need_update: bool = True,
    ) -> None:
        """Run the backward; with `need_update` clip the gradients stepped for `parameters`, and step, or skip."""
        self._scaler.scale(loss).backward(create_graph=create_graph)
        if not need_update:
            return
        if clip_grad is not None:
            self._scaler.unscale_(optimizer)
            clipped = [*(amp.master_params(optimizer) if parameters is None else parameters)]
            if clip_mode == "norm":
                amp.clip_grad_norm_(clipped, clip_grad)
            elif clip_mode == "value":
                amp.clip_grad_value_(clipped, clip_grad)
            else:
                dispatch_clip_grad(clipped, clip_grad, mode=clip_mode)
        self._scaler.step(optimizer)
        self._scaler.update()
