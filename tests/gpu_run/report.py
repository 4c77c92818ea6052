"""The findings: results as they come, a line of JSON each, and the outcomes of the stages."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.gpu_run.parts import Part
from tests.gpu_run.stages import UNFINISHED, Outcome

Row = dict[str, Any]

# How a number is printed; what is not listed here is printed with three digits.
FORMATS = {
    "of_copy": "{:.0%}",
    "kept_full": "{:.0%}",
    "gb_per_s": "{:.0f}",
    "per_s": "{:,.0f}",
    "bytes_a_parameter": "{:.0f}",
    **dict.fromkeys(("peak_gb", "host_gb"), "{:.2f}"),
    "seconds": "{:.0f}",
    **dict.fromkeys(("enter_us", "exit_us", "clip_us", "step_us", "total_us"), "{:,.0f}"),
}


class Rows:
    """Appends rows to a file, so that a stage that is cut short keeps what it has."""

    def __init__(self, path: Path | None, stage: str) -> None:
        self.path, self._stage = path, stage

    def add(self, case: str, what: str, **numbers: Any) -> None:
        """Add one row. Numbers that are None are left out."""
        row = {"stage": self._stage, "case": case, "what": what}
        row |= {name: value for name, value in numbers.items() if value is not None}
        shown = "  ".join(f"{name} {cell(name, row[name])}" for name in list(row)[3:])
        print(f"{case:34} {what:44} {shown}", flush=True)
        if self.path:
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")


def read_rows(path: Path) -> list[Row]:
    """The whole rows; the last line may be half, of a stage that was killed."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


class Report:
    """The outcomes of the stages of a part, as JSON beside its rows.

    Attributes:
        rows_file: where the stages append what they find.
        outcomes: of the stages that have ended.
    """

    def __init__(self, folder: Path, part: Part, about: dict[str, str]) -> None:
        self.rows_file = folder / f"{part.name}.jsonl"
        self.outcomes: list[Outcome] = []
        self._file, self._part, self._about = folder / f"{part.name}.json", part, about

    def write(self, clocks: Sequence[Row]) -> None:
        """Write it anew. A reader sees the old file or the new one, whole, also if this process is killed."""
        stages = [asdict(outcome) for outcome in self.outcomes]
        for stage in self._part.stages[len(stages) :]:
            stages.append({"stage": stage.name, "outcome": UNFINISHED})
        head = {"part": self._part.name, "about_part": self._part.about, "limit": self._part.limit}
        text = json.dumps({**head, "about": self._about, "stages": stages, "clocks": list(clocks)}, indent=1)
        replace_text(self._file, text + "\n")


def replace_text(path: Path, text: str) -> None:
    """Write a file as a whole or not at all."""
    new = path.with_name(path.name + ".new")
    new.write_text(text)
    os.replace(new, path)


def cell(name: str, value: object) -> str:
    """A value as a reader wants it, in one line of a table."""
    if isinstance(value, float):
        return FORMATS.get(name, "{:.3f}").format(value)
    return str(value).replace("|", "\\|").replace("\n", " ")
