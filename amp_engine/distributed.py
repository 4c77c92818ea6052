"""What torch.distributed has done to models: wrappers that reduce gradients, parameters that are shards."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from amp_engine.torch_private import is_wrapper_subclass


def has_ranks() -> bool:
    """Whether there is a process group. A tenth of a microsecond."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def is_sharded(param: Any) -> bool:
    """Whether `param` wraps other tensors, as a DTensor does."""
    return is_wrapper_subclass(param)


def without_wrapper(model: nn.Module) -> nn.Module:
    """The model inside of DistributedDataParallel, or `model` itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def wrappers_around(params: Iterable[nn.Parameter]) -> list[DistributedDataParallel]:
    """Each DistributedDataParallel that reduces the gradient of one of `params`, also one that nobody has told us of.

    Looks at every object of the process, a tenth of a second, unless there is no process group.
    """
    if not has_ranks():
        return []
    ids = {id(param) for param in params}
    if not _live_wrappers(ids):
        return []
    gc.collect()  # one that is garbage reduces nothing any more
    return _live_wrappers(ids)


def _live_wrappers(ids: set[int]) -> list[DistributedDataParallel]:
    kinds = _with_subclasses(DistributedDataParallel)
    # By type(), which asks no object anything: some are proxies, and would do work.
    found = [one for one in gc.get_objects() if type(one) in kinds]
    return [
        one
        for one in found
        if isinstance(module := getattr(one, "module", None), nn.Module)  # not made to the end, without
        and any(id(param) in ids for param in module.parameters())
    ]


def _with_subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))
