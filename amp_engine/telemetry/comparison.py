"""Results of `amp.compare_levels`: records of operations, modules and gradients, as text and as HTML."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from amp_engine.page.page import Page, Paged, Sentence, Table

SHOWN = 10
"""How many operations, and how many modules, a table has."""


@dataclass(frozen=True)
class ComparedOperation:
    """One operation of the forward, at the level and at the reference.

    Attributes:
        operation: by the name that torch gives it, such as "addmm" for nn.Linear.
        module: name of the innermost module around it, "" for the model itself; None outside of it, as in a loss.
        module_type: class of that module.
        call: which call of the module, from 1; 0 outside.
        nth: which operation of this name in that call, from 1.
        order: its place among all that were compared, from 0.
        dtype: of its result at the level, such as "float16"; of its operands where a recipe rounds them.
        in_low_precision: an input or the result is float16 or bfloat16 at the level, or a recipe rounds its operands.
        error_in: the largest relative error of its inputs, ||a - b|| / ||b||; 0 if they are the same.
        error: the relative error of its result: infinity where that is not finite and the reference is; 1 where the
            reference is 0 and the result is not.
        growth: error / max(error_in, unit roundoff). 1 where both an input and the result are not finite.
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
    """One module by its own operations, without operations of modules in it.

    Attributes:
        module: its name; "" for the model itself, None for operations outside of it.
        module_type: its class.
        operations: how many of its own there are at the level, and
        unmatched: how many of them the reference has not, as where torch has other kernels for half;
        in_low_precision: how many took or gave float16 or bfloat16, or what a recipe rounds.
        growth: the largest growth of one of them. Where some are unmatched at least that of the whole module, from the
            error of its inputs to the error of its outputs.
        error: the largest relative error of its outputs; None where none is floating.
        gradient_error: the largest relative error of their gradients; None where they have none.
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
        norm: ||b||, of the reference.
    """

    parameter: str
    error: float
    norm: float


@dataclass(frozen=True)
class LevelComparison(Paged):
    """One batch at a level beside the same batch at a reference, which the errors are relative to.

    Attributes:
        level, reference: "O2", "O0", or a recipe.
        keep_float: the modules that were kept in FP32 by name at the level.
        dtype: the low-precision type of the level; that of FP32 where it has none. Of a recipe that of operands.
        roundoff: unit roundoff of that type, the largest relative error of one rounding: 2**-11 for float16, 2**-8 for
            bfloat16, 2**-4 for E4M3, 2**-2 for E2M1.
        loss, reference_loss: summed if there are several.
        loss_error: |loss - reference_loss| / |reference_loss|.
        gradient_error: of the gradients of all parameters as one vector, unscaled: ||a - b|| / ||b||.
        loss_scale: that the level's loss was multiplied by.
        overflowed: its gradients are not finite at that scale, while the loss is.
        operations: the paired ones; not finite first, then by growth.
        modules: that have operations of their own, by the largest growth of one.
        parameters: by error.
        unmatched: how many operations of the level the reference has not, so that nothing is known of them.
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
    """Not finite first, then by growth."""
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
