"""Moving averages of a model's weights in FP32: of the masters, if there are any."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import swa_utils

from amp_engine.casting.in_force import discard_weight_casts
from amp_engine.errors import AmpStateError, AmpTypeError, AmpValueError
from amp_engine.ground.dtypes import is_low_precision
from amp_engine.initialization.cast_model import CastInputs, without_casts
from amp_engine.stepping.exact import float32_of
from amp_engine.stepping.rows import round_written

MultiAvgFn = Callable[[Any, Any, Any], None]
AvgFn = Callable[[Tensor, Tensor, Any], Tensor]


class AveragedModel(swa_utils.AveragedModel):
    """torch.optim.swa_utils.AveragedModel, in FP32 at every level.

    `module` is a copy of the model with exact FP32 parameters and FP32 buffers and without casts; floating inputs are
    cast to FP32 if the model casts its own. State dictionaries are like those of torch's class around an FP32 model.
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

        The first call copies them. No host sync except torch's own, which reads `n_averaged`.
        """
        exact: Any = SimpleNamespace(
            parameters=lambda: _exact(model.parameters()), buffers=lambda: _exact(model.buffers())
        )
        super().update_parameters(exact)


@contextmanager
def averaged_weights(model: nn.Module, averaged: nn.Module) -> Iterator[None]:
    """Return a context in which `model` computes with `averaged`'s weights and buffers, rounded to its own types.

        with amp.averaged_weights(model, averaged):
            evaluate(model.eval())

    Its end restores weights and buffers, bit for bit, and training continues from the masters. A checkpoint that is
    saved inside has the average, as after any write through `.data`.

    Args:
        model: also at O0, before `initialize`, and in DistributedDataParallel or torch.compile.
        averaged: `amp.averaged_model`, torch's AveragedModel, or a copy of the model, on any device.

    Uses memory for another copy of the weights and buffers. No host sync on one device.

    Raises AmpTypeError or AmpValueError, before anything is changed, unless `averaged` has weights and buffers of the
    same shapes, and AmpStateError at the end if the body wrote weights, for example by a step: these keep the values
    that were written.
    """
    weights, buffers, values = _paired(model, averaged)
    round_written(model, ())  # else the first forward would, over the average
    tensors = [*weights, *buffers]
    before = [tensor.detach().clone() for tensor in tensors]
    versions = [weight._version for weight in weights]
    try:
        _write(tensors, values)
        yield
    finally:
        written = {id(weight) for weight, version in zip(weights, versions, strict=True) if weight._version != version}
        kept = [tensor for tensor in tensors if id(tensor) not in written]
        _write(kept, [value for tensor, value in zip(tensors, before, strict=True) if id(tensor) not in written])
    if written:
        raise AmpStateError(
            f"{len(written)} weights were written in the body of averaged_weights(), where the average stands in for "
            "them.  Load and step after the body."
        )


def _write(tensors: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        present = tensor.data  # a write into it moves no version: masters follow in a step alone, which the end refuses
        if _is_expanded(tensor):  # each element of its memory is written once
            once = tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride())
            present, value = present[once], value[once]
        present.copy_(value)
    discard_weight_casts()


def _is_expanded(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and 0 in tensor.stride()


def _paired(model: nn.Module, averaged: nn.Module) -> tuple[list[nn.Parameter], list[Tensor], list[Tensor]]:
    """Return the weights and the buffers of `model`, and the values that replace both."""
    for one in (model, averaged):
        if not isinstance(one, nn.Module):
            raise AmpTypeError(
                f"averaged_weights() takes a torch.nn.Module and its average, not a {type(one).__name__}.  Call "
                "amp.averaged_weights(model, averaged) with averaged = amp.averaged_model(model, optimizer)."
            )
    inside = averaged.module if isinstance(averaged, swa_utils.AveragedModel) else averaged
    weights, buffers = [*model.parameters()], [*model.buffers()]
    values = [tensor.detach() for tensor in (*inside.parameters(), *inside.buffers())]
    shapes, wanted = [value.shape for value in values], [tensor.shape for tensor in (*weights, *buffers)]
    if shapes != wanted:
        raise AmpValueError(
            f"averaged_weights() was given a {type(model).__name__} of {len(wanted)} weights and buffers, and an "
            f"average of {len(shapes)}, or of other shapes.  Pass the average of this model: averaged = "
            "amp.averaged_model(model, optimizer)."
        )
    return weights, buffers, values


def _exact(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    return (float32_of(tensor).to(tensor.device) if is_low_precision(tensor) else tensor for tensor in tensors)


@torch.no_grad()
def _widen(twin: nn.Module, model: nn.Module) -> None:
    """Make `twin`, a copy of `model`, an FP32 model with the exact values, on its own device."""
    was_cast = without_casts(twin)
    pairs: list[tuple[Tensor, Tensor]] = [*zip(twin.parameters(), model.parameters(), strict=True)]
    pairs += zip(twin.buffers(), model.buffers(), strict=True)
    for (copy, _), exact in zip(pairs, _exact(tensor for _, tensor in pairs), strict=True):
        if copy.is_leaf:
            copy.grad = None
        if is_low_precision(copy):
            copy.data = exact.to(copy.device, torch.float32, copy=True)
        elif _is_expanded(copy):  # torch's average writes buffers
            copy.data = copy.data.contiguous()
    for module in twin.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()  # cuDNN wants its weights in one chunk again
    if was_cast:
        twin.register_forward_pre_hook(CastInputs(torch.float32), with_kwargs=True)
