"""`amp.find_fp32_modules`: finds the fewest modules that must stay in FP32 to make a level acceptable."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from amp_engine.errors import AmpTypeError, AmpValueError
from amp_engine.ground.dtypes import LOW_PRECISION
from amp_engine.levels import levels
from amp_engine.tools.page.page import Page, Section, Sentence
from amp_engine.tools.policy_file import RunPolicy
from amp_engine.tools.telemetry.compare_levels import StepFn, Trials, as_policy
from amp_engine.tools.telemetry.comparison import ComparedModule, LevelComparison
from amp_engine.tools.telemetry.delta_debugging import reduced

Accept = Callable[[LevelComparison], bool]

# Roundings of random sign add up as sqrt(n) u: N. J. Higham and T. Mary, A New Approach to Probabilistic Rounding Error
# Analysis, SIAM Journal on Scientific Computing 41(5), 2019. So 64 u is the error of some 4000 successive roundings:
# 3 % in float16, 25 % in bfloat16, where the angle between the two gradients is below 15 degrees. A module that loses
# its digits is off by 100 %.
ROUNDINGS = 64
SINGLES = 8
"""This many modules are tried alone before several together, which finds the less suspicious ones."""
WHOLE = ""
"""The name of the model itself."""


@dataclass(frozen=True)
class FP32Modules:
    """The modules that a search found, and facts about the search.

    Attributes:
        modules: their names, in the order of suspicion; empty if none is needed, or if keeping modules does not help.
        policy: the level's policy with these modules, for `initialize`. If the cast of the inputs is the cause, its
            `cast_inputs` names the arguments to leave alone.
        before: the comparison without these modules kept.
        after: the comparison with these modules kept; `before` if there are none.
        is_acceptable: True if `after` is good enough.
        is_minimal: True if each module was left out once, and the others were not enough.
        tolerance: limit of the relative errors of the loss and of the whole gradient; None if `accept` decided.
        runs: number of runs of the level, without those of the reference.
        failures: number of runs that raised, because types do not fit each other; they count as not acceptable.
        failure: the message of the first failure.
        uncast: names of the model's arguments whose cast is the cause; `policy` leaves them alone.
    """

    modules: tuple[str, ...]
    policy: RunPolicy
    before: LevelComparison
    after: LevelComparison
    is_acceptable: bool
    is_minimal: bool
    tolerance: float | None
    runs: int
    failures: int = 0
    failure: str | None = None
    uncast: tuple[str, ...] = ()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the policy file, for `amp.initialize(model, optimizer, policy=path)`.

        Raises AmpValueError if nothing acceptable was found, OSError as `open` does.
        """
        if not self.is_acceptable:
            raise AmpValueError(f"There is no policy to save.  {self}")
        self.policy.save(path)

    def __str__(self) -> str:
        level, runs = self.policy.opt_level, f"{self.runs} run{'s' if self.runs != 1 else ''}"
        raised = f"  {self.failures} of them raised, the first one: {self.failure}" if self.failures else ""
        if not self.is_acceptable:
            return (
                f"Keeping modules in FP32 does not help {level}: with the whole model kept {_errors(self.after)}.  "
                f"Look outside of the model: at the loss function, and at the data.  {runs}.{raised}"
            )
        if self.after is self.before:
            return f"{level} needs no module in FP32: {_errors(self.after)}.  {runs}."
        needs = [f"{', '.join(name or 'the whole model' for name in self.modules)} in FP32"] if self.modules else []
        if self.uncast:
            are = "the input" if len(self.uncast) == 1 else "the inputs"
            needs.insert(0, f"{are} {', '.join(self.uncast)} as given, by cast_inputs={[*self.uncast]}")
        minimal = "Without it" if len(self.modules) + len(self.uncast) == 1 else "Without any one of them"
        proven = (
            f"{minimal} {level} is not acceptable."
            if self.is_minimal
            else f"Whether fewer are enough was not settled within {runs}; raise max_runs."
        )
        return (
            f"{level} needs {', and '.join(needs)}: then {_errors(self.after)}; before {_errors(self.before)}.  "
            f"{proven}  {runs}.{raised}"
        )

    def _repr_html_(self) -> str:
        return Page("", [Section("", [Sentence(str(self))]), *self.before._page().sections]).html()


class _OutOfRunsError(Exception):
    """The search has used all allowed runs."""


class _Search:
    """Tries lists of modules, in addition to the policy's, each list once, and counts the runs."""

    def __init__(
        self, trials: Trials, policy: RunPolicy, accept: Accept, looks_at_operations: bool, max_runs: int
    ) -> None:
        self.runs = self.failures = 0
        self.failure: str | None = None
        self.best: Sequence[str] = (WHOLE,)  # the shortest list that is known to be enough
        self.uncast: tuple[str, ...] = ()  # arguments that are left alone
        self._trials, self._policy, self._accept = trials, policy, accept
        self._looks_at_operations, self._max_runs = looks_at_operations, max_runs
        self._known: dict[tuple[frozenset[str], tuple[str, ...]], bool] = {}

    def with_kept(self, names: Sequence[str]) -> RunPolicy:
        """The policy with these modules also kept, and arguments left alone."""
        kept = tuple(dict.fromkeys((*self._policy.keep_float, *names)))
        if self.uncast:
            return dataclasses.replace(self._policy, keep_float=kept, cast_inputs=self.uncast)
        return dataclasses.replace(self._policy, keep_float=kept)

    def compare(self, names: Sequence[str], operations: bool = True) -> LevelComparison:
        """Run the level once, and count the run. Passes on errors of the run."""
        self.runs += 1
        return self._trials.compare(self.with_kept(names), operations)

    def is_enough(self, names: Sequence[str]) -> bool:
        """True if the level is good enough with these modules kept. Raises _OutOfRunsError."""
        key = frozenset(names), self.uncast
        if key not in self._known:
            if self.runs >= self._max_runs - 1:  # the last run is for the final comparison
                raise _OutOfRunsError
            found = self._tried(names)
            self._known[key] = found is not None and bool(self._accept(found))
        if self._known[key] and (WHOLE in self.best or len(key[0]) < len(self.best)):
            self.best = [*dict.fromkeys(names)]
        return self._known[key]

    def _tried(self, names: Sequence[str]) -> LevelComparison | None:
        """The comparison; None if the run raises, as when types do not fit each other."""
        try:
            return self.compare(names, self._looks_at_operations)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as e:
            self.failures += 1
            self.failure = self.failure or str(e).partition("\n")[0]
            return None

    def smallest(self, candidates: Sequence[str], singles: int) -> bool:
        """Find a small list of modules, and set `best` to it. Tries the first `singles` candidates alone.

        Returns True if no module can be left out of `best`.
        """
        try:
            if any(self.is_enough([name]) for name in candidates[:singles]):
                return True
            count = min(2, len(candidates))
            while not (count and self.is_enough(candidates[:count])):
                if count >= len(candidates):
                    return True  # all of them are not enough; only the whole model is
                count = min(2 * count, len(candidates))
            self.best = reduced(candidates[:count], self.is_enough)
        except _OutOfRunsError:
            return False
        return True

    def without_inputs(self, arguments: Sequence[str], candidates: Sequence[str], singles: int) -> bool:
        """Look for a small list of modules that is enough where these arguments are left alone; the whole model else.

        Returns True if no module and no argument can be left out.
        """
        self.uncast = tuple(arguments)
        try:
            is_minimal = self.is_enough([]) or self.smallest(candidates, singles)
            for one in arguments if WHOLE not in self.best and len(arguments) > 1 else ():
                before, self.uncast = self.uncast, tuple(name for name in self.uncast if name != one)
                if not (self.uncast and self.is_enough(self.best)):
                    self.uncast = before
        except _OutOfRunsError:
            is_minimal = False
        if WHOLE in self.best:
            self.uncast = ()
        return is_minimal


def find_fp32_modules(
    model: nn.Module,
    step_fn: StepFn,
    level: str | RunPolicy = "O2",
    reference: str | RunPolicy = "O0",
    *,
    tolerance: float | None = None,
    accept: Accept | None = None,
    max_runs: int = 100,
) -> FP32Modules:
    """Find the fewest modules that must stay in FP32, so that a level computes nearly the same as FP32.

        found = amp.find_fp32_modules(model, lambda model: loss_fn(model(x), y), "O2")
        print(found)
        found.save("policy.json")
        model, optimizer = amp.initialize(model, optimizer, policy="policy.json")

    Args:
        model: as `amp.compare_levels` takes it.
        step_fn: as `amp.compare_levels` takes it.
        reference: as `amp.compare_levels` takes it.
        level: "O1" to "O5", or an `amp.RunPolicy`, whose modules are kept in any case.
        tolerance: limit of the relative errors of the loss and of the whole gradient; everything must be finite too.
            Default 64 times the unit roundoff of the level's type, 3 % in float16 and 25 % in bfloat16: thousands of
            roundings add up to that, and a module that loses its digits is off by 100 %.
        accept: decides instead of `tolerance`; a function of the LevelComparison of a run.
        max_runs: the most runs of the level, at least 3. Runs that search for a lower loss scale after an overflow
            are not counted.

    Returns:
        A frozen record; `str()` is a sentence, `.modules` the names, `.before` and `.after` the comparisons, `.policy`
        the policy to initialize with. The list is empty if the level needs no module, or if even the whole model in
        FP32 is not acceptable; `.is_acceptable` distinguishes the two.

    If only the whole model in FP32 is enough, the search is done again with inputs that are not cast: `uncast` names
    the arguments whose cast is the cause, such as a time step of 937 that is 936 in bfloat16.

    The search tries modules whose own operations took or gave half, in the order of their largest growth (see
    `amp.compare_levels`): the first 8 alone, then the first 2, 4, 8, ... together, until they are enough. Delta
    debugging (Zeller and Hildebrandt, 2002) then leaves out as many of these as it can: no single module of the result
    can be left out, though another list may be shorter. Keeping a module also keeps the modules in it, so a module with
    more suspicious ones in it comes after all others, and is not tried alone; the model itself is the last.

    Takes at most the time of `max_runs` batches, and as much memory as `amp.compare_levels`. If a run with modules kept
    raises a RuntimeError, it counts as not acceptable, and the result reports it; without kept modules it is passed on.

    Raises AmpTypeError or AmpValueError for other arguments, and the errors of `amp.compare_levels`.
    """
    if isinstance(max_runs, bool) or not isinstance(max_runs, int) or max_runs < 3:
        raise AmpValueError(f"max_runs={max_runs!r} is no whole number from 3 on.  Use max_runs=100.")
    if accept is not None and not callable(accept):
        raise AmpTypeError(
            f"accept is a {type(accept).__name__}, and has to be a function of a comparison.  Type for example "
            "accept=lambda comparison: comparison.loss_error < 0.01."
        )
    if tolerance is not None and not (isinstance(tolerance, (int, float)) and tolerance > 0):
        raise AmpValueError(f"tolerance={tolerance!r} is no number above 0.  Use for example tolerance=0.05.")
    if accept is not None and tolerance is not None:
        raise AmpValueError("tolerance and accept were both given, and accept decides alone.  Leave one of them out.")
    policy = as_policy(level)
    trials = Trials(model, step_fn, reference, "find_fp32_modules")

    def within(comparison: LevelComparison) -> float:
        return ROUNDINGS * comparison.roundoff if tolerance is None else tolerance

    def is_near(comparison: LevelComparison) -> bool:
        return comparison.is_finite and max(comparison.loss_error, comparison.gradient_error) <= within(comparison)

    search = _Search(trials, policy, accept or is_near, accept is not None, max_runs)
    before = search.compare([])
    limit = within(before) if accept is None else None
    if (accept or is_near)(before):
        return FP32Modules((), policy, before, before, True, True, limit, search.runs)
    if not search.is_enough([WHOLE]):
        after = before if search.failures else search.compare([WHOLE])
        failed = search.failures, search.failure
        return FP32Modules((), policy, before, after, False, False, limit, search.runs, *failed)
    first, later = _candidates(before.modules, policy)
    candidates, singles = [*first, *later], min(SINGLES, len(first), max(1, max_runs // 4))
    is_minimal = search.smallest(candidates, singles)
    if WHOLE in search.best and _casts_inputs(policy) and trials.given:
        is_minimal = search.without_inputs([*trials.given], candidates, singles)
    after = search.compare(search.best)
    found = tuple(search.best)
    facts = search.runs, search.failures, search.failure, search.uncast
    return FP32Modules(found, search.with_kept(found), before, after, True, is_minimal, limit, *facts)


def _casts_inputs(policy: RunPolicy) -> bool:
    level = levels.level(policy.opt_level)
    return level.cast_model_type in LOW_PRECISION and policy.cast_inputs in (None, True)


def _candidates(modules: Sequence[ComparedModule], policy: RunPolicy) -> tuple[list[str], list[str]]:
    """The modules to try, the most suspicious first; and separately those with more suspicious modules in them."""
    names = [m.module for m in modules if m.module and m.in_low_precision and m.module not in policy.keep_float]
    later = [name for i, name in enumerate(names) if any(other.startswith(f"{name}.") for other in names[:i])]
    return [name for name in names if name not in later], later


def _errors(comparison: LevelComparison) -> str:
    if not comparison.is_finite:
        what = "the loss is" if comparison.loss - comparison.loss != 0.0 else "gradients are"
        return f"{what} not finite"
    return f"the gradient is off by {comparison.gradient_error:.2g} and the loss by {comparison.loss_error:.2g}"
