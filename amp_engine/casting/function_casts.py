"""The function casts of one engine: in which type, on or off, for which registered functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch

from amp_engine.casting import locks, patcher
from amp_engine.casting.cache import NativeWeightCache, WeightCache
from amp_engine.casting.float_region import float_region, in_float_region
from amp_engine.casting.patcher import Registration
from amp_engine.casting.wrappers import Call
from amp_engine.kernels import _native

HAS_NATIVE = _native.module is not None
_NAMES = {torch.float16: "Half", torch.bfloat16: "BFloat16", torch.float32: "Float"}


class Observer(Protocol):
    """Somebody who wants to know what is cast."""

    def tell(self, call: Call) -> None:
        """Told of each call of a listed function, in the thread that makes it."""


class FunctionCasts:
    """Casts around listed torch functions, process-wide while installed.

    Args:
        dtype: the low-precision type, float16 or bfloat16.
        enable_caching: keep casts of weights within an iteration.
        allow_banned: run banned functions in FP32 instead of refusing them.
        verbose: report each cast.
        registrations: functions beside the lists; they win over them.
        removals: owner and name of functions that are not cast, listed or not.
        emit: takes the reports.
        native: whether the compiled wrappers cast, rather than those of Python. Default: where they are compiled.
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
        emit: Callable[[str], None] = print,
        native: bool | None = None,
    ) -> None:
        self.dtype = dtype
        self.enable_caching = enable_caching
        self.allow_banned = allow_banned
        self.verbose = verbose
        self.registrations: Sequence[Registration] = tuple(registrations)
        self.removals: Sequence[tuple[Any, str]] = tuple(removals)
        self.is_native = HAS_NATIVE if native is None else native
        self.cache = NativeWeightCache() if self.is_native else WeightCache()
        self._observers: tuple[Observer, ...] = (_Trace(emit),) if verbose else ()
        self._disabled = 0
        self._is_switched_off = False
        self.is_disabled_everywhere = False  # which Dynamo guards, and not how often

    @property
    def is_active(self) -> bool:
        """Whether functions are cast: installed, the newest that is, and not disabled here."""
        return patcher.current() is self

    @property
    def is_disabled(self) -> bool:
        """Whether inside `disabled`, or in this thread inside `disabled_in_thread` or a module kept in float32."""
        return self.is_disabled_everywhere or in_float_region()

    @property
    def weight_copies(self) -> WeightCache | None:
        """The cache, for a step that writes weights and what it keeps of them; None while it is not used."""
        return self.cache if self.enable_caching and patcher.in_force(self) else None

    @property
    def is_observed(self) -> bool:
        """Whether somebody is to be told of each call, which the wrappers of wrappers.py do."""
        return bool(self._observers)

    def observe(self, observer: Observer) -> None:
        """Tell `observer` of each call, in any thread, until `unobserve`."""
        with locks.shared:
            self._observers = (*self._observers, observer)
        patcher.tell_native()

    def unobserve(self, observer: Observer) -> None:
        """Stop telling `observer`, if it is told."""
        with locks.shared:
            self._observers = tuple(other for other in self._observers if other is not observer)
        patcher.tell_native()

    def tell(self, call: Call) -> None:
        """Pass `call` on to all observers."""
        for observer in self._observers:
            observer.tell(call)

    @property
    def installed(self) -> bool:
        """Whether torch is patched for them, or will be when others are removed."""
        return patcher.holds(self)

    def install(self) -> None:
        """Patch torch. Does nothing if installed."""
        if not self.installed:
            patcher.install(self)

    def remove(self) -> None:
        """Restore torch, or the casts that were in force before. Does nothing if not installed."""
        patcher.remove(self)

    def abandon(self) -> None:
        """As `remove`, for a finalizer: waits for no other thread, of which one may do it later."""
        patcher.abandon(self)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """No casts inside, in any thread. Nests."""
        # The guards of what is compiled see the region, not the count.
        region = float_region() if patcher.in_force(self) else nullcontext()
        if torch.compiler.is_compiling():  # Dynamo traces no lock
            with region:
                yield
            return
        self._disable(1)
        try:
            with region:
                yield
        finally:
            self._disable(-1)

    def disabled_in_thread(self) -> AbstractContextManager[None]:
        """No casts inside, in this thread. Nests."""
        return float_region()

    def switch(self, on: bool) -> None:
        """Cast, or cast nothing in any thread until switched on again. Does not nest."""
        if on == self._is_switched_off:
            self._is_switched_off = not on
            self._disable(-1 if on else 1)

    def _disable(self, by: int) -> None:
        with locks.shared:
            self._disabled += by
            self.is_disabled_everywhere = self._disabled > 0
        patcher.tell_native()


class _Trace:
    """Reports each cast in apex's words."""

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit = emit

    def tell(self, call: Call) -> None:
        for made in call.casts:
            self._emit(f"{_NAMES[made.source]}->{_NAMES[made.target]} ({call.function.rpartition('.')[2]})")
