"""What torch.distributed has done to models: wrappers that reduce gradients, parameters that are shards."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from amp_engine.ground.torch_private import fsdp_param_dtype, is_wrapper_subclass

T = TypeVar("T")


_CAN_HAVE_RANKS = torch.distributed.is_available()  # as torch was built


def has_ranks() -> bool:
    """Whether there is a process group. A tenth of a microsecond."""
    return _CAN_HAVE_RANKS and torch.distributed.is_initialized()


def is_sharded(param: Any) -> bool:
    """Whether `param` wraps other tensors, as a DTensor does."""
    return is_wrapper_subclass(param)


def steps_shards(optimizer: Optimizer) -> bool:
    """True if a parameter in the groups of `optimizer` is sharded."""
    return any(is_sharded(p) for group in optimizer.param_groups for p in group["params"])


def is_any_sharded(model: nn.Module) -> bool:
    """True if torch has made shards of a part of `model`."""
    return any(map(is_sharded, model.parameters())) or has_fsdp2(model) or fsdp1_in(model) is not None


def local_of(tensor: Tensor) -> Tensor:
    """What this rank has of `tensor`: the shard of a DTensor, in its memory; or `tensor` itself."""
    with torch.no_grad():
        return tensor.to_local() if is_sharded(tensor) and hasattr(tensor, "to_local") else tensor


def local_gradient(param: Any) -> Tensor:
    """The shard of a DTensor's gradient, in its memory, laid out as `param` is.

    A sum that is still to be made, as sequence parallelism leaves it, is made, and put in the place of the gradient.
    """
    grad = param.grad
    if grad.placements != param.placements:
        with torch.no_grad():
            grad = param.grad = grad.redistribute(placements=param.placements)
    return local_of(grad)


def groups_of_shards(params: Iterable[Any]) -> list[Any]:
    """The process groups whose ranks have shards or replicas of those of `params` that are DTensors.

    One of all ranks where their mesh has all, else one for each dimension of their meshes.
    """
    meshes = dict.fromkeys(param.device_mesh for param in params if is_sharded(param) and hasattr(param, "device_mesh"))
    if any(mesh.size() == torch.distributed.get_world_size() for mesh in meshes):
        return [torch.distributed.group.WORLD]
    return list(dict.fromkeys(mesh.get_group(dim) for mesh in meshes for dim in range(mesh.ndim)))


def without_wrapper(model: nn.Module) -> nn.Module:
    """The model inside of DistributedDataParallel, or `model` itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def fsdp1_in(model: nn.Module) -> nn.Module | None:
    """A FullyShardedDataParallel in `model`, or `model` itself; None without one."""
    kind = _class_of_fsdp("FullyShardedDataParallel")
    return None if kind is None else next((m for m in model.modules() if isinstance(m, kind)), None)


def has_fsdp2(model: nn.Module) -> bool:
    """Whether `fully_shard` was called on `model` or a module in it."""
    kind = _class_of_fsdp("FSDPModule")
    return kind is not None and any(isinstance(module, kind) for module in model.modules())


def is_fsdp2(module: nn.Module) -> bool:
    """Whether `fully_shard` was called on `module` itself."""
    kind = _class_of_fsdp("FSDPModule")
    return kind is not None and isinstance(module, kind)


def fsdp2_param_dtypes(model: nn.Module) -> set[torch.dtype]:
    """What `MixedPrecisionPolicy(param_dtype=...)` says in the calls of `fully_shard` on `model` and modules in it."""
    kind = _class_of_fsdp("FSDPModule")
    found = () if kind is None else map(fsdp_param_dtype, (m for m in model.modules() if isinstance(m, kind)))
    return {dtype for dtype in found if dtype is not None}


def is_zero(optimizer: Any) -> bool:
    """Whether it is torch's ZeroRedundancyOptimizer."""
    kind = _class_of_zero()
    return kind is not None and isinstance(optimizer, kind)


def is_in_zero(optimizer: Any) -> bool:
    """Whether a ZeroRedundancyOptimizer steps by `optimizer`. May look at every object of the process."""
    kind = _class_of_zero()
    if kind is None or not has_ranks():
        return False
    return any(getattr(one, "optim", None) is optimizer for one in _live(kind))


def _class_of_zero() -> Any:
    return getattr(sys.modules.get("torch.distributed.optim"), "ZeroRedundancyOptimizer", None)


def _class_of_fsdp(name: str) -> type[nn.Module] | None:
    """A class that takes a second to import. Who has not imported it has none of them."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), name, None)


def fsdp1_around(model: nn.Module) -> nn.Module | None:
    """A FullyShardedDataParallel that `model` is in, or None. Looks at every object of the process."""
    kind = _class_of_fsdp("FullyShardedDataParallel")
    if kind is None or not has_ranks():
        return None
    if not any(_is_in(model, one) for one in _live(kind)):
        return None
    gc.collect()  # one that is garbage shards nothing any more
    return next((one for one in _live(kind) if _is_in(model, one)), None)


def wrappers_around(params: Iterable[nn.Parameter]) -> list[DistributedDataParallel]:
    """Each DistributedDataParallel that reduces the gradient of one of `params`, also one that nobody has told us of.

    Looks at every object of the process, a tenth of a second, unless there is no process group.
    """
    if not has_ranks():
        return []
    ids = {id(param) for param in params}
    if not any(_has_one_of(ids, one) for one in _live(DistributedDataParallel)):
        return []
    gc.collect()  # one that is garbage reduces nothing any more
    return [one for one in _live(DistributedDataParallel) if _has_one_of(ids, one)]


def _has_one_of(ids: set[int], wrapper: nn.Module) -> bool:
    return any(id(param) in ids for param in _inside(wrapper).parameters())


def _is_in(model: nn.Module, wrapper: nn.Module) -> bool:
    return any(module is model for module in _inside(wrapper).modules())


def _inside(wrapper: nn.Module) -> nn.Module:
    """What is wrapped; an empty module in one that is not made to the end."""
    # Not by attribute, for which a FullyShardedDataParallel that is not made to the end asks itself without end.
    modules = vars(wrapper).get("_modules", {}).values()
    return next((module for module in modules if isinstance(module, nn.Module)), nn.Module())


def _live(kind: type[T]) -> list[T]:
    """Every object of a class or its subclasses."""
    kinds = _with_subclasses(kind)
    # By type(), which asks no object anything: some are proxies, and would do work.
    return [one for one in gc.get_objects() if type(one) in kinds]


def _with_subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))
