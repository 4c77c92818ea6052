"""Step hooks of an optimizer: the pre-hook does the whole step, then torch calls `step` on a ghost."""

from __future__ import annotations

import inspect
import weakref
from collections import OrderedDict
from contextlib import nullcontext
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from amp_engine.errors import AmpStateError
from amp_engine.ground.random_state import RandomState, random_state, set_random_state
from amp_engine.ground.torch_private import disable_dynamo
from amp_engine.optimizers.fused_step import fused_step_of
from amp_engine.optimizers.wrapped import inner_optimizers, takes_hooks
from amp_engine.stepping.ghost import Ghosts, discard_ghost
from amp_engine.stepping.gradient_warnings import warn_of_copied_masters
from amp_engine.stepping.master_parameter import has_copied_masters
from amp_engine.stepping.own_step import unhooked_step
from amp_engine.stepping.scale_loss import ScaledBackwards
from amp_engine.stepping.stepper import Stepper

CLOSURE_REFUSED = "Currently, Amp does not support closure use with optimizers."


# Optimizer -> its StepHook, for every optimizer of an engine.
_HOOKS: weakref.WeakKeyDictionary[Optimizer, weakref.ref[StepHook]] = weakref.WeakKeyDictionary()
_HANDLES: list[RemovableHandle] = []  # the handle of `_before_hooks`, while _HOOKS or copied masters exist


def _before_hooks(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Global pre-hook. torch runs it before the optimizer's own hooks, so it may still change their order."""
    if torch.compiler.is_compiling():
        return
    ref = _HOOKS.get(optimizer)
    if ref is None:
        warn_of_copied_masters(optimizer)
    elif (hook := ref()) is not None:
        hook.before_hooks(optimizer)


def _add(optimizer: Optimizer, hook: StepHook) -> None:
    _HOOKS[optimizer] = weakref.ref(hook)
    if not _HANDLES:
        _HANDLES.append(register_optimizer_step_pre_hook(_before_hooks))
        _be_first(_HANDLES[0])


def step_last(optimizer: Optimizer) -> None:
    """Put our pre-hook, if there is one, behind those that another global pre-hook added in this step."""
    ref = _HOOKS.get(optimizer)
    if ref is not None and (hook := ref()) is not None:
        hook.be_last(optimizer)


def remove_hooks(optimizer: Optimizer) -> None:
    """Remove all of our hooks for `optimizer`."""
    ref = _HOOKS.get(optimizer)
    if ref is not None and (hook := ref()) is not None:
        hook.remove()
    _HOOKS.pop(optimizer, None)
    remove_unused()


def remove_unused() -> None:
    """Remove the global pre-hook if neither an optimizer of an engine nor a copied master is left."""
    # Not called when the last optimizer is collected, which may happen while torch iterates over these hooks.
    while _HANDLES and not (_HOOKS or has_copied_masters()):
        _HANDLES.pop().remove()


def _be_first(handle: RemovableHandle) -> None:
    """Move the hook of `handle` before all others."""
    hooks = handle.hooks_dict_ref()
    assert isinstance(hooks, OrderedDict)
    hooks.move_to_end(handle.id, last=False)


class StepHook:
    """The hooks of one optimizer. The optimizer owns this object; none of its methods is replaced.

    Args:
        stepped: does the step.
        backwards: unscales gradients that are still scaled before the step. While its `scaling` is active,
            `step(closure)` is an error, since the backward in a closure would come after the decision to skip. Its
            `casts` are off during a step; a fused step also writes the casts' copies of FP32 parameters.
    """

    def __init__(self, stepped: Stepper, backwards: ScaledBackwards) -> None:
        self._stepped = stepped
        self._backwards = backwards
        self._ghosts = Ghosts()
        self._is_stepping = False
        optimizer = stepped.optimizer
        self._random: RandomState | None = None  # restored after a ghost's step
        self._handles: list[RemovableHandle] = []  # the first is that of the step's pre-hook
        _add(optimizer, self)
        self._put_on(optimizer)

    def _put_on(self, optimizer: Optimizer) -> None:
        self._handles.append(optimizer.register_step_pre_hook(self._before_step))
        self._handles.append(optimizer.register_step_post_hook(self._after_step))
        _be_first(self._handles[-1])
        self._handles.append(optimizer.register_load_state_dict_pre_hook(self._before_load))
        for inner in inner_optimizers(optimizer).values():
            if takes_hooks(inner):
                self._handles.append(inner.register_step_pre_hook(self._before_inner_step))

    def before_hooks(self, optimizer: Optimizer) -> None:
        """Put our pre-hook behind the user's (clipping, logging), and gradients where the step will read them."""
        own, everyones = optimizer._optimizer_step_pre_hooks, _HANDLES[0].hooks_dict_ref()
        if self._is_stepping or (len(own) == 1 and everyones is not None and len(everyones) == 1):
            return  # the user has no hooks
        self._prepare()
        self.be_last(optimizer)

    def be_last(self, optimizer: Optimizer) -> None:
        """Put our pre-hook behind the optimizer's other ones."""
        own = optimizer._optimizer_step_pre_hooks
        if self._handles[0].id not in own:  # optimizer.__init__() was called again
            self._handles.clear()
            self._put_on(optimizer)
        elif next(reversed(own)) != self._handles[0].id:
            self._handles[0].remove()
            self._handles[0] = optimizer.register_step_pre_hook(self._before_step)

    def _prepare(self) -> None:
        """Unscale gradients that are still scaled. Raises AmpStateError in the body of a `scale_loss` of theirs."""
        if self._stepped.window.is_in_body and not self._backwards.evidence.is_rehearsal:
            raise AmpStateError(
                f"{type(self._stepped.optimizer).__name__}.step() was called inside of the "
                "`with amp.scale_loss(...)` of its loss, whose exit unscales the gradients that it steps.  Nothing was "
                "stepped.  Leave the `with` first, then call step(); where the loss comes from scale() of an "
                "amp.GradScaler, call scaler.step(optimizer) in place of optimizer.step().  A hook of "
                "register_post_accumulate_grad_hook runs in the backward, and cannot step here."
            )
        self._stepped.check_first_use()
        self._backwards.close_windows_into(self._stepped)
        self._stepped.hide_spent()

    def remove(self) -> None:
        """Remove these hooks from the optimizer. Only `remove_hooks` calls it."""
        for handle in self._handles:
            handle.remove()

    def _before_inner_step(self, inner: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise AmpStateError for a separate step of an inner optimizer: it is not skipped, and misses the model."""
        stepped = self._stepped
        is_ours = stepped.rows.makes_masters or stepped.needs_kernels or self._backwards.scaling.is_active
        if self._is_stepping or not is_ours or self._backwards.get(inner) is not None:
            return
        name, outer = type(inner).__name__, type(stepped.optimizer).__name__
        raise AmpStateError(
            f"The {name} inside of this {outer} was stepped by itself, where only {outer}.step() is looked after: "
            "overflows would be stepped on, and FP32 masters never reach the model.  Nothing was stepped.  Pass "
            f"the {name} to amp.initialize and amp.scale_loss, not the {outer}, which may go on stepping it."
        )

    def _before_load(self, optimizer: Optimizer, state_dict: Any) -> None:
        # torch casts loaded state to the types of the parameters in the groups, so masters must replace them first.
        if self._stepped.rows.makes_masters:
            self._stepped.rows.scan()

    @disable_dynamo
    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._is_stepping:  # a subclass called super().step()
            return None
        self._random = None
        stepped, is_scaled = self._stepped, self._backwards.scaling.is_active
        has_closure = callable(args[1] if len(args) > 1 else kwargs.get("closure"))
        self._prepare()
        if self._backwards.evidence.is_rehearsal:
            stepped.forget_backwards()
            return self._ghost(args, kwargs, fused_step_of(optimizer) is not None)
        if not (has_closure or hasattr(optimizer, "found_inf")):  # torch.amp.GradScaler sets it, and has checked
            self._backwards.look_at_unseen(stepped, is_stepping=True)
        stepped.missing_gradients.warn(optimizer, stepped.rows)
        casts_off = self._backwards.casts.off()
        is_own = stepped.rows.makes_masters or stepped.needs_kernels
        # torch's own step needs nothing from us. At O4 the forward in a closure needs the casts, so they stay on.
        if not is_own and not is_scaled and (has_closure or (casts_off is None and not stepped.is_pending)):
            stepped.taken_unseen()
            return None
        if has_closure:
            raise AmpStateError(
                f"{CLOSURE_REFUSED}  {type(optimizer).__name__}.step(closure) was called; run the closure's forward "
                "and backward with amp.scale_loss yourself, then call step() without arguments."
            )
        stepped.look_at_gradients(optimizer)
        # Only the class's own step handles arguments, and the attributes that torch.amp.GradScaler sets.
        fused = fused_step_of(optimizer)
        is_plain = _says_nothing(optimizer, args, kwargs) and not hasattr(optimizer, "found_inf")
        with nullcontext() if casts_off is None else casts_off:
            try:
                self._is_stepping = True
                stepped.step(args, kwargs, fused if is_plain else None, self._backwards.casts)
            finally:
                self._is_stepping = False
            return self._ghost(args, kwargs, fused is not None)

    def _ghost(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], steps_its_groups: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with which torch then calls `step`: a ghost as the optimizer."""
        double = self._ghosts.of(args, kwargs, steps_its_groups)
        if not steps_its_groups:
            self._random = random_state()
        return (double, *args[1:]), kwargs

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """After a ghost's step: restore the random state, and free the ghost."""
        if self._random is not None and not self._is_stepping:
            set_random_state(self._random)
            self._random = None
            discard_ghost(args[0])


def _says_nothing(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if the call means the same as `step()`: each argument is None, and `step` accepts it."""
    if len(args) == 1 and not kwargs:
        return True
    if any(value is not None for value in (*args[1:], *kwargs.values())):
        return False
    if len(args) + len(kwargs) == 2 and kwargs.keys() <= {"closure"}:
        return True
    try:
        inspect.signature(unhooked_step(optimizer)).bind(*args, **kwargs)
    except TypeError:  # the class's own step will raise this before it does anything
        return False
    return True
