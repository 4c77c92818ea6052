"""Warnings and errors about gradients that never reach the masters, and about foreign writes."""

from __future__ import annotations

import warnings
import weakref
from typing import NoReturn

from torch.optim import Optimizer

from amp_engine.errors import AmpGradientWarning, AmpStateError
from amp_engine.kernels import tensor_lists
from amp_engine.optimizers.fused_step import FusedStep, StepInput
from amp_engine.stepping.master_parameter import copied_masters, is_copied_master
from amp_engine.stepping.rows import Rows


def _warn(text: str) -> None:
    warnings.warn(text, AmpGradientWarning, stacklevel=3)


class WrittenGradients:
    """Warns, in the first steps, of the model's own gradients that were written or discarded since the last backward.

    A script that clips them does so from its first step.
    """

    def __init__(self) -> None:
        self._marks: tensor_lists.GradientMarks | None = None
        self._looks = 64

    def note(self, rows: Rows) -> None:
        """After a backward: mark the gradients."""
        if self._looks > 0:
            self._marks = rows.gradient_marks()

    def warn(self, optimizer: Optimizer, rows: Rows) -> None:
        """Before the step: warn if the gradients were written or discarded since `note`."""
        before = self._marks
        if before is None or self.warn_of_discarded(optimizer, rows):
            return
        self._looks -= 1
        if rows.gradients_written_since(before):
            self._looks = 0
            _warn(
                "Gradients of the model were written (clipped, edited, or reached by another backward) between "
                f"amp.scale_loss and {type(optimizer).__name__}.step(), which steps those of its FP32 masters: it has "
                "no effect.  To clip call amp.clip_grad_norm_(optimizer, max_norm); for anything else write to `.grad` "
                "of what amp.master_params(optimizer) gives.  This is said once."
            )

    def warn_of_discarded(self, optimizer: Optimizer, rows: Rows) -> bool:
        """Before a backward or the step: warn if gradients were discarded since `note`, and not their masters'."""
        before, self._marks = self._marks, None
        if before is None or not rows.gradients_discarded_since(before):
            return False
        self._looks = 0
        _warn(
            "Gradients of the model were set to None, as model.zero_grad() does, after amp.scale_loss.  Those of the "
            f"FP32 masters that {type(optimizer).__name__}.step() steps are still there: it steps them, or the sum of "
            "them and the next.  Call optimizer.zero_grad(); to leave some parameters out, set `.grad` of what "
            "amp.master_params(optimizer) gives to None.  This is said once."
        )
        return True


def warn_of_unseen_gradients(optimizer: Optimizer, rows: Rows) -> None:
    """Warn of gradients of no `scale_loss` that listed `optimizer`, which never reach the masters."""
    if any(m.param.grad is not None and not m.is_held() and m.gradient() is None for m in rows.masters):
        _warn(
            f"{type(optimizer).__name__}.step() found gradients of a backward() outside of amp.scale_loss, or inside "
            "of one that did not list this optimizer: they never reach the FP32 masters that it steps.  Use `with "
            "amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`, at a scale of 1 too; where a "
            "loss reaches parameters of several optimizers, list them all: amp.scale_loss(loss, [optimizer, other])."
        )


# Optimizers without an engine that were checked for copied masters.
_LOOKED_AT: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def warn_of_copied_masters(optimizer: Optimizer) -> None:
    """Before the first step of an optimizer without an engine: warn if it steps copied masters without gradients."""
    if optimizer in _LOOKED_AT:
        return
    _LOOKED_AT.add(optimizer)
    copies = [p for group in optimizer.param_groups for p in group["params"] if is_copied_master(p)]
    if copies and all(p.grad is None for p in copies):
        _warn(f"{copied_masters(optimizer)}  Its step() changed no model, and found no gradient.")


class MissingGradients:
    """Warns, in the first steps, of no gradient after a `scale_loss`, and once of gradients that are not scaled."""

    def __init__(self) -> None:
        self._is_unscaled_said = False
        self._looks = 64
        self._bodies: set[bool | None] = set()  # the arguments of `note` since the last step

    def note(self, has_begun: bool | None) -> None:
        """At the exit of a `scale_loss`: note if a backward ran.

        Args:
            has_begun: True if a backward of the scaled loss began in the body; None if unknown.
        """
        if self._looks > 0:
            self._bodies.add(has_begun)

    def warn_of_unscaled(self, optimizer: Optimizer) -> None:
        """At the exit of a `scale_loss`: warn of gradients that came without a backward of the scaled loss."""
        if self._is_unscaled_said:
            return
        self._is_unscaled_said = True
        _warn(
            f"Gradients of {type(optimizer).__name__} came in the body of `with amp.scale_loss(loss, optimizer) as "
            "scaled_loss`, and no backward of scaled_loss ran there.  The exit divides them by the loss scale, which "
            "nothing has multiplied them by unless you did.  Write scaled_loss.backward() in place of a backward of "
            "another loss or of parts of this one, such as l1.backward(); l2.backward() where loss is l1 + l2.  This "
            "is said once."
        )

    def warn(self, optimizer: Optimizer, rows: Rows) -> None:
        """Before the step: warn if there is no gradient after a `scale_loss`."""
        if not self._bodies:
            return
        bodies, self._bodies = self._bodies, set()
        self._looks -= 1
        columns = rows.columns
        if rows.ledger.slots.count > 0 or rows.ledger.spent.zero_rows() or columns.asks:
            return
        if tensor_lists.any_gradient(columns.weight_handle):
            return
        if not any(p.requires_grad for p in columns.params):
            return
        self._looks = 0
        no_backward = "no backward of the scaled loss ran inside of the `with`: call scaled_loss.backward() in it"
        zeroed = (
            "zero_grad() came between the backward and step(): call it after step(), or before the forward; or the "
            "backward reached none of these parameters"
        )
        why = no_backward if bodies == {False} else zeroed
        why = f"{no_backward}; or {zeroed}" if None in bodies else why
        _warn(
            f"{type(optimizer).__name__}.step() finds no gradient after `with amp.scale_loss(loss, optimizer) as "
            f"scaled_loss`, and changes nothing.  Why: {why}.  This is said once."
        )


class WrittenParameters:
    """Warns of a script that writes low-precision parameters between all steps, as SAM and weight clipping do."""

    def __init__(self) -> None:
        self._steps = 0  # count of steps in a row before which parameters were written

    def warn(self, optimizer: Optimizer, rows: Rows) -> None:
        """In a step, after masters have followed writes: warn at the fourth such step in a row."""
        was_rounded, rows.was_rounded = rows.was_rounded, False
        self._steps = self._steps + 1 if was_rounded else 0
        if self._steps != 4:
            return
        name = type(optimizer).__name__
        write = (
            "Where that has to be, choose master_weights=True or opt_level='O4'"
            if rows.splits
            else "Write what amp.master_params(optimizer) gives instead: forwards of the model see it"
        )
        _warn(
            f"Low-precision parameters of the model were written before each of the last 4 steps of {name}.  Its "
            "FP32 masters take what was written, which is rounded: updates that are smaller than such a parameter can "
            f"hold are lost.  {write}."
        )


def warn_of_written_masters(optimizer: Optimizer) -> None:
    """Warn that masters were written since the step, and that the forward of a loss did not use them."""
    name = type(optimizer).__name__
    _warn(
        f"FP32 masters of this {name} were written, as SAM does, and this loss was computed with the weights of "
        "before: earlier, by parts of the model, or by a compiled one.  From the next forward on the model and its "
        "modules see what is written; where the model is compiled, call optimizer._master_params_to_model_params() "
        "after you write masters.  This is said once."
    )


def refuse_foreign_scaler(optimizer: Optimizer, rows: Rows) -> None:
    """Raise AmpStateError if torch.amp.GradScaler is about to step gradients that never reached the masters."""
    if rows.has_parameter_gradients():
        raise AmpStateError(
            f"torch.amp.GradScaler is to step {type(optimizer).__name__}, which steps FP32 masters, and the "
            "gradients of a backward() outside of amp.scale_loss never reach them.  Leave the GradScaler out, "
            "and use `with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`, then "
            "optimizer.step(): scale_loss scales, unscales and skips."
        )


def refuse_own_step(optimizer: Optimizer, fused: FusedStep | None, step: StepInput) -> NoReturn:
    """Raise AmpStateError if only the class's own step could run, which handles no remainders or narrow moments."""
    by_caller = "step() has arguments, or torch.amp.GradScaler drives it"
    reason = by_caller if fused is None else fused.obstacle(step)
    raise AmpStateError(
        f"{type(optimizer).__name__} cannot be stepped by the kernels: {reason}.  Its own step() knows neither split "
        "masters nor bfloat16 moments.  Leave out master_weights='split' and moment_dtype, or what is in the way."
    )
