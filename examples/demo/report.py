"""The table, notes on it, and results.json."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

from examples.demo.tasks import BFLOAT16_LEVELS, HALF_LEVELS, PURE, SMALL
from examples.demo.training import FINAL_STEPS, Row, Run

HEADERS = ("task", "level", "steps", "loss", "metric", "ms/step", "speed", "state", "skipped", "scale")
PROMISED_LEVELS = ("O1", "O2", "O4", "O5", SMALL)
PROMISED_DISTANCE = 0.02  # from O0's metric, relative


def render_table(runs: Sequence[Run]) -> str:
    """The rows as aligned text, a rule before each task."""
    cells = [_cells(run) for run in runs]
    widths = [max(map(len, column)) for column in zip(HEADERS, *cells, strict=True)]

    def render(line: Sequence[str]) -> str:
        words = [word.ljust(width) for word, width in zip(line[:2], widths[:2], strict=True)]
        words += [word.rjust(width) for word, width in zip(line[2:], widths[2:], strict=True)]
        return "  ".join(words)

    rule = "-" * len(render(HEADERS))
    lines = [render(HEADERS)]
    for run, line in zip(runs, cells, strict=True):
        lines += [rule] * (run.row.opt_level == "O0") + [render(line)]
    return "\n".join([*lines, rule])


def _cells(run: Run) -> tuple[str, ...]:
    row = run.row
    metric = "{:.2%}" if run.task.metric == "accuracy" else "{:.3f} b/c"
    return (
        row.task if row.opt_level == "O0" else "",
        row.opt_level,
        f"{row.steps}" if row.note is None else f"{row.steps}/{row.planned_steps}",
        _cell("{:.4f}", row.loss),
        _cell(metric, row.metric),
        _cell("{:.1f}", row.ms_per_step),
        _cell("x{:.2f}", row.speedup),
        _cell("{:.2f} MiB", row.state_bytes and row.state_bytes / 2**20),
        _cell("{}", row.skipped),
        _cell("{:g}", row.loss_scale),
    )


def _cell(form: str, value: float | None) -> str:
    return "-" if value is None else form.format(value)


def render_notes(rows: Sequence[Row], where: str) -> str:
    """A text on the columns and the results of this run; `where` is "this CPU" or the like."""
    notes = [
        f"""\
loss: training, mean of the last {FINAL_STEPS} steps.  metric: held-out, accuracy or bits per
character (b/c).  ms/step: median.  speed: against O0.  state: parameters, buffers, FP32 masters
and optimizer state; gradients and activations are not in it."""
    ]
    short = _short_rows(rows)
    if short:
        notes.append("\n".join(["Fewer steps than planned, so no metric to compare:", *short]))
    notes.append(
        f"""\
{SMALL}: split masters and bfloat16 moments, 8 bytes of state a parameter where O0 has 12.
{_verdict(rows)}O3 and {PURE} have no FP32 weights: their rows are printed, not promised."""
    )
    for name, levels in (("float16", HALF_LEVELS), ("bfloat16", BFLOAT16_LEVELS)):
        speeds = [row.speedup for row in rows if row.opt_level in levels and row.speedup is not None]
        slow = [speed for speed in speeds if speed < 1]
        if slow:
            notes.append(
                f"{name} is slower than FP32 on {where} at this size (x{min(slow):.2f} to x{max(slow):.2f} in "
                f"{len(slow)} of these rows):\nthe {name} rows show that training works, not what it gains."
            )
    return "\n\n".join(notes)


def _short_rows(rows: Sequence[Row]) -> list[str]:
    """A line for each row that is not whole; successive rows of the same task, steps and note share one."""
    lines = []
    for (task, steps, note), group in groupby(rows, key=lambda row: (row.task, row.steps, row.note)):
        if note is not None:
            same = list(group)
            what = f"{steps} of {same[0].planned_steps} steps" if steps else "left out"
            lines.append(f"  {task} {', '.join(row.opt_level for row in same)}: {what}: {note}.")
    return lines


def _verdict(rows: Sequence[Row]) -> str:
    baselines = {row.task: row.metric for row in rows if row.opt_level == "O0"}
    distance = {
        (row.task, row.opt_level): abs(row.metric / baseline - 1)
        for row in rows
        if row.opt_level in PROMISED_LEVELS
        and row.metric is not None
        and (baseline := baselines.get(row.task)) is not None
    }
    if not distance:
        return ""
    task, opt_level = max(distance, key=lambda key: distance[key])
    farthest = distance[task, opt_level]
    verdict = "within" if farthest <= PROMISED_DISTANCE else "NOT within"
    levels = [level for level in PROMISED_LEVELS if any(level == key[1] for key in distance)]
    return (
        f"{', '.join(levels)} end {verdict} {PROMISED_DISTANCE:.0%} of O0's metric "
        f"(farthest: {opt_level} on {task}, by {farthest:.2%}).\n"
    )


def write_results(rows: Sequence[Row], path: Path) -> None:
    """Write a JSON list of the rows, with the keys of `Row`."""
    path.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
