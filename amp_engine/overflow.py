"""What is said when gradients overflow: each skip, one diagnosis of many in a row, one word of static scales."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from amp_engine.distributed import local_of
from amp_engine.report import OverflowDiagnosis, Reporter, overflow_message, static_overflow_message
from amp_engine.stepping.backward import Backward
from amp_engine.stepping.pending import SKIPS_BEFORE_DIAGNOSIS
from amp_engine.stepping.scaling import Scaling


class OverflowWatch:
    """Turns overflows into messages.

    Args:
        reporter: prints them.
        parameter_names: asked for the names of parameters, by id, when a diagnosis is due.
        scaling: where it is noted which static scales were reported.
    """

    def __init__(self, reporter: Reporter, parameter_names: Callable[[], dict[int, str]], scaling: Scaling) -> None:
        self._reporter = reporter
        self._parameter_names = parameter_names
        self._scaling = scaling

    def skipped(self, skips_in_a_row: int, backwards: Sequence[Backward]) -> None:
        """A step was skipped because of `backwards`, which are not empty."""
        for loss_id, b in {b.loss_id: b for b in backwards}.items():
            scale = b.adjusted_scale() if b.scaler.dynamic else b.scaler.loss_scale()
            self._reporter.say(overflow_message(loss_id, scale, b.scaler.dynamic))
        if skips_in_a_row == SKIPS_BEFORE_DIAGNOSIS:
            self._reporter.say(str(self.diagnose(skips_in_a_row, backwards[-1])))

    def stepped_on(self, backward: Backward) -> None:
        """A static scaler overflowed and the step was taken."""
        if backward.loss_id not in self._scaling.reported:
            self._scaling.reported.add(backward.loss_id)
            self._reporter.say(static_overflow_message(backward.loss_id, backward.scaler.loss_scale()))

    def diagnose(self, skips: int, backward: Backward) -> OverflowDiagnosis:
        """What was not finite: which gradients of `backward`, which weights, the loss. Waits for the device."""
        names = self._parameter_names()
        # NaN has more bits than inf, so the largest magnitude is NaN if there is one.
        nonfinite = [
            (param, math.isnan(largest))
            for checked in backward.checked
            for param, bad, largest in zip(
                checked.params, checked.checks.nonfinite.tolist(), checked.checks.largest.tolist(), strict=True
            )
            if bad
        ]

        def name(param: Tensor) -> str:
            return names.get(id(param), f"a parameter of shape {tuple(param.shape)}")

        named = [name(param) for param, _ in nonfinite]
        params = {id(param): param for checked in backward.checked for param in checked.params}.values()
        # A backward goes from the last to the first, so the last one was reached first. In the order of the optimizer
        # where the graph tells none, or one for all.
        order = [(backward.order.get(id(param), 0), row) for row, (param, _) in enumerate(nonfinite)]
        first = max(order, default=(0, None))[1]
        return OverflowDiagnosis(
            skips=skips,
            loss_id=backward.loss_id,
            loss_scale=backward.scaler.loss_scale(),
            loss=float(backward.loss.float().sum()),
            nonfinite=tuple(named),
            first=None if first is None else named[first],
            is_nan=first is not None and nonfinite[first][1],
            checked=sum(len(checked.arrived) - checked.arrived.count(0) for checked in backward.checked),
            weights=tuple(name(param) for param in params if not local_of(param.detach()).isfinite().all()),
        )
