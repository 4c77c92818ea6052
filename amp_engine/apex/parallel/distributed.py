"""`apex.parallel.distributed`: DistributedDataParallel and Reducer, on torch's DistributedDataParallel."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from amp_engine.apex import apex_C
from amp_engine.errors import AmpStateError, AmpTypeError, AmpValueError, AmpWarning
from amp_engine.ground.callers import warn
from amp_engine.ground.distributed import has_ranks
from amp_engine.ground.torch_private import leaves_of


@dataclass(frozen=True)
class Averaging:
    """The state of `all_reduce_gradients`.

    Attributes:
        average: divides by the number of ranks; otherwise the sum stays.
        predivide_factor: divides before the sum; an average is multiplied by it afterwards.
        always_fp32: sums half gradients in float32.
    """

    average: bool = True
    predivide_factor: float = 1.0
    always_fp32: bool = False


def all_reduce_gradients(
    state: Averaging,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """Sum a bucket of gradients over the ranks as `state` says: a communication hook for DistributedDataParallel."""
    buffer = bucket.buffer()
    summed = buffer.float() if state.always_fp32 else buffer
    if state.predivide_factor != 1.0:
        summed.div_(state.predivide_factor)
    factor = state.predivide_factor / dist.get_world_size() if state.average else 1.0
    work = dist.all_reduce(summed, async_op=True)

    def finish(future: torch.futures.Future[Any]) -> Tensor:
        future.wait()
        if factor != 1.0:
            summed.mul_(factor)
        return buffer if summed is buffer else buffer.copy_(summed)

    return work.get_future().then(finish)


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """torch's DistributedDataParallel with apex's arguments.

    The constructor broadcasts parameters and buffers from rank 0; afterwards each rank has its own buffers, as in apex.
    Wrap the model that `amp.initialize` returned. After `disable_allreduce` gradients accumulate on each rank; under
    amp use `amp.scale_loss(..., delay_unscale=True)` there, since masters take over gradients that are not delayed.

    Args:
        module: on the device that it trains on.
        message_size: elements of a bucket, the gradients that are summed in one call.
        delay_allreduce: parameters may be left unused by a forward. The sums overlap with the backward in any case.
        allreduce_always_fp32: sum half gradients in float32.
        gradient_average: divide by the number of ranks.
        gradient_predivide_factor: divide by it before the sum, and multiply an average by it afterwards.
        shared_param, allreduce_trigger_params, retain_allreduce_buffers, num_allreduce_streams,
            allreduce_communicators, gradient_average_split_factor, prof: ignored with a warning: torch needs none.

    Raises AmpStateError without a process group, AmpTypeError for anything but a module, AmpValueError for sizes and
    factors that are not positive.
    """

    def __init__(
        self,
        module: nn.Module,
        message_size: int = 10_000_000,
        delay_allreduce: bool = False,
        shared_param: bool | None = None,
        allreduce_trigger_params: Sequence[Tensor] | None = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: Any = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: float | None = None,
        prof: bool = False,
    ) -> None:
        check_process_group("DistributedDataParallel")
        if not isinstance(module, nn.Module):
            raise AmpTypeError(
                f"DistributedDataParallel() got a {type(module).__name__}, but wraps a model.  Call "
                "DistributedDataParallel(model) with what amp.initialize returned."
            )
        for name, value in (
            ("message_size", message_size),
            ("gradient_predivide_factor", gradient_predivide_factor),
        ):
            if not value > 0:
                raise AmpValueError(f"{name}={value!r}, but it must be above 0.  Leave it out for apex's default.")
        ignored = {
            "shared_param": shared_param is not None,
            "allreduce_trigger_params": allreduce_trigger_params is not None,
            "retain_allreduce_buffers": bool(retain_allreduce_buffers),
            "num_allreduce_streams": num_allreduce_streams != 1,
            "allreduce_communicators": allreduce_communicators is not None,
            "gradient_average_split_factor": gradient_average_split_factor is not None,
            "prof": bool(prof),
        }
        if any(ignored.values()):
            names = ", ".join(name for name, given in ignored.items() if given)
            warn(
                f"apex.parallel.DistributedDataParallel ignores {names}: torch overlaps the sums with the backward by "
                "itself, and torch.profiler shows them.  Leave them out.",
                AmpWarning,
            )
        super().__init__(
            module,
            bucket_cap_mb=_megabytes(module, message_size),
            find_unused_parameters=delay_allreduce,
        )
        self.broadcast_buffers = False  # torch 2.13 warns of the constructor's argument
        averaging = Averaging(bool(gradient_average), float(gradient_predivide_factor), bool(allreduce_always_fp32))
        if averaging != Averaging():  # torch averages like this without a hook, dividing before the sum
            self.register_comm_hook(averaging, all_reduce_gradients)
        self._end_the_group_last()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._end_the_group_last()
        # torch gives a copy a new reducer and keeps the list of hooks, but does not register them with that reducer.
        hooks, self._comm_hooks = self._comm_hooks, []
        for hook, hook_state in hooks:
            self.register_comm_hook(hook_state, hook)

    def _end_the_group_last(self) -> None:
        # Attributes are destroyed in their order. After dist.destroy_process_group(), the reducer of a model that still
        # exists may hold the group's last reference, and destroys the group with the GIL held: it waits for Gloo's
        # threads, one of which may wait for the GIL to release a tensor
        # (https://github.com/pytorch/pytorch/issues/56297). The group's Python object releases the GIL.
        vars(self)["process_group"] = vars(self).pop("process_group")

    def disable_allreduce(self) -> None:
        """Let the next backwards accumulate gradients on each rank, as torch's `no_sync` does."""
        self.require_backward_grad_sync = False

    def enable_allreduce(self) -> None:
        """Reduce gradients over the ranks again from the next backward on, with those accumulated so far."""
        self.require_backward_grad_sync = True


class Reducer:
    """Averages gradients over the ranks on demand, for a model without DistributedDataParallel.

    Under amp call `reduce()` inside of `amp.scale_loss`, after the backward: gradients are then unscaled once all ranks
    have the same.

    Args:
        module_or_grads_list: a module, whose parameters become those of rank 0 at once; or gradients, as a tensor or as
            lists and dictionaries of tensors.

    Raises AmpStateError without a process group, AmpTypeError for any other argument.
    """

    def __init__(self, module_or_grads_list: Any) -> None:
        check_process_group("Reducer")
        self._module = module_or_grads_list if isinstance(module_or_grads_list, nn.Module) else None
        self._given = [] if self._module is not None else leaves_of(module_or_grads_list)
        for leaf in self._given:
            if not isinstance(leaf, Tensor):
                raise AmpTypeError(
                    f"Reducer() got a {type(leaf).__name__}, but takes a module, or gradients as tensors.  Call "
                    "Reducer(model), and call reduce() after each backward."
                )
        if self._module is not None:
            flat_dist_call([p.detach() for p in self._module.parameters()], dist.broadcast, (0,))

    def reduce(self) -> None:
        """Average the gradients in place over the ranks; the same gradients must be None on all ranks."""
        grads = self._given if self._module is None else [p.grad for p in self._module.parameters()]
        flat_dist_call([grad for grad in grads if grad is not None], dist.all_reduce)


@torch.no_grad()
def flat_dist_call(
    tensors: Sequence[Tensor], call: Callable[..., Any], extra_args: Sequence[Any] | None = None
) -> None:
    """Run a collective of torch.distributed once for each type among `tensors`, which then hold its result.

    Args:
        tensors: dense. Masters follow results that are written into `p.data`.
        call: called as `call(flat, *extra_args)` with all tensors of a type in one flat tensor. The sums of
            `all_reduce` are divided by the number of ranks.
    """
    by_type: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        by_type.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for alike in by_type.values():
        flat = apex_C.flatten(alike)
        call(flat, *(extra_args or ()))
        if call is dist.all_reduce:
            flat.div_(dist.get_world_size())
        torch._foreach_copy_(alike, apex_C.unflatten(flat, alike))


def check_process_group(name: str) -> None:
    """Raise AmpStateError unless torch.distributed is initialized."""
    if not has_ranks():
        raise AmpStateError(
            f"apex.parallel.{name} needs torch.distributed.  Call torch.distributed.init_process_group(backend='nccl') "
            "before, and start the script with torchrun --nproc_per_node=GPUS script.py."
        )


def _megabytes(module: nn.Module, message_size: int) -> float:
    """Return the size of a bucket of `message_size` elements in torch's unit, 2**20 bytes."""
    params = [p for p in module.parameters() if p.requires_grad]
    elements = sum(p.numel() for p in params)
    size = sum(p.numel() * p.element_size() for p in params) / elements if elements else 4
    return message_size * size / 2**20
