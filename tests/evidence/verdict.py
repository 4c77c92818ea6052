"""Paired differences of losses, and when they are small enough."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from tests.evidence.tasks import CONTROLS, LEVELS, REFERENCE, TASKS

# Student's t at 97.5%, of 1 degree of freedom and on: NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2.
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
T_975 += (2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093)


@dataclass(frozen=True)
class Comparison:
    """A level against O0, seed by seed.

    The margin is the standard deviation of O0's loss between seeds: a level trains as FP32 does if it changes the
    mean loss by less than another seed changes the loss. It is declared so here, before anything is run.
    """

    task: str
    level: str
    loss: float  # means over the seeds, on the test data
    accuracy: float
    difference: float  # to O0
    half_width: float  # of the 95% interval of that difference
    margin: float

    @property
    def equivalent(self) -> bool:
        """True if the whole interval lies within the margin."""
        return abs(self.difference) + self.half_width <= self.margin

    @property
    def control(self) -> bool:
        """True for what must not be equivalent."""
        return self.level in CONTROLS

    @property
    def as_it_must(self) -> bool:
        """True for a level that is equivalent, and for a control that is not."""
        return self.equivalent != self.control


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Mean and half width of its 95% interval; not a number if a difference is not."""
    if not all(map(math.isfinite, differences)):
        return math.nan, math.nan
    return mean(differences), T_975[len(differences) - 2] * stdev(differences) / math.sqrt(len(differences))


def compare(rows: Iterable[Mapping[str, object]]) -> Iterator[Comparison]:
    """Return one comparison for each task and level of the rows, O0 first."""
    of_run: dict[tuple[str, str], dict[int, Mapping]] = {}
    for row in rows:
        of_run.setdefault((row["task"], row["level"]), {})[row["seed"]] = row
    for task in TASKS:
        for level in (*LEVELS, *CONTROLS):
            if (task, level) not in of_run:
                continue
            by_seed, reference = of_run[task, level], of_run[task, REFERENCE]
            difference, half_width = interval([row["loss"] - reference[seed]["loss"] for seed, row in by_seed.items()])
            yield Comparison(
                task=task,
                level=level,
                loss=mean(row["loss"] for row in by_seed.values()),
                accuracy=mean(row["accuracy"] for row in by_seed.values()),
                difference=difference,
                half_width=half_width,
                margin=stdev(row["loss"] for row in reference.values()),
            )
