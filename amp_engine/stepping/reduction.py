"""One decision of all ranks: a sum tells each rank if gradients of any rank were not finite, and all losses."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

_UNKNOWN = -math.inf  # in place of a loss


class Reduction:
    """The ranks in some groups that found an overflow, and their losses; summed from construction on.

    With one group, the usual case, no rank waits before `wait`: 16 bytes a rank are sent meanwhile. Several groups are
    summed one after the other.

    Args:
        groups: at least one; on every rank in the same order.
        found_inf: float32, shape []; != 0 is an overflow of this rank. On a device that the groups' backends take.
        loss: of this rank, a number or a tensor of shape [] on that device; None if it is not known.

    Attributes:
        is_first: True if this rank is rank 0 of each group.
        rank: of this process in the only group; 0 with several.
    """

    def __init__(
        self, groups: Sequence[dist.ProcessGroup], found_inf: Tensor, loss: Tensor | float | None = None
    ) -> None:
        self.is_first = all(dist.get_rank(group) == 0 for group in groups)
        self.rank = dist.get_rank(groups[0]) if len(groups) == 1 else 0
        self._ranks = dist.get_process_group_ranks(groups[0]) if len(groups) == 1 else None
        # Every rank adds its column to zeros. Every backend can sum float64, which holds these numbers exactly.
        self._sum = torch.zeros(2, dist.get_world_size(), dtype=torch.float64, device=found_inf.device)
        self._sum[0, dist.get_rank()] = found_inf
        self._sum[1, dist.get_rank()] = _UNKNOWN if loss is None else loss
        for group in groups[:-1]:
            dist.all_reduce(self._sum, group=group)
        self._work: dist.Work | None = dist.all_reduce(self._sum, group=groups[-1], async_op=True)

    def wait(self) -> Tensor:
        """Return float32 of shape [], != 0 if a rank found an overflow.

        With Gloo the host waits for the last rank, with NCCL the current stream does.
        """
        if self._work is not None:
            self._work.wait()
            self._work = None
        return (self._sum[0] != 0).any().float()

    def is_unanimous(self) -> bool:
        """True if each rank of the only group found an overflow itself. Call after `wait`; waits for the device."""
        return self._ranks is not None and bool((self._sum[0, self._ranks] != 0).all())

    def losses(self) -> list[float | None]:
        """Return the loss of each rank of the only group, None where unknown; [] with several groups.

        Call after `wait`; waits for the device.
        """
        found = [] if self._ranks is None else self._sum[1, self._ranks].tolist()
        return [None if one == _UNKNOWN else one for one in found]


def agree(groups: Sequence[dist.ProcessGroup], found_inf: Tensor) -> None:
    """Make `found_inf`, float32 of shape [], != 0 if it is != 0 on any rank of `groups`; keep it without groups."""
    if groups:
        found_inf.copy_(Reduction(groups, found_inf).wait())


def norm_over(group: dist.ProcessGroup, norm: Tensor, norm_type: float) -> Tensor:
    """Return the total norm of order `norm_type` of gradients whose parts the ranks of `group` hold.

    `norm` is that of this rank's part. Sums powers in float64: (sum of norm ** p) ** (1 / p), or takes the largest for
    infinity. Returns float32. Waits as `Reduction.wait` does.
    """
    if norm_type == math.inf:
        largest = norm.double()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        return largest.float()
    total = norm.double() ** norm_type
    dist.all_reduce(total, group=group)
    return (total ** (1.0 / norm_type)).float()
