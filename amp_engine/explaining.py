"""What an engine tells of itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from amp_engine import report
from amp_engine.errors import AmpStateError
from amp_engine.initialized import Initialized
from amp_engine.policy import Policy
from amp_engine.scaler import LossScaler
from amp_engine.stepping.scaled_backwards import ScaledBackwards
from amp_engine.telemetry.find_overflow import OverflowSource, find_overflow
from amp_engine.telemetry.overflow_watch import OverflowWatch
from amp_engine.telemetry.post_mortem import OverflowReport


class Explaining:
    """The part of an Engine that says what it did and why."""

    policy: Policy | None
    reporter: report.Reporter
    backwards: ScaledBackwards
    _initialized: Initialized

    @property
    def scalers(self) -> list[LossScaler]:
        """One for each loss_id."""
        raise NotImplementedError

    @property
    def overflows(self) -> OverflowWatch:
        """What was noted of overflows."""
        return self._initialized.overflows

    def overflow_report(self) -> OverflowReport:
        """As the function `amp.overflow_report`."""
        return self.overflows.report()

    def find_overflow(self, step_fn: Callable[[], Any], loss_scale: float | None = None) -> OverflowSource:
        """As the function `amp.find_overflow`."""
        if self.policy is None:
            raise AmpStateError(
                "find_overflow() was called before amp.initialize(), which tells the models to look at.  Call model, "
                "optimizer = amp.initialize(model, optimizer, opt_level=...) first."
            )
        if loss_scale is None and (records := self.overflow_report()):
            loss_scale = records[-1].loss_scale
        initialized, backwards = self._initialized, self.backwards
        return find_overflow(
            step_fn,
            initialized.models,
            backwards,
            self.scalers,
            initialized.parameter_places(),
            lambda loss: backwards.of(loss, initialized.stepped, self.scalers[0], 0),
            loss_scale,
        )
