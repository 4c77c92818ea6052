"""Effects of torch.distributed on models: wrappers that reduce gradients, parameters that are shards."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from amp_engine.errors import AmpStateError
from amp_engine.ground.torch_private import fsdp_param_dtype, is_wrapper_subclass

T = TypeVar("T")


_CAN_HAVE_RANKS = torch.distributed.is_available()  # depends on the build of torch


def has_ranks() -> bool:
    """True if there is a process group. Takes a tenth of a microsecond."""
    return _CAN_HAVE_RANKS and torch.distributed.is_initialized()


def has_other_ranks() -> bool:
    """True if there is a process group of more than one rank."""
    return has_ranks() and torch.distributed.get_world_size() > 1


def is_sharded(param: Any) -> bool:
    """True if `param` wraps other tensors, as a DTensor does."""
    return is_wrapper_subclass(param)


def is_placed_like(one: Tensor, other: Tensor) -> bool:
    """True if both are DTensors with the same placements."""
    return getattr(one, "placements", 0) == getattr(other, "placements", 1)


def steps_shards(optimizer: Optimizer) -> bool:
    """True if a parameter in the groups of `optimizer` is sharded."""
    return any(is_sharded(p) for group in optimizer.param_groups for p in group["params"])


def is_any_sharded(model: nn.Module) -> bool:
    """True if torch has made shards of a part of `model`."""
    return any(map(is_sharded, model.parameters())) or has_fsdp2(model) or fsdp1_in(model) is not None


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's part of `tensor`: the shard of a DTensor, in the same memory; or `tensor` itself."""
    with torch.no_grad():
        return tensor.to_local() if is_sharded(tensor) and hasattr(tensor, "to_local") else tensor


def local_gradient(param: Any) -> Tensor:
    """Return this rank's shard of a DTensor's gradient, in the same memory, with the placements of `param`.

    If ranks still have to sum the gradient, as sequence parallelism leaves it, sums it and replaces `param.grad`. Other
    wrapper subclasses may have plain gradients; raises AmpStateError for one that wraps others, too.
    """
    grad = param.grad
    if not hasattr(param, "placements"):
        if is_sharded(grad):
            raise AmpStateError(
                f"A gradient of shape {tuple(grad.shape)} is a {type(grad).__name__}, which wraps other tensors and is "
                "no DTensor: it cannot be checked for overflows.  Choose opt_level='O4' or 'O0', which scale no loss."
            )
        return grad
    if grad.placements != param.placements:
        with torch.no_grad():
            grad = param.grad = grad.redistribute(placements=param.placements)
    return local_of(grad)


def groups_of_shards(params: Iterable[Any]) -> list[Any]:
    """Return the process groups whose ranks have shards or replicas of the DTensors among `params`.

    This is the group of all ranks if a mesh has all of them, else one group for each dimension of each mesh.
    """
    meshes = dict.fromkeys(param.device_mesh for param in params if is_sharded(param) and hasattr(param, "device_mesh"))
    if any(mesh.size() == torch.distributed.get_world_size() for mesh in meshes):
        return [torch.distributed.group.WORLD]
    return list(dict.fromkeys(mesh.get_group(dim) for mesh in meshes for dim in range(mesh.ndim)))


def without_wrapper(model: nn.Module) -> nn.Module:
    """Return the model inside of DistributedDataParallel, or `model` itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def fsdp1_in(model: nn.Module) -> nn.Module | None:
    """Return the first FullyShardedDataParallel among `model` and the modules in it; None if there is none."""
    kind = _class_of_fsdp("FullyShardedDataParallel")
    return None if kind is None else next((m for m in model.modules() if isinstance(m, kind)), None)


def has_fsdp2(model: nn.Module) -> bool:
    """True if `fully_shard` was called on `model` or a module in it."""
    kind = _class_of_fsdp("FSDPModule")
    return kind is not None and any(isinstance(module, kind) for module in model.modules())


def is_fsdp2(module: nn.Module) -> bool:
    """True if `fully_shard` was called on `module` itself."""
    kind = _class_of_fsdp("FSDPModule")
    return kind is not None and isinstance(module, kind)


def fsdp2_param_dtypes(model: nn.Module) -> set[torch.dtype]:
    """Return each `param_dtype` of the policies that `fully_shard` got for `model` and modules in it."""
    kind = _class_of_fsdp("FSDPModule")
    found = () if kind is None else map(fsdp_param_dtype, (m for m in model.modules() if isinstance(m, kind)))
    return {dtype for dtype in found if dtype is not None}


def is_zero(optimizer: Any) -> bool:
    """True if `optimizer` is torch's ZeroRedundancyOptimizer."""
    kind = _class_of_zero()
    return kind is not None and isinstance(optimizer, kind)


def is_in_zero(optimizer: Any) -> bool:
    """True if a ZeroRedundancyOptimizer steps with `optimizer`. May look at every object of the process."""
    kind = _class_of_zero()
    if kind is None or not has_ranks():
        return False
    return any(getattr(one, "optim", None) is optimizer for one in _live(kind))


def _class_of_zero() -> Any:
    return getattr(sys.modules.get("torch.distributed.optim"), "ZeroRedundancyOptimizer", None)


def _class_of_fsdp(name: str) -> type[nn.Module] | None:
    """Return a class of torch.distributed.fsdp; None if it has no instances, as that was not imported (a second)."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), name, None)


def fsdp1_around(model: nn.Module) -> nn.Module | None:
    """Return a FullyShardedDataParallel that contains `model`, or None. Looks at every object of the process."""
    kind = _class_of_fsdp("FullyShardedDataParallel")
    if kind is None or not has_ranks():
        return None
    if not any(_is_in(model, one) for one in _live(kind)):
        return None
    gc.collect()  # a wrapper that is garbage does not shard any more
    return next((one for one in _live(kind) if _is_in(model, one)), None)


def wrappers_around(params: Iterable[nn.Parameter]) -> list[DistributedDataParallel]:
    """Return each DistributedDataParallel that reduces a gradient of `params`, also if it was never passed to us.

    Looks at every object of the process, which takes a tenth of a second, unless there is no process group.
    """
    if not has_ranks():
        return []
    ids = {id(param) for param in params}
    if not any(_has_one_of(ids, one) for one in _live(DistributedDataParallel)):
        return []
    gc.collect()  # a wrapper that is garbage does not reduce any more
    return [one for one in _live(DistributedDataParallel) if _has_one_of(ids, one)]


def _has_one_of(ids: set[int], wrapper: nn.Module) -> bool:
    return any(id(param) in ids for param in _inside(wrapper).parameters())


def _is_in(model: nn.Module, wrapper: nn.Module) -> bool:
    return any(module is model for module in _inside(wrapper).modules())


def _inside(wrapper: nn.Module) -> nn.Module:
    """Return the wrapped module; an empty one if the wrapper's constructor has not finished."""
    # Attribute access would recurse without end in a FullyShardedDataParallel whose constructor has not finished.
    modules = vars(wrapper).get("_modules", {}).values()
    return next((module for module in modules if isinstance(module, nn.Module)), nn.Module())


def _live(kind: type[T]) -> list[T]:
    """Return every object of a class or its subclasses."""
    kinds = _with_subclasses(kind)
    # type() runs no code of the object; isinstance() would make proxies do work.
    return [one for one in gc.get_objects() if type(one) in kinds]


def _with_subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))
