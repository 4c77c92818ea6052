"""`apex.parallel`."""

from typing import Any

import torch.distributed as dist
from torch import nn

from amp_engine.apex.parallel import sync_batchnorm as sync_batchnorm
from amp_engine.apex.parallel.distributed import DistributedDataParallel as DistributedDataParallel
from amp_engine.apex.parallel.distributed import Reducer as Reducer
from amp_engine.apex.parallel.distributed import check_process_group

# This import first binds the attribute LARC to the submodule, then to the class.
from amp_engine.apex.parallel.LARC import LARC as LARC
from amp_engine.apex.parallel.optimized_sync_batchnorm import SyncBatchNorm as SyncBatchNorm
from amp_engine.errors import AmpValueError
from amp_engine.ground.torch_private import BatchNormBase

__all__ = [
    "LARC",
    "DistributedDataParallel",
    "Reducer",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
]


def convert_syncbn_model(module: nn.Module, process_group: Any = None, channel_last: bool = False) -> nn.Module:
    """Replace every batch norm in `module` by a SyncBatchNorm, in place, and return `module`, or its replacement.

    Parameters, buffers and hooks are the same objects as before, so an optimizer that was built earlier still works,
    and so does amp, before or after `amp.initialize`.

    Args:
        module: a model, or a batch norm.
        process_group: the ranks that share statistics; None: all.
        channel_last: the channels are the last dimension of the batch norms' input.
    """
    return _converted(module, process_group, channel_last, {})


def _converted(module: nn.Module, process_group: Any, channel_last: bool, done: dict[int, nn.Module]) -> nn.Module:
    if id(module) in done:  # a module in two places stays one
        return done[id(module)]
    result = done[id(module)] = module
    if isinstance(module, BatchNormBase):
        result = done[id(module)] = SyncBatchNorm.__new__(SyncBatchNorm)
        vars(result).update(vars(module))
        result.process_group = process_group
        result.channel_last = channel_last
        result.fuse_relu = False
    for name, child in module._modules.items():
        if child is not None:
            module._modules[name] = _converted(child, process_group, channel_last, done)
    return result


def create_syncbn_process_group(group_size: int) -> Any:
    """Make groups of `group_size` neighbouring ranks that share statistics, and return this rank's group.

    Every rank must call it. Raises AmpValueError unless `group_size` divides the number of ranks, AmpStateError without
    a process group.

    Args:
        group_size: ranks in a group; 0 for all ranks together, for which None is returned.
    """
    if group_size == 0:
        return None
    check_process_group("create_syncbn_process_group")
    ranks = dist.get_world_size()
    if not 0 < group_size <= ranks or ranks % group_size:
        raise AmpValueError(
            f"group_size={group_size!r} does not divide the {ranks} ranks.  Use 0 for all of them, or a divisor."
        )
    mine = None
    for first in range(0, ranks, group_size):
        members = range(first, first + group_size)
        group = dist.new_group(list(members))
        if dist.get_rank() in members:
            mine = group
    return mine
