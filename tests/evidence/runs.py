"""Runs in processes, each recorded when it ends; processes find no function in `__main__`."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from tests.evidence.tasks import TASKS, train


class Run(NamedTuple):
    """One training."""

    seed: int
    task: str
    level: str


def resumed(
    runs: Sequence[Run], path: Path, workers: int, train_all: Callable[[Sequence[Run], int], Iterable[dict]]
) -> Iterator[dict]:
    """The rows of the runs: those of the file that are of this torch and recipe, and the others, trained and added."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    recorded = {Run(row["seed"], row["task"], row["level"]): row for row in rows if row["setting"] == setting(row)}
    yield from (recorded[run] for run in runs if run in recorded)
    missing = [run for run in runs if run not in recorded]
    command = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    with path.open("a") as file:
        for done, row in enumerate(train_all(missing, workers), 1):
            row["commit"] = commit
            print(json.dumps(row), file=file, flush=True)
            print(f"{done:4} of {len(missing)}  {row['task']:12} {row['level']:21} seed {row['seed']}", file=sys.stderr)
            yield row


def in_processes(runs: Sequence[Run], workers: int) -> Iterator[dict]:
    """Rows as they end."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield from pool.imap_unordered(in_process, runs)


def in_process(run: Run) -> dict:
    """Train one run; its row."""
    started = time.process_time()
    row = {**run._asdict(), **train(TASKS[run.task], run.level, run.seed)}
    return {**row, "seconds": time.process_time() - started, "setting": setting(row)}


def setting(row: dict) -> dict[str, object]:
    """Return the settings whose change puts a row out of date."""
    task = TASKS[row["task"]]
    recipe = [task.batch_size, task.steps, task.learning_rate, task.weight_decay]
    return {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability(), "recipe": recipe}
