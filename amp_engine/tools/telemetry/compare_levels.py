"""`amp.compare_levels`: runs one batch at two levels and compares it operation by operation."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from amp_engine.casting import in_force
from amp_engine.casting.forward_casts import casts_of
from amp_engine.casting.inputs import Arguments, floats_in
from amp_engine.engine import Engine
from amp_engine.errors import AmpStateError, AmpTypeError
from amp_engine.ground.distributed import is_any_sharded, without_wrapper
from amp_engine.ground.dtypes import dtype_name
from amp_engine.ground.reachable import reachable
from amp_engine.ground.torch_private import without_compiled
from amp_engine.initialization.cast_model import is_cast
from amp_engine.levels import levels
from amp_engine.levels.scale_rule import DEFAULT_MIN_LOSS_SCALE
from amp_engine.tools.diagnosis.put_back import put_back, randomness
from amp_engine.tools.diagnosis.rehearsal import check_shapes
from amp_engine.tools.diagnosis.relative_error import Distance, distance, roundoff, stored
from amp_engine.tools.policy_file import RunPolicy
from amp_engine.tools.telemetry.batch_recording import Comparing, Recording, unscaled
from amp_engine.tools.telemetry.comparison import ComparedParameter, LevelComparison, by_growth

StepFn = Callable[[Any], Any]

_LOWEST = int(math.log2(DEFAULT_MIN_LOSS_SCALE))


@dataclass
class _Run:
    """One batch of a copy: its loss, and its unscaled gradients by parameter name."""

    loss: Tensor
    gradients: dict[str, Tensor]
    loss_scale: float
    is_dynamic: bool
    dtype: str
    roundoff: float
    follower: Recording | Comparing

    @property
    def has_finite_gradients(self) -> bool:
        return all(bool(stored(gradient).isfinite().all()) for gradient in self.gradients.values())


class Trials:
    """Runs one batch on copies of a model at several levels, and compares them with a reference.

    Args:
        model: the model to copy.
        step_fn: runs one batch of a model and returns the loss.
        reference: a level, or a RunPolicy.
        call: the function that the user called, for errors.
    """

    def __init__(self, model: nn.Module, step_fn: StepFn, reference: str | RunPolicy, call: str) -> None:
        self._call = call
        self._how = f"Type for example amp.{call}(model, lambda model: loss_fn(model(x), y))."
        self._check(model, step_fn)
        self._model, self._step_fn = without_wrapper(model), step_fn
        self._reference_policy = as_policy(reference)
        self._reference: _Run | None = None
        self._restore_randomness = randomness(reachable([step_fn, model]))
        self.given: dict[str, None] = {}  # of the model's forward: those that had floating tensors

    def compare(self, policy: RunPolicy, operations: bool = True) -> LevelComparison:
        """Run the batch under `policy`, and compare; without `operations` only the loss and the gradients."""
        with put_back([self._model, self._step_fn]), torch.enable_grad():
            if self._reference is None:
                self._reference = self._fitting(self._reference_policy, True)
            return self._compared(policy, self._fitting(policy, operations), self._reference)

    def _fitting(self, policy: RunPolicy, looks: bool) -> _Run:
        """Run at the policy's initial loss scale; if it is dynamic and overflows, at the largest that does not."""
        run = self._run(policy, looks)
        if run.has_finite_gradients or not bool(run.loss.isfinite().all()) or not run.is_dynamic:
            return run

        def fits(exponent: int) -> bool:
            return self._run(policy, False, 2.0**exponent).has_finite_gradients

        if not fits(_LOWEST):
            return run
        low, high = _LOWEST, math.ceil(math.log2(run.loss_scale))  # exponents: `low` fits, `high` does not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return self._run(policy, looks, 2.0**low)

    def _run(self, policy: RunPolicy, looks: bool, loss_scale: float | None = None) -> _Run:
        """Run one batch of a copy, by default at the policy's initial loss scale; follow operations if `looks`."""
        self._restore_randomness()
        model = self._copied()
        model.register_forward_pre_hook(self._note_arguments, with_kwargs=True)
        with Engine() as engine, torch.compiler.set_stance("force_eager"):
            engine.initialize(model, policy=policy, opt_level=policy.opt_level, verbosity=0)
            if (casts := casts_of(model)) is not None:
                casts.of_model.be_quiet()
                casts.warnings.be_quiet()
            decided, scaler = engine.policy, engine.scalers[0]
            assert decided is not None
            scale = scaler.loss_scale() if loss_scale is None else loss_scale
            dtype = decided.low_precision or torch.float32
            follower = self._follower(model, roundoff(dtype), scale)
            try:
                with follower.following() if looks else nullcontext():
                    loss = self._step_fn(model)
                gradients = self._gradients(loss, model, scale)
            finally:
                follower.end()
            name, unit = dtype_name(dtype), roundoff(dtype)
            return _Run(loss.detach().sum(), gradients, scale, scaler.dynamic, name, unit, follower)

    def _note_arguments(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = {**dict(zip(Arguments.of_module(model).positional, args, strict=False)), **kwargs}
        self.given.update(dict.fromkeys(name for name, value in named.items() if floats_in(value)))

    def _follower(self, model: nn.Module, roundoff: float, scale: float) -> Recording | Comparing:
        if self._reference is None:
            return Recording(model, scale)
        assert isinstance(self._reference.follower, Recording)
        return Comparing(model, self._reference.follower, roundoff, scale)

    def _gradients(self, loss: Any, model: nn.Module, scale: float) -> dict[str, Tensor]:
        """Run the backward at `scale`, and return the unscaled gradients."""
        self._check_loss(loss, model)
        (loss.double() if loss.dtype is torch.float64 else loss.float()).sum().mul(scale).backward()
        named = {without_compiled(name): param for name, param in model.named_parameters()}
        if all(p.grad is None for p in named.values()):
            raise AmpStateError(
                f"The loss does not depend on the model that {self._call}() gave to step_fn, a copy.  {self._how}"
            )
        gradients = {name: unscaled(p.grad, scale) for name, p in named.items() if p.grad is not None}
        for p in named.values():
            p.grad = None
        return gradients

    def _compared(self, policy: RunPolicy, run: _Run, reference: _Run) -> LevelComparison:
        parameters, whole = compared_gradients(run.gradients, reference.gradients)
        overflows = not run.has_finite_gradients
        loss, reference_loss = run.loss.float(), reference.loss.float()
        assert isinstance(run.follower, Comparing)
        return LevelComparison(
            level=policy.opt_level,
            reference=self._reference_policy.opt_level,
            keep_float=tuple(policy.keep_float),
            dtype=run.dtype,
            roundoff=run.roundoff,
            loss=float(loss),
            reference_loss=float(reference_loss),
            loss_error=distance(loss, reference_loss).relative,
            gradient_error=math.inf if overflows else whole.relative,
            loss_scale=run.loss_scale,
            overflowed=overflows and bool(run.loss.isfinite()),
            operations=by_growth(run.follower.operations),
            modules=run.follower.by_module(),
            parameters=parameters,
            unmatched=len(run.follower.unmatched),
        )

    def _copied(self) -> nn.Module:
        try:
            return copy.deepcopy(self._model)
        except Exception as e:
            raise AmpStateError(
                f"{self._call}() works on a copy, and copy.deepcopy(model) of this {type(self._model).__name__} raises "
                f"{type(e).__name__}: {e}  Pass a model that was not run yet, and whose buffers are no results of a "
                "graph."
            ) from e

    def _check(self, model: Any, step_fn: Any) -> None:
        if not isinstance(model, nn.Module):
            raise AmpTypeError(f"{self._call} takes a torch.nn.Module, not a {type(model).__name__}.  {self._how}")
        if not callable(step_fn):
            raise AmpTypeError(
                f"{self._call} takes a function that gives the loss of one batch of a model, not a "
                f"{type(step_fn).__name__}.  {self._how}"
            )
        if is_cast(model) or in_force.is_installed():
            what = f"this {type(model).__name__}" if is_cast(model) else "torch's functions"
            raise AmpStateError(
                f"{self._call}() was called after amp.initialize, whose casts of {what} would be in both runs.  Call "
                f"it before amp.initialize, or after amp.close()."
            )
        if is_any_sharded(model):
            raise AmpStateError(
                f"{self._call}() works on copies, and a model that torch.distributed has made shards of cannot be "
                "copied.  Call it before fully_shard."
            )
        check_shapes([model], self._call)

    def _check_loss(self, loss: Any, model: nn.Module) -> None:
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            what = "a tensor that requires no gradient" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise AmpTypeError(f"step_fn has to return the loss, and gave {what}.  {self._how}")
        if any(p.grad is not None for p in model.parameters()):
            raise AmpStateError(
                f"step_fn has run a backward, which {self._call}() does itself, at a scale of its own.  Leave out "
                f"backward(), scale_loss and step().  {self._how}"
            )


def compare_levels(
    model: nn.Module, step_fn: StepFn, level: str | RunPolicy = "O2", reference: str | RunPolicy = "O0"
) -> LevelComparison:
    """Run one batch at two levels and say which operation of which module makes the numbers differ.

        print(amp.compare_levels(model, lambda model: loss_fn(model(x), y), "O2"))

    Args:
        model: a model that was not passed to `initialize`, in the mode, train or eval, to run it in.
        step_fn: given a copy of the model, runs one batch and returns the loss, without a backward. It is called
            several times, and must use the same batch each time.
        level: "O1" to "O5", or an `amp.RunPolicy` with modules to keep and overrides.
        reference: the level or policy that errors are relative to.

    Returns:
        A frozen record; `str()` and notebooks show tables. `operations` are those of the forward. They are paired by
        module name, call of the module, operation name, and number of that name in the call; casts, copies and views
        are left out. For each

            error    = ||a - b|| / ||b||, in the 2-norm, a at the level and b at the reference
            error_in = the largest error of its inputs
            growth   = error / max(error_in, u), u the unit roundoff of the level's type

        (Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, SIAM 2002, sections 1.2, 1.6 and 2.2). So
        an operation that only passes on the errors of its inputs has a growth of 1, and one that loses digits a large
        one. If a result is not finite, and the reference is, its error is infinity. The record has the same errors for
        the outputs of modules and their gradients, each parameter's gradient, the whole gradient, and the loss.

    A dynamic loss scale has its initial value, by default 65536; if gradients overflow there, it is the largest power
    of two, from 2**-24 on, at which they do not. Both runs use the same random numbers.

    Keeps the result of each operation of one batch at the reference, as much memory as all intermediate results. It
    checks each operation and waits for the device each time, so it takes many times as long as a step. Copies the
    model; the model's parameters, gradients, buffers and hooks, and the random numbers of torch, Python and NumPy, stay
    as before, also if something raises. Each rank compares alone. Code from torch.compile runs uncompiled; operations
    that torch.jit compiled count for the module around them.

    Raises AmpStateError after `initialize` of the model or with functions cast, for a model that cannot be copied or
    whose lazy modules have no shape yet, and if step_fn runs a backward or another model; AmpValueError if it uses a
    different batch the second time; AmpTypeError.
    """
    return Trials(model, step_fn, reference, "compare_levels").compare(as_policy(level))


def as_policy(level: str | RunPolicy) -> RunPolicy:
    """A level as a policy. Raises AmpStateError, in apex's words, for a string that is no level."""
    if isinstance(level, RunPolicy):
        return level
    levels.level(level)
    return RunPolicy(level)


def compared_gradients(
    gradients: Mapping[str, Tensor], reference: Mapping[str, Tensor]
) -> tuple[tuple[ComparedParameter, ...], Distance]:
    """Compare gradients by name, the largest error first, and all as one vector; a missing gradient counts as 0.

    Waits for the device.
    """
    parameters, whole = [], Distance(0.0, 0.0)
    for name in dict.fromkeys((*reference, *gradients)):
        given, expected = gradients.get(name), reference.get(name)
        one = given if given is not None else expected
        assert one is not None
        zero = torch.zeros((), device=one.device).expand(one.shape)
        found = distance(zero if given is None else given, zero if expected is None else expected)
        parameters.append(ComparedParameter(name, found.relative, found.norm))
        whole += found
    return tuple(sorted(parameters, key=lambda p: -p.error)), whole
