"""The table, what it does and does not show, and results.json."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from examples.demo.tasks import HALF_LEVELS
from examples.demo.training import FINAL_STEPS, Row, Run

HEADERS = ("task", "level", "loss", "metric", "ms/step", "speed", "state", "skipped", "scale")
PROMISED_LEVELS = ("O1", "O2", "O4", "O5")
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
    return (
        row.task if row.opt_level == "O0" else "",
        row.opt_level,
        f"{row.loss:.4f}",
        f"{row.metric:.2%}" if run.task.metric == "accuracy" else f"{row.metric:.3f} b/c",
        f"{row.ms_per_step:.1f}",
        f"x{row.speedup:.2f}",
        f"{row.state_bytes / 2**20:.2f} MiB",
        f"{row.skipped}",
        f"{row.loss_scale:g}",
    )


def render_notes(rows: Sequence[Row], where: str) -> str:
    """What the columns mean and what this run showed; `where` is "this CPU" or the like."""
    baselines = {row.task: row for row in rows if row.opt_level == "O0"}
    distance = {
        (row.task, row.opt_level): abs(row.metric / baselines[row.task].metric - 1)
        for row in rows
        if row.opt_level in PROMISED_LEVELS
    }
    task, opt_level = max(distance, key=lambda key: distance[key])
    farthest = f"{opt_level} on {task}, by {distance[task, opt_level]:.2%}"
    verdict = "within" if distance[task, opt_level] <= PROMISED_DISTANCE else "NOT within"
    notes = f"""\
loss: training, mean of the last {FINAL_STEPS} steps.  metric: held-out, accuracy or bits per
character (b/c).  ms/step: median.  speed: against O0.  state: parameters, buffers, FP32 masters
and optimizer state, at their largest; gradients and activations are not in it.

{", ".join(PROMISED_LEVELS)} end {verdict} {PROMISED_DISTANCE:.0%} of O0's metric (farthest: {farthest}).
O3 has no FP32 weights and no dynamic scale: its rows are printed, not promised."""
    slow = [row for row in rows if row.opt_level in HALF_LEVELS and row.speedup < 1]
    if slow:
        speeds = f"x{min(row.speedup for row in slow):.2f} to x{max(row.speedup for row in slow):.2f}"
        notes += f"""
float16 is slower than FP32 on {where} at this size ({speeds} in {len(slow)} of these rows):
the float16 rows show that training works, not what it gains."""
    return notes


def write_results(rows: Sequence[Row], path: Path) -> None:
    """A JSON list of the rows, keys as in `Row`."""
    path.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
