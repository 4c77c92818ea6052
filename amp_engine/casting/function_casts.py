"""The function casts of one engine: their type, registrations and observers, and the switch that turns them off."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from amp_engine.casting import in_force, locks, patch_torch
from amp_engine.casting.cache import NativeWeightCache, WeightCache
from amp_engine.casting.calls import Call
from amp_engine.casting.regions import casts_here, float_region
from amp_engine.casting.registration import Registration
from amp_engine.ground import messages
from amp_engine.kernels.choice import CASTS

_NAMES = {torch.float16: "Half", torch.bfloat16: "BFloat16", torch.float32: "Float"}


Observer = Callable[[Call], None]  # takes each call of a listed function, in the thread that makes it


class FunctionCasts:
    """Casts around listed torch functions, process-wide while installed.

    Args:
        dtype: the low-precision type, float16 or bfloat16.
        enable_caching: keep casts of weights within an iteration.
        allow_banned: run banned functions in FP32 instead of refusing them.
        verbose: report each cast.
        registrations: more functions that are cast; they win over the lists.
        removals: owner and name of functions that are not cast, listed or not.
        emit: takes the reports.
        observers: get each call, in any thread; code that changes the list must call `patch_torch.tell_native`.
        native: True to cast by the compiled wrappers, if there are any; False to cast by the Python ones.
        origin: the level or call that switched the casts on, for messages.
        everywhere: True to cast also outside of all regions; False to cast in cast regions only.
        only_observe: cast nothing, but pass each call to the observers.
        warns: warn at the first call in low precision if it is made inside of torch.autocast.
        owner: the engine; referred to weakly.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        *,
        enable_caching: bool = True,
        allow_banned: bool = False,
        verbose: bool = False,
        registrations: Sequence[Registration] = (),
        removals: Sequence[tuple[Any, str]] = (),
        emit: Callable[[str], None] = messages.say,
        observers: list[Observer] | None = None,
        native: bool = True,
        origin: str = "FunctionCasts",
        everywhere: bool = True,
        only_observe: bool = False,
        warns: bool = False,
        owner: Any = None,
    ) -> None:
        self.dtype = dtype
        self.enable_caching = enable_caching
        self.allow_banned = allow_banned
        self.registrations: Sequence[Registration] = tuple(registrations)
        self.removals: Sequence[tuple[Any, str]] = tuple(removals)
        self.cache = WeightCache() if CASTS is None or not native else NativeWeightCache(CASTS)
        self.verbose = verbose
        self._emit = emit
        self.observers = [] if observers is None else observers
        self._disabled = 0
        self._is_switched_off = False
        self.is_disabled_everywhere = False  # Dynamo guards this flag, and not the count
        self.origin = origin
        self.everywhere = everywhere
        self.only_observe = only_observe
        self.were_used = not warns
        self.owner = None if owner is None else weakref.ref(owner)

    def note_use(self) -> None:
        """Note a call in low precision. Until then calls go through the Python wrappers, which call this and warn."""
        self.were_used = True
        patch_torch.tell_native()

    @property
    def is_abandoned(self) -> bool:
        """True if the engine of these casts was freed without `close`."""
        return self.owner is not None and self.owner() is None

    @property
    def is_active(self) -> bool:
        """True if these casts are in force, and not disabled in this thread."""
        return in_force.current() is self

    @property
    def is_disabled(self) -> bool:
        """True inside of `disabled`, and where this thread casts nothing: see `regions.casts_here`."""
        return self.is_disabled_everywhere or not casts_here()

    @property
    def is_observed(self) -> bool:
        """True if casts are reported or observed: calls then go through wrappers.py."""
        return self.verbose or bool(self.observers)

    def tell(self, call: Call) -> None:
        """Report the casts of `call`, if `verbose`, and pass it on to all observers."""
        for made in call.casts if self.verbose else ():  # in apex's words
            self._emit(f"{_NAMES[made.source]}->{_NAMES[made.target]} ({call.function.rpartition('.')[2]})")
        for observer in tuple(self.observers):
            observer(call)

    @property
    def installed(self) -> bool:
        """True if torch is patched for these casts."""
        return in_force.in_force() is self

    def install(self) -> None:
        """Patch torch for these casts, in the place of those in force."""
        patch_torch.install(self)

    def remove(self) -> None:
        """Restore torch. Does nothing if not installed."""
        with locks.install:
            if self.installed:
                patch_torch.install(None)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Cast nothing inside, in any thread. Nests."""
        # Guards of compiled code see the region, not the count.
        region = float_region() if self.installed else nullcontext()
        if torch.compiler.is_compiling():  # Dynamo cannot trace locks
            with region:
                yield
            return
        self._disable(1)
        try:
            with region:
                yield
        finally:
            self._disable(-1)

    def switch(self, on: bool) -> None:
        """Switch the casts on or off, in all threads. Does not nest."""
        if on == self._is_switched_off:
            self._is_switched_off = not on
            self._disable(-1 if on else 1)

    def _disable(self, by: int) -> None:
        with locks.shared:
            self._disabled += by
            self.is_disabled_everywhere = self._disabled > 0
        patch_torch.tell_native()
