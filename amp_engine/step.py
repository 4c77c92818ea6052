"""The step of one optimizer, from a pre-hook: skip it, or do it with casts off and masters kept."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from amp_engine.devices import HostFlag
from amp_engine.errors import AmpStateError
from amp_engine.ghost import ghost
from amp_engine.gradients import Checked, GradientWindow
from amp_engine.master_weights import MasterWeights
from amp_engine.scaler import LossScaler, ScaleSnapshot

CLOSURE_REFUSED = "Currently, Amp does not support closure use with optimizers."


@dataclass
class Verdict:
    """What one backward decided for every optimizer of its `scale_loss`."""

    loss_id: int
    scaler: LossScaler
    overflow: HostFlag
    skips: bool  # whether an overflow skips the step, or is only reported
    checked: list[Checked]
    loss: Tensor


class SteppedOptimizer:
    """One optimizer in the care of an engine.

    Args:
        optimizer: gets a step pre-hook and a load_state_dict pre-hook, and while `masters` exist its groups
            hold them. None of its methods is replaced.
        masters: its FP32 masters, or None.
        casts_off: gives a context without function casts, for the time of a step; None while there are none.
        is_scaled: says whether a backward may scale gradients or have a step skipped. Then `step(closure)` is
            an error, since the backward in a closure would come after the decision to skip.
        adopt_data_writes: whether writes through `param.data` are looked for before each step.
        on_skip: told the verdicts that made a step a skip.
        on_report: told a verdict that did not.
        on_window_left_open: asked to close the open window when a step finds one.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        masters: MasterWeights | None,
        *,
        casts_off: Callable[[], AbstractContextManager[None] | None],
        is_scaled: Callable[[], bool],
        adopt_data_writes: bool,
        on_skip: Callable[[SteppedOptimizer, list[Verdict]], None],
        on_report: Callable[[Verdict], None],
        on_window_left_open: Callable[[SteppedOptimizer], None],
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.masters = masters
        self.window: GradientWindow | None = None
        self.in_backward = False
        self.backward_seen = False  # since the last step
        self.verdicts: list[Verdict] = []
        self.skipped = False
        self.skips_in_a_row = 0
        self._casts_off = casts_off
        self._is_scaled = is_scaled
        self._adopt_data_writes = adopt_data_writes
        self._on_skip = on_skip
        self._on_report = on_report
        self._on_window_left_open = on_window_left_open
        self._stepping = False
        self._ghost_has_stand_ins: bool | None = None
        self._step_hook = optimizer.register_step_pre_hook(self._before_step)
        self._load_hook = optimizer.register_load_state_dict_pre_hook(self._before_load)

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer, which outlives every call that needs it."""
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    def enter_backward(self, scaler: LossScaler, loss_id: int, snapshot: ScaleSnapshot) -> None:
        """Entry of `scale_loss`: look for new parameters and foreign writes, open or re-enter the window."""
        if self.in_backward:
            raise AmpStateError(
                f"scale_loss() was entered again for {type(self.optimizer).__name__} inside of its own body.  Leave "
                "the first `with amp.scale_loss(...)` before the next one, or call scale_loss once on the sum."
            )
        if self.masters is not None:
            self.masters.scan()
            self.masters.refresh()
        if self.window is None:
            self.window = GradientWindow(self.optimizer, self.masters, scaler, loss_id, snapshot)
        else:
            self.window.reenter()
        self.in_backward = True

    def leave_open(self, loss: Tensor) -> None:
        """Exit of `scale_loss(..., delay_unscale=True)`."""
        assert self.window is not None
        self.in_backward = False
        self.window.leave_open(loss)

    def close_window(self, check: bool, unscaled: set[int]) -> Checked:
        """Exit of `scale_loss`: unscale and check, but what another optimizer of it did. No host sync."""
        assert self.window is not None
        checked = self.window.close(check, unscaled)
        self.in_backward = False
        self.backward_seen = True
        self.window = None
        self._hook_last()
        return checked

    def add_verdict(self, verdict: Verdict) -> None:
        """Keep a verdict for the next step, and no more than that needs, however many backwards it takes."""
        self.verdicts = [v for v in self.verdicts if not v.overflow.is_known_clean()]
        self.verdicts.append(verdict)

    def abandon(self) -> None:
        """The body of `scale_loss` raised."""
        self.in_backward = False
        if self.window is not None and not self.window.abandon():
            self.window = None

    def release(self) -> None:
        """Remove the hooks and give the optimizer its own parameters back."""
        self._step_hook.remove()
        self._load_hook.remove()
        if self.window is not None:
            self.window.discard()
            self.window = None
        if any(v.skips and v.overflow.read() for v in self.verdicts):
            for group in self.optimizer.param_groups:
                for p in group["params"]:
                    p.grad = None  # not finite, and nobody is left to skip the step
        if self.masters is not None:
            self.masters.release()

    def _before_load(self, optimizer: Optimizer, state_dict: Any) -> None:
        # torch casts loaded state to the type of what is in the groups: masters must be there first.
        if self.masters is not None:
            self.masters.scan()

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._stepping:  # a subclass called super().step()
            return None
        casts_off = self._casts_off()
        pending = self.verdicts or self.window is not None
        if self.masters is None and casts_off is None and not pending and not self._is_scaled():
            return None  # nothing to add to torch's own step
        if _closure(args, kwargs) is not None:
            if self.masters is None and not self._is_scaled():
                return None  # O4: the closure's forward wants its casts
            raise AmpStateError(
                f"{CLOSURE_REFUSED}  {type(optimizer).__name__}.step(closure) was called; run the closure's forward "
                "and backward with amp.scale_loss yourself, then call step() without arguments."
            )
        if self.window is not None:
            self._on_window_left_open(self)
        backward_seen, self.backward_seen = self.backward_seen, False
        if not self._skip():
            if not backward_seen:
                self._warn_of_unseen_gradients()
            self._step(optimizer, args, kwargs, nullcontext() if casts_off is None else casts_off)
        return (self._ghost(optimizer, args, kwargs), *args[1:]), kwargs

    def _skip(self) -> bool:
        """Whether a backward since the last step overflowed. Waits for the device if one was checked."""
        verdicts, self.verdicts = self.verdicts, []
        overflowed = [v for v in verdicts if v.overflow.read()]
        skipping = [v for v in overflowed if v.skips]
        for verdict in overflowed:
            if not verdict.skips:
                self._on_report(verdict)
        self.skipped = bool(skipping)
        self.skips_in_a_row = self.skips_in_a_row + 1 if skipping else 0
        if skipping:
            if self.masters is not None:
                self.masters.drop_gradients()
            self._on_skip(self, skipping)
        return self.skipped

    def _step(
        self,
        optimizer: Optimizer,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        casts_off: AbstractContextManager[None],
    ) -> None:
        self._stepping = True
        try:
            with casts_off:
                if self.masters is not None:
                    self.masters.scan()
                    self.masters.refresh(self._adopt_data_writes)
                try:
                    _unhooked_step(optimizer)(optimizer, *args[1:], **kwargs)
                finally:
                    # Also after an exception: a parameter never disagrees with its master.
                    if self.masters is not None:
                        self.masters.write_back()
            if self.masters is not None:
                self.masters.drop_gradients()
        finally:
            self._stepping = False

    def _ghost(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Optimizer:
        """A ghost that this class can step; which kind is found out once."""
        if self._ghost_has_stand_ins is not None:
            return ghost(optimizer, self._ghost_has_stand_ins)
        failures = []
        for stand_ins in (False, True):
            try:
                _unhooked_step(optimizer)(ghost(optimizer, stand_ins), *args[1:], **kwargs)
            except Exception as e:  # whatever a class raises when it finds nothing to step
                failures.append(e)
            else:
                self._ghost_has_stand_ins = stand_ins
                return ghost(optimizer, stand_ins)
        raise AmpStateError(
            f"{type(optimizer).__name__} cannot be stepped under amp: its step() fails when there is nothing to step "
            f"({failures[-1]!r}), so no step of it can be skipped.  Use opt_level='O0' or 'O3' without loss scaling."
        ) from failures[-1]

    def _warn_of_unseen_gradients(self) -> None:
        """Of a backward outside of `scale_loss`, whose gradients never reach the masters."""
        masters = [] if self.masters is None else self.masters.in_groups
        if any(m.param.grad is not None and m.weight.grad is None for m in masters):
            warnings.warn(
                f"{type(self.optimizer).__name__}.step() found gradients of a backward() outside of amp.scale_loss, "
                "which never reach the FP32 masters that it steps.  Type `with amp.scale_loss(loss, optimizer) as "
                "scaled_loss: scaled_loss.backward()`, at a scale of 1 too.",
                stacklevel=2,
            )

    def _hook_last(self) -> None:
        # The hook does the step itself, so hooks that the user has registered by now (clipping, logging) go first.
        hooks = self.optimizer._optimizer_step_pre_hooks
        if next(reversed(hooks)) != self._step_hook.id:
            self._step_hook.remove()
            self._step_hook = self.optimizer.register_step_pre_hook(self._before_step)


def _closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    return closure if callable(closure) else None


def _unhooked_step(optimizer: Optimizer) -> Callable[..., Any]:
    """The class's own `step`, without the wrapper in which torch runs the hooks."""
    step: Any = type(optimizer).step
    while hasattr(step, "hooked"):
        step = step.__wrapped__
    return step
