"""Moving averages of a model's weights in FP32: of the masters, where weights have some."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import swa_utils

from amp_engine.errors import AmpTypeError
from amp_engine.ground.dtypes import is_low_precision
from amp_engine.initialization.cast_model import CastInputs, without_casts
from amp_engine.stepping.exact import exact_value

MultiAvgFn = Callable[[Any, Any, Any], None]
AvgFn = Callable[[Tensor, Tensor, Any], Tensor]


class AveragedModel(swa_utils.AveragedModel):
    """torch.optim.swa_utils.AveragedModel, in FP32 whatever the level.

    `module` is a copy of the model with exact FP32 parameters and FP32 buffers and without casts; floating inputs
    are cast to FP32 where the model casts its own. State dictionaries are as of torch's class around an FP32 model.
    """

    averages_exactly = True  # so its copy deserves no warning

    def __init__(
        self,
        model: nn.Module,
        device: int | torch.device | None = None,
        avg_fn: AvgFn | None = None,
        multi_avg_fn: MultiAvgFn | None = None,
        use_buffers: bool = False,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise AmpTypeError(
                f"averaged_model() takes a torch.nn.Module, not a {type(model).__name__}.  Call "
                "amp.averaged_model(model, optimizer), for each model one."
            )
        super().__init__(model, device, avg_fn, multi_avg_fn, use_buffers)
        _widen(self.module, model)

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Move the average towards the model: its masters, its FP32 parameters, and with `use_buffers` its buffers.

        The first time they are copied. No host sync but torch's own, which reads `n_averaged`.
        """
        exact: Any = SimpleNamespace(
            parameters=lambda: _exact(model.parameters()), buffers=lambda: _exact(model.buffers())
        )
        super().update_parameters(exact)


def _exact(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    for tensor in tensors:
        if not is_low_precision(tensor):
            yield tensor
            continue
        value_f32 = exact_value(tensor) if isinstance(tensor, nn.Parameter) else None
        yield tensor.detach().float() if value_f32 is None else value_f32


@torch.no_grad()
def _widen(twin: nn.Module, model: nn.Module) -> None:
    """Make `twin`, a copy of `model`, an FP32 model with the exact values, where it is."""
    was_cast = without_casts(twin)
    pairs: list[tuple[Tensor, Tensor]] = [*zip(twin.parameters(), model.parameters(), strict=True)]
    pairs += zip(twin.buffers(), model.buffers(), strict=True)
    for (copy, _), exact in zip(pairs, _exact(tensor for _, tensor in pairs), strict=True):
        if copy.is_leaf:
            copy.grad = None
        if is_low_precision(copy):
            copy.data = exact.to(copy.device, torch.float32, copy=True)
    for module in twin.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()  # cuDNN wants its weights in one chunk again
    if was_cast:
        twin.register_forward_pre_hook(CastInputs(torch.float32), with_kwargs=True)
