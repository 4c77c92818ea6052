"""The function casts of one engine, its registrations, and its observers."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import nn

from amp_engine.casting import patch_torch
from amp_engine.casting.calls import Call
from amp_engine.casting.function_casts import FunctionCasts, Observer
from amp_engine.casting.overrides import from_environment
from amp_engine.casting.patches import check_patchable
from amp_engine.casting.regions import cast_region, float_region
from amp_engine.casting.registration import Registration
from amp_engine.errors import AmpValueError
from amp_engine.ground.dtypes import LOW_PRECISION
from amp_engine.levels import report
from amp_engine.levels.policy import Policy

_WATCHING: list[Observer] = []  # observers of all engines, for calls while no engine has casts


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
        self._said_ended = False
        self._casts_model_at: str | None = None  # the newest level, if it casts the model and no functions
        self._said_without = False

    @property
    def casts(self) -> FunctionCasts | None:
        """The casts, from `install` until `remove` or until the last of their modules is freed; else None."""
        casts = self._installed
        return None if casts is None or casts.has_ended else casts

    # For a step.

    def off(self) -> AbstractContextManager[None] | None:
        """Return a context without function casts in this thread; None if there are no casts."""
        return None if self.casts is None else float_region()

    # For a backward.

    def note_use(self, wanted: bool) -> None:
        """Note that a loss was computed. Says once if casts are `wanted` but have ended with their modules.

        If nothing has used the casts yet, `initialize` was called as a switch, and the casts count as used from now on.
        """
        casts = self._installed
        if casts is None:
            return
        if wanted and casts.has_ended:
            if not self._said_ended:
                self._say(report.casts_ended(casts.origin), rank0=True)
            self._said_ended = True
        elif not casts.were_used:
            casts.note_use()

    def why_nothing_is_cast(self, policy: Policy | None) -> str | None:
        """Explain, for users, why nothing is cast under `policy`; None if functions are cast."""
        if self.casts is not None:
            return None
        if policy is None:
            return "amp.initialize() was not called.  Call amp.initialize(model, optimizer, opt_level='O1') first."
        if not policy.enabled:
            return "amp.initialize(enabled=False) casts nothing."
        if (ended := self.why_ended(policy)) is not None:
            return ended
        level = policy.opt_level
        if policy.cast_model_type in LOW_PRECISION:
            return f"Function casts are not on at {level}, which casts the model instead; O1 and O4 cast functions."
        return f"Function casts are not on at {level}; O1 and O4 cast functions."

    def why_ended(self, policy: Policy | None) -> str | None:
        """Explain, for users, why the function casts of `policy` have ended; None if they have not, or it has none."""
        is_over = policy is not None and policy.patch_torch_functions and self.casts is None
        return report.casts_ended(self._installed.origin) if is_over and self._installed is not None else None

    def after_backward(self) -> None:
        """Discard casts of weights: the iteration that they were made for has ended."""
        casts = self.casts
        if casts is not None:
            casts.cache.clear()

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
        with patch_torch.changing():
            if self.casts is not None:
                try:
                    self._install(self._options, self.casts.modules)
                except BaseException:
                    self._registrations, self._removals = before
                    raise

    # Installing.

    def install(
        self,
        dtype: torch.dtype,
        *,
        models: Sequence[nn.Module] = (),
        origin: str = "amp.init()",
        everywhere: bool = True,
        **options: bool,
    ) -> FunctionCasts:
        """Cast listed functions to `dtype` from now on, process-wide; replaces this engine's earlier casts.

        Args:
            everywhere: False casts in cast regions only.
            options: `enable_caching`, `allow_banned` and `verbose` of FunctionCasts.

        The casts end with the last module of `models` and of the models of the earlier casts; without `models` they
        last until `remove`.

        Raises AmpValueError like `check`; then nothing has changed.
        """
        self.check(everywhere)
        of_casts = {**options, "dtype": dtype, "origin": origin, "everywhere": everywhere}
        new = _modules_of(models)
        with patch_torch.changing():  # else casts that another thread installs meanwhile would never be removed
            before = self.casts
            earlier = [] if before is None else before.modules
            lasts = earlier is None or not models
            casts = self._install(of_casts, None if earlier is None or lasts else [*earlier, *new])
            self._said_ended = False
        if before is not None and before.dtype != dtype:
            ids = {id(module) for module in new}
            if earlier is None or any(id(module) not in ids for module in earlier):
                self._say(report.casts_replaced(before.origin, origin, dtype), rank0=True)
        return casts

    def check(self, everywhere: bool) -> None:
        """Raise AmpValueError for a wrong AMP_ENGINE_HALF, _FLOAT or _PROMOTE, or if `everywhere` differs from now."""
        from_environment(os.environ, self._registrations)
        casts = self.casts
        if casts is not None and casts.everywhere != everywhere:
            here, there = ("everywhere", "model") if everywhere else ("model", "everywhere")
            raise AmpValueError(
                f'casts="{here}" was asked for where {casts.origin} casts functions with casts="{there}" already.  '
                "Pass the same `casts` in each call of amp.initialize, or call amp.close() first."
            )

    def follow(
        self, policy: Policy, models: Sequence[nn.Module], allow_banned: bool, verbose: bool, everywhere: bool
    ) -> None:
        """Cast functions for `models`, or end casts for them alone, as `policy` says. Raises like `install`."""
        if policy.patch_torch_functions:
            self.install(
                policy.patch_torch_functions_type or torch.float16,
                allow_banned=allow_banned,
                verbose=verbose,
                origin=str(policy.opt_level),
                models=models,
                everywhere=everywhere,
            )
        else:
            self.end_of(models, str(policy.opt_level))
            if self.casts is None and policy.cast_model_type in LOW_PRECISION:
                self._casts_model_at = str(policy.opt_level)
                self._say_without(self._registrations)

    def _install(self, options: dict[str, Any], modules: Sequence[nn.Module] | None) -> FunctionCasts:
        registrations, removed = from_environment(os.environ, self._registrations)
        removals = [r for r in self._removals if not any(_names(r, added) for added in registrations)]
        casts = FunctionCasts(
            **options,
            registrations=registrations,
            removals=[*removed, *removals],
            emit=self._say,
            observers=self._observers,
        )
        casts.belong_to(self, modules)
        if self.casts is not None and self.casts.were_used:
            casts.note_use()
        casts.install()
        # From here on a forked child keeps the new casts, and discards the earlier ones.
        before, self._installed, self._options = self._installed, casts, options
        self._casts_model_at = None
        if before is not None:
            before.remove()
        return casts

    def end_of(self, models: Any, level: str) -> None:
        """End the casts for `models`, whose new `level` has no function casts. Says if functions are still cast."""
        self._casts_model_at, self._said_without = None, False
        if self.casts is not None and self.casts.let_go(_modules_of(models)):
            self.remove()
        if patch_torch.newest() is not None:
            gc.collect()  # frees models that only cycles of references keep alive
        patch_torch.discard_switches()
        newest = patch_torch.newest()
        if newest is not None:
            newest.note_use()
            self._say(report.still_casting(level, newest.origin, newest.dtype), rank0=True)

    def remove(self) -> None:
        """End the casts and restore torch's functions."""
        with patch_torch.changing():
            self._casts_model_at, self._said_without = None, False
            if self._installed is not None:
                self._installed.remove()
                self._installed = None

    def enabled(self) -> AbstractContextManager[None]:
        """Return a context in which this thread casts functions, if there are casts. Nests."""
        return nullcontext() if self.casts is None else cast_region()

    def disabled(self) -> AbstractContextManager[None]:
        """Return a context in which no thread casts functions. Nests."""
        return nullcontext() if self.casts is None else self.casts.disabled()

    @contextmanager
    def observed(self, tell: Observer) -> Iterator[None]:
        """Pass each call to the method `tell`, also under casts installed meanwhile, and while there are none."""
        told = _weakly(tell)
        try:
            self._observers.append(tell)
            _WATCHING.append(told)
            with patch_torch.changing():
                patch_torch.tell_native()
                patch_torch.watch(FunctionCasts(torch.float16, observers=_WATCHING, only_observe=True))
            yield
        finally:
            for observers, observer in ((_WATCHING, told), (self._observers, tell)):
                with suppress(ValueError):
                    observers.remove(observer)
            patch_torch.tell_native()
            patch_torch.remove_discarded()


def _stop_watching() -> None:
    """Stop observing in a forked child: its calls do not reach the parent, and it may lack the thread that explains."""
    if _WATCHING:
        _WATCHING.clear()
        patch_torch.remove_discarded()


os.register_at_fork(after_in_child=_stop_watching)


def _weakly(tell: Observer) -> Observer:
    """Return an observer that does not keep the explanation, which may be dropped before its exit, nor its engine."""
    ref = weakref.WeakMethod(tell)

    def told(call: Call) -> None:
        if (tell := ref()) is not None:
            tell(call)

    return told


def _names(removal: tuple[Any, str], registration: Registration) -> bool:
    return removal[0] is registration.module and removal[1] == registration.name


def _modules_of(models: Any) -> list[nn.Module]:
    listed = models if isinstance(models, (list, tuple)) else [models]
    return [module for model in listed if isinstance(model, nn.Module) for module in model.modules()]
