"""Make masters follow the writes of torch.distributed's collectives into parameters.

c10d's operators write their first argument without moving its version, because their schemas declare no write. While
an engine is open, our kernel under the dispatch key ADInplaceOrView moves the versions of the written parameters, on
every rank alike, so that masters of all ranks take the same values.

The kernel also requests the data pointers of copy-on-write arguments, which copies their memory, before it passes them
on. Backends do that in threads of their own, and torch fails if two threads do it at once for the same memory:
"refcount >= 0 INTERNAL ASSERT FAILED". A weight with a copy in half may be copy-on-write (casting/cache.py).

torch's operators on lists (`_foreach_mul_`, `_fused_adam_`) get such a kernel too: on a GPU they request the memory
that they write as if they only read it, so a write into a gradient of the model would reach its copy-on-write clone.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from amp_engine.ground.torch_private import after_ad_inplace_or_view, is_copy_on_write
from amp_engine.kernels import tensor_lists
from amp_engine.stepping.exact import written_memory

# Each writes its first argument: a tensor, a list of them, or a list of lists.
WRITING = (
    "_allgather_base_",
    "_reduce_scatter_base_",
    "allgather_",
    "allgather_coalesced_",
    "allgather_into_tensor_coalesced_",
    "allreduce_",
    "allreduce_coalesced_",
    "alltoall_",
    "alltoall_base_",
    "broadcast_",
    "gather_",
    "recv_",
    "recv_any_source_",
    "reduce_",
    "reduce_scatter_",
    "reduce_scatter_tensor_coalesced_",
    "scatter_",
)
# Reads its first argument.
READING = ("send",)


# Versions are moved while this set is not empty.
_OWNERS: weakref.WeakSet[object] = weakref.WeakSet()

# Registered once, never removed: torch would free a kernel that another thread may run. No owners: versions stay.
_REGISTERED: list[object] = []
_REGISTERING = threading.Lock()


def watch(owner: object) -> None:
    """Make collectives move versions until `unwatch(owner)`, or until `owner` is garbage collected."""
    with _REGISTERING:
        if not _REGISTERED:
            tensor_lists.ask_for_written_lists()
            _REGISTERED.append(torch.distributed.is_available() and _watch_c10d())
    _OWNERS.add(owner)


def unwatch(owner: object) -> None:
    """Undo `watch`."""
    _OWNERS.discard(owner)


def _watch_c10d() -> object:
    writing, reading = ([n for n in names if hasattr(torch.ops.c10d, n)] for names in (WRITING, READING))
    return tensor_lists.watch_collectives(writing, reading, _written) or _register(writing, reading)


def _register(writing: Sequence[str], reading: Sequence[str]) -> torch.library.Library:
    library = torch.library.Library("c10d", "IMPL")
    for name in (*writing, *reading):
        kernel = _kernel(getattr(torch.ops.c10d, name).default, name in writing, name == "broadcast_")
        library.impl(name, kernel, "ADInplaceOrView", with_keyset=True)
    return library


def _kernel(operator: Any, writes: bool, is_broadcast: bool) -> Callable[..., Any]:
    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        for tensor in _tensors([*args, *kwargs.values()]):
            if tensor.layout is torch.strided and is_copy_on_write(tensor):
                tensor.data_ptr()
        result = operator.redispatch(keyset & after_ad_inplace_or_view, *args, **kwargs)
        if writes:
            _written(_tensors(args[0]), is_broadcast)
        return result

    return kernel


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list):
        for part in value:
            yield from _tensors(part)


def _written(tensors: Iterable[Tensor], is_broadcast: bool) -> None:
    """Move the versions of parameters and masters whose memory overlaps that of `tensors`."""
    for tensor in tensors if _OWNERS else ():
        if isinstance(tensor, nn.Parameter):
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)
        # Not subclasses: a compiler's fake tensor has no memory, and a distributed tensor none of its own.
        elif type(tensor) is Tensor and tensor.layout is torch.strided and tensor.is_floating_point():
            torch.autograd.graph.increment_version(written_memory(tensor))
