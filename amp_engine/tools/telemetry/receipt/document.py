"""The receipt as a record with all of its sections."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass

from amp_engine.engine import Engine
from amp_engine.errors import AmpStateError, AmpTypeError
from amp_engine.ground.dtypes import dtype_name
from amp_engine.tools.explanation import Explanation
from amp_engine.tools.page.page import Page, Paged, Section, Sentence, Table, write_by_suffix
from amp_engine.tools.software import describe
from amp_engine.tools.telemetry import histogram_picture, step_times, update_page
from amp_engine.tools.telemetry.histogram_picture import GradientHistogram
from amp_engine.tools.telemetry.receipt import asked, functions, losses, memory, models, optimizers, shapes
from amp_engine.tools.telemetry.receipt.asked import Asked
from amp_engine.tools.telemetry.receipt.functions import Functions
from amp_engine.tools.telemetry.receipt.losses import Loss
from amp_engine.tools.telemetry.receipt.memory import Memory
from amp_engine.tools.telemetry.receipt.models import Model
from amp_engine.tools.telemetry.receipt.optimizers import Stepped
from amp_engine.tools.telemetry.receipt.shapes import Shapes
from amp_engine.tools.telemetry.step_times import StepTimes, Times
from amp_engine.tools.telemetry.update_audit import UpdateAudit
from amp_engine.tools.telemetry.update_report import UpdateReport
from amp_engine.tools.telemetry.wording import number, plural, size

FORMAT = 1
"""The format number of the JSON; changes when a field changes its meaning."""

_NO_TIMES = (
    "Not measured.  Type:  with amp.step_times() as times: ...  around some iterations, then amp.receipt(times=times)."
)
_NO_GRADIENTS = (
    "Not measured.  Type:  gradients = amp.gradient_histogram(lambda: loss_fn(model(x), y)),  then "
    "amp.receipt(gradients=gradients)."
)
_NO_UPDATES = (
    "Not audited.  Type:  with amp.audit_updates(optimizer) as audit: ...  around some iterations, then "
    "amp.receipt(updates=audit)."
)


@dataclass(frozen=True, repr=False)
class Receipt(Paged):
    """A run: its arguments, their effects, and its memory, scales and skips.

    `str(receipt)` is a page of text, `receipt.save("run.html")` a page of HTML in one file; a notebook shows the same.
    """

    asked: Asked
    models: tuple[Model, ...]
    functions: Functions
    optimizers: tuple[Stepped, ...]
    losses: tuple[Loss, ...]
    memory: tuple[Memory, ...]
    shapes: Shapes
    times: Times | None
    gradients: GradientHistogram | None
    software: dict[str, str]
    updates: UpdateReport | None = None

    @property
    def title(self) -> str:
        """The classes of the models, and the level."""
        names = ", ".join(dict.fromkeys(model.class_name for model in self.models))
        at = self.asked.level or "enabled=False"
        return f"amp receipt: {names} at {at}" if names else f"amp receipt: {at}"

    @property
    def verdict(self) -> tuple[str, ...]:
        """Sentences about skips, the code that steps, memory, and audited updates."""
        said = []
        if steps := sum(one.steps for one in self.optimizers):
            said.append(f"{number(sum(one.skips for one in self.optimizers))} of {plural(steps, 'step')} skipped.")
        for by in dict.fromkeys(one.by for one in self.optimizers):
            names = ", ".join(dict.fromkeys(one.class_name for one in self.optimizers if one.by == by))
            said.append(f"{names}: stepped by {by}.")
        parameters = sum(of.elements for model in self.models for of in model.types if of.kind == memory.PARAMETERS)
        if parameters and self.memory:
            used = sum(one.bytes for one in self.memory)
            said.append(f"{size(used)} in all, {used / parameters:.1f} bytes a parameter.")
        return (*said, *(self.updates.sentences[:1] if self.updates is not None else ()))

    def to_json(self) -> str:
        """The sections by name, as JSON of plain types."""
        fields = {"format": FORMAT, "verdict": self.verdict, **dataclasses.asdict(self)}
        return json.dumps(fields, indent=1, allow_nan=False, default=dtype_name)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file: text, JSON or HTML, by its suffix .txt, .json or .html.

        Raises AmpValueError for another suffix, OSError as `open` does.
        """
        writers = {".txt": lambda: f"{self}\n", ".json": self.to_json, ".html": lambda: self._page().html_file()}
        write_by_suffix(path, writers, "a receipt")

    def _page(self) -> Page:
        gradients = histogram_picture.blocks(self.gradients) if self.gradients else [Sentence(_NO_GRADIENTS, "soft")]
        times = step_times.blocks(self.times) if self.times else [Sentence(_NO_TIMES, "soft")]
        updates = update_page.blocks(self.updates) if self.updates else [Sentence(_NO_UPDATES, "soft")]
        sections = (
            Section("Verdict", [Sentence(sentence) for sentence in self.verdict]),
            asked.section(self.asked),
            models.section(self.models),
            functions.section(self.functions),
            optimizers.section(self.optimizers),
            losses.section(self.losses),
            memory.section(self.memory),
            shapes.section(self.shapes),
            Section("Gradients", gradients),
            Section("Updates", updates),
            Section("Time", times),
            Section("Software", [Table([*self.software.items()])]),
        )
        return Page(self.title, sections)


def receipt(
    engine: Engine,
    explanation: Explanation | None = None,
    times: StepTimes | None = None,
    gradients: GradientHistogram | None = None,
    updates: UpdateAudit | None = None,
) -> Receipt:
    """Describe a run as it is now: arguments, casts and kept modules, with reasons; memory; loss scales.

        with amp.explain() as explanation:
            ...  # one iteration
        print(amp.receipt(explanation))
        amp.receipt(explanation).save("run.html")  # or .txt, .json

    Args:
        explanation: of some iterations, for the table of functions and types. It is not collected otherwise.
        times: the StepTimes of some iterations, from `with amp.step_times() as times:`, for the shares of time.
        gradients: the result of `amp.gradient_histogram(step_fn)`, for the picture of gradients that underflow.
        updates: the audit of some steps, from `with amp.audit_updates(optimizer) as audit:`, for the part of them that
            rounding erased.

    Returns:
        A frozen record; `str()`, a notebook, `save(path)` and `to_json()` render it.

    Waits for the device, and for other ranks if they agree on an overflow. Changes nothing, but reports skips that the
    host did not know of before. Losses are counted from the last `initialize` on, steps from the `initialize` of their
    optimizer on.

    Raises AmpStateError before `initialize`, after `close`, and inside of a CUDA graph's capture; AmpTypeError.
    """
    policy = engine.policy
    if policy is None:
        raise AmpStateError(
            "There is no run to give a receipt for: amp.initialize() was not called, or amp.close() was.  Call model, "
            "optimizer = amp.initialize(model, optimizer, opt_level=...) first, and amp.receipt() before amp.close()."
        )
    for name, given, kind, source in (
        ("explanation", explanation, Explanation, "`with amp.explain() as explanation:`"),
        ("times", times, StepTimes, "`with amp.step_times() as times:`"),
        ("gradients", gradients, GradientHistogram, "amp.gradient_histogram(step_fn)"),
        ("updates", updates, UpdateAudit, "`with amp.audit_updates(optimizer) as audit:`"),
    ):
        if given is not None and not isinstance(given, kind):
            raise AmpTypeError(f"{name} is what {source} gives, not a {type(given).__name__}.")
    software = dict(describe())
    if not policy.enabled:
        return Receipt(asked.NOT_ENABLED, (), functions.NONE, (), (), (), shapes.NONE, None, None, software)
    for one in engine.records.all:
        one.pending.hear(wait=True)
    engine._scaling.history.hear(wait=True)
    return Receipt(
        asked=asked.described(engine, policy),
        models=models.described(engine, policy),
        functions=functions.described(engine, explanation),
        optimizers=optimizers.described(engine),
        losses=losses.described(engine),
        memory=memory.described(engine),
        shapes=shapes.described(engine),
        times=None if times is None else times.measured(),
        gradients=gradients,
        software=software,
        updates=None if updates is None else updates.measured(),
    )
