"""The function casts of one engine, its registrations, and its observers."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from amp_engine.casting import in_force, locks, patch_torch
from amp_engine.casting.function_casts import FunctionCasts, Observer
from amp_engine.casting.overrides import from_environment
from amp_engine.casting.patches import check_patchable
from amp_engine.casting.regions import cast_region, float_region
from amp_engine.casting.registration import Registration
from amp_engine.errors import AmpStateError, AmpValueError
from amp_engine.ground.dtypes import LOW_PRECISION
from amp_engine.levels import report
from amp_engine.levels.policy import Policy

_OBSERVERS: list[Observer] = []  # of all engines, for calls while no engine has casts


class EngineCasts:
    """The casts of one engine: at most one `FunctionCasts` at a time.

    Args:
        say: prints a message; with `rank0=True` on rank 0 only.
    """

    def __init__(self, say: Callable[..., None]) -> None:
        self._say = say
        self._installed: FunctionCasts | None = None
        self._options: dict[str, Any] = {}
        self._registrations: list[Registration] = []
        self._removals: list[tuple[Any, str]] = []
        self._observers: list[Observer] = []
        self._casts_model_at: str | None = None  # the newest level, if it casts the model and no functions
        self._said_without = False

    @property
    def casts(self) -> FunctionCasts | None:
        """The casts, from `install` until `remove`; else None."""
        return self._installed

    # For a step.

    def off(self) -> AbstractContextManager[None] | None:
        """Return a context without function casts in this thread; None if there are no casts."""
        return None if self.casts is None else float_region()

    # For a backward.

    def after_backward(self) -> None:
        """Discard casts of weights: the iteration that they were made for has ended."""
        casts = self.casts
        if casts is not None:
            casts.cache.clear()

    def why_nothing_is_cast(self, policy: Policy | None) -> str | None:
        """Explain, for users, why nothing is cast under `policy`; None if functions are cast."""
        if self.casts is not None:
            return None
        if policy is None:
            return "amp.initialize() was not called.  Call amp.initialize(model, optimizer, opt_level='O1') first."
        if not policy.enabled:
            return "amp.initialize(enabled=False) casts nothing."
        level = policy.opt_level
        if policy.cast_model_type in LOW_PRECISION:
            return f"Function casts are not on at {level}, which casts the model instead; O1 and O4 cast functions."
        return f"Function casts are not on at {level}; O1 and O4 cast functions."

    # Lists.

    @property
    def registrations(self) -> list[Registration]:
        """The registrations since the last `discard_lists`; the first one of a function counts."""
        return list(self._registrations)

    @property
    def removals(self) -> list[tuple[Any, str]]:
        """Owner and name of each function taken off the lists since `discard_lists`; a registration wins over it."""
        return list(self._removals)

    def register(self, registration: Registration) -> None:
        """Cast one more function wherever O1 or O4 is on, until `discard_lists`."""
        check_patchable(registration.module, registration.name)
        self._change_lists([*self._registrations, registration], self._removals)
        self._say_without([registration])

    def unregister(self, module: Any, name: str) -> None:
        """Run `module.name` without casts, even if registered or listed, until `discard_lists` or `register`."""
        check_patchable(module, name)
        removal = (module, name)
        registrations = [registration for registration in self._registrations if not _names(removal, registration)]
        self._change_lists(registrations, [*self._removals, removal])

    def discard_lists(self) -> None:
        """Discard registrations and removals."""
        self._registrations, self._removals = [], []

    def note_without(self, kind: str, name: str) -> None:
        """Say, once, that a decorated function is called without casts because its level casts the model instead."""
        if self._casts_model_at is not None and not self._said_without:
            self._said_without = True
            self._say(report.nothing_is_cast(self._casts_model_at, f"amp.{kind}_function", name), rank0=True)

    def _say_without(self, registrations: Sequence[Registration]) -> None:
        """Say that registrations have no effect if the level casts the model and no functions."""
        level = self._casts_model_at
        if level is not None and registrations:
            calls = ", ".join(dict.fromkeys(f"amp.register_{r.kind}_function" for r in registrations))
            names = ", ".join(
                f"{getattr(r.module, '__name__', type(r.module).__name__)}.{r.name}" for r in registrations
            )
            self._say(report.nothing_is_cast(level, calls, names), rank0=True)

    def _change_lists(self, registrations: list[Registration], removals: list[tuple[Any, str]]) -> None:
        before = self._registrations, self._removals
        self._registrations, self._removals = registrations, removals
        with locks.install:
            if self.casts is not None:
                try:
                    self._install(self._options)
                except BaseException:
                    self._registrations, self._removals = before
                    raise

    # Installing.

    def install(
        self, dtype: torch.dtype, *, origin: str = "amp.init()", everywhere: bool = True, **options: bool
    ) -> FunctionCasts:
        """Cast listed functions to `dtype` until `remove`, process-wide; replaces this engine's earlier casts.

        Args:
            everywhere: False casts in cast regions only.
            options: `enable_caching`, `allow_banned` and `verbose` of FunctionCasts.

        Raises AmpStateError or AmpValueError like `check`; then nothing has changed.
        """
        with locks.install:
            self.check(everywhere)
            before = self.casts
            casts = self._install({**options, "dtype": dtype, "origin": origin, "everywhere": everywhere})
        if before is not None and before.dtype != dtype:
            self._say(report.casts_replaced(before.origin, origin, dtype), rank0=True)
        return casts

    def check(self, everywhere: bool) -> None:
        """Raise if functions cannot be cast now.

        Raises AmpValueError for a wrong AMP_ENGINE_HALF, _FLOAT or _PROMOTE, or if `everywhere` differs from now, and
        AmpStateError if another engine casts functions.
        """
        from_environment(os.environ, self._registrations)
        casts, other = self.casts, in_force.in_force()
        if other is not None and other is not casts and not other.only_observe:
            gc.collect()  # its engine may be garbage
            if not other.is_abandoned:
                raise AmpStateError(
                    f"Another Engine casts functions ({other.origin}), process-wide, and only one can at a time.  Call "
                    "close() on it first, or initialize all models with one Engine."
                )
        if casts is not None and casts.everywhere != everywhere:
            here, there = ("everywhere", "model") if everywhere else ("model", "everywhere")
            raise AmpValueError(
                f'casts="{here}" was asked for where {casts.origin} casts functions with casts="{there}" already.  '
                "Pass the same `casts` in each call of amp.initialize, or call amp.close() first."
            )

    def follow(self, policy: Policy, allow_banned: bool, verbose: bool, everywhere: bool) -> None:
        """Cast functions as `policy` says; if it casts none, say if functions are still cast. Raises like `install`."""
        if policy.patch_torch_functions:
            self.install(
                policy.patch_torch_functions_type or torch.float16,
                allow_banned=allow_banned,
                verbose=verbose,
                origin=str(policy.opt_level),
                everywhere=everywhere,
            )
        else:
            self.note_other_level(str(policy.opt_level))
            if self.casts is None and policy.cast_model_type in LOW_PRECISION:
                self._casts_model_at = str(policy.opt_level)
                self._say_without(self._registrations)

    def note_other_level(self, level: str) -> None:
        """Note that a model is initialized at `level`, without function casts. Says if functions are still cast."""
        self._casts_model_at, self._said_without = None, False
        casts = in_force.in_force()
        if casts is not None and not casts.only_observe:
            self._say(report.still_casting(level, casts.origin, casts.dtype), rank0=True)

    def _install(self, options: dict[str, Any]) -> FunctionCasts:
        registrations, removed = from_environment(os.environ, self._registrations)
        removals = [r for r in self._removals if not any(_names(r, added) for added in registrations)]
        casts = FunctionCasts(
            **options,
            registrations=registrations,
            removals=[*removed, *removals],
            emit=self._say,
            observers=self._observers,
            warns=self.casts is None or not self.casts.were_used,
            owner=self,
        )
        casts.install()
        self._installed, self._options, self._casts_model_at = casts, options, None
        return casts

    def remove(self) -> None:
        """End the casts, or those of an engine that was freed without `close`, and restore torch's functions."""
        with locks.install:
            self._casts_model_at, self._said_without = None, False
            casts = in_force.in_force()
            # Not `self._installed`: an interrupt may have come before it was set.
            if casts is not None and casts.owner is not None and casts.owner() in (self, None):
                patch_torch.install(_observing())
            self._installed = None

    def enabled(self) -> AbstractContextManager[None]:
        """Return a context in which this thread casts functions, if there are casts. Nests."""
        return nullcontext() if self.casts is None else cast_region()

    def disabled(self) -> AbstractContextManager[None]:
        """Return a context in which no thread casts functions. Nests."""
        return nullcontext() if self.casts is None else self.casts.disabled()

    @contextmanager
    def observed(self, tell: Observer) -> Iterator[None]:
        """Pass each call to `tell`, also under casts installed meanwhile, and while there are none."""
        with locks.install:
            self._observers.append(tell)
            _OBSERVERS.append(tell)
            if in_force.in_force() is None:
                patch_torch.install(_observing())
            patch_torch.tell_native()
        try:
            yield
        finally:
            with locks.install:
                self._observers.remove(tell)
                _OBSERVERS.remove(tell)
                casts = in_force.in_force()
                if casts is not None and casts.only_observe and not _OBSERVERS:
                    patch_torch.install(None)
                patch_torch.tell_native()


def _observing() -> FunctionCasts | None:
    """Return casts that only observe; None without observers."""
    return FunctionCasts(torch.float16, observers=_OBSERVERS, only_observe=True) if _OBSERVERS else None


def _names(removal: tuple[Any, str], registration: Registration) -> bool:
    return removal[0] is registration.module and removal[1] == registration.name
