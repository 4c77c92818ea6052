"""One decision of all ranks: a sum of a few bytes tells if a gradient of any rank was not finite."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor


class Reduction:
    """The number of ranks in some groups that found an overflow; its sum starts at construction.

    With one group, which is the rule, no rank waits before `wait`: 8 bytes are on their way meanwhile. Several groups
    are summed one after the other.

    Args:
        groups: at least one; on every rank in the same order.
        found_inf: float32, shape []; != 0 is an overflow of this rank. On a device that the groups' backends take.

    Attributes:
        is_first: True if this rank is rank 0 of each group.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup], found_inf: Tensor) -> None:
        self.is_first = all(dist.get_rank(group) == 0 for group in groups)
        self._ranks = dist.get_world_size(groups[0]) if len(groups) == 1 else math.inf  # several are not counted
        # Every backend can sum float64, which is exact for any number of ranks.
        self._sum = (found_inf != 0).double()
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
        return (self._sum != 0).float()

    def is_unanimous(self) -> bool:
        """True if each rank of the only group found an overflow itself. Call after `wait`; waits for the device."""
        return float(self._sum) == self._ranks


def agree(groups: Sequence[dist.ProcessGroup], found_inf: Tensor) -> None:
    """Make `found_inf`, float32 of shape [], != 0 if it is so on any rank of `groups`; without groups keep it."""
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
