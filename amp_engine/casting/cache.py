"""Half copies of FP32 weights, which are never stale.

`weight.data`, numpy, collectives and extensions write a weight without incrementing its version counter. So a cache
*watches* the storage of each weight that has a copy: torch notes each request to write there. The cache returns a copy
only if no such request came and no other tensor shares the storage, as that tensor may have requested it before.

`WeightCache` keeps a copy for the uses of a weight in one iteration. `NativeWeightCache` also keeps it across steps of
our kernels, which write the copies beside the weights.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from amp_engine.ground import devices
from amp_engine.ground.torch_private import (
    current_dispatch_mode,
    functorch_level,
    is_copy_on_write,
    lazy_clone,
    storage_users,
)


@dataclass(frozen=True)
class _Entry:
    weight: weakref.ref[nn.Parameter]
    cast: Tensor
    version: int
    cast_version: int
    storage: int
    requires_grad: bool


class WeightCache:
    """Casts of `nn.Parameter`s in training.

    A cast is reused while its weight is the same object with the same version, storage and `requires_grad`, its
    storage is watched and no other tensor shares it. torch does not see a write through an address that other code
    kept as a number, so the owner of the cache also calls `after_step` after every optimizer step, and
    `after_backward` after every `scale_loss`.

    The cache keeps no cast while gradients are off: a cast would go stale between a load and the next forward, hold
    memory through evaluation, and be reused in training without its autograd edge. It keeps none under torch.compile,
    functorch or a dispatch mode, where tensors may be fakes or wrappers, and none under torch.jit.trace or the
    capture of a CUDA graph, which would record the cast as a constant.

    The cast's autograd node keeps its weight alive until the entry is discarded, at the latest by `discard_orphans` in
    a collection of garbage.
    """

    native: Any = None

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._changes = 0  # incremented when weights may have been written, perhaps while another thread casts

    def __len__(self) -> int:
        return len(self._entries)

    def kept(self) -> list[Tensor] | None:
        """Return the casts; None if the cache is the compiled one."""
        return [entry.cast for entry in list(self._entries.values())]

    def cast(self, weight: nn.Parameter, dtype: torch.dtype, on_cast: Callable[[], None] = lambda: None) -> Tensor:
        """Return `weight.to(dtype)`, from the cache if it is there. Gradients flow to `weight`.

        Calls `on_cast` if a cast was made.
        """
        if not (torch.is_grad_enabled() and _may_keep(weight)):
            on_cast()
            return weight.to(dtype)
        entry = self._entries.get(id(weight))
        if (
            entry is not None
            and entry.weight() is weight
            and entry.version == weight._version
            and entry.cast_version == entry.cast._version
            and entry.storage == weight.untyped_storage()._cdata
            and entry.requires_grad == weight.requires_grad
            and entry.cast.dtype == dtype
            and _is_untouched(weight)
        ):
            return entry.cast
        on_cast()
        changes, version, storage = self._changes, weight._version, weight.untyped_storage()._cdata
        is_watched = _watch(weight)
        cast = weight.to(dtype)
        if is_watched and changes == self._changes:
            self._entries[id(weight)] = _Entry(
                weakref.ref(weight), cast, version, cast._version, storage, weight.requires_grad
            )
        else:
            self._entries.pop(id(weight), None)
        return cast

    def after_backward(self) -> None:
        """Discard every cast: after a backward any weight may have been written."""
        self._changes += 1
        self._entries.clear()

    def after_step(self) -> None:
        """Discard every cast after an optimizer's step."""
        self.after_backward()

    def discard_orphans(self) -> None:
        """Free the weights that only their own casts keep alive."""
        for key, entry in list(self._entries.items()):
            weight: Any = entry.weight()
            # Three references: of this frame, of the call, and of the C++ tensor that the cast's autograd node holds.
            if weight is None or (sys.getrefcount(weight) <= 3 and weight._use_count() > 1):
                self._entries.pop(key, None)

    def clear(self) -> None:
        """Discard every cast."""
        self.after_backward()

    def copies(self, weights: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the copies that a step must write beside the weights: n times None, as this cache keeps none."""
        return [None] * len(weights)

    def written(self, weights: Sequence[Tensor]) -> None:
        """Note that the step wrote these weights and no other one."""


class NativeWeightCache(WeightCache):
    """A `WeightCache` in C++, whose copies live across steps.

    A copy that our kernels write in a step is valid until other code may have written its weight: until code requests
    the weight's memory, the weight's version or address changes, another optimizer steps, or a `scale_loss` exits. A
    weight whose storage other tensors share is cast at each use.

    A step does not write copies that a graph or another step still holds: it gets new memory for them, or none. If a
    step inside of a CUDA graph writes a weight, its copy is never read again, since the cache does not see replays.
    """

    def __init__(self, casts: Any) -> None:
        self.native = casts.WeightCache()
        self._steps = threading.local()  # per thread: number of the step with copies, and if it has called `written`

    def __len__(self) -> int:
        return len(self.native)

    def kept(self) -> list[Tensor] | None:
        """Return None: the copies live in C++."""
        return None

    def cast(self, weight: nn.Parameter, dtype: torch.dtype, on_cast: Callable[[], None] = lambda: None) -> Tensor:
        """Return `weight.to(dtype)`, from the cache if it is there. Gradients flow to `weight`."""
        if not _may_keep(weight):
            on_cast()
            return weight.to(dtype)
        cast, was_made = self.native.cast(weight, dtype)
        if was_made:
            on_cast()
        return cast

    def after_backward(self) -> None:
        """Discard every cast: after a backward any weight may have been written."""
        self.native.after_backward()

    def discard_orphans(self) -> None:
        """Free the weights that only their own casts keep alive."""
        self.native.discard_orphans()

    def clear(self) -> None:
        """Discard every cast."""
        self.native.clear()

    def copies(self, weights: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the copies that a step must write beside the weights: those that are valid and that no graph holds."""
        self._steps.has_copies, copies = self.native.copies(weights, getattr(self._steps, "has_copies", 0))
        return copies

    def written(self, weights: Sequence[Tensor]) -> None:
        """Note that the step wrote these weights and no other one."""
        self._steps.told = True
        step, self._steps.has_copies = getattr(self._steps, "has_copies", 0), 0
        self.native.written(weights, step)
        if len(weights) > 0 and devices.is_capturing(weights[0].device):
            self.native.leave(weights)

    def after_step(self) -> None:
        """Discard every cast after an optimizer's step, unless that step called `written`."""
        if not getattr(self._steps, "told", False):
            self.native.after_backward()
        self._steps.told = False


def tensors_hold_their_objects() -> bool:
    """True if a tensor that C++ holds adds to the reference count of its Python object: not in every torch version."""
    weight = nn.Parameter(torch.zeros(1))
    before = sys.getrefcount(weight)
    held_by_node = weight.view(1)
    after = sys.getrefcount(weight)
    del held_by_node
    return after > before


def _watch(weight: nn.Parameter) -> bool:
    """Have torch note requests to write the storage of `weight` from now on. True if torch can.

    Makes the storage copy-on-write with one owner: torch ends that state at the first request. Memory of numpy, of a
    file, or of several processes cannot be watched, because code outside of torch writes it.
    """
    if not _is_alone(weight):
        return False  # FSDP2 frees and reallocates its storages, which must not be copy-on-write then
    if not is_copy_on_write(weight):
        weight.data_ptr()  # the compiled cache, which may watch this weight too, takes this for a write
        try:
            lazy_clone(weight.detach())  # the clone is discarded at once
        except RuntimeError:
            return False
    return _is_untouched(weight)


def _is_untouched(weight: nn.Parameter) -> bool:
    """True if no request to write the storage of `weight` came since `_watch`, and no other tensor shares it."""
    return is_copy_on_write(weight) and _is_alone(weight)


def _is_alone(weight: nn.Parameter) -> bool:
    """True if no other tensor shares the storage of `weight`."""
    return bool(storage_users(weight.untyped_storage()._cdata) == 2)  # the weight, and this call


def _may_keep(weight: nn.Parameter) -> bool:
    return (
        not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()  # type: ignore[attr-defined]
        and not devices.is_capturing(weight.device)
        and not weight.is_inference()
        and weight.layout is torch.strided
        and functorch_level() is None
        and current_dispatch_mode() is None
    )
