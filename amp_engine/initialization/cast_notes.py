"""What `initialize` tells of a cast to half: values that it loses, and what stays FP32."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from amp_engine.casting.keep_float import is_kept
from amp_engine.casting.one_type import is_layer
from amp_engine.ground.distributed import is_sharded
from amp_engine.ground.dtypes import LOW_PRECISION, is_low_precision
from amp_engine.ground.torch_private import BatchNormBase
from amp_engine.initialization.arguments import ZERO_IN_FLOAT16
from amp_engine.initialization.as_it_came import came_in_half, declared_modules, declared_tensors
from amp_engine.initialization.cast_model import cast_targets
from amp_engine.levels import report
from amp_engine.levels.policy import Policy

_INFINITE = 65520.0  # rounds to inf in float16: midpoint of its largest number and the one that would follow


def notes(models: Sequence[nn.Module], policy: Policy) -> list[str]:
    """The messages of a cast that is to come. Waits for the device."""
    dtype = policy.cast_model_type
    if dtype not in LOW_PRECISION:
        return []
    targets = [cast_targets(model, dtype, bool(policy.keep_batchnorm_fp32)) for model in models]
    said = [line for pair in zip(models, targets, strict=True) for line in _fp32_parts(*pair, dtype)]
    return [*said, *report.lost_values(str(policy.opt_level), dtype, *_lost_values(models, targets, dtype))]


def _lost_values(
    models: Sequence[nn.Module], targets: Sequence[list[tuple[Tensor, torch.dtype]]], dtype: torch.dtype
) -> tuple[list[str], list[str], list[str]]:
    """Name parameters and buffers of which values become infinite, 0 (of parameters: all), or other whole numbers.

    Of parameters only those are looked at that float16 cannot hold: bfloat16 has the range of float32.
    """
    infinite: list[str] = []
    zero: list[str] = []
    whole: list[str] = []
    for model, of_model in zip(models, targets, strict=True):
        cast = {id(t) for t, to in of_model if to is not t.dtype and t.numel() and not (is_sharded(t) or t.is_meta)}
        params = {name: p.detach() for name, p in model.named_parameters() if id(p) in cast}
        largest = torch._foreach_norm([*params.values()], float("inf")) if params and dtype is torch.float16 else []
        for name, most in zip(params, map(float, largest), strict=False):
            if _INFINITE <= most < math.inf:
                infinite.append(name)
            if 0 < most <= ZERO_IN_FLOAT16:
                zero.append(name)
        for name, buffer in model.named_buffers():
            if id(buffer) in cast:
                after = buffer.to(dtype).to(buffer.dtype)
                if (buffer.isfinite() & ~after.isfinite()).any():
                    infinite.append(name)
                if ((buffer != 0) & (after == 0)).any():
                    zero.append(name)
                if (buffer == buffer.round()).all() and ((buffer != after) & after.isfinite()).any():
                    whole.append(name)
    return infinite, zero, whole


def _fp32_parts(model: nn.Module, targets: list[tuple[Tensor, torch.dtype]], dtype: torch.dtype) -> Iterator[str]:
    """The messages of what the cast of `model` leaves in FP32, but for batch norms and kept modules."""
    came = next((p.dtype for p in model.parameters() if is_low_precision(p)), None) if came_in_half(model) else None
    declared = {} if came else {**dict(declared_modules(model)), **dict(declared_tensors(model))}
    stay = {id(t) for t, to in targets if to is t.dtype and not is_low_precision(t)}
    said = {id(t) for m in model.modules() if is_kept(m) or isinstance(m, BatchNormBase) for t in _tensors(m)}
    said |= {id(one) for one in declared.values()}
    named = chain(model.named_parameters(), model.named_buffers())
    halved = {id(t) for t, to in targets if to is dtype and t.dtype is not dtype} if came is None else set()
    beside = [
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if id(buffer) in halved and not is_layer(module) and not _is_mask(buffer, dtype)
    ]
    return report.fp32_parts(came, [*declared], [name for name, t in named if id(t) in stay - said], beside)


def _is_mask(buffer: Tensor, dtype: torch.dtype) -> bool:
    """True if `dtype` holds each value, and these differ: what is constant may be a state that begins."""
    if buffer.is_meta or is_sharded(buffer) or buffer.numel() == 0:
        return True
    return torch.equal(buffer.to(dtype).to(buffer.dtype), buffer) and bool((buffer != buffer.reshape(-1)[0]).any())


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()
