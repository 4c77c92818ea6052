"""curves.png: the loss in FP32, at O5 and without masters, and the differences to FP32's."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from examples.demo.tasks import PURE, SMALL
from examples.demo.training import Run


@dataclass(frozen=True)
class Style:
    """How a level is drawn."""

    color: str
    label: str
    width: float = 1.8


# Levels that agree lie on top of one another, so O1, O3 and O4 are in the table alone.
STYLES = {
    "O0": Style("#c3c8d0", "O0  FP32", width=6),
    "O2": Style("#1d4fb8", "O2  float16, FP32 masters"),
    "O5": Style("#f5a742", "O5  bfloat16, FP32 masters"),
    SMALL: Style("#0f8a5f", "O5  split masters, bfloat16 moments"),
    PURE: Style("#c026a3", "bfloat16, no masters"),
}
LOSSES = ("O0", "O5", PURE)  # of the upper panels
LINEAR_BELOW = 1e-3  # differences are on a logarithmic axis, linear around 0
GREY = "#6b7280"


def write_curves(runs: Sequence[Run], path: Path) -> None:
    """Draw two panels per task: the smoothed loss, and below it the difference to O0's, for the steps of both."""
    tasks = [list(group) for _, group in groupby(runs, key=lambda run: run.task.name)]
    figure = Figure(figsize=(5.2 * len(tasks), 7.2), layout="constrained", facecolor="white")
    panels = figure.subplots(2, len(tasks), squeeze=False, sharex="col", height_ratios=(3, 2))
    for (loss_axes, difference_axes), task_runs in zip(panels.T, tasks, strict=True):
        window = max(1, task_runs[0].task.steps // 15)
        losses = {run.row.opt_level: smooth(run.losses, window) for run in task_runs if run.losses}
        _draw_losses(loss_axes, losses)
        _draw_differences(difference_axes, losses)
        difference_axes.set_xlabel("step")
        _dress(loss_axes)
        _dress(difference_axes)
        steps = task_runs[0].task.steps
        margin = 0.01 * max(1, steps - 1)
        difference_axes.set_xlim(1 - margin, steps + margin)
        loss_axes.set_title(task_runs[0].task.name, loc="left", fontweight="bold")
        loss_axes.set_title(f"mean of {window} steps", loc="right", fontsize=9, color=GREY)
    panels[0, 0].set_ylabel("training loss")
    panels[1, 0].set_ylabel("loss \N{MINUS SIGN} loss at O0")
    figure.legend(
        handles=[
            Line2D([], [], color=style.color, linewidth=style.width + 1, label=style.label) for style in STYLES.values()
        ],
        loc="outside upper center",
        ncols=len(STYLES),
        frameon=False,
    )
    figure.savefig(path, dpi=130)


def smooth(losses: Sequence[float], window: int) -> np.ndarray:
    """Mean over the last `window` steps, fewer at the start; as long as `losses`."""
    total = np.cumsum(np.asarray(losses))
    total[window:] -= total[:-window].copy()
    return total / np.minimum(np.arange(1, len(losses) + 1), window)


def _draw_losses(axes: Axes, losses: dict[str, np.ndarray]) -> None:
    for level in LOSSES:
        if (loss := losses.get(level)) is not None:
            style = STYLES[level]
            axes.plot(_steps(loss), loss, color=style.color, linewidth=style.width)


def _draw_differences(axes: Axes, losses: dict[str, np.ndarray]) -> None:
    axes.set_yscale("symlog", linthresh=LINEAR_BELOW, linscale=1.5)
    baseline = losses.get("O0", np.empty(0))
    for level in STYLES:
        loss = losses.get(level, np.empty(0))
        steps = min(len(loss), len(baseline))
        axes.plot(_steps(loss[:steps]), loss[:steps] - baseline[:steps], color=STYLES[level].color, linewidth=1.8)


def _steps(loss: np.ndarray) -> np.ndarray:
    return np.arange(1, len(loss) + 1)


def _dress(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(colors=GREY, labelsize=9)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.01)
