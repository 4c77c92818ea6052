"""The function casts of one engine: in which type, on or off, for which registered functions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from amp_engine.casting import patcher
from amp_engine.casting.cache import NativeWeightCache, WeightCache
from amp_engine.casting.patcher import Registration
from amp_engine.kernels import _native

HAS_NATIVE = _native.module is not None
_NAMES = {torch.float16: "Half", torch.bfloat16: "BFloat16", torch.float32: "Float"}


class FunctionCasts:
    """Casts around listed torch functions, process-wide while installed.

    Args:
        dtype: the low-precision type, float16 or bfloat16.
        enable_caching: keep casts of weights within an iteration.
        allow_banned: run banned functions in FP32 instead of refusing them.
        verbose: report each cast.
        registrations: functions beside the lists; they win over them.
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
        emit: Callable[[str], None] = print,
        native: bool | None = None,
    ) -> None:
        self.dtype = dtype
        self.enable_caching = enable_caching
        self.allow_banned = allow_banned
        self.registrations: Sequence[Registration] = tuple(registrations)
        self.is_native = HAS_NATIVE if native is None else native
        self.cache = NativeWeightCache() if self.is_native else WeightCache()
        self.installed = False
        self._verbose = verbose
        self._emit = emit
        self._lock = threading.Lock()
        self._disabled = 0

    @property
    def is_active(self) -> bool:
        """Whether functions are cast: installed, the newest that is, and not disabled here."""
        return patcher.current() is self

    @property
    def is_disabled(self) -> bool:
        """Whether inside `disabled`."""
        return self._disabled > 0

    @property
    def weight_copies(self) -> WeightCache | None:
        """The cache, for a step that writes weights and what it keeps of them; None while it is not used."""
        return self.cache if self.enable_caching and patcher.in_force(self) else None

    def install(self) -> None:
        """Patch torch. Does nothing if installed."""
        if not self.installed:
            patcher.install(self)
            self.installed = True

    def remove(self) -> None:
        """Restore torch, or the casts that were in force before. Does nothing if not installed."""
        if self.installed:
            patcher.remove(self)
            self.installed = False
            self.cache.clear()

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """No casts inside, in any thread. Nests."""
        self._disable(1)
        try:
            yield
        finally:
            self._disable(-1)

    def disabled_in_thread(self) -> AbstractContextManager[None]:
        """No casts inside, in this thread. Nests."""
        return patcher.disabled_in_thread()

    @property
    def is_observed(self) -> bool:
        """Whether each cast is told of."""
        return self._verbose

    def trace(self, source: torch.dtype, target: torch.dtype, function: str) -> None:
        """Report a cast, if verbose, in apex's words."""
        if self._verbose:
            self._emit(f"{_NAMES[source]}->{_NAMES[target]} ({function})")

    def _disable(self, by: int) -> None:
        with self._lock:
            self._disabled += by
        patcher.tell_native()
