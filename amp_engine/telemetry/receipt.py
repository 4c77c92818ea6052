"""`amp.receipt()`: one page about a run, collected from an engine; as text, JSON and HTML."""

from __future__ import annotations

import dataclasses
import json
import os
import pkgutil
import types
import typing
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amp_engine.casting import Explanation, FunctionCasts
from amp_engine.casting.lists import NAMESPACES
from amp_engine.engine import Engine
from amp_engine.errors import AmpStateError, AmpTypeError, AmpValueError
from amp_engine.levels import levels
from amp_engine.levels.policy import Policy
from amp_engine.levels.scale_rule import DEFAULT_MAX_LOSS_SCALE
from amp_engine.telemetry import kept, memory, receipt_html, receipt_text, shapes, stepped_by
from amp_engine.telemetry.gradient_histogram import GradientHistogram
from amp_engine.telemetry.records import (
    Asked,
    Fact,
    Functions,
    Loss,
    Memory,
    Model,
    Op,
    Property,
    ScalePoint,
    Shapes,
    Stepped,
    Times,
)
from amp_engine.telemetry.software import describe
from amp_engine.telemetry.step_times import StepTimes

FORMAT = 1
"""Of the JSON; another number where a field has got another meaning."""

_HOW_TO_EXPLAIN = (
    "What ran in which type was not collected.  Type:\n\n    with amp.explain() as explanation:\n"
    "        ...  # one iteration\n    print(amp.receipt(explanation))"
)


@dataclass(frozen=True)
class Receipt:
    """What a run was asked for, what became of it, and what it takes. See `records` for the sections.

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
    software: tuple[Fact, ...]

    @property
    def title(self) -> str:
        """Of which models at which level."""
        names = ", ".join(dict.fromkeys(model.class_name for model in self.models))
        at = self.asked.level or "enabled=False"
        return f"amp receipt: {names} at {at}" if names else f"amp receipt: {at}"

    def to_json(self) -> str:
        """The sections by name, in JSON of plain types, which `from_json` reads back."""
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Receipt:
        """The receipt that `to_json` wrote. Raises AmpValueError for any other text."""
        try:
            fields = json.loads(text)
            if fields.pop("format") != FORMAT:
                raise ValueError("of another format")
            return typing.cast("Receipt", _built(cls, fields))
        except (AttributeError, KeyError, TypeError, ValueError) as e:
            raise AmpValueError(f"This is no receipt that Receipt.to_json of this version wrote ({e}).") from e

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file: text, JSON or HTML, by its suffix .txt, .json or .html.

        Raises AmpValueError for another suffix, OSError as `open` does.
        """
        writers = {".txt": lambda: f"{self}\n", ".json": self.to_json, ".html": lambda: receipt_html.page(self)}
        suffix = Path(path).suffix.lower()
        if suffix not in writers:
            raise AmpValueError(
                f"save({os.fspath(path)!r}): a receipt is written as .txt, .json or .html.  "
                f"Use for example {str(Path(path).with_suffix('.html'))!r}."
            )
        Path(path).write_text(writers[suffix](), encoding="utf-8")

    def __str__(self) -> str:
        return receipt_text.rendered(self)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return receipt_html.rendered(self)


def receipt(
    engine: Engine,
    explanation: Explanation | None = None,
    times: StepTimes | None = None,
    gradients: GradientHistogram | None = None,
) -> Receipt:
    """One page about a run, as it is now: what was asked for, what was cast and kept, and why, memory, loss scale.

        with amp.explain() as explanation:
            ...  # one iteration
        print(amp.receipt(explanation))
        amp.receipt(explanation).save("run.html")  # or .txt, .json

    Args:
        engine: whose run; `amp.receipt` takes none.
        explanation: of some iterations, for the table of functions and types. It is not collected otherwise.
        times: of some iterations, for the shares of time: what `with amp.step_times() as times:` gives.
        gradients: of a batch, for the picture of what underflows: what `amp.gradient_histogram(step_fn)` gives.

    Returns:
        A frozen record; `str()`, a notebook, `save(path)` and `to_json()` render it.

    Waits for the device, and for other ranks where they agree on an overflow. Changes nothing, but that skips are
    reported of which the host hears by it. Counts begin at the last `initialize` for losses, and for an optimizer where
    it came.

    Raises AmpStateError before `initialize`, after `close`, and inside of a CUDA graph's capture; AmpTypeError.
    """
    policy = engine.policy
    if policy is None:
        raise AmpStateError(
            "There is no run to give a receipt for: amp.initialize() was not called, or amp.close() was.  Call model, "
            "optimizer = amp.initialize(model, optimizer, opt_level=...) first, and amp.receipt() before amp.close()."
        )
    if not isinstance(explanation, (Explanation, types.NoneType)):
        raise AmpTypeError(
            f"explanation is what `with amp.explain() as explanation:` gives, not a {type(explanation).__name__}."
        )
    if not isinstance(times, (StepTimes, types.NoneType)):
        raise AmpTypeError(f"times is what `with amp.step_times() as times:` gives, not a {type(times).__name__}.")
    if not isinstance(gradients, (GradientHistogram, types.NoneType)):
        raise AmpTypeError(
            f"gradients is what amp.gradient_histogram(step_fn) gives, not a {type(gradients).__name__}."
        )
    if not policy.enabled:
        nothing = Functions(None, (), (), None, "")
        asked = Asked(False, None, "enabled=False: amp leaves everything as it is.", ())
        return Receipt(asked, (), nothing, (), (), (), Shapes(0, ()), None, None, tuple(_software()))
    models, stepped = engine._initialized.models, engine._initialized.stepped
    scaling = engine._scaling
    for one in stepped:
        one.pending.hear(wait=True)
    scaling.history.hear(wait=True)
    names = [""] if len(models) == 1 else [f"models[{i}]" for i in range(len(models))]
    casts = engine.function_casts.casts
    audits = [shapes.audited(name, model, casts) for name, model in zip(names, models, strict=True)]
    return Receipt(
        asked=_asked(engine, policy),
        models=tuple(kept.described(name, model, policy) for name, model in zip(names, models, strict=True)),
        functions=_functions(engine, explanation),
        optimizers=tuple(stepped_by.described(one, scaling.is_active, casts is not None) for one in stepped),
        losses=tuple(_losses(engine)),
        memory=tuple(memory.by_class(models, stepped, None if casts is None else casts.cache)),
        shapes=Shapes(sum(count for count, _ in audits), tuple(shape for _, found in audits for shape in found)),
        times=None if times is None else times.measured(),
        gradients=gradients,
        software=tuple(_software()),
    )


def _asked(engine: Engine, policy: Policy) -> Asked:
    level = str(policy.opt_level)
    defaults = levels.level(level).properties()
    rows = [(name, value, defaults[name]) for name, value in policy.properties().items()]
    rows += [
        ("num_losses", len(engine.scalers), 1),
        ("min_loss_scale", engine.min_loss_scale, None),
        ("max_loss_scale", engine.max_loss_scale, DEFAULT_MAX_LOSS_SCALE),
        ("skip_on_overflow", engine._scaling.skip_on_overflow, False),
    ]
    if (casts := engine.function_casts.casts) is not None:
        rows.append(("casts", "everywhere" if casts.everywhere else "model", "everywhere"))
    properties = tuple(Property(name, str(value), str(default)) for name, value, default in rows)
    return Asked(True, level, levels.BRIEFS[level].strip(), properties)


def _functions(engine: Engine, explanation: Explanation | None) -> Functions:
    casts = engine.function_casts.casts
    why_not = engine.function_casts.why_nothing_is_cast(engine.policy)
    ops, note = None, why_not or ""
    if explanation is not None:
        ops = tuple(
            Op(r.function, r.listed, None if r.dtype is None else kept.dtype_name(r.dtype), *_counts(r))
            for r in explanation.records
        )
        note = "" if ops else why_not or str(explanation)
    elif why_not is None:
        note = _HOW_TO_EXPLAIN
    if casts is None:
        return Functions(None, (), (), ops, note)
    return Functions(kept.dtype_name(casts.dtype), _lists(casts), tuple(_changes(casts)), ops, note)


def _counts(record: Any) -> tuple[int, int, int, int]:
    return record.calls, record.casts, record.cached, record.bytes_moved


def _lists(casts: FunctionCasts) -> tuple[tuple[str, int], ...]:
    """How many functions of this torch are on each list, with what users added and without what they took off."""
    taken = {(id(r.module), r.name): r.kind for r in casts.registrations[::-1]}
    removed = {(id(owner), name) for owner, name in casts.removals}
    counts = Counter(taken.values())
    for path, lists in NAMESPACES:
        namespace = pkgutil.resolve_name(path)
        for kind, names in vars(lists).items():
            found = [name for name in names if hasattr(namespace, name)]
            left = [name for name in found if (id(namespace), name) not in removed | taken.keys()]
            counts["promote" if kind == "sequence" else kind] += len(left)
    return tuple((name, count) for name, count in counts.items() if count)


def _changes(casts: FunctionCasts) -> Iterator[str]:
    for r in casts.registrations:
        yield f"registered as {r.kind}: {_owner(r.module)}.{r.name}"
    for owner, name in casts.removals:
        yield f"taken off its list: {_owner(owner)}.{name}"


def _owner(owner: Any) -> str:
    return str(getattr(owner, "__name__", type(owner).__name__))


def _losses(engine: Engine) -> Iterator[Loss]:
    for loss_id, scaler in enumerate(engine.scalers):
        track = engine._scaling.history.track(loss_id)
        points = tuple(ScalePoint(p.backward, p.scale, p.overflows) for p in track.points)
        yield Loss(loss_id, scaler.dynamic, scaler.loss_scale(), track.backwards, track.overflows, points)


def _software() -> Iterator[Fact]:
    return (Fact(name, value) for name, value in describe())


def _built(kind: Any, value: Any) -> Any:
    """`value`, of JSON, as what an annotation says: a record, a tuple, an optional one, or a plain value."""
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return kind(**{name: _built(hints[name], inner) for name, inner in value.items()})  # type: ignore[operator]
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is tuple:
        inner = arguments[:1] * len(value) if arguments[-1] is ... else arguments
        return tuple(_built(one, item) for one, item in zip(inner, value, strict=True))
    if types.NoneType in arguments:
        return None if value is None else _built(arguments[0], value)
    return value
