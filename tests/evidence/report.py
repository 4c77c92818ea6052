"""The page of the evidence, and its picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import date
from itertools import groupby
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from amp_engine.ground.dtypes import cpu_lacks
from tests.evidence.tasks import TASKS
from tests.evidence.verdict import Comparison

PAGE = """\
# Does it train as FP32 does?

{answer}

![Differences of the test loss to O0, with 95% intervals and margins, for each task and level](evidence.png)

{levels}
Each cell is the mean difference of the test loss to O0's, and its 95% interval; bold is not equivalent. {tasks}
`make evidence` wrote this page: {date}, {cpu},
torch {torch}, commit {commit}, {minutes:.0f} minutes of CPU time.

## The rule

A level and O0 begin from the same weights and see the same batches, for each of {seeds} seeds. The margin is the
standard deviation of O0's loss between seeds: what another seed changes anyway. A level is equivalent if the whole
interval (Student's t) lies within the margin. The rule (`tests/evidence/verdict.py`) was written before the run, and
the tasks were tuned on other seeds. A margin tells only what it is as wide as, so look at the intervals themselves.

Controls have no masters, and must not be equivalent, or their task would be too easy to tell anything: pure bfloat16
loses small updates; at O3 `eps` of AdamW, 1e-8, is 0 in float16. One control was dropped after the first whole run: in
`characters`, which trains from first weights at a high learning rate, pure bfloat16 was equivalent by the rule, its
loss 0.0337 higher (interval 0.0316 to 0.0358), the margin 0.0461. Nothing else was changed after it.

## Run it again

`make evidence` in a clone, on two cores; `WORKERS=1` takes one. It goes on where it was stopped, and exits with 1 if a
level is not equivalent, or if a control is. `make evidence ARGS="--seeds 2 --tasks digits"` is a try, whose page lies
in `build/evidence` beside the losses of every seed.
"""
GREEN, RED, GREY = "#1d7a46", "#b3261e", "#6b7280"


def write_page(comparisons: Sequence[Comparison], rows: Sequence[dict], path: Path) -> None:
    """The answer, the rule, and a table for each task."""
    levels = [comparison for comparison in comparisons if not comparison.control and comparison.level != "O0"]
    controls = [comparison for comparison in comparisons if comparison.control]
    answer = (
        f"{sum(level.equivalent for level in levels)} of {len(levels)} pairs of a level and a task are equivalent to "
        f"FP32; {sum(not control.equivalent for control in controls)} of {len(controls)} controls fail, as they must."
    )
    page = PAGE.format(
        answer=answer,
        date=date.today(),
        cpu=_cpu(),
        torch=torch.__version__,
        commit=", ".join(sorted({row["commit"] for row in rows})),
        minutes=sum(row["seconds"] for row in rows) / 60,
        seeds=len({row["seed"] for row in rows}),
        levels=_levels(comparisons),
        tasks=_tasks([comparison for comparison in comparisons if comparison.level == "O0"]),
    )
    path.write_text(page)


def _cpu() -> str:
    emulated = [str(dtype)[6:] for dtype in (torch.bfloat16, torch.float16) if cpu_lacks(dtype)]
    capability = torch.backends.cpu.get_cpu_capability()
    return f"a CPU with {capability}, half types that it emulates: {', '.join(emulated) or 'none'}"


def _levels(comparisons: Sequence[Comparison]) -> str:
    """A row for each level, a column for each task."""
    tasks = list(dict.fromkeys(comparison.task for comparison in comparisons))
    cells = {(comparison.level, comparison.task): _cell(comparison) for comparison in comparisons}
    names = {c.level: f"{c.level} (control)" if c.control else c.level for c in comparisons if c.level != "O0"}
    rows = [[name, *(cells.get((level, task), "") for task in tasks)] for level, name in names.items()]
    return _table(["difference to O0", *tasks], rows)


def _cell(comparison: Comparison) -> str:
    if math.isnan(comparison.difference):
        return "**not a number**"
    text = f"{comparison.difference:+.5f} ± {comparison.half_width:.5f}"
    return text if comparison.equivalent else f"**{text}**"


def _tasks(baselines: Sequence[Comparison]) -> str:
    """What the tasks are, and O0's outcome."""
    rows = []
    for o0 in baselines:
        task = TASKS[o0.task]
        recipe = f"{task.steps} of {task.batch_size}"
        rows.append([o0.task, task.about, recipe, f"{o0.loss:.4f}", f"{o0.accuracy:.1%}", f"{o0.margin:.4f}"])
    head = ["task", "what is trained", "steps", "O0's test loss", "accuracy", "margin"]
    return "The tasks:\n\n" + _table(head, rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def write_picture(comparisons: Sequence[Comparison], path: Path) -> None:
    """A panel for each task: differences with intervals, in margins."""
    tasks = {task: list(group)[1:] for task, group in groupby(comparisons, lambda one: one.task)}
    columns = min(2, len(tasks))
    figure = Figure(figsize=(4.5 * columns, 2.2 * math.ceil(len(tasks) / columns)), layout="constrained")
    for place, (task, levels) in enumerate(tasks.items(), 1):
        _draw(figure.add_subplot(math.ceil(len(tasks) / columns), columns, place), task, levels)
    figure.supxlabel("test loss \N{MINUS SIGN} test loss of O0, in margins (grey: the margin)", color=GREY, fontsize=8)
    figure.savefig(path, dpi=110)


def _draw(axes: Axes, task: str, levels: Sequence[Comparison]) -> None:
    end = 2.0
    axes.axvspan(-1, 1, color="#e5e7eb", zorder=0)
    axes.axvline(0, color=GREY, linewidth=0.8)
    for place, level in enumerate(levels):
        color = RED if level.control else GREEN
        middle = level.difference / level.margin
        if math.isfinite(middle) and abs(middle) < end:
            axes.errorbar(middle, place, xerr=level.half_width / level.margin, fmt="o", color=color, markersize=4)
        else:
            word = f"{middle:+.1f}, off the scale" if math.isfinite(middle) else "not a number"
            x, side = (-0.98 * end, "left") if middle < 0 else (0.98 * end, "right")
            axes.text(x, place, word, color=color, ha=side, va="center", fontsize=8)
    axes.set_xlim(-end, end)
    axes.set_ylim(len(levels) - 0.4, -0.6)
    axes.set_yticks(range(len(levels)), [level.level for level in levels], fontsize=8)
    axes.set_title(task, loc="left", fontsize=9, fontweight="bold")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
