"""The step of one optimizer, by official hooks: taken by the kernels, by its class on FP32 masters, or skipped.

A pre-hook of torch may replace the arguments of the call, `self` among them. After a step of the kernels, and at a
skip, torch calls `step` on a ghost: an object of the class that has nothing to step.
"""

from __future__ import annotations

import copy
import inspect
import math
import sys
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from amp_engine.errors import AmpStateError
from amp_engine.ground import devices
from amp_engine.ground.devices import moved
from amp_engine.ground.dtypes import is_low_precision
from amp_engine.ground.torch_private import disable_dynamo
from amp_engine.kernels import CODES, tensor_lists
from amp_engine.optimizers.fused_step import FusedStep, StepInput, fused_step_of, own_fused_step
from amp_engine.optimizers.rules import own_rule_of
from amp_engine.optimizers.wrapped import inner_optimizers, refuse_calling, takes_hooks
from amp_engine.stepping import exact_state, shards
from amp_engine.stepping.gradient_warnings import refuse_own_step, warn_of_rounded_masters
from amp_engine.stepping.half_weights import warn_of_copy
from amp_engine.stepping.host_step import HostStep
from amp_engine.stepping.pending import Skip
from amp_engine.stepping.record import Record
from amp_engine.stepping.records import Records
from amp_engine.stepping.release import Release

# Attributes of apex's names that `initialize` adds to an optimizer: the first is apex's, the others are its methods.
APEX_NAMES = (
    "_amp_stash",
    "_amp_lazy_init",
    "_lazy_init_maybe_master_weights",
    "_post_amp_backward",
    "_prepare_amp_backward",
)
CLOSURE_REFUSED = "Currently, Amp does not support closure use with optimizers."


# Optimizer -> its StepHook, for every optimizer of an engine.
_HOOKS: weakref.WeakKeyDictionary[Optimizer, weakref.ref[StepHook]] = weakref.WeakKeyDictionary()
_HANDLES: list[RemovableHandle] = []  # the handle of `_before_hooks`, while _HOOKS or _OWNERS have entries
# Called with an optimizer that no engine knows, before its step: may have an engine know it, or raise; returns False to
# be called again before the next step of the same parameters.
_OWNERS: weakref.WeakKeyDictionary[Any, Callable[[Any, Optimizer], bool]] = weakref.WeakKeyDictionary()
# Optimizers that were let through -> how many parameters they had.
_STRANGERS: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()


def look_at_strangers(owner: Any, look: Callable[[Any, Optimizer], bool]) -> None:
    """Call `look(owner, optimizer)` before a step of each optimizer that no engine knows, until it returns True."""
    _OWNERS[owner] = look
    _STRANGERS.clear()
    _look_first()


def let_strangers_be(owner: Any) -> None:
    """Undo `look_at_strangers`."""
    _OWNERS.pop(owner, None)
    remove_unused()


def _before_hooks(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Global pre-hook. torch runs it before the optimizer's own hooks, so it may still change their order."""
    _look_before(optimizer)


@disable_dynamo
def _look_before(optimizer: Optimizer) -> None:
    if optimizer not in _HOOKS:
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if _STRANGERS.get(optimizer) != count:
            is_done = [look(owner, optimizer) for owner, look in list(_OWNERS.items()) if optimizer not in _HOOKS]
            if optimizer not in _HOOKS and all(is_done):
                _STRANGERS[optimizer] = count
                if any(owner.has_masters for owner in _OWNERS):
                    warn_of_copy(optimizer)
    ref = _HOOKS.get(optimizer)
    if ref is not None and (hook := ref()) is not None:
        hook.before_hooks(optimizer)


def _add(optimizer: Optimizer, hook: StepHook) -> None:
    _HOOKS[optimizer] = weakref.ref(hook)
    _look_first()


def _look_first() -> None:
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
    """Remove the global pre-hook if nothing needs it."""
    # Not called when the last optimizer is collected, which may happen while torch iterates over these hooks.
    while _HANDLES and not (_HOOKS or _OWNERS):
        _HANDLES.pop().remove()


def _be_first(handle: RemovableHandle) -> None:
    """Move the hook of `handle` before all others."""
    hooks = handle.hooks_dict_ref()
    assert isinstance(hooks, OrderedDict)
    hooks.move_to_end(handle.id, last=False)


def unhooked_step(optimizer: Optimizer) -> Callable[..., Any]:
    """Return the class's own `step`, without the wrapper in which torch runs the hooks."""
    step: Any = type(optimizer).step
    while hasattr(step, "hooked"):
        step = step.__wrapped__
    return step


def ghost_of(optimizer: Optimizer, groups: Sequence[dict[str, Any]] = ()) -> Optimizer:
    """Return an object of the class of `optimizer` that shares its attributes, without hooks and state.

    Args:
        groups: its groups.
    """
    ghost = object.__new__(type(optimizer))
    vars(ghost).update(vars(optimizer))
    # Torch's own steps read what torch.amp.GradScaler adds; apex's names keep the hook alive, which keeps the ghost.
    for name in ("grad_scale", "found_inf", *APEX_NAMES):
        vars(ghost).pop(name, None)
    ghost.param_groups, ghost.state = list(groups), defaultdict(dict)
    for name in [name for name in vars(ghost) if name.startswith("_optimizer_") and name.endswith("_hooks")]:
        vars(ghost)[name] = OrderedDict()
    # torch warns once if all groups are capturable and the step is not captured; without groups all are.
    ghost._warned_capturable_if_run_uncaptured = True
    return ghost


def _ghost_of_unknown(optimizer: Optimizer, needs_parameters: bool) -> Optimizer:
    """Return a ghost of a class of which we know nothing: it has copies of the groups, without their parameters.

    Args:
        needs_parameters: True to give each group a stand-in of its first parameter.
    """
    groups = []
    for group in optimizer.param_groups:
        params = [_stand_in(p) for p in group["params"][:1]] if needs_parameters else []
        groups.append({**{key: _copied(value) for key, value in group.items() if key != "params"}, "params": params})
    ghost = ghost_of(optimizer, groups)
    state: dict[Any, Any] = optimizer.state
    ghost.state.update((key, copy.deepcopy(value)) for key, value in state.items() if not isinstance(key, Tensor))
    for name, inner in inner_optimizers(optimizer).items():
        if name in vars(ghost):
            vars(ghost)[name] = _ghost_of_unknown(inner, needs_parameters)
    return ghost


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return copy.deepcopy(value) if isinstance(value, (list, dict, set)) else value


def _stand_in(param: Tensor) -> nn.Parameter:
    stand_in = nn.Parameter(param.detach().to(torch.float32, copy=True))
    stand_in.grad = torch.ones_like(stand_in)
    return stand_in


class StepHook:
    """The hooks of one optimizer. The optimizer owns this object; none of its methods is replaced.

    Args:
        record: of the optimizer.
        owner: checks gradients that no exit saw. Its `casts` are off during a step.
    """

    def __init__(self, record: Record, owner: Records) -> None:
        self._record = record
        self._owner = owner
        self._empty: Optimizer | None = None  # the ghost after a step of the kernels
        self._fails_empty: bool | None = None  # True if the class's step fails with nothing to step
        self._hides_by_zeros = False  # True if it fails where all gradients are None
        self._hidden: list[tuple[Tensor, Tensor]] = []  # parameters and their gradients, during a step that is skipped
        self._open: ExitStack | None = None  # while the class's own step runs
        self._frame: FrameType | None = None  # of that step's call
        self._is_stepping = False
        self._incoming: dict[str, Any] = {}
        self._was_loaded = False  # True if FP32 state was loaded since the last step
        self._is_first = True  # until a step has looked at who calls it
        self._release: Release | None = None
        self._host: HostStep | None = None
        optimizer = record.optimizer
        self._handles: list[RemovableHandle] = []  # the first is that of the step's pre-hook
        _add(optimizer, self)
        self._put_on(optimizer)

    def _put_on(self, optimizer: Optimizer) -> None:
        self._handles.append(optimizer.register_step_pre_hook(self._before_step))
        self._handles.append(optimizer.register_step_post_hook(self._after_step))
        _be_first(self._handles[-1])
        self._handles.append(optimizer.register_load_state_dict_pre_hook(self._before_load))
        self._handles.append(optimizer.register_load_state_dict_post_hook(self._after_load))
        self._handles.append(optimizer.register_state_dict_pre_hook(self._before_save))
        self._handles.append(optimizer.register_state_dict_post_hook(self._after_save, prepend=True))
        for inner in inner_optimizers(optimizer).values():
            if takes_hooks(inner):
                self._handles.append(inner.register_step_pre_hook(self._before_inner_step))

    def remove(self) -> None:
        """Remove these hooks from the optimizer. Only `remove_hooks` calls it."""
        for handle in self._handles:
            handle.remove()
        if self._release is not None:
            self._release.remove()

    def release_gradients(self, tell: Callable[[int, nn.Parameter, bool], None]) -> None:
        """Step parameters in the backward from now on; `tell` as in Release."""
        self._release = Release(self._record, self._owner, tell)
        self._record.releases = True

    def step_on_host(self) -> None:
        """Step masters in the memory of the host from now on."""
        self._host = HostStep(self._record, self._owner)

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
        record = self._record
        if record.is_in_body and not self._owner.is_rehearsal:
            raise AmpStateError(
                f"{type(record.optimizer).__name__}.step() was called inside of the "
                "`with amp.scale_loss(...)` of its loss, whose exit unscales the gradients that it steps.  Nothing was "
                "stepped.  Leave the `with` first, then call step(); where the loss comes from scale() of an "
                "amp.GradScaler, call scaler.step(optimizer) in place of optimizer.step().  A hook of "
                "register_post_accumulate_grad_hook runs in the backward, and cannot step here."
            )
        record.check_first_use()
        record.follow_writes()
        record.rows.round_shown()  # else a step would take what the caller wrote into a master for an older value
        self._owner.close_into(record)

    # Before a step.

    @disable_dynamo
    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._is_stepping and self._is_running():  # a subclass called super().step()
            return None
        owner, record = self._owner, self._record
        self._hidden.clear()  # of a skipped step that raised
        self._prepare()
        if self._is_first and not record.rows.is_shown:
            if record.rows.kind is not None:
                refuse_calling(optimizer)
            self._is_first = False
        if self._was_loaded:
            self._was_loaded = False
            warn_of_rounded_masters(optimizer, record.rows)
        if owner.is_rehearsal:
            record.discard()
            return self._ghost(args, kwargs)
        closure: Any = args[1] if len(args) > 1 else kwargs.get("closure")
        has_closure = callable(closure)
        is_scaled, is_own = owner.scaling.is_active, record.rows.kind is not None or record.needs_kernels
        casts_off = owner.casts.off()
        if has_closure:
            # torch's own step needs nothing from us. At O4 the forward in a closure needs the casts, so they stay on.
            if not is_own and not is_scaled:
                record.pending.taken_unseen()
                return _with_closure(owner.heard(closure, record), args, kwargs)
            args, kwargs = self._run_closure(closure, args, kwargs)
        if self._release is not None:
            self._release.end_step()
            return self._ghost(args, kwargs)
        record.refuse_joined(is_scaled and owner.may_be_scaled)
        record.refuse_foreign()
        by_scaler = hasattr(optimizer, "found_inf")  # torch.amp.GradScaler sets it, and has checked
        seen = record.taken_gradients()
        if seen is None or record.has_left:
            record.refuse_written_after_clip()
            if not by_scaler:
                owner.look_at_unseen(record, is_stepping=True)
            seen = record.taken_gradients()
        record.missing_gradients.warn(optimizer, record.rows)
        if self._host is not None:
            return self._step_on_host(self._host, optimizer, args, kwargs, has_closure)
        if not is_own and not is_scaled and casts_off is None and not record.pending.backwards:
            record.pending.taken_unseen()
            record.stepped(may_be_left=False)
            return None
        # Only the class's own step handles arguments, and the attributes that torch.amp.GradScaler sets.
        is_plain = (has_closure or _says_nothing(optimizer, args, kwargs)) and not by_scaler
        return self._step(optimizer, args, kwargs, fused_step_of(optimizer) if is_plain else None, seen)

    def _run_closure(
        self, closure: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Run the closure of a step at a scale of 1, and return the arguments with one that returns its loss.

        Raises AmpStateError at another scale, in apex's words.
        """
        if not all(scaler.is_identity for scaler in self._owner.scaling.scalers):
            raise AmpStateError(
                f"{CLOSURE_REFUSED}  {type(self._record.optimizer).__name__}.step(closure) was called; run the "
                "closure's forward and backward with amp.scale_loss yourself, then call step() without arguments."
            )
        with torch.enable_grad():
            loss = closure()
        self._record.follow_writes()
        self._record.rows.round_shown()
        return _with_closure(lambda: loss, args, kwargs)

    def _step(
        self,
        optimizer: Optimizer,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        fused: FusedStep | None,
        seen: Sequence[Tensor | None] | None,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Skip the step, or take it by the kernels, or have torch take it by the class's own step.

        Args:
            seen: `Record.taken_gradients`.

        Waits for the device if the host must decide and does not know the flags yet. Raises AmpStateError if the
        kernels are needed and cannot do the step, for a low-precision weight that is refused, and for a CUDA graph
        whose replay would miss the decision.
        """
        record, rows = self._record, self._record.rows
        record.written_parameters.warn(optimizer, rows)
        # Plan once, before the decision: a group that joins between two plans could be stepped on inf.
        planned = None
        if fused is not None:
            step = _input_of(record, seen)
            planned = shards.plan(fused, step) if record.columns.has_shards else fused.plan(step)
        if planned is None or not planned.is_current:  # model.half() may have been called
            rows.look_at_types()
            rows.judge_half()
        if planned is None:
            if record.needs_kernels:
                refuse_own_step(optimizer, fused, _input_of(record, seen))
            rows.check_can_show()
        if record.is_captured and record.backward_seen:
            self._refuse_half_a_capture()
        if planned is None:
            self._refuse_capture()
        decision = record.pending.decide(on_device=planned is not None)
        may_be_bad = isinstance(decision, Skip) or bool(decision.flags)
        if not may_be_bad:
            record.pending.conclude()  # before the step, as reports look at weights
        if isinstance(decision, Skip):
            replaced = self._skip(args, kwargs)
        elif fused is not None and planned is not None:
            casts_off = self._owner.casts.off()
            with nullcontext() if casts_off is None else casts_off:
                self._by_kernels(fused, planned, decision.flags)
            replaced = self._ghost(args, kwargs)
        else:
            self._begin_own_step()
            replaced = args, kwargs  # of a closure, its loss
        record.stepped(may_be_left=may_be_bad)
        if may_be_bad:
            record.pending.conclude()
        return replaced

    def _step_on_host(
        self, host: HostStep, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], has_closure: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Skip the step, or have the CPU take it. Waits for the device, whose flags decide before anything is written.

        Raises AmpStateError for a step with arguments, and what HostStep.check raises.
        """
        record = self._record
        record.written_parameters.warn(optimizer, record.rows)
        host.check()
        if not (has_closure or _says_nothing(optimizer, args, kwargs)) or hasattr(optimizer, "found_inf"):
            refuse_own_step(optimizer, None, None)
        is_skipped = isinstance(record.pending.decide(on_device=False), Skip)
        if is_skipped:
            replaced = self._skip(args, kwargs)
        else:
            record.pending.conclude()  # before the step, as reports look at weights
            host.step()
            replaced = self._ghost(args, kwargs)
        record.stepped(may_be_left=is_skipped)
        if is_skipped:
            record.pending.conclude()
        return replaced

    def _by_kernels(self, fused: FusedStep, step: StepInput, flags: Sequence[Tensor]) -> None:
        """Step weights and write the model's parameters in one pass; do nothing if one of `flags` is != 0."""
        record, found_inf = self._record, None
        for flag in flags:
            found_inf = flag if found_inf is None else torch.maximum(found_inf, moved(flag, found_inf.device))
        has_shards, clip, found = record.columns.has_shards, record.clip, record.found
        checks = None
        # An exit at a scale has checked scaled gradients, which those of rows without a master are no more.
        is_kept = record.kept is not None and not record.columns.has_plain
        are_checked = found is not None and (found.snapshot is None or is_kept)
        if fused.rule.reads_sums and clip is None and found is not None and are_checked:
            checks = None if found.marks.have_moved() else found.checks
        fused.step(
            step,
            inv_scale=None if record.kept is None else record.kept.snapshot.inv_scale,
            found_inf=found_inf,
            norm=None if clip is None else clip.norm,
            max_norm=math.inf if clip is None else clip.max_norm,
            checks=checks,
        )
        if has_shards:
            shards.mark_written(step.params)
            record.rows.pairs.mark()
        else:
            record.rows.pairs.bump()

    def _skip(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a step that changes nothing."""
        optimizer = self._record.optimizer
        if fused_step_of(optimizer) is not None:
            return self._ghost(args, kwargs)
        if self._fails_empty is None:
            for self._hides_by_zeros in (False, True):
                error = self._error_of_empty(args, kwargs)
                self._fails_empty = error is not None
                if not isinstance(error, (AttributeError, TypeError)):  # not of a gradient that is None
                    break
        self._hide_gradients()
        return self._ghost(args, kwargs)

    def _error_of_empty(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception | None:
        """Return what the class's step raises where there is nothing to step; any class raises its own error."""
        optimizer = self._record.optimizer
        self._hide_gradients()
        try:
            with torch.no_grad():
                unhooked_step(optimizer)(_ghost_of_unknown(optimizer, False), *args[1:], **kwargs)
        except Exception as e:
            return e
        finally:
            self._show_gradients()
        return None

    def _hide_gradients(self) -> None:
        """Hide all gradients: a class may keep its parameters in attributes, which the ghost has."""
        self._hidden = [(param, param.grad) for param in self._record.columns.params if param.grad is not None]
        for param, grad in self._hidden:
            param.grad = torch.zeros_like(grad) if self._hides_by_zeros else None

    def _show_gradients(self) -> None:
        while self._hidden:
            param, grad = self._hidden.pop()
            param.grad = grad

    def _ghost(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with a ghost that steps nothing."""
        optimizer = self._record.optimizer
        if fused_step_of(optimizer) is None:
            return (_ghost_of_unknown(optimizer, bool(self._fails_empty)), *args[1:]), kwargs
        if self._empty is None:
            self._empty = ghost_of(optimizer)
        return (self._empty, *args[1:]), kwargs

    # The class's own step, which torch runs between our hooks.

    def _begin_own_step(self) -> None:
        """Have the groups and the state show FP32 weights, with FP32 gradients, until the step has ended."""
        record = self._record
        with ExitStack() as undo:
            casts_off = self._owner.casts.off()
            if casts_off is not None:
                undo.enter_context(casts_off)
            if record.rows.makes_masters:
                record.rows.adopt()
                undo.enter_context(record.lent_gradients())
            undo.enter_context(record.rows.shown())
            self._opened(undo.pop_all())

    def _opened(self, undo: ExitStack) -> None:
        self._open, self._frame, self._is_stepping = undo, _frame_of_step(), True
        self._record.rows.end_own_step = self._end_if_over

    def _is_running(self) -> bool:
        """True if the call of the class's own step is still on the stack."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return frame is not None

    def _end_if_over(self) -> None:
        if self._open is not None and not self._is_running():
            self._end_own_step()

    @disable_dynamo
    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._show_gradients()
        if self._open is not None and _frame_of_step() is self._frame:
            self._end_own_step()
        if not self._is_stepping and self._owner.scaling.default().is_identity:
            self._record.fit_wrappers()

    def _end_own_step(self) -> None:
        opened, self._open, self._frame, self._is_stepping = self._open, None, None, False
        self._record.rows.end_own_step = None
        if opened is not None:
            opened.close()

    def _before_inner_step(self, inner: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise AmpStateError for a separate step of an inner optimizer: it is not skipped, and misses the model."""
        record = self._record
        is_ours = record.rows.kind is not None or record.needs_kernels or self._owner.scaling.is_active
        if self._is_stepping or not is_ours or self._owner.get(inner) is not None:
            return
        name, outer = type(inner).__name__, type(record.optimizer).__name__
        raise AmpStateError(
            f"The {name} inside of this {outer} was stepped by itself, where only {outer}.step() is looked after: "
            "overflows would be stepped on, and FP32 masters never reach the model.  Nothing was stepped.  Pass "
            f"the {name} to amp.initialize and amp.scale_loss, not the {outer}, which may go on stepping it."
        )

    # Captures of CUDA graphs.

    def _refuse_capture(self) -> None:
        """Raise AmpStateError in the capture of a CUDA graph: the host decides here, and a replay skips the host."""
        record, params = self._record, self._record.columns.params
        if record.pending.backwards and params and devices.is_capturing(params[0].device):
            raise AmpStateError(
                f"{type(record.optimizer).__name__}.step() is captured in a CUDA graph, but whether it is skipped is "
                "decided on the host: only exactly Adam, AdamW, SGD of torch.optim and the fused optimizers, not "
                "wrapped by another, on dense gradients skip on the GPU.  Leave scale_loss and step() out of the "
                "capture: torch.cuda.make_graphed_callables captures the model's forward and backward alone."
            )

    def _refuse_half_a_capture(self) -> None:
        """Raise AmpStateError if a CUDA graph has the backward and not the step: a replay does not tell the host."""
        record, params = self._record, self._record.columns.params
        if params and not devices.is_capturing(params[0].device):
            raise AmpStateError(
                f"The backward is in a CUDA graph, and {type(record.optimizer).__name__}.step() is not: no replay "
                "tells the host of its gradients, which steps would miss, or take where they are not finite.  Nothing "
                "was stepped.  Capture step() in the same graph, or leave scale_loss out of it as well: "
                "torch.cuda.make_graphed_callables captures the model's forward and backward alone."
            )

    # Checkpoints.

    def _before_save(self, optimizer: Optimizer) -> None:
        self._record.settle()

    def _after_save(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        rows = self._record.rows
        if self._record.is_later and rows.kind is not None and not rows.is_shown:
            exact_state.add_to(state_dict, optimizer)

    def _before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        self._record.settle()
        self._record.rows.scan()
        exact_state.leave_out(state_dict)
        self._incoming = state_dict

    def _after_load(self, optimizer: Optimizer) -> None:
        """Set moments, which torch has cast to the type of their parameters, to the saved values, in FP32 or in blocks.

        Moments that were saved in blocks are widened if this run keeps no blocks, those in half if none was in FP32.
        """
        saved, self._incoming = self._incoming, {}
        fused = fused_step_of(optimizer) if own_rule_of(optimizer) is None else own_fused_step(optimizer)
        if fused is not None:
            fused.forget()
        rows = self._record.rows
        if rows.is_shown:
            return
        indices = [i for group in saved["param_groups"] for i in group["params"]]
        own = [p for group in optimizer.param_groups for p in group["params"]]
        beside = {id(one.param): one for one in rows.columns.beside if one is not None}
        for index, param in zip(indices, own, strict=True):
            one, of_one = beside.get(id(param)), saved["state"].get(index, {})
            home = param.device if one is None else one.stepped.device
            floating = dict(exact_state.floating(of_one)) if one is not None else {}
            is_wide = exact_state.has_float32(floating, param)
            self._was_loaded |= is_wide
            for name, value in floating.items():
                copied = partial(_copy, home=home, widens=not is_wide)
                optimizer.state[param][name] = exact_state.mapped(value, copied)
            for name, value in of_one.items():
                if fused is not None and isinstance(value, Tensor) and value.dtype is CODES:
                    dtype = param.dtype if one is None else torch.float32
                    optimizer.state[param][name] = fused.loaded(name, value.to(home, copy=True), param, dtype)


def _copy(tensor: Tensor, home: torch.device, widens: bool) -> Tensor:
    """Return a copy on a device; `widens`: in FP32 if the tensor is half."""
    return tensor.to(home, torch.float32 if widens and is_low_precision(tensor) else tensor.dtype, copy=True)


def _input_of(record: Record, grads: Sequence[Tensor | None] | None) -> StepInput:
    """Return the input of the next step of the kernels, as of the last scan; `grads` is `Record.taken_gradients`."""
    columns, are_plain = record.columns, True
    if grads is None:
        grads, accesses, _ = tensor_lists.gradients(columns.handle)
        # Where nothing has a gradient, parameters of a class with a `grad` of its own are asked for it.
        are_plain = tensor_lists.OTHER not in accesses and accesses.count(tensor_lists.NONE) < len(accesses)
        if not are_plain:
            grads = [p.grad for p in columns.params]
    scaled = bytes(len(columns.params))
    if record.clip is not None or record.kept is not None:
        scaled = columns.plain_mask.translate(_INVERTED)
    return StepInput(record.rows.entries, columns.weights, grads, columns.copies, scaled, are_plain=are_plain)


_INVERTED = bytes([1, 0]) + bytes(254)


def _frame_of_step() -> FrameType | None:
    """Return the frame of the wrapper in which torch runs the hooks of the innermost step on the stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not (
        frame.f_code.co_name == "wrapper" and frame.f_globals.get("__name__") == "torch.optim.optimizer"
    ):
        frame = frame.f_back
    return frame


def _with_closure(
    closure: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a step with another closure."""
    return ((args[0], closure, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": closure})


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
