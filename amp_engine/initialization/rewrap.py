"""Make a DistributedDataParallel from before `initialize` again, around the cast model."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from amp_engine.errors import AmpStateError, AmpTypeError
from amp_engine.ground.torch_private import comm_hooks, delays_reductions

_KEPT = (
    *("device_ids", "output_device", "dim", "process_group", "find_unused_parameters", "gradient_as_bucket_view"),
    *("static_graph", "skip_all_reduce_unused_params", "batched_grad_copy"),
)
_MB = 1024 * 1024


@contextmanager
def rewrap(ddp: DistributedDataParallel) -> Iterator[nn.Module]:
    """A context around `initialize` for a model that is in a DistributedDataParallel already.

        with amp.rewrap(ddp) as model:
            amp.initialize(model, optimizer, opt_level="O2")

    It yields the model, which has no wrapper inside of the context. At exit `ddp`, the same object, reduces the
    gradients of the cast model, with its old options, bucket sizes and communication hooks. Module hooks on `ddp`
    itself are lost. All ranks must call it. Use it before the first backward.

    Raises AmpTypeError if `ddp` has another type, AmpStateError if it has `mixed_precision` or delayed reductions.
    """
    if not isinstance(ddp, DistributedDataParallel):
        raise AmpTypeError(
            f"rewrap() takes a DistributedDataParallel, not a {type(ddp).__name__}.  Call amp.initialize(model, "
            "optimizer) for a model without a wrapper."
        )
    if ddp.mixed_precision is not None or delays_reductions(ddp):
        raise AmpStateError(
            "rewrap() was given a DistributedDataParallel with mixed_precision or delay_all_reduce_named_params, which "
            "it cannot make again.  Call amp.initialize first, then make the wrapper."
        )
    model, options, hooks = ddp.module, _options(ddp), comm_hooks(ddp)
    # Remove its reducer, whose hooks are for parameters of the old types.
    ddp._modules.clear()
    del ddp.reducer, ddp.logger
    try:
        yield model
    finally:
        DistributedDataParallel.__init__(ddp, model, **options)
        for hook, state in hooks:
            ddp.register_comm_hook(state, hook)


def _options(ddp: DistributedDataParallel) -> dict[str, Any]:
    """The arguments that `ddp` was made with, but without the initial synchronization, which is already done."""
    known = inspect.signature(DistributedDataParallel).parameters
    options = {name: getattr(ddp, name) for name in _KEPT if name in known}
    syncs = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options[syncs] = getattr(ddp, syncs)
    if not ddp.bucket_bytes_cap_default:
        options["bucket_cap_mb"] = ddp.bucket_bytes_cap / _MB
    if sizes := getattr(ddp, "bucket_bytes_cap_list", ()):
        options["bucket_cap_mb_list"] = [size / _MB for size in sizes]
    return {**options, "init_sync": False}
