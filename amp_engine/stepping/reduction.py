"""One decision of all ranks: whether a gradient of any of them was not finite, as one sum of a few bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor


class Reduction:
    """The sum, over all ranks of some groups, of whether each found an overflow; begun when it is made.

    With one group, which is the rule, nobody waits until `wait`: 8 bytes are on their way meanwhile. With several they
    are summed one after the other.

    Args:
        groups: at least one; on every rank in the same order.
        found_inf: float32, shape []: != 0 is an overflow of this rank; on a device that the groups' backends take.

    Attributes:
        is_first: whether this rank is the first one in each of the groups.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup], found_inf: Tensor) -> None:
        self.is_first = all(dist.get_rank(group) == 0 for group in groups)
        self._ranks = dist.get_world_size(groups[0]) if len(groups) == 1 else math.inf  # of several nobody is counted
        # A sum, which every backend has for float64, exact for any number of ranks.
        self._sum = (found_inf != 0).double()
        for group in groups[:-1]:
            dist.all_reduce(self._sum, group=group)
        self._work: dist.Work | None = dist.all_reduce(self._sum, group=groups[-1], async_op=True)

    def wait(self) -> Tensor:
        """float32, shape []: != 0 if a rank found an overflow.

        Gloo has the host wait for the last rank, NCCL the current stream.
        """
        if self._work is not None:
            self._work.wait()
            self._work = None
        return (self._sum != 0).float()

    def is_unanimous(self) -> bool:
        """Whether each rank of the one group found an overflow itself. After `wait`; waits for the device."""
        return float(self._sum) == self._ranks


def agree(groups: Sequence[dist.ProcessGroup], found_inf: Tensor) -> None:
    """Have `found_inf`, float32 of shape [], be != 0 where it is on any rank of the groups; none: as it is."""
    if groups:
        found_inf.copy_(Reduction(groups, found_inf).wait())


def norm_over(group: dist.ProcessGroup, norm: Tensor, norm_type: float) -> Tensor:
    """The norm of order `norm_type` of what the ranks of `group` have different parts of, from that of each part.

    Sums powers in float64: (sum of norm ** p) ** (1 / p), or the largest for infinity. Waits as `Reduction.wait` does.
    """
    if norm_type == math.inf:
        largest = norm.double()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        return largest.float()
    total = norm.double() ** norm_type
    dist.all_reduce(total, group=group)
    return (total ** (1.0 / norm_type)).float()
