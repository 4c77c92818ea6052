"""`amp.audit_updates`: compares the change that a step made to the weights with the change that the optimizer wanted.

The optimizer's class makes the step twice: first on copies in the next wider type, then on the weights as usual.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_engine.engine import Engine
from amp_engine.errors import AmpStateError, AmpTypeError, AmpValueError
from amp_engine.ground.callers import before_what
from amp_engine.ground.devices import is_capturing
from amp_engine.ground.distributed import is_sharded
from amp_engine.ground.dtypes import dtype_name
from amp_engine.ground.random_state import random_state, set_random_state
from amp_engine.optimizers.wrapped import inner_of, takes_hooks
from amp_engine.stepping.exact import exact_of, float32_of
from amp_engine.stepping.step import unhooked_step
from amp_engine.tools.diagnosis.recorder import places_in
from amp_engine.tools.page.page import Page, Paged, Section, write_by_suffix
from amp_engine.tools.telemetry import step_times, update_page, update_report
from amp_engine.tools.telemetry.shadow import shadow
from amp_engine.tools.telemetry.update_report import AuditedOptimizer, AuditedTensor, UpdateReport

_WIDER = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float64,
    torch.float64: torch.float64,
}
_FLOAT32_AT_MOST = {**_WIDER, torch.float32: torch.float32}  # for classes that reject float64
_NO_FLOAT64 = "Its class takes no float64: what float32 itself erases of a step is not seen."
_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_SAMPLE = 2**18  # approximate number of elements that the median of a tensor reads

FORMAT = 1
"""The format number of the JSON; changes when a field changes its meaning."""


class UpdateAudit(Paged):
    """Audits the steps of optimizers inside of `with amp.audit_updates(optimizer) as audit:`.

        with amp.audit_updates(optimizer, every=10) as audit:
            train()
        print(audit)              # the tensors whose steps rounding erases, the worst first, and what to do
        audit.save("audit.html")  # or .json, .txt

    Before an audited step the optimizer's class makes that step on copies of weights, state and gradients in the next
    wider type: float32 for half types, float64 for float32. The change of the copies is the wanted update; the change
    of the weights in the real step is the actual one. FP32 masters, split ones too, count as the weights if they exist.
    A class that takes no float64, such as amp_engine's fused ones, steps float32 copies of FP32 weights, and a note
    says so. The audit does not change a bit of the run's weights, state and random numbers.

    Works with or without `initialize`. Skipped steps, and updates that are not finite, are counted separately. Each
    audited step has one host sync, and memory for copies of weights, gradients and state in the wider type. Two flags
    for each element stay until the end. `measured()` has the figures, with the audit's own time and memory.

    If a step cannot be made on copies, the optimizer goes on unaudited, and the result names it with the reason:
    step(closure), released gradients, DTensors, complex or 8-bit weights, a CUDA graph's capture, classes that raise on
    wider copies.

    Args:
        optimizers: one, or several in a list or tuple. A wrapper without hooks stands for the optimizer inside.
        every: audit every n-th step, beginning with the first.
        models: one, or several in a list or tuple, whose parameter names are used. Default: the initialized models.
            Other parameters have their names in the groups, or else their places there.

    Raises AmpTypeError or AmpValueError for other arguments, AmpStateError if it is entered twice.
    """

    def __init__(
        self,
        engine: Engine,
        optimizers: Optimizer | Sequence[Optimizer],
        every: int = 1,
        models: nn.Module | Sequence[nn.Module] | None = None,
    ) -> None:
        if isinstance(every, bool) or not isinstance(every, int):
            raise AmpTypeError(f"every is a number of steps, not a {type(every).__name__}.  Use every=10.")
        if every < 1:
            raise AmpValueError(f"every={every}: expected 1 or more steps.  Use every=1 for each of them.")
        self._engine = engine
        self._every = every
        self._models = _listed(models, nn.Module, "models", "a model")
        self._followed: list[_Followed] = []
        self._is_inside = False
        self._inner = [_stepping(one) for one in _listed(optimizers, object, "optimizer", "an optimizer")]

    def __enter__(self) -> UpdateAudit:
        if self._is_inside:
            raise AmpStateError("This audit is inside of its `with` already.  Make another by amp.audit_updates().")
        self._is_inside = True
        self._followed = []
        for optimizer in self._inner:
            self.follow(optimizer)
        return self

    def __exit__(self, *error: object) -> None:
        self._is_inside = False
        for one in self._followed:
            one.end()

    def follow(self, optimizer: Optimizer, models: Sequence[nn.Module] = ()) -> None:
        """Audit one more optimizer, which must take hooks, until the end of the `with`; models give names."""
        self._models += [model for model in models if all(model is not one for one in self._models)]
        self._followed.append(_Followed(optimizer, self._engine, self._every))

    def follows(self, optimizer: Optimizer) -> bool:
        """True if the optimizer is audited."""
        return any(one.optimizer is optimizer for one in self._followed)

    def measured(self) -> UpdateReport:
        """The figures so far, the worst tensor first."""
        names = self._names()
        return UpdateReport(
            self._every,
            tuple(one.described(self._models_of(one.optimizer)) for one in self._followed),
            update_report.sorted_tensors(
                [tensor for i, one in enumerate(self._followed) for tensor in one.tensors(i, names)]
            ),
        )

    def to_json(self) -> str:
        """The figures as JSON, with the advice in words."""
        fields = {"format": FORMAT, **update_report.asdict(self.measured())}
        return json.dumps(fields, indent=1, allow_nan=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file: text, JSON or HTML, by its suffix .txt, .json or .html.

        Raises AmpValueError for another suffix, OSError as `open` does.
        """
        writers = {
            ".txt": lambda: f"{self}\n",
            ".json": self.to_json,
            ".html": lambda: self._page().html_file(),
        }
        write_by_suffix(path, writers, "an audit")

    def _page(self) -> Page:
        return Page("Audit of updates", [Section("", update_page.blocks(self.measured()))])

    def _known_models(self) -> Sequence[nn.Module]:
        return self._models or self._engine._initialized.models

    def _models_of(self, optimizer: Optimizer) -> tuple[str, ...]:
        """Return the classes of the models that have a parameter in the optimizer's groups."""
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        models = [model for model in self._known_models() if any(id(p) in stepped for p in model.parameters())]
        return tuple(type(model).__name__ for model in models)

    def _names(self) -> dict[int, str]:
        """Return the name of each parameter of the models, by id."""
        places = places_in(self._known_models())
        return {key: place.parameter for key, place in places.items()}


class _Weight:
    """The figures of one entry of an optimizer's groups: plain numbers, and two flags for each element."""

    def __init__(self, weight: nn.Parameter, place: str) -> None:
        self.weight, self.place = weight, place
        self.steps = 0
        self.dtype = weight.dtype
        self._wanted = self._erased = self._small = self._small_moved = 0.0
        self._ratios: list[float] = []
        self._was_wanted = torch.zeros(weight.shape, dtype=torch.bool, device=weight.device)
        self._has_moved = torch.zeros_like(self._was_wanted)

    @property
    def bytes(self) -> int:
        return 2 * self._was_wanted.numel()

    def add(self, numbers: Sequence[float], wanted: Tensor, moved: Tensor, dtype: torch.dtype) -> None:
        """Add the numbers of one step."""
        size, erased, ratio, small, small_moved = numbers
        self.steps += 1
        self.dtype = dtype
        self._wanted += size
        self._erased += erased
        self._small += small
        self._small_moved += small_moved
        if size > 0:
            self._ratios.append(ratio)
        self._was_wanted |= wanted != 0
        self._has_moved |= moved

    def described(self, optimizer: int, state: Any, names: dict[int, str]) -> AuditedTensor:
        """The record of this weight. Waits for the device."""
        wanted = int(self._was_wanted.sum())
        still = int((self._was_wanted & ~self._has_moved).sum())
        kinds = (
            {v.dtype for v in state.values() if isinstance(v, Tensor) and v.dim()} if isinstance(state, dict) else ()
        )
        return AuditedTensor(
            name=names.get(id(self.weight), self.place),
            optimizer=optimizer,
            dtype=dtype_name(self.dtype),
            parameter_dtype=dtype_name(self.weight.dtype),
            shape=tuple(self.weight.shape),
            steps=self.steps,
            wanted=self._wanted,
            erased=self._erased / self._wanted if self._wanted else 0.0,
            never_moved=still / wanted if wanted else 0.0,
            step_in_spacings=median(self._ratios) if self._ratios else 0.0,
            moved_by_chance=self._small_moved / self._small if self._small else 0.0,
            state_dtypes=tuple(sorted(map(dtype_name, kinds))),
        )


class _Step(NamedTuple):
    """A step in progress: the audited weights, their values before it, and the changes that it wants."""

    weights: list[_Weight]
    before: list[Tensor]
    wanted: list[Tensor]
    begun: Any
    prepared: Any
    bytes: int


class _Followed:
    """Audits one optimizer with two hooks on its steps."""

    def __init__(self, optimizer: Optimizer, engine: Engine, every: int) -> None:
        self.optimizer, self._engine, self._every = optimizer, engine, every
        self._weights: dict[int, _Weight] = {}
        self._steps = self._audited = self._skipped = self._bytes = 0
        self._marks: list[tuple[Any, ...]] = []
        self._refused = self._note = self._before_what = self._broken = ""
        self._lrs: set[float] = set()
        self._wider = _WIDER
        self._depth = 0  # a subclass that calls super().step() calls the hooks again
        self._step: _Step | None = None
        self._handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    def end(self) -> None:
        """Remove the hooks, and free the copies of a step that raised."""
        for handle in self._handles:
            handle.remove()
        self._step = None

    def described(self, models: tuple[str, ...]) -> AuditedOptimizer:
        """The record of this optimizer. Waits for the device."""
        return AuditedOptimizer(
            class_name=type(self.optimizer).__name__,
            models=models,
            lrs=tuple(sorted({min(self._lrs), max(self._lrs)})) if self._lrs else (),
            before=self._before_what,
            steps=self._steps,
            audited=self._audited,
            skipped=self._skipped,
            broken=self._broken,
            milliseconds=1000 * median(map(_seconds, self._marks)) if self._marks else None,
            bytes=self._bytes,
            refused=self._refused,
            note="" if self._refused else self._note,
        )

    def tensors(self, place: int, names: dict[int, str]) -> list[AuditedTensor]:
        """A record for each weight that was in an audited step."""
        state = self.optimizer.state
        audited = [one for one in self._weights.values() if one.steps]
        return [one.described(place, state.get(one.weight), names) for one in audited]

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments | None:
        if torch.compiler.is_compiling() or self._engine.records.is_rehearsal:
            return None
        self._depth += 1
        if self._depth > 1:
            return None
        self._steps += 1
        if self._steps == 1:
            self._before_what = before_what()
        if (self._steps - 1) % self._every or self._refused:
            return None
        record = self._engine.records.get(optimizer)
        if record is None and _calls_closure_first(optimizer):
            args, kwargs = _with_loss(args, kwargs)
        begun = step_times.now()
        if record is not None:
            record.follow_writes()  # as the step does first: earlier writes are no part of it
            record.complete_gradients()
        if record is not None and record.releases:
            self._refused = "Not audited: release_gradients=True steps each parameter in the backward."
            return args, kwargs
        self._refused = _obstacle(optimizer, args, kwargs)
        if not self._refused:
            self._step = self._wanted(args, kwargs, begun)
        return args, kwargs

    def _wanted(self, args: tuple[Any, ...], kwargs: Any, begun: Any) -> _Step | None:
        """Let the class make the step on wider copies; None if it raises."""
        entries = list(_entries(self.optimizer))
        values = [_value(weight) for weight, _ in entries]
        try:
            twins, held = self._stepped_copies(entries, values, args, kwargs)
        except Exception as first:  # each class raises its own error
            self._wider, self._note = _FLOAT32_AT_MOST, _NO_FLOAT64
            try:
                twins, held = self._stepped_copies(entries, values, args, kwargs)
            except Exception:
                self._refused = f"Not audited: its step() fails on copies in the next wider type ({first!r:.200})."
                return None
        step = _Step([], [], [], begun, step_times.now(), held)
        for (weight, place), value in zip(entries, values, strict=True):
            twin = twins[id(weight)]
            if twin.grad is not None:
                one = self._weights.get(id(weight))
                if one is None:
                    one = self._weights[id(weight)] = _Weight(weight, place)
                step.weights.append(one)
                step.before.append(value)
                step.wanted.append(twin.detach().sub_(value))
        return step._replace(prepared=step_times.now())

    def _stepped_copies(
        self, entries: Sequence[tuple[nn.Parameter, str]], values: Sequence[Tensor], args: Any, kwargs: Any
    ) -> tuple[dict[int, nn.Parameter], int]:
        """Return copies by id of the weight, after the class's step on them, and the bytes of all copies."""
        twins = {
            id(weight): _twin(weight, value, self._wider[value.dtype])
            for (weight, _), value in zip(entries, values, strict=True)
        }
        double = shadow(self.optimizer, twins)
        _widen_state(double)
        random = random_state()
        try:
            unhooked_step(self.optimizer)(double, *args[1:], **kwargs)
            copies = [*twins.values(), *(twin.grad for twin in twins.values()), *_state_of(double), *values]
            return twins, sum(one.numel() * one.element_size() for one in copies if isinstance(one, Tensor))
        finally:
            set_random_state(random)

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depth = max(0, self._depth - 1)
        if self._depth or self._step is None:
            return
        step, self._step = self._step, None
        begun = step_times.now()
        moved = [_value(one.weight) for one in step.weights]
        found = _numbers(step, moved)
        held = step.bytes + sum(one.bytes for one in self._weights.values())
        self._bytes = max(self._bytes, held)
        if self._was_skipped(optimizer) or not all(map(math.isfinite, itertools.chain(*found))):
            self._skipped += 1
            broken = (before for row, before in zip(found, step.before, strict=True) if _is_broken(row))
            if (first := next(broken, None)) is not None and not self._was_skipped(optimizer):
                self._broken = dtype_name(first.dtype)
            return
        self._audited += 1
        self._lrs |= {float(group["lr"]) for group in optimizer.param_groups if "lr" in group}
        for one, row, before, wanted, after in zip(step.weights, found, step.before, step.wanted, moved, strict=True):
            one.add(row, wanted, before != after, before.dtype)
        self._marks.append((step.begun, step.prepared, begun, step_times.now()))

    def _was_skipped(self, optimizer: Optimizer) -> bool:
        """True if the last step was skipped. Waits for the device."""
        record = self._engine.records.get(optimizer)
        found_inf = getattr(optimizer, "found_inf", None)  # of torch.amp.GradScaler, for fused optimizers
        return (record is not None and record.pending.last.skipped) or (found_inf is not None and float(found_inf) != 0)


def _is_broken(row: Sequence[float]) -> bool:
    """True if a step in the wider type was finite, and the step itself was not."""
    return math.isfinite(row[0]) and not math.isfinite(row[1])


def _listed(given: Any, kind: type, argument: str, one: str) -> list[Any]:
    """`given`, an object, a list or tuple of them, or None, as a list. Raises AmpTypeError for another type."""
    found = list(given) if isinstance(given, (list, tuple)) else [] if given is None else [given]
    wrong = next((item for item in found if not isinstance(item, kind)), None)
    if wrong is not None:
        raise AmpTypeError(f"{argument} is {one} or a list of them, not a {type(wrong).__name__}.")
    return found


def _stepping(optimizer: Any) -> Optimizer:
    """The optimizer whose hooks torch calls. Raises AmpTypeError without one."""
    inner = inner_of(optimizer)
    if not isinstance(inner, Optimizer) or not takes_hooks(inner):
        raise AmpTypeError(
            f"An audit needs the step hooks of torch.optim.Optimizer, which a {type(optimizer).__name__} has not.  "
            "Pass the optimizer that it steps, or a list of optimizers."
        )
    return inner


def _calls_closure_first(optimizer: Optimizer) -> bool:
    """True for the classes of torch that call a closure once, before all else."""
    return type(optimizer).__module__.startswith("torch.optim.") and not isinstance(optimizer, torch.optim.LBFGS)


@torch.enable_grad()
def _with_loss(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments:
    """Call a closure in the arguments of `step`, and return them with its result in its place."""

    def called(value: Any) -> Any:
        return _Loss(value()) if callable(value) else value

    return (*args[:1], *map(called, args[1:])), {name: called(value) for name, value in kwargs.items()}


class _Loss(NamedTuple):
    """A closure that has been called."""

    value: Any

    def __call__(self) -> Any:
        return self.value


def _obstacle(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Explain why a step cannot be made on copies; "" if it may be possible."""
    weights = [weight for weight, _ in _entries(optimizer)]
    if any(callable(value) and not isinstance(value, _Loss) for value in (*args[1:], *kwargs.values())):
        return "Not audited: step(closure) computes its gradients in the step."
    if any(map(is_sharded, weights)):
        return "Not audited: it steps DTensors, which no process has whole."
    unknown = next((weight.dtype for weight in weights if weight.dtype not in _WIDER), None)
    if unknown is not None:
        return f"Not audited: it steps {dtype_name(unknown)}, for which there is no wider type."
    if any(map(is_capturing, {weight.device for weight in weights})):
        return "Not audited: a CUDA graph captures its step."
    return ""


def _entries(optimizer: Optimizer) -> Iterable[tuple[nn.Parameter, str]]:
    """Yield each weight, and its name in the groups, or else its place."""
    for i, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [f"group {i}, tensor {k}" for k in range(len(group["params"]))]
        yield from zip(group["params"], names, strict=True)


@torch.no_grad()
def _value(weight: nn.Parameter) -> Tensor:
    """Copy a weight as the optimizer has it: in float32 if it is a split master."""
    return weight.detach().clone() if next(exact_of(weight), None) is None else float32_of(weight)


def _twin(weight: nn.Parameter, value: Tensor, wider: torch.dtype) -> nn.Parameter:
    """Copy a weight and its gradient in a wider type."""
    twin = nn.Parameter(value.to(wider, copy=True), weight.requires_grad)
    grad = weight.grad
    twin.grad = None if grad is None else grad.detach().to(wider, copy=True)
    return twin


def _widen_state(double: Optimizer) -> None:
    """Cast state with fewer bits than its weight to the weight's type, except numbers and tensors of other classes."""
    for weight, values in double.state.items():
        for name, value in values.items() if isinstance(values, dict) else ():
            is_plain = type(value) is Tensor and value.dim() > 0 and value.dtype in _WIDER
            if is_plain and isinstance(weight, Tensor) and value.element_size() < weight.element_size():
                values[name] = value.to(weight.dtype)


def _state_of(double: Optimizer) -> list[Any]:
    return [value for values in double.state.values() if isinstance(values, dict) for value in values.values()]


def _numbers(step: _Step, after: Sequence[Tensor]) -> list[list[float]]:
    """Return the numbers of `_five` for each weight. Waits once for each device."""
    found: list[list[float]] = [[] for _ in after]
    by_device: dict[torch.device, list[int]] = {}
    for i, value in enumerate(after):
        by_device.setdefault(value.device, []).append(i)
    for places in by_device.values():
        rows = torch.stack([_five(step.before[i], step.wanted[i], after[i]) for i in places]).tolist()
        for i, row in zip(places, rows, strict=True):
            found[i] = row
    return found


@torch.no_grad()
def _five(before: Tensor, wanted: Tensor, after: Tensor) -> Tensor:
    """Sums of |wanted| and |wanted - got|, median of |wanted| / spacing, counts of small changes and of moved ones."""
    size = wanted.abs()
    got = after.to(wanted.dtype) - before.to(wanted.dtype)
    ratio = size / spacing(before)
    is_small = (size > 0) & (ratio < 0.25)
    by_one_unit = (got != 0) & (got.abs() <= 2 * spacing(before))  # 2: below a power of two the spacing is half
    sampled = ratio.where(size > 0, float("nan")).flatten()[:: max(1, size.numel() // _SAMPLE)]
    middle = sampled.nanmedian() if sampled.numel() else size.new_zeros(())
    sums = [size.double().sum(), (wanted - got).abs().double().sum(), middle.nan_to_num(0.0).double()]
    return torch.stack([*sums, is_small.sum().double(), (is_small & by_one_unit).sum().double()])


def spacing(values: Tensor) -> Tensor:
    """The distance from each magnitude to the next larger one of its type, in the next wider type. No host sync."""
    wider = _WIDER[values.dtype]
    magnitudes = values.abs()
    following = (magnitudes.view(_INTEGER[values.element_size()]) + 1).view(values.dtype)
    return following.to(wider) - magnitudes.to(wider)


def _seconds(marks: tuple[Any, ...]) -> float:
    """The time that the audit took in one step, measured on the GPU if there is one."""
    return step_times.elapsed(*marks[:2]) + step_times.elapsed(*marks[2:])


def audit_updates(  # noqa: D103
    engine: Engine,
    optimizers: Optimizer | Sequence[Optimizer],
    every: int = 1,
    models: nn.Module | Sequence[nn.Module] | None = None,
) -> UpdateAudit:
    return UpdateAudit(engine, optimizers, every, models)


audit_updates.__doc__ = UpdateAudit.__doc__
