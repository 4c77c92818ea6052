"""FP32 weights that were loaded before DistributedDataParallel was made, whose constructor writes half parameters."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from amp_engine.ground.distributed import is_sharded, wrappers_around
from amp_engine.ground.dtypes import is_low_precision
from amp_engine.ground.torch_private import joins_uneven_inputs
from amp_engine.stepping.beside import Beside, Master
from amp_engine.stepping.exact import exact_of


@torch.no_grad()
def agree(params: Iterable[nn.Parameter]) -> list[Beside]:
    """Give all ranks the loaded FP32 weights of rank 0, if there are any, as DistributedDataParallel gave half ones.

    Call before the first step of an optimizer, which the ranks of a wrapper take together. Waits for the device.

    Returns:
        What lies beside parameters now: the caller holds it until an optimizer does.
    """
    found: list[Beside] = []
    half = [p for p in params if is_low_precision(p) and p.requires_grad and not is_sharded(p)]
    for wrapper in wrappers_around(half):
        group = wrapper.process_group
        if dist.get_world_size(group) == 1 or joins_uneven_inputs(wrapper):
            continue
        reduced = set(map(id, wrapper.module.parameters()))
        both = [(p, next((one for one in exact_of(p) if isinstance(one, Beside)), None)) for p in half]
        both = [(p, one) for p, one in both if id(p) in reduced and not (one is not None and one.is_owned())]
        has_loaded = any(one is not None and one.owner is None for _, one in both)
        loaded = torch.full((), float(has_loaded), device=half[0].device)
        dist.all_reduce(loaded, dist.ReduceOp.MAX, group=group)
        for p, one in both if bool(loaded) else ():
            value = (p.detach().float() if one is None else one.value()).contiguous()
            dist.broadcast(value, group=group, group_src=0)
            if torch.equal(value.to(p.dtype), p):
                one = Master(p, None) if one is None else one
                one.take(value)
                found.append(one)
    return found
