"""The call of a patched function that observers get, and the interface of the casts that wrappers use."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from amp_engine.casting.cache import WeightCache
from amp_engine.casting.registration import Registration


@dataclass(frozen=True)
class Cast:
    """One tensor that was cast.

    Attributes:
        source: its type.
        target: the type that the function gets.
        bytes_moved: bytes read and written. A function that converts by itself may convert as it reads, and move less.
    """

    source: torch.dtype
    target: torch.dtype
    bytes_moved: int


@dataclass
class Call:
    """One call of a patched function, for observers of the casts.

    Attributes:
        function: qualified name, such as "torch.nn.functional.linear".
        kind: the list that the function is on: half, float, promote, match_self, refused_in_place or banned.
        dtype: the widest floating type among its arguments after casting, None if there is none.
        casts: the casts that were made.
        cached: number of casts that the cache saved.
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
    owner: weakref.ReferenceType[Any] | None

    @property
    def is_active(self) -> bool:
        """True if these casts are in force and not disabled in this thread."""

    @property
    def is_abandoned(self) -> bool:
        """True if the engine of these casts was freed without `close`."""

    @property
    def is_disabled(self) -> bool:
        """True if these casts are disabled, in this thread or in all threads."""

    @property
    def is_observed(self) -> bool:
        """True if each call must go through the Python wrappers, which pass it to observers."""

    def note_use(self) -> None:
        """Note a call in low precision; wrappers call this at the first one."""

    def tell(self, call: Call) -> None:
        """Pass `call` to the observers; wrappers call this if there are any."""
