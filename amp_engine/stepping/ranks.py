"""The ranks that train with this one: the groups that agree on an overflow, and gradients that were never reduced."""

from __future__ import annotations

import weakref

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from amp_engine.errors import AmpStateError
from amp_engine.ground.distributed import groups_of_shards, has_ranks, wrappers_around
from amp_engine.ground.torch_private import joins_uneven_inputs
from amp_engine.stepping.arithmetic import is_zero
from amp_engine.stepping.rows import Columns, Rows


class Ranks:
    """The ranks of one optimizer.

    DistributedDataParallel reduces the gradients in `.grad`. Under its `no_sync` they stay there for the next
    reduction; the exit of a `scale_loss` without `delay_unscale` unscales them, and the next scaled backward
    sets them aside, so that no reduction reaches them.

    Args:
        process_group: the group that the user named; None for the groups of the DTensors among its parameters and of
            the DistributedDataParallel around them, if there are any.
        is_in_zero: True if each rank steps different parameters of a model that all ranks have.
        in_flat_shards: True if the parameters are shards of a FullyShardedDataParallel.
    """

    def __init__(
        self,
        rows: Rows,
        process_group: dist.ProcessGroup | None = None,
        is_in_zero: bool = False,
        in_flat_shards: bool = False,
    ) -> None:
        self._rows = rows
        self._process_group = process_group
        self._is_in_zero = is_in_zero
        self.in_flat_shards = in_flat_shards
        self._of_shards: tuple[Columns, list[dist.ProcessGroup]] | None = None
        # The wrappers of its parameters: searched at the first backward in a process group, and when one was freed.
        self._wrappers: list[weakref.ref[DistributedDataParallel]] | None = None
        self._local: list[weakref.ref[DistributedDataParallel]] = []  # wrappers under `no_sync` in this backward
        self._waiting: list[weakref.ref[DistributedDataParallel]] = []  # those of earlier backwards that were unscaled

    def enter(self, is_first: bool, is_left_open: bool) -> None:
        """Entry of `scale_loss`: note wrappers under `no_sync`.

        Raises AmpStateError if its backward will reduce gradients that an earlier exit unscaled before a reduction.

        Args:
            is_first: True for the first backward since the last step.
            is_left_open: True if scaled gradients of an earlier backward are there.
        """
        if self._wrappers is None and not has_ranks():
            return
        if self._wrappers is None or any(ref() is None for ref in self._wrappers):
            self._look_for_wrappers()
        if not self._wrappers:
            return
        if is_first and self._waiting:
            self._waiting = []
        for ref in self._waiting:
            wrapper = ref()
            if wrapper is None or not wrapper.require_backward_grad_sync:
                continue
            if is_left_open or self._has_gradients(wrapper):
                raise AmpStateError(
                    f"scale_loss() unscaled gradients under {type(wrapper).__name__}.no_sync(), before they were "
                    "reduced, and they would never be.  Use amp.scale_loss(loss, optimizer, delay_unscale=True) under "
                    "no_sync(), for all but the last backward before optimizer.step(), and zero_grad() before the "
                    "first, as scaled gradients cannot be added to unscaled ones."
                )
        # At the entry: `no_sync` is for the forward, and may be over by the exit.
        self._local = [
            ref for ref in self._wrappers if (one := ref()) is not None and not one.require_backward_grad_sync
        ]

    def has_wrappers(self) -> bool:
        """True if a DistributedDataParallel reduces gradients of these parameters, as of the last `scale_loss`."""
        if self._wrappers is None and has_ranks():
            self._look_for_wrappers()
        return any(ref() is not None for ref in self._wrappers or ())

    def _look_for_wrappers(self) -> None:
        self._wrappers = [weakref.ref(one) for one in wrappers_around(self._rows.columns.params)]

    def groups(self) -> list[dist.ProcessGroup]:
        """Return the groups with other ranks, which agree on an overflow at the exit of this `scale_loss`.

        Every rank of a group must leave `scale_loss` equally often. DistributedDataParallel guarantees that, since its
        ranks call backward together, except under `no_sync` and under its `join`, where a rank may have finished.
        """
        if not has_ranks():
            return []
        said = self._process_group
        wrappers = [one for ref in self._wrappers or () if (one := ref()) is not None]
        if any(map(joins_uneven_inputs, wrappers)):
            return []
        if said is not None:
            groups = [said]
        else:
            local = [ref() for ref in self._local]
            groups = [*self._groups_of_shards(), *(one.process_group for one in wrappers if one not in local)]
        return [group for group in dict.fromkeys(groups) if dist.get_world_size(group) > 1]

    @property
    def are_replicas(self) -> bool:
        """True if all ranks have the same gradients after the reduction: only with DistributedDataParallel."""
        return self._process_group is None and not self._groups_of_shards()

    @property
    def are_said(self) -> bool:
        """True if the user named the process group."""
        return self._process_group is not None

    @property
    def can_agree(self) -> bool:
        """False if each rank steps other parameters, and nobody said which ranks are to agree."""
        return self._process_group is not None or not (self._is_in_zero or self.in_flat_shards)

    def of_parts(self) -> dist.ProcessGroup | None:
        """Return the group whose ranks step different parameters, so that a norm must sum over them; None if none."""
        if self._process_group is None or not has_ranks() or self._groups_of_shards():
            return None
        has_replicas = any(ref() is not None for ref in self._wrappers or ()) and not self._is_in_zero
        return None if has_replicas or dist.get_world_size(self._process_group) == 1 else self._process_group

    def _groups_of_shards(self) -> list[dist.ProcessGroup]:
        columns = self._rows.columns
        if self._of_shards is None or self._of_shards[0] is not columns:
            self._of_shards = columns, groups_of_shards(columns.params)
        return self._of_shards[1]

    def close(self) -> None:
        """Exit of a `scale_loss` that unscales: remember wrappers whose gradients were not reduced."""
        if self._local:
            self._waiting += [ref for ref in self._local if ref not in self._waiting]
            self._local = []

    def _has_gradients(self, wrapper: DistributedDataParallel) -> bool:
        """True if a parameter of `wrapper` has a gradient that is not 0. Waits for the device."""
        ids = {id(param) for param in wrapper.module.parameters()}
        columns = self._rows.columns
        grads = (p.grad for p in columns.params if id(p) in ids)
        return any(grad is not None and not is_zero(grad) for grad in grads)
