"""What an engine tells of itself."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from amp_engine.casting import EngineCasts, Explanation
from amp_engine.diagnosis.find_overflow import OverflowSource, find_overflow
from amp_engine.diagnosis.overflow_watch import OverflowWatch
from amp_engine.diagnosis.post_mortem import OverflowReport
from amp_engine.errors import AmpStateError, AmpTypeError
from amp_engine.initialization.initialized import Initialized
from amp_engine.levels import report
from amp_engine.levels.policy import Policy
from amp_engine.optimizers import LARC
from amp_engine.scaling.scaler import LossScaler
from amp_engine.stepping.last_step import LastStep
from amp_engine.stepping.scaled_backwards import ScaledBackwards


class Explaining:
    """The part of an Engine that says what it did and why."""

    policy: Policy | None
    reporter: report.Reporter
    backwards: ScaledBackwards
    function_casts: EngineCasts
    _initialized: Initialized

    def __init__(self) -> None:
        # How many steps each scheduler has followed.
        self._followed: weakref.WeakKeyDictionary[LRScheduler, int] = weakref.WeakKeyDictionary()

    @property
    def scalers(self) -> list[LossScaler]:
        """One for each loss_id."""
        raise NotImplementedError

    @property
    def overflows(self) -> OverflowWatch:
        """What was noted of overflows."""
        return self._initialized.overflows

    @property
    def _is_disabled(self) -> bool:
        return self.policy is not None and not self.policy.enabled

    def explain(self) -> Explanation:
        """For `with amp.explain() as explanation:` around one or more iterations.

        Collects, in all threads, which function on the lists of O1 and O4 ran in which type how often, how many
        casts were made for it, how many the cache saved, and how many bytes the casts read and wrote:
        `explanation.records`. `str(explanation)` is a table of them. Nests. Casts made by code that
        torch.compile compiled are not seen. Python runs at each call, so do not time it. No host sync.
        """
        return Explanation(self.function_casts.observed, lambda: self.function_casts.why_nothing_is_cast(self.policy))

    def overflow_report(self) -> OverflowReport:
        """What is known of each overflow since the first `initialize`, or the first after `close`, oldest first.

        The newest 1000, as far as the host has heard; `str()` is a table of them, and an entry the line that was
        printed. Each has the parameter and the module in which the backward first became non-finite, how many elements,
        inf or nan, the loss and its scale, the likely cause, and for a loss that was not finite the operation that made
        it so. No host sync.
        """
        return self.overflows.report()

    def last_step(self, optimizer: Optimizer | LARC | None = None) -> LastStep:
        """What became of the last `optimizer.step()`: skipped or not, at which loss scale, with which norm.

            last = amp.last_step()
            ...                                  # later, when the GPU has come so far
            print(last.skipped, last.loss_scale, last.norm)

        Args:
            optimizer: needed if several are initialized.

        Asking waits for nothing; reading its attributes waits until the host knows. `last.flag` is whether it was
        skipped as a tensor on the device, and `last.is_known` whether the host knows by now. Raises AmpTypeError for an
        optimizer that was not passed to `initialize`, AmpStateError without one where there is not exactly one.
        """
        if self._is_disabled:
            return LastStep()
        if optimizer is None:
            found = self._initialized.optimizers
            if len(found) != 1:
                raise AmpStateError(
                    f"last_step() was called without an optimizer, and {len(found)} are initialized.  Type "
                    "amp.last_step(optimizer)."
                )
            optimizer = found[0]
        return self._initialized.stepped_by(optimizer).pending.last

    def step_scheduler(self, scheduler: LRScheduler, optimizer: Optimizer | LARC | None = None) -> int:
        """`scheduler.step()` in a loop that steps it once an iteration, but not for steps that were skipped.

            optimizer.step()
            amp.step_scheduler(scheduler)

        Nobody waits: on a GPU the scheduler follows as the host hears of steps, which is an iteration or two late.

        Args:
            scheduler: of torch.optim.lr_scheduler, or any object with `step` and `optimizer`.
            optimizer: whose steps it follows; default `scheduler.optimizer`.

        Returns:
            How many times it was stepped: 0, 1, or more where the host has heard of several. Raises AmpTypeError for
            what is no scheduler, and for an optimizer that was not passed to `initialize`.
        """
        found = getattr(scheduler, "optimizer", None) if optimizer is None else optimizer
        if not hasattr(scheduler, "step") or found is None:
            raise AmpTypeError(
                f"step_scheduler takes a scheduler that has an optimizer, not a {type(scheduler).__name__}.  Type for "
                "example amp.step_scheduler(torch.optim.lr_scheduler.StepLR(optimizer, 1000)), or pass optimizer=."
            )
        if self._is_disabled:
            scheduler.step()
            return 1
        if self.backwards.evidence.is_rehearsal:
            return 0
        pending = self._initialized.stepped_by(found).pending
        pending.hear(wait=False)
        # A scheduler that is new here stands where the optimizer stood before its last step.
        took_last = not pending.unheard and not pending.last.skipped
        before = max(0, pending.taken - took_last)
        followed = self._followed.get(scheduler, before)
        for _ in range(pending.taken - followed):
            scheduler.step()
        self._followed[scheduler] = pending.taken
        return pending.taken - followed

    def find_overflow(self, step_fn: Callable[[], Any], loss_scale: float | None = None) -> OverflowSource:
        """Run one batch once more and name the module and operation that first gave a value that is not finite.

            print(amp.find_overflow(lambda: loss_fn(model(x), y)))

        Args:
            step_fn: runs one batch, without arguments: the forward, and the backward in `amp.scale_loss`. If it returns
                a loss and ran no backward, that is done here, for all optimizers. `optimizer.step()` of the optimizers
                that were passed to `initialize` does nothing inside.
            loss_scale: what dynamic scales are meanwhile. Default: that of the newest overflow, or else as they are. If
                the backward overflows at the former, the batch is run once more at the present scale.

        Returns:
            What was found; `str()` is a sentence. Gradients, buffers and loss scales are as before, and so is what
            step_fn refers to: generators (torch's, Python's and NumPy's are anyway), averages and other modules,
            schedulers, other optimizers. An iterator that it takes a batch from goes on.
            What torch.compile compiled is run without it; what torch.jit compiled is one operation.

        Looks at the arguments and results of every operation, so it takes many times as long as a step; waits for the
        device at each. Of several ranks all have to call it. Raises AmpStateError before `initialize` and with
        enabled=False, inside of a `scale_loss`, while gradients wait for a step, for lazy modules that have no shape
        yet, and where there was no backward, unless something was found before it; AmpTypeError for what cannot be
        called.
        """
        if self.policy is None or self._is_disabled:
            raise AmpStateError(
                "find_overflow() was called, but amp.initialize() was not, or with enabled=False.  Call model, "
                "optimizer = amp.initialize(model, optimizer, opt_level=...) first."
            )
        initialized, backwards = self._initialized, self.backwards

        def run(scale: float | None) -> OverflowSource:
            return find_overflow(
                step_fn,
                initialized.models,
                backwards,
                self.scalers,
                initialized.parameter_places(),
                scale,
            )

        records = self.overflow_report()
        if loss_scale is not None or not records:
            return run(loss_scale)
        found = run(records[-1].loss_scale)
        # Of a batch that overflows in the backward it matters whether the scale has left that behind.
        if found.phase != "backward" or all(s.loss_scale() == found.loss_scale for s in self.scalers):
            return found
        present = run(None)
        return found if present.phase is not None else replace(found, finite_at=present.loss_scale)
