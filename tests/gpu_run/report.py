"""What was measured: rows as they come, one line of JSON each; at the end gpu.json and gpu.md."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.gpu_run.stages import OK, Outcome

ROWS, JSON, MARKDOWN = "rows.jsonl", "gpu.json", "gpu.md"
ABOUT = "about"  # the key of the one row that says what the machine is

Row = dict[str, Any]

# How a number is printed; what is not listed here is printed with three digits.
FORMATS = {
    "of_copy": "{:.0%}",
    "kept_full": "{:.0%}",
    "ratio": "{:.3f}",
    "gb_per_s": "{:.0f}",
    "per_s": "{:,.0f}",
    "peak_gb": "{:.2f}",
    "of_peer": "{:.2f}",
    "loss": "{:.3f}",
}


class Rows:
    """Appends rows to a file, so that a stage that is cut short keeps what it has."""

    def __init__(self, path: Path | None, stage: str) -> None:
        self._path, self._stage = path, stage

    def add(self, case: str, what: str, **numbers: Any) -> None:
        """One row. Numbers that are None are left out."""
        row = {"stage": self._stage, "case": case, "what": what}
        row |= {name: value for name, value in numbers.items() if value is not None}
        shown = "  ".join(f"{name} {cell(name, row[name])}" for name in list(row)[3:])
        print(f"{case:34} {what:44} {shown}", flush=True)
        self.write(row)

    def write(self, row: Row) -> None:
        """Append a row."""
        if self._path:
            with self._path.open("a") as file:
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


def write_report(folder: Path, about: dict[str, str], outcomes: Sequence[Outcome], clocks: Sequence[Row]) -> None:
    """Write gpu.json and gpu.md from the outcomes and the rows so far."""
    rows = read_rows(folder / ROWS)
    about = {**about, **next((row[ABOUT] for row in reversed(rows) if ABOUT in row), {})}
    rows = [row for row in rows if ABOUT not in row]
    data = {"about": about, "stages": [asdict(outcome) for outcome in outcomes], "clocks": list(clocks), "rows": rows}
    (folder / JSON).write_text(json.dumps(data, indent=1) + "\n")
    (folder / MARKDOWN).write_text(markdown(about, outcomes, clocks, rows))


def markdown(about: dict[str, str], outcomes: Sequence[Outcome], clocks: Sequence[Row], rows: Sequence[Row]) -> str:
    """The report as tables: the outcomes, the clocks, one for each stage that measured something."""
    parts = ["\n".join(f"* {name}: {value}" for name, value in about.items())]
    stages = [
        {"stage": o.stage, "outcome": o.outcome, "seconds": f"{o.seconds:.0f} of {o.limit:.0f}", "last line": o.note}
        for o in outcomes
    ]
    parts.append(table(stages))
    if clocks:
        parts.append(table(clocks))
    for stage in dict.fromkeys(row["stage"] for row in rows):
        of_stage = [{k: v for k, v in row.items() if k != "stage"} for row in rows if row["stage"] == stage]
        parts.append(f"**{stage}**\n\n" + table(of_stage))
    bad = [outcome for outcome in outcomes if outcome.outcome != OK]
    for outcome in bad:
        parts.append(f"**{outcome.stage} {outcome.outcome}**\n\n```text\n" + "\n".join(outcome.tail) + "\n```")
    return "\n\n".join(parts) + "\n"


def table(rows: Sequence[Row]) -> str:
    """A Markdown table with a column for every key that a row has."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(name.replace("_", " ") for name in columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(cell(name, row.get(name, "")) for name in columns) + " |" for row in rows]
    return "\n".join(lines)


def cell(name: str, value: object) -> str:
    """A value as a reader wants it, in one line of a table."""
    if isinstance(value, float):
        return FORMATS.get(name, "{:.3f}").format(value)
    return str(value).replace("|", "\\|").replace("\n", " ")
