"""Results of `amp.compare_levels`: records of operations, modules and gradients, as text and as HTML."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from amp_engine.tools.page.page import Page, Paged, Sentence, Table

SHOWN = 10
"""A table shows this many operations or modules."""


@dataclass(frozen=True)
class ComparedOperation:
    """One operation of the forward, at the level and at the reference.

    Attributes:
        operation: torch's name of the operation, such as "addmm" for nn.Linear.
        module: name of the innermost module around it, "" for the model itself; None outside of it, as in a loss.
        module_type: class of that module.
        call: number of the call of the module, from 1; 0 outside.
        nth: number of this operation among those of its name in the call, from 1.
        order: its position among all compared operations, from 0.
        dtype: type of its result at the level, such as "float16".
        in_low_precision: True if an input or the result is in half at the level.
        error_in: the largest relative error of its inputs, ||a - b|| / ||b||; 0 if they are the same.
        error: the relative error of its result; infinity if the result is not finite and the reference is; 1 if the
            reference is 0 and the result is not.
        growth: error / max(error_in, unit roundoff); 1 if both an input and the result are not finite.
    """

    operation: str
    module: str | None
    module_type: str | None
    call: int
    nth: int
    order: int
    dtype: str
    in_low_precision: bool
    error_in: float
    error: float
    growth: float


@dataclass(frozen=True)
class ComparedModule:
    """One module and its own operations, without operations of modules in it.

    Attributes:
        module: its name; "" for the model itself, None for operations outside of it.
        module_type: its class.
        operations: number of its own operations at the level.
        unmatched: number of these that the reference lacks, as when torch has other kernels for half.
        in_low_precision: number of these with inputs or results in half.
        growth: the largest growth of one of its operations. If some are unmatched, at least the growth of the whole
            module, from the error of its inputs to the error of its outputs.
        error: the largest relative error of its outputs; None if no output is floating.
        gradient_error: the largest relative error of its outputs' gradients; None if they have none.
    """

    module: str | None
    module_type: str | None
    operations: int
    unmatched: int
    in_low_precision: int
    growth: float
    error: float | None
    gradient_error: float | None


@dataclass(frozen=True)
class ComparedParameter:
    """The gradient of one parameter, unscaled.

    Attributes:
        parameter: its name.
        error: ||a - b|| / ||b||.
        norm: ||b||, the norm at the reference.
    """

    parameter: str
    error: float
    norm: float


@dataclass(frozen=True)
class LevelComparison(Paged):
    """One batch at a level and at a reference; errors are relative to the reference.

    Attributes:
        level, reference: "O2", "O0".
        keep_float: names of the modules that were kept in FP32 at the level.
        dtype: the low-precision type of the level, or FP32 if it has none.
        roundoff: unit roundoff of that type, the largest relative error of one rounding: 2**-11 for float16, 2**-8 for
            bfloat16.
        loss, reference_loss: the losses; a loss with several elements is summed.
        loss_error: |loss - reference_loss| / |reference_loss|.
        gradient_error: ||a - b|| / ||b|| of the unscaled gradients of all parameters as one vector.
        loss_scale: the loss scale at the level.
        overflowed: True if gradients at the level are not finite at that scale, while the loss is.
        operations: the paired operations; not finite first, then by growth.
        modules: the modules that have their own operations, by the largest growth of an operation.
        parameters: the gradients, by error.
        unmatched: number of operations at the level that the reference lacks, so that their errors are unknown.
    """

    level: str
    reference: str
    keep_float: tuple[str, ...]
    dtype: str
    roundoff: float
    loss: float
    reference_loss: float
    loss_error: float
    gradient_error: float
    loss_scale: float
    overflowed: bool
    operations: tuple[ComparedOperation, ...]
    modules: tuple[ComparedModule, ...]
    parameters: tuple[ComparedParameter, ...]
    unmatched: int

    @property
    def is_finite(self) -> bool:
        """True if the loss and every gradient are finite at the level."""
        return math.isfinite(self.loss) and not self.overflowed and math.isfinite(self.gradient_error)

    def _page(self) -> Page:
        operations = Table(self._operation_rows(), _OPERATION_HEAD, numbers=range(4, len(_OPERATION_HEAD)))
        modules = Table(self._module_rows(), _MODULE_HEAD, numbers=range(2, len(_MODULE_HEAD)))
        return Page.of(Sentence(self._heading()), operations, *map(Sentence, self._sentences()), modules)

    def _heading(self) -> str:
        kept = f", with {', '.join(map(_shown, self.keep_float))} in FP32" if self.keep_float else ""
        more = f" of {len(self.operations)}" if len(self.operations) > SHOWN else ""
        return (
            f"{self.level} beside {self.reference}{kept}: the operations{more} by which relative errors grew most, and "
            "what is not finite."
        )

    def _sentences(self) -> list[str]:
        lines = [
            f"The loss is {self.loss:.6g}, and {self.reference_loss:.6g} at {self.reference}: a relative error of "
            f"{_number(self.loss_error)}.  That of the whole gradient is {_number(self.gradient_error)}.  One rounding "
            f"to {self.dtype} is up to {self.roundoff:.1e}.  Loss scale {self.loss_scale:g}."
        ]
        if not math.isfinite(self.reference_loss):
            lines.append(f"At {self.reference} the loss is not finite either.")
        if self.overflowed:
            lines.append("Gradients overflow at that loss scale, and would at any lower one, or at a static one.")
        if self.unmatched:
            lines.append(f"Of {self.unmatched} operations nothing is known, since {self.reference} runs others.")
        return lines

    def _operation_rows(self) -> list[tuple[str, ...]]:
        return [
            (
                o.operation,
                _shown(o.module),
                o.module_type or "",
                o.dtype,
                _number(o.growth),
                _number(o.error_in),
                _number(o.error),
            )
            for o in self.operations[:SHOWN]
        ]

    def _module_rows(self) -> list[tuple[str, ...]]:
        return [
            (
                _shown(m.module),
                m.module_type or "",
                f"{m.in_low_precision} of {m.operations}",
                _number(m.growth),
                _number(m.error),
                _number(m.gradient_error),
            )
            for m in self.modules[:SHOWN]
        ]


_OPERATION_HEAD = ("operation", "module", "class", "type", "growth", "error in", "error out")
_MODULE_HEAD = ("module", "class", "operations in half", "growth", "error out", "error of gradient")


def by_growth(operations: Sequence[ComparedOperation]) -> tuple[ComparedOperation, ...]:
    """Sort operations: not finite first, then by growth."""
    return tuple(
        sorted(operations, key=lambda o: (-o.growth if math.isinf(o.growth) else 0, o.error != math.inf, -o.growth))
    )


def _shown(module: str | None) -> str:
    return "outside of the model" if module is None else module or "the model itself"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if value >= 1e4 or value < 1e-2:
        return "0" if value == 0.0 else "inf" if math.isinf(value) else f"{value:.1e}"
    return f"{value:.3g}"
