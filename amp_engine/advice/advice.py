"""What `advise` gives: the trials, the figures, and the recommendation; as text and JSON."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from dataclasses import dataclass
from typing import Any

from amp_engine.advice import text
from amp_engine.advice.figures import Comparison, compared
from amp_engine.advice.recommendation import Recommendation, recommend
from amp_engine.advice.records import Trial

FORMAT = 1
"""Of the JSON; another number where a field has got another meaning."""


@dataclass(frozen=True)
class Advice:
    """A script, a few steps of it at each level, and what follows.

    Attributes:
        script: what was run, as it is typed after `python`.
        steps: that each level was asked for.
        warmup: how many of the first are left out of times.
        base: the first run at O0.
        levels: the runs at other levels, in the order in which they were asked for.
        again: the second run at O0, after the others, with perturbed weights.
    """

    script: tuple[str, ...]
    steps: int
    warmup: int
    base: Trial
    levels: tuple[Trial, ...]
    again: Trial | None

    @functools.cached_property
    def comparison(self) -> Comparison:
        """The figures of all levels."""
        return compared(self.base, self.levels, self.again, self.warmup)

    @functools.cached_property
    def recommendation(self) -> Recommendation:
        """The level that the figures speak for, and why."""
        return recommend(self.comparison)

    @property
    def level(self) -> str | None:
        """The recommended one; None where levels cannot be compared, as `recommendation.sentence` says."""
        return self.recommendation.level

    def to_json(self) -> str:
        """All of it, in JSON of plain types; numbers that are not finite are the strings "nan", "inf" and "-inf"."""
        fields = {"format": FORMAT, **dataclasses.asdict(self)}
        fields["comparison"] = dataclasses.asdict(self.comparison)
        fields["recommendation"] = dataclasses.asdict(self.recommendation)
        return json.dumps(_plain(fields), indent=1, allow_nan=False)

    def __str__(self) -> str:
        return text.rendered(self)

    def __repr__(self) -> str:
        return str(self)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
