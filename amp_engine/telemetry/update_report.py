"""The result of `amp.audit_updates`: what rounding erased of each tensor's steps, as records."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from amp_engine.telemetry.wording import number, percent, plural

LIMIT = 0.1
"""A tensor loses its steps if rounding erased this share of them, or if this share of its elements never moved."""

BY_CHANCE = 0.05
"""If this share of the changes below a quarter of the spacing moved a weight, it is not rounded to nearest."""


@dataclass(frozen=True)
class AuditedTensor:
    """One weight over the audited steps.

    Attributes:
        name: of its parameter in the model, or its place in the optimizer's groups.
        optimizer: place of its optimizer among `UpdateReport.optimizers`, from 0.
        dtype: that the optimizer steps it in; "float32" for FP32 masters, split ones too.
        parameter_dtype: of the model's parameter; another one where there is a master.
        shape: of the tensor.
        steps: number of the audited steps in which it had a gradient.
        erased: sum of |wanted - got| over sum of |wanted|, of all elements and audited steps; 0 if nothing was wanted.
        never_moved: of the elements that an audited step wanted to change, the share that none of them changed, 0 to 1.
        step_in_spacings: median of |wanted| over the distance from a weight to the next larger magnitude of its type:
            over the elements that a step wanted to change, then over steps. 0 if nothing was wanted.
        moved_by_chance: of the changes below a quarter of that distance, the share that moved the weight all the same:
            0 under rounding to nearest. 0 where there were none.
        state_dtypes: types of the optimizer's state for it, beside numbers.
    """

    name: str
    optimizer: int
    dtype: str
    parameter_dtype: str
    shape: tuple[int, ...]
    steps: int
    erased: float
    never_moved: float
    step_in_spacings: float
    moved_by_chance: float
    state_dtypes: tuple[str, ...]

    @property
    def loses(self) -> bool:
        """True if 10 % of its steps or more were erased, or 10 % of its elements or more never moved."""
        return max(self.erased, self.never_moved) >= LIMIT

    @property
    def remedy(self) -> str:
        """The remedy: a level, "larger lr" or "nothing"; empty for a tensor that loses nothing."""
        if not self.loses:
            return ""
        if self.moved_by_chance >= BY_CHANCE:
            return "nothing"
        return _LEVEL.get(self.dtype, "larger lr")

    @property
    def advice(self) -> str:
        """The reason and the remedy: "bfloat16 weights without masters: O5"; empty for a tensor that loses nothing."""
        if not self.loses:
            return ""
        if self.moved_by_chance >= BY_CHANCE:
            why = "rounded by chance, so that small steps count on average"
        elif self.dtype in _LEVEL:
            kind = "weights and state" if self.dtype in self.state_dtypes else "weights"
            why = f"{self.dtype} {kind} without masters"
        else:
            why = f"steps too small for {self.dtype}"
        return f"{why}: {self.remedy}"


_LEVEL = {"bfloat16": "O5", "float16": "O2"}


@dataclass(frozen=True)
class AuditedOptimizer:
    """One optimizer over the audit.

    Attributes:
        class_name: of the optimizer.
        steps: calls of `step` during the audit.
        audited: number of these that are in the figures.
        skipped: calls that were chosen and are not in the figures: skipped ones, and updates that were not finite.
        milliseconds: median time of the audit itself for an audited step; None without one.
        bytes: the most memory that the audit held: copies during a step, and two flags for each element.
        refused: why no further step of it could be audited; "" if all could.
        note: what the figures do not tell; "" if they tell all.
    """

    class_name: str
    steps: int
    audited: int
    skipped: int
    milliseconds: float | None
    bytes: int
    refused: str
    note: str


@dataclass(frozen=True)
class UpdateReport:
    """The figures of an audit.

    Attributes:
        every: each how-manieth step was looked at.
        optimizers: in the order in which they were named, or were first stepped.
        tensors: the worst first.
    """

    every: int
    optimizers: tuple[AuditedOptimizer, ...]
    tensors: tuple[AuditedTensor, ...]

    @property
    def is_well(self) -> bool:
        """True if there was an audited step, and no tensor needs anything done."""
        return bool(self.tensors) and not any(self._counts(one) for one in self.tensors)

    @property
    def sentences(self) -> tuple[str, ...]:
        """The verdict, then what each kind of losing tensors needs."""
        return tuple(self._verdict())

    @staticmethod
    def _counts(one: AuditedTensor) -> bool:
        return one.loses and one.moved_by_chance < BY_CHANCE

    def _verdict(self) -> Iterator[str]:
        if not self.tensors:
            yield "No step was audited."
            return
        losing = [one for one in self.tensors if self._counts(one)]
        if not losing:
            most = max((one.erased for one in self.tensors if not one.loses), default=0.0)
            yield f"All is well: the weights keep their steps; rounding erased {at_most(most)} of any."
        else:
            total = plural(len(self.tensors), "tensor")
            yield f"Rounding erases steps of {number(len(losing))} of {total}; {losing[0].name} loses most."
        for advice, count in Counter(one.advice for one in self.tensors if one.loses).items():
            yield f"{plural(count, 'tensor')}: {advice}."
        for level in sorted({one.remedy for one in losing} & set(_LEVEL.values())):
            yield f'Type model, optimizer = amp.initialize(model, optimizer, opt_level="{level}").'


def at_most(value: float) -> str:
    """The largest of some shares, in words."""
    return "less than 0.1 %" if value < 0.0005 else f"at most {percent(value)}"


def sorted_tensors(tensors: Sequence[AuditedTensor]) -> tuple[AuditedTensor, ...]:
    """The worst first: by what is lost, then by how small their steps are."""
    return tuple(sorted(tensors, key=lambda one: (-max(one.erased, one.never_moved), one.step_in_spacings)))


def asdict(report: UpdateReport) -> dict[str, object]:
    """The report as plain types, for JSON; of each tensor also the advice."""
    fields = dataclasses.asdict(report)
    for values, one in zip(fields["tensors"], report.tensors, strict=True):
        values["advice"] = one.advice
    return {"sentences": list(report.sentences), **fields}
