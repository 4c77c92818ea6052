"""`FP16_Optimizer`: an optimizer around an optimizer, which steps FP32 masters of half parameters."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_engine.apex_private import stash
from amp_engine.casting import EngineCasts
from amp_engine.errors import AmpStateError, AmpTypeError, AmpValueError
from amp_engine.ground.dtypes import is_low_precision
from amp_engine.initialization.arguments import check_optimizers
from amp_engine.levels.policy import Skips
from amp_engine.levels.report import Reporter
from amp_engine.scaling.losses import Scaling
from amp_engine.scaling.scaler import LossScaler
from amp_engine.stepping import clipping
from amp_engine.stepping.backward import Backward
from amp_engine.stepping.beside import Master
from amp_engine.stepping.pending import Pending
from amp_engine.stepping.record import Record
from amp_engine.stepping.records import Body, Records
from amp_engine.stepping.rows import Rows
from amp_engine.stepping.step import StepHook


class FP16_Optimizer(stash.ByGroup):  # noqa: N801 - apex's name
    """Steps FP32 masters of half parameters, with a loss scale of its own.

        optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), dynamic_loss_scale=True)
        optimizer.zero_grad()
        optimizer.backward(loss)
        optimizer.step()

    Masters lie beside the float16 and bfloat16 parameters that require gradients, as at O2: groups, state and gradients
    are the model's own. Pass `optimizer.optimizer` to learning rate schedulers.

    Args:
        init_optimizer: an optimizer that `amp.initialize` would take at O2, and was not passed to it.
        static_loss_scale: the scale, unless it is dynamic.
        dynamic_loss_scale: halves the scale and skips the step on overflow, doubles it after 2000 clean checks.
        dynamic_loss_args: arguments of `amp_engine.LossScaler`: init_scale (2**16), scale_factor, scale_window,
            min_loss_scale, max_loss_scale.
        verbose: prints messages.
        skip_on_overflow: skips overflowing steps under a static scale too. Otherwise, as in apex, they are taken, with
            one warning.

    Attributes:
        optimizer: `init_optimizer`.
        fp16_groups, fp32_from_fp16_groups: per group, half parameters and their masters.
        fp32_from_fp32_groups: per group, the float32 parameters.

    Raises AmpTypeError for parameters of other types, AmpStateError for an optimizer that cannot be wrapped.
    """

    def __init__(
        self,
        init_optimizer: Optimizer,
        static_loss_scale: float | str = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, float] | None = None,
        verbose: bool = True,
        *,
        skip_on_overflow: bool = False,
    ) -> None:
        if stash.is_on(init_optimizer):
            raise AmpStateError(
                f"This {type(init_optimizer).__name__} was passed through amp.initialize, which keeps masters and "
                "scales losses itself.  Do without FP16_Optimizer, or without amp.initialize."
            )
        check_optimizers([init_optimizer], is_scaled=True, has_masters=True)
        for param in chain.from_iterable(group["params"] for group in init_optimizer.param_groups):
            if param.requires_grad and not is_low_precision(param) and param.dtype is not torch.float32:
                raise AmpTypeError(
                    "Wrapped parameters must be either torch.cuda.FloatTensor or torch.cuda.HalfTensor. "
                    f"Received {param.type()}"
                )
        self.optimizer = init_optimizer
        self._reporter = Reporter(int(bool(verbose)))
        self._dynamic_loss_args = {} if dynamic_loss_args is None else dict(dynamic_loss_args)
        scaler = self._scaler("dynamic" if dynamic_loss_scale else static_loss_scale)
        self._scaling = Scaling([scaler], Skips.ALWAYS if skip_on_overflow else Skips.NEVER)
        self._records = Records(self._scaling, EngineCasts(self._reporter.say))
        events = self._records.events
        # Not methods: the optimizer owns the records, and a cycle would keep it alive.
        events.skipped.subscribe(partial(_say_skipped, self._reporter, self._scaling))
        events.reported.subscribe(partial(_say_taken, self._reporter, self._scaling))
        self._record = Record(init_optimizer, Rows(init_optimizer, Master), Pending(events))
        self._records.add(self._record)
        self._hook = StepHook(self._record, self._records)
        self._reporter.say(
            "Warning:  FP16_Optimizer is deprecated and dangerous, and will be deleted soon.  So it was in apex; here "
            "it stays.  New code is simpler with amp.initialize and amp.scale_loss.",
            rank0=True,
        )

    def backward(self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False) -> None:
        """Run the backward of the scaled loss. Unscaled gradients add up in `.grad` until `zero_grad`. No host sync.

        Args:
            loss: of shape [].
            update_master_grads: False leaves gradients scaled until `update_master_grads`, the next backward or the
                step. For all but the last of several backwards it saves time.
            retain_graph: as in `Tensor.backward`.
        """
        body = Body(self._records, loss, [self._record], self.loss_scaler, 0, not update_master_grads, False)
        with body as scaled_loss:
            scaled_loss.backward(retain_graph=retain_graph)

    def update_master_grads(self) -> None:
        """Unscale and check gradients that `backward(loss, update_master_grads=False)` left. No host sync."""
        self._records.close_into(self._record)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the masters and round them into the model, unless a gradient overflowed.

        Args:
            closure: calls `zero_grad` and `backward` of this optimizer and returns the loss. It is run again, with a
                lower scale, as long as its gradients overflow; the step is then taken once.

        Returns:
            The loss of the closure, else the result of `optimizer.step`; None for a skipped step.

        Raises AmpStateError if a closure overflows at a scale that can fall no further.
        """
        if closure is None:
            return self.optimizer.step()
        while True:
            before = self.loss_scale
            loss = closure()
            if not self.overflow:
                self.optimizer.step()
                return loss
            if self.loss_scale == before:
                raise AmpStateError(
                    f"The closure's gradients overflow at a loss scale of {before}, which falls no more: no scale can "
                    "help.  Look for an inf or a NaN in the loss."
                )
            self._reporter.say(f"OVERFLOW within closure! Skipping step, reducing loss scale to {self.loss_scale}")

    def zero_grad(self, set_grads_to_None: bool = False) -> None:  # noqa: N803 - apex's name
        """Zero the gradients, or set them to None."""
        Optimizer.zero_grad(self.optimizer, set_to_none=set_grads_to_None)

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> Tensor | int:
        """Clip the unscaled gradients by their common norm. Waits for the device.

        Returns:
            The norm before clipping, float32, shape []; -1 if the gradients overflowed, and then nothing is clipped.
        """
        self._look()
        if self.overflow:
            return -1
        clipped, look = clipping.of_optimizer(self.param_groups, self._record), self._records.look_at_unseen
        norm = clipping.clip_grad_norm_(clipped, max_norm, norm_type, error_if_nonfinite=False, look=look)
        self._record.hand_out()  # so that gradients show it before the step
        return norm

    def inspect_master_grad_data(self) -> list[list[Tensor | None]] | None:
        """Return, per group, the unscaled gradient of each parameter or None; None and a warning after an overflow.

        Waits for the device.
        """
        self._look()
        if self.overflow:
            self._reporter.say(
                "Warning:  inspect_master_grad_data() has nothing to show: the gradients of the last backward "
                "overflowed."
            )
            return None
        self._record.hand_out()
        return [[None if p.grad is None else p.grad.detach() for p in group["params"]] for group in self.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, the masters and the loss scale, in the keys of apex. Waits for the device.

        The scale is saved as numbers, {"loss_scale": float, "unskipped": int}, which `torch.load` reads with
        `weights_only=True`; apex saved its scaler object. Tensors are the live ones, as in torch's own optimizers.
        """
        self._record.follow_writes()
        return {
            "loss_scaler": self.loss_scaler.state_dict(),
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "first_closure_call_this_step": True,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": [[master.detach() for master in group] for group in self.fp32_from_fp16_groups],
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a `state_dict` saved here or by apex, and round its masters into the model's half parameters.

        Raises AmpValueError, before any change, for masters of other shapes, or a scaler that is neither numbers nor a
        scaler of apex.
        """
        saved = state_dict["fp32_from_fp16"]
        shapes = [[tuple(t.shape) for t in group] for group in saved]
        expected = [[tuple(t.shape) for t in group] for group in self.fp32_from_fp16_groups]
        if shapes != expected:
            raise AmpValueError(
                f"fp32_from_fp16 holds masters of the shapes {shapes}, but this optimizer has {expected}.  Wrap an "
                "optimizer of the same groups and half parameters as the one that was saved."
            )
        scaler = self._loaded_scaler(state_dict["loss_scaler"], bool(state_dict["dynamic_loss_scale"]))
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        self._scaling.scalers = [scaler]
        for one, value in zip(self._record.rows.masters, chain.from_iterable(saved), strict=True):
            one.param.copy_(value)
            one.take(value)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise AmpStateError(
            "FP16_Optimizer cannot be pickled or copied.  Save its state_dict() and load that with load_state_dict()."
        )

    @property
    def overflow(self) -> bool:
        """True if the last check found a gradient that is not finite, so that `step` does nothing. Waits for it."""
        return self._record.may_have_overflowed()

    @property
    def loss_scaler(self) -> LossScaler:
        """The scaler."""
        return self._scaling.default()

    @property
    def dynamic_loss_scale(self) -> bool:
        """True if the scale is dynamic."""
        return self.loss_scaler.dynamic

    @property
    def loss_scale(self) -> float:
        """The scale of the next backward. Waits for the device if it is dynamic."""
        return self.loss_scaler.loss_scale()

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.loss_scaler._loss_scale = value

    @property
    def state(self) -> Any:
        """The state of `optimizer`, by parameter of the model."""
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of `optimizer`, with the model's parameters."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = value

    def _look(self) -> None:
        """Unscale gradients that were left scaled, and check those that other code wrote."""
        self.update_master_grads()
        self._record.look_for_parameters()
        self._records.look_at_unseen(self._record)

    def _scaler(self, loss_scale: float | str) -> LossScaler:
        arguments: Any = self._dynamic_loss_args if loss_scale == "dynamic" else {}
        return LossScaler(loss_scale, **arguments)  # type: ignore[arg-type]

    def _loaded_scaler(self, saved: Any, is_dynamic: bool) -> LossScaler:
        if isinstance(saved, LossScaler):  # as a pickled scaler of apex.amp comes back, with its own bounds
            return copy.deepcopy(saved)
        scaler = self._scaler("dynamic" if is_dynamic else 1.0)
        of_fp16_utils: Mapping[str, Any] = {"loss_scale": getattr(saved, "loss_scale", None), "unskipped": 0}
        scaler.load_state_dict(saved if isinstance(saved, Mapping) else of_fp16_utils)
        return scaler


def _say_skipped(reporter: Reporter, scaling: Scaling, skips_in_a_row: int, backwards: Sequence[Backward]) -> None:
    last, scaler = backwards[-1], scaling.default()
    if reporter.says(last.is_first):
        scale = last.outcome.next_scale() if last.scaler.dynamic else scaler.loss_scale()
        fate = "reducing loss scale to" if scaler.dynamic else "loss scale is static at"
        reporter.say(f"Gradient overflow.  Skipping step, {fate} {scale}")


def _say_taken(reporter: Reporter, scaling: Scaling, backward: Backward, in_a_row: int) -> None:
    if not backward.outcome.overflowed() or scaling.reported:
        return
    scaling.reported.add(backward.loss_id)
    reporter.say(
        f"Gradient overflow.  The loss scale is static at {backward.scaler.loss_scale()}, so the step is taken with "
        "non-finite gradients.  Pass skip_on_overflow=True to FP16_Optimizer to skip such steps, or "
        "dynamic_loss_scale=True.  This is said once.",
        level=logging.WARNING,
    )
