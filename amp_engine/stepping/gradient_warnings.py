"""Warnings about gradients that never came, parameters that other code writes, and masters that begin rounded."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch.optim import Optimizer

from amp_engine.errors import AmpGradientWarning, AmpRuntimeWarning, AmpStateError
from amp_engine.ground.callers import is_called_by, warn
from amp_engine.ground.dtypes import dtype_name
from amp_engine.kernels import tensor_lists
from amp_engine.optimizers.fused_step import FusedStep, StepInput
from amp_engine.stepping.rows import Rows


class MissingGradients:
    """Warns, in the first steps, of no gradient after a `scale_loss`, and once of gradients that are not scaled."""

    def __init__(self) -> None:
        self._is_unscaled_said = False
        self.is_scale_known = False  # True after a `scale_loss`, and after a step without one
        self._looks = 64
        self._bodies: set[bool | None] = set()  # the arguments of `note` since the last step

    def note(self, has_begun: bool | None) -> None:
        """At the exit of a `scale_loss`: note if a backward ran.

        Args:
            has_begun: True if a backward of the scaled loss began in the body; None if unknown.
        """
        self.is_scale_known = True
        if self._looks > 0:
            self._bodies.add(has_begun)

    def warn_of_unscaled(self, optimizer: Optimizer) -> None:
        """At the exit of a `scale_loss`: warn of gradients that came without a backward of the scaled loss."""
        if self._is_unscaled_said:
            return
        self._is_unscaled_said = True
        warn(
            f"Gradients of {type(optimizer).__name__} came in the body of `with amp.scale_loss(loss, optimizer) as "
            "scaled_loss`, and no backward of scaled_loss ran there.  The exit divides them by the loss scale, which "
            "nothing has multiplied them by unless you did.  Write scaled_loss.backward() in place of a backward of "
            "another loss or of parts of this one, such as l1.backward(); l2.backward() where loss is l1 + l2.  This "
            "is said once.",
            AmpGradientWarning,
        )

    def warn_of_no_scale(self, optimizer: Optimizer) -> None:
        """Before the step of gradients that no `scale_loss` saw: warn if none was before, nor torch's GradScaler."""
        if is_called_by("torch.distributed.checkpoint.state_dict"):  # its step of zeros
            return
        self.is_scale_known = True
        if not is_called_by("torch.amp.grad_scaler"):
            warn(
                f"{type(optimizer).__name__}.step() takes gradients of a backward() outside of amp.scale_loss: nothing "
                "scaled the loss, unless you did, and small float16 gradients became 0 on their way.  Write `with "
                "amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`, or take opt_level='O4', "
                "which needs no loss scale.  This is said once.",
                AmpGradientWarning,
            )

    def warn(self, optimizer: Optimizer, rows: Rows) -> None:
        """Before the step: warn if there is no gradient after a `scale_loss`."""
        if not self._bodies:
            return
        bodies, self._bodies = self._bodies, set()
        self._looks -= 1
        columns = rows.columns
        if tensor_lists.any_gradient(columns.handle) or not any(p.requires_grad for p in columns.params):
            return
        self._looks = 0
        no_backward = "no backward of the scaled loss ran inside of the `with`: call scaled_loss.backward() in it"
        zeroed = (
            "zero_grad() came between the backward and step(): call it after step(), or before the forward; or the "
            "backward reached none of these parameters"
        )
        why = no_backward if bodies == {False} else zeroed
        why = f"{no_backward}; or {zeroed}" if None in bodies else why
        warn(
            f"{type(optimizer).__name__}.step() finds no gradient after `with amp.scale_loss(loss, optimizer) as "
            f"scaled_loss`, and changes nothing.  Why: {why}.  This is said once.",
            AmpGradientWarning,
        )


class WrittenParameters:
    """Warns of a script that writes low-precision parameters between steps, as Lookahead and weight clipping do."""

    def __init__(self) -> None:
        self._steps = 0  # a bit for each of the last 20 steps: 1 if parameters were written before it

    def warn(self, optimizer: Optimizer, rows: Rows) -> None:
        """In a step, after masters have followed writes: warn if that was so in 3 of the last 20 steps. No host sync.

        On a GPU the host hears of a write some steps later.
        """
        self._steps = (self._steps << 1 | rows.was_written()) & 0xFFFFF
        if self._steps.bit_count() < 3:
            return
        self._steps = 0
        rows.look_at_no_writes()
        name = type(optimizer).__name__
        write = (
            "Where that has to be, choose master_weights=True or opt_level='O4'"
            if not rows.can_show
            else "Write the FP32 masters instead, inside of `with amp.on_masters(optimizer):`, where the optimizer's "
            "groups show them"
        )
        warn(
            f"Low-precision parameters of the model were written before 3 of the last 20 steps of {name}.  Its FP32 "
            "masters take what was written, which is rounded: updates that are smaller than such a parameter can hold "
            f"are lost.  {write}.  This is said once.",
            AmpGradientWarning,
        )


def warn_of_rounded_masters(optimizer: Optimizer, rows: Rows) -> None:
    """After FP32 state was loaded: warn if all masters are the half parameters widened. Waits for the device."""
    beside = [one for one in rows.columns.beside if one is not None]
    if not beside or any(one.is_loaded for one in beside):
        return
    for one in beside:
        value = one.value()
        if not torch.equal(value, one.param.detach().to(value.device, torch.float32)):
            return
    name, half = type(optimizer).__name__, dtype_name(beside[0].param.dtype)
    warn(
        f"{name} goes on from saved FP32 state, but its {beside[0].plural} begin at {half} weights: what rounding took "
        "from the saved weights is lost.  To resume exactly, load these in FP32: "
        "from_pretrained(path, dtype=torch.float32) before amp.initialize, or model.load_state_dict(...) after it.",
        AmpRuntimeWarning,
    )


def refuse_own_step(optimizer: Optimizer, fused: FusedStep | None, step: StepInput | None) -> NoReturn:
    """Raise AmpStateError if only the class's own step could run, which does nothing that needs the kernels."""
    by_caller = "step() has arguments, or torch.amp.GradScaler drives it"
    reason = by_caller if fused is None or step is None else fused.obstacle(step)
    raise AmpStateError(
        f"{type(optimizer).__name__} cannot be stepped by the kernels: {reason}.  Its own step() knows neither narrow "
        "moments nor masters on the CPU.  Leave out moment_dtype and masters_on, or what is in the way."
    )
