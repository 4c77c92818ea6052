"""Half casts of FP32 weights, each made once for all uses in one iteration, as torch.autocast's cache keeps them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from amp_engine.ground import devices
from amp_engine.ground.torch_private import current_dispatch_mode, data_address, functorch_level, is_in_backward


@dataclass(frozen=True)
class _Entry:
    weight: weakref.ref[nn.Parameter]
    cast: Tensor
    version: int
    cast_version: int
    address: int
    requires_grad: bool


class WeightCache:
    """Casts of `nn.Parameter`s, from the first use of each to the next `clear`.

    The owner calls `clear` at the exit of every `scale_loss` and after every optimizer's step. A backward through one
    of the casts discards all, too, when the next one is asked for. In between a weight is cast anew when its version,
    address or `requires_grad` has changed. A write through `weight.data` changes none of these.

    No cast is kept or read while gradients are off: it would lack the autograd edge that training needs, and averages
    go in and out through `.data` there. Nor under torch.compile, functorch or a dispatch mode, where tensors may be
    fakes or wrappers; nor under torch.jit.trace or the capture of a CUDA graph, which would record the cast as a
    constant.

    The autograd node of a cast keeps its weight alive until `clear`.
    """

    native: Any = None

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._clears = 0
        self._spent: list[None] = []  # filled by a backward through one of the casts; its hooks share it

    def kept(self) -> list[Tensor]:
        """Return the casts."""
        return [entry.cast for entry in list(self._entries.values())]

    def cast(self, weight: nn.Parameter, dtype: torch.dtype, on_cast: Callable[[], None] = lambda: None) -> Tensor:
        """Return `weight.to(dtype)`, from the cache if it is there. Gradients flow to `weight`.

        Calls `on_cast` if a cast was made.
        """
        if not _may_keep(weight):
            on_cast()
            return weight.to(dtype)
        if self._spent and not is_in_backward():  # a checkpoint in a backward takes the casts of its first time
            self.clear()
        entry = self._entries.get(id(weight))
        if (
            entry is not None
            and entry.weight() is weight
            and entry.version == weight._version
            and entry.cast_version == entry.cast._version
            and entry.address == data_address(weight)
            and entry.requires_grad == weight.requires_grad
            and entry.cast.dtype == dtype
        ):
            return entry.cast
        on_cast()
        clears, version, address, requires_grad = (
            self._clears,
            weight._version,
            data_address(weight),
            weight.requires_grad,
        )
        cast = weight.to(dtype)
        if clears == self._clears:  # otherwise another thread may have written the weight meanwhile
            if cast.grad_fn is not None:
                cast.register_hook(partial(_fill, self._spent))
            self._entries[id(weight)] = _Entry(
                weakref.ref(weight), cast, version, cast._version, address, requires_grad
            )
        return cast

    def clear(self) -> None:
        """Discard every cast."""
        self._clears += 1
        self._spent = []
        self._entries.clear()


class NativeWeightCache(WeightCache):
    """A `WeightCache` in C++."""

    def __init__(self, casts: Any) -> None:
        self.native = casts.WeightCache()

    def kept(self) -> list[Tensor]:
        """Return the casts."""
        kept: list[Tensor] = self.native.kept()
        return kept

    def cast(self, weight: nn.Parameter, dtype: torch.dtype, on_cast: Callable[[], None] = lambda: None) -> Tensor:
        """Return `weight.to(dtype)`, from the cache if it is there. Gradients flow to `weight`."""
        if not _may_keep(weight):
            on_cast()
            return weight.to(dtype)
        cast, was_made = self.native.cast(weight, dtype)
        if was_made:
            on_cast()
        return cast

    def clear(self) -> None:
        """Discard every cast."""
        self.native.clear()


def _fill(spent: list[None], grad: Tensor) -> None:
    spent.append(None)


def _may_keep(weight: nn.Parameter) -> bool:
    return (
        torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()  # type: ignore[attr-defined]
        and not devices.is_capturing(weight.device)
        and not weight.is_inference()
        and weight.layout is torch.strided
        and functorch_level() is None
        and current_dispatch_mode() is None
    )
