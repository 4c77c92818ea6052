"""A call of a patched function, as observers are told of it, and the casts that its wrapper needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from amp_engine.casting.cache import WeightCache
from amp_engine.casting.registration import Registration


@dataclass(frozen=True)
class Cast:
    """One tensor that was cast, or would have been but for the cache.

    Attributes:
        source: its type.
        target: the type that the function gets.
        bytes_moved: read and written; 0 from the cache. A function that converts by itself may do so as it reads, and
            move less.
    """

    source: torch.dtype
    target: torch.dtype
    bytes_moved: int


@dataclass
class Call:
    """One call of a patched function, for observers of the casts.

    Attributes:
        function: qualified name, such as "torch.nn.functional.linear".
        kind: the list that it is on: half, float, promote, match_self, refused_in_place or banned.
        dtype: the widest floating type among its arguments after casting, None if there is none.
        casts: the casts that were made.
        cached: how many casts the cache saved.
    """

    function: str
    kind: str
    dtype: torch.dtype | None = None
    casts: list[Cast] = field(default_factory=list)
    cached: int = 0

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> None:
        """Note that `tensor` is cast to `dtype`."""
        moved = tensor.numel() * (tensor.dtype.itemsize + dtype.itemsize)
        self.casts.append(Cast(tensor.dtype, dtype, moved))

    def cast_weight(self, weight: nn.Parameter, casts: Casts) -> Tensor:
        """Return the weight in the low-precision type, from the cache if it is there."""
        before = len(self.casts)
        cast = casts.cache.cast(weight, casts.dtype, lambda: self.cast(weight, casts.dtype))
        self.cached += before == len(self.casts)
        return cast


class Casts(Protocol):
    """The casts of an engine, as wrappers and patches see them."""

    dtype: torch.dtype
    cache: WeightCache
    enable_caching: bool
    allow_banned: bool
    registrations: Sequence[Registration]
    removals: Sequence[tuple[Any, str]]
    is_disabled_everywhere: bool
    origin: str
    everywhere: bool
    were_used: bool
    only_observe: bool

    @property
    def is_active(self) -> bool:
        """True if functions are to be cast."""

    @property
    def is_disabled(self) -> bool:
        """True if they are switched off, here or everywhere."""

    @property
    def is_observed(self) -> bool:
        """True if each call must go through Python, which tells the observers."""

    @property
    def is_wanted(self) -> bool:
        """True unless they have ended, or their owner is gone or does not have them, as a forked child may find."""

    @property
    def modules(self) -> list[nn.Module] | None:
        """The live modules with the last of which the casts end; None if they last until they are removed."""

    def note_use(self) -> None:
        """Note that the casts were used; wrappers call this at the first call."""

    def tell(self, call: Call) -> None:
        """Pass `call` on to the observers; wrappers call this if there are any."""

    def discard(self) -> None:
        """End them, now or as soon as no other thread holds a lock that this needs."""
