"""The result of `amp.audit_updates`: records of the part of each tensor's steps that rounding erased."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from amp_engine.tools.telemetry.wording import number, percent, plural, share

LIMIT = 0.1
"""A tensor loses its steps if rounding erased this share of them, or if this share of its elements never moved."""

BY_CHANCE = 0.05
"""If this share of changes below a quarter of the spacing moved the weights, they are not rounded to nearest."""


@dataclass(frozen=True)
class AuditedTensor:
    """One weight over the audited steps.

    Attributes:
        name: name of its parameter in the model, or its place in the optimizer's groups.
        optimizer: index of its optimizer in `UpdateReport.optimizers`, from 0.
        dtype: type in which the optimizer steps it; "float32" for FP32 masters, split ones too.
        parameter_dtype: type of the model's parameter; differs from `dtype` if there is a master.
        shape: shape of the tensor.
        steps: number of the audited steps in which it had a gradient.
        wanted: sum of |wanted|, of all elements and audited steps.
        erased: sum of |wanted - got| over sum of |wanted|, of all elements and audited steps; 0 if the latter is 0.
        never_moved: of the elements that audited steps wanted to change, the share, 0 to 1, that no step changed.
        step_in_spacings: |wanted| over the distance from a weight to the next larger magnitude of its type, as a median
            over the elements that a step wanted to change, then over steps; 0 if no step wanted a change.
        moved_by_chance: share of the changes below a quarter of that distance that still moved the weight, by one unit;
            0 under rounding to nearest, and if there were no such changes.
        state_dtypes: types of the tensors in its optimizer state.
    """

    name: str
    optimizer: int
    dtype: str
    parameter_dtype: str
    shape: tuple[int, ...]
    steps: int
    wanted: float
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
        class_name: class of the optimizer.
        models: classes of the models whose parameters it steps.
        lrs: the least and the largest learning rate of its groups in audited steps; empty if they have none.
        before: what the trainer that steps it calls or makes first, in words; "" in a loop without a trainer.
        steps: number of calls of `step` during the audit.
        audited: number of steps in the figures.
        skipped: number of chosen steps that are not in the figures: skipped ones, and updates that were not finite.
        broken: the type of weights that a step made not finite where the same step in a wider type is finite, or "".
        milliseconds: median time of the audit itself for an audited step; None without one.
        bytes: the most memory that the audit held: copies during a step, and two flags for each element.
        refused: the reason why no further step could be audited; "" if all could.
        note: a limit of the figures; "" without one.
    """

    class_name: str
    models: tuple[str, ...]
    lrs: tuple[float, ...]
    before: str
    steps: int
    audited: int
    skipped: int
    broken: str
    milliseconds: float | None
    bytes: int
    refused: str
    note: str


@dataclass(frozen=True)
class UpdateReport:
    """The figures of an audit.

    Attributes:
        every: every n-th step was audited.
        optimizers: in the order in which they were passed, or first stepped.
        tensors: the worst first.
    """

    every: int
    optimizers: tuple[AuditedOptimizer, ...]
    tensors: tuple[AuditedTensor, ...]

    @property
    def is_well(self) -> bool:
        """True if a step was audited, and no tensor needs a remedy."""
        return bool(self.tensors) and not any(self._counts(one) for one in self.tensors)

    @property
    def summary(self) -> tuple[str, ...]:
        """A line for each optimizer: models, learning rate, and the share of its steps that rounding erased."""
        return tuple(self._summary_of(i, one) for i, one in enumerate(self.optimizers) if one.audited)

    def _summary_of(self, place: int, one: AuditedOptimizer) -> str:
        rates = " to ".join(f"{lr:.3g}" for lr in one.lrs)
        what = f"{' and '.join(one.models) or 'Parameters'}, {one.class_name}"
        if rates:
            what += f", lr {rates}"
        tensors = [
            tensor for tensor in self.tensors if tensor.optimizer == place and tensor.moved_by_chance < BY_CHANCE
        ]
        wanted = sum(tensor.wanted for tensor in tensors)
        if not wanted:
            return f"{what}."
        erased = sum(tensor.wanted * tensor.erased for tensor in tensors) / wanted
        if erased > 1:
            return f"{what}: its steps differ from what {one.class_name} wanted by {share(erased)} of that."
        return f"{what}: {share(erased)} of what {one.class_name} wanted never reached the weights."

    @property
    def sentences(self) -> tuple[str, ...]:
        """The verdict, then the remedy for each kind of losing tensors."""
        return tuple(self._verdict())

    @staticmethod
    def _counts(one: AuditedTensor) -> bool:
        return one.loses and one.moved_by_chance < BY_CHANCE

    def _verdict(self) -> Iterator[str]:
        if not self.tensors:
            yield "No step was audited."
            for one in self.optimizers:
                if one.broken in _LEVEL:
                    yield (
                        f"A step of {one.class_name} in {one.broken} gave weights that are not finite, and the same "
                        f"step in FP32 did not: numbers as small as an eps of 1e-8 are 0 in {one.broken}."
                    )
                    yield _line_to_type(_LEVEL[one.broken], one.before)
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
        for remedy, before in sorted({(one.remedy, self.optimizers[one.optimizer].before) for one in losing}):
            if remedy in _LEVEL.values():
                yield _line_to_type(remedy, before)


def _line_to_type(level: str, before: str) -> str:
    if before:  # adapters alone scale losses, as float16 wants it
        half = "" if level == "O5" else ", which trains in bfloat16"
        return f'Type amp.initialize(model, opt_level="O5") before {before}{half}.'
    scaled = " and `with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`"
    end = scaled if level == "O2" else ""
    return f'Type model, optimizer = amp.initialize(model, optimizer, opt_level="{level}"){end}.'


def at_most(value: float) -> str:
    """The largest of some shares, in words."""
    return "less than 0.1 %" if value < 0.0005 else f"at most {percent(value)}"


def sorted_tensors(tensors: Sequence[AuditedTensor]) -> tuple[AuditedTensor, ...]:
    """The worst first: by the share lost, then by the size of steps, small ones first."""
    return tuple(sorted(tensors, key=lambda one: (-max(one.erased, one.never_moved), one.step_in_spacings)))


def asdict(report: UpdateReport) -> dict[str, object]:
    """The report as plain types, for JSON, with the advice for each tensor."""
    fields = dataclasses.asdict(report)
    for values, one in zip(fields["tensors"], report.tensors, strict=True):
        values["advice"] = one.advice
    return {"summary": list(report.summary), "sentences": list(report.sentences), **fields}
