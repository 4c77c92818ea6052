"""Of which types a model is, and which of its modules a level leaves in FP32, and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from amp_engine.casting.keep_float import kept_modules
from amp_engine.ground.distributed import is_sharded
from amp_engine.ground.dtypes import LOW_PRECISION
from amp_engine.ground.torch_private import BatchNormBase
from amp_engine.levels.policy import Policy
from amp_engine.telemetry.records import Kept, Model, OfType

BY_KEEP_FLOAT = "amp.keep_float"
BY_KEEP_FLOAT_O1 = "amp.keep_float: no function is cast inside of its forward"
BY_BATCH_NORM = "batch norm, by keep_batchnorm_fp32=True"
IS_SHARD = "an FP32 shard: fully_shard casts it for forward and backward"
IS_SHARED = "shared with {0}, which is kept"
NOT_FLOATING = "not floating point"
CAME_SINCE = "in this type since initialize: the module was added, or cast, afterwards"


def described(name: str, model: nn.Module, policy: Policy) -> Model:
    """One initialized model, under the policy that counts now. Changes nothing. No host sync."""
    return Model(name, type(model).__name__, tuple(_types(model)), tuple(_kept(model, policy)))


def dtype_name(dtype: torch.dtype) -> str:
    """`float16` for torch.float16."""
    return str(dtype).removeprefix("torch.")


def measured(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Those that have a shape by now: a lazy module's have none before its first forward."""
    return [tensor for tensor in tensors if not nn.parameter.is_lazy(tensor)]


def _types(model: nn.Module) -> Iterator[OfType]:
    for kind, tensors in (("parameters", measured(model.parameters())), ("buffers", measured(model.buffers()))):
        for dtype in dict.fromkeys(t.dtype for t in tensors):
            of_type = [t for t in tensors if t.dtype is dtype]
            elements = sum(t.numel() for t in of_type)
            yield OfType(kind, dtype_name(dtype), len(of_type), elements, elements * dtype.itemsize)


def _kept(model: nn.Module, policy: Policy) -> Iterator[Kept]:
    is_half = policy.cast_model_type in LOW_PRECISION or any(p.dtype in LOW_PRECISION for p in model.parameters())
    if is_half:
        yield from _kept_in_half_model(model, policy)
    elif policy.patch_torch_functions:
        names = {module: name for name, module in model.named_modules()}
        for module, _ in kept_modules(model):
            tensors = measured([*module.parameters(), *module.buffers()])
            count = sum(t.numel() for t in tensors)
            yield Kept(names[module], type(module).__name__, None, len(tensors), count, BY_KEEP_FLOAT_O1)


def _kept_in_half_model(model: nn.Module, policy: Policy) -> Iterator[Kept]:
    by_user = {part for module, _ in kept_modules(model) for part in module.modules()}
    names = {module: name for name, module in model.named_modules()}
    reasons: dict[int, str] = {}  # by id of a tensor that a module of its own is kept for
    owners: dict[int, str] = {}
    for module, name in names.items():
        is_norm = isinstance(module, BatchNormBase) and module.affine and bool(policy.keep_batchnorm_fp32)
        why = BY_KEEP_FLOAT if module in by_user else BY_BATCH_NORM if is_norm else None
        for tensor in _own(module) if why is not None else ():
            reasons.setdefault(id(tensor), str(why))
            owners.setdefault(id(tensor), name)
    for module, name in names.items():
        found: dict[tuple[torch.dtype, str], list[Tensor]] = {}
        for tensor in _own(module):
            if tensor.dtype in LOW_PRECISION:
                continue
            why = reasons.get(id(tensor))
            if why is not None and owners[id(tensor)] != name:
                why = IS_SHARED.format(owners[id(tensor)] or "the model")
            if not tensor.is_floating_point():
                why = NOT_FLOATING
            elif why is None:
                why = IS_SHARD if is_sharded(tensor) else CAME_SINCE
            found.setdefault((tensor.dtype, why), []).append(tensor)
        for (dtype, why), tensors in found.items():
            count = sum(t.numel() for t in tensors)
            yield Kept(name, type(module).__name__, dtype_name(dtype), len(tensors), count, why)


def _own(module: nn.Module) -> Sequence[Tensor]:
    return measured([*module.parameters(recurse=False), *module.buffers(recurse=False)])
