"""Makes docs/gpu.md of the reports under docs/gpu: `python -m tests.gpu_run.page`.

`make gpu` makes a page of its own reports, with all their tables. One that is to stay is put under docs/gpu, in a
folder of any name: the files A.json and A.jsonl of part A, and so on. docs/gpu/about.md says what they show, so
docs/gpu.md has that, and a table of the reports.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.gpu_run.report import Row, cell, read_rows, replace_text
from tests.gpu_run.stages import OK, UNFINISHED

DOCS = Path(__file__).parents[2] / "docs"
HEAD = """# On a GPU

How fast is it on a GPU, and what has run on one? `make gpu` measures yours ([benchmarks.md](benchmarks.md#gpus)
says how, and what the numbers mean); `python -m tests.gpu_run.page` makes this page of the reports under `docs/gpu`.
"""
NOTHING = """
**Nothing has run on a GPU yet.** The CUDA kernels compile, and run on a simulator of blocks and threads with the CPU's
bits; the tests and the measurements that a GPU is to run are tried out on the CPU, which stands in for one. Nothing is
claimed about speed, nor about what only a GPU can show: streams, graphs, waits, memory.
"""


def reports(folder: Path) -> list[dict[str, Any]]:
    """The reports that lie in a folder and below it, the oldest first, with their rows."""
    found = []
    for path in sorted(folder.rglob("*.json")):
        rows = read_rows(path.with_suffix(".jsonl"))
        picture = path.with_suffix(".png")
        drawn = picture.relative_to(folder) if picture.exists() else None
        report = {"rows": rows, "path": path.relative_to(folder.parent), "picture": drawn}
        found.append({**json.loads(path.read_text()), **report})
    return sorted(found, key=lambda report: (report["about"]["date"], report["part"]))


def page(folder: Path) -> str:
    """The page, of all reports in a folder."""
    every = reports(folder)
    if not every:
        return HEAD + NOTHING
    summaries, about = table([summary(report) for report in every]), folder / "about.md"
    if about.exists():
        return "\n".join([HEAD, about.read_text(), summaries, ""])
    return "\n".join([HEAD, summaries, *map(section, every)])


def summary(report: dict[str, Any]) -> Row:
    """A row of the table at the top."""
    about = report["about"]
    became = {stage["stage"]: stage["outcome"] for stage in report["stages"]}
    wrong = [f"{stage} {outcome}" for stage, outcome in became.items() if outcome != OK]
    return {
        "part": report["part"],
        "when": about["date"],
        "commit": about["commit"],
        "where": "**no GPU: the CPU stood in for one**" if "on a stand-in" in about else about["gpu"],
        "torch": about["torch"],
        "ended well": ", ".join(stage for stage, outcome in became.items() if outcome == OK),
        "did not": ", ".join(wrong),
        "report": f"[{report['path'].name}]({report['path']})",
    }


def section(report: dict[str, Any]) -> str:
    """Return one report as tables."""
    return "\n" + "\n\n".join(_blocks(report)) + "\n"


def _blocks(report: dict[str, Any]) -> Iterator[str]:
    yield f"## Part {report['part']}: {report['about_part']}"
    yield "\n".join(f"* {name}: {value}" for name, value in report["about"].items())
    yield table([_outcome(stage) for stage in report["stages"]])
    if report["clocks"]:
        yield table(report["clocks"])
    rows = report["rows"]
    for stage in dict.fromkeys(row["stage"] for row in rows):
        yield f"**{stage}**"
        yield table([{k: v for k, v in row.items() if k != "stage"} for row in rows if row["stage"] == stage])
    if report["picture"]:
        yield f"![{report['about_part']}]({report['picture']})"
    for stage in report["stages"]:
        if stage.get("tail"):
            yield f"**{stage['stage']} {stage['outcome']}**"
            yield "```text\n" + "\n".join(stage["tail"]) + "\n```"


def _outcome(stage: dict[str, Any]) -> Row:
    if stage["outcome"] == UNFINISHED:
        return {"stage": stage["stage"], "outcome": UNFINISHED}
    seconds = f"{stage['seconds']:.0f} of {stage['limit']:.0f}"
    return {"stage": stage["stage"], "outcome": stage["outcome"], "seconds": seconds, "last line": stage["note"]}


def table(rows: Sequence[Row]) -> str:
    """A Markdown table with a column for every key that a row has."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(name.replace("_", " ") for name in columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(cell(name, row.get(name, "")) for name in columns) + " |" for row in rows]
    return "\n".join(lines)


def write_page(folder: Path, path: Path) -> None:
    """Write the page of a folder's reports."""
    replace_text(path, page(folder))


if __name__ == "__main__":
    write_page(DOCS / "gpu", DOCS / "gpu.md")
