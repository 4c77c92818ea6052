"""Train every task at every level from every seed, compare with FP32, and write docs/evidence.md and its picture."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tests.evidence.report import write_page, write_picture
from tests.evidence.runs import Run, in_processes, resumed
from tests.evidence.tasks import LEVELS, TASKS
from tests.evidence.verdict import T_975, compare

SEEDS = 10


def main(
    arguments: Sequence[str] | None = None, train_all: Callable[[Sequence[Run], int], Iterable[dict]] | None = None
) -> int:
    """Run what `arguments` ask for; returns 1 if a level is not equivalent or a control is.

    Args:
        arguments: those of the command line.
        train_all: yields a row for each of the runs, in any order, by so many workers; None trains them.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.evidence", description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS, choices=range(2, len(T_975) + 2), metavar="N")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread; default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("build/evidence"), help="default: %(default)s")
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="for a whole run's page; default: %(default)s")
    options = parser.parse_args(arguments)

    options.out.mkdir(parents=True, exist_ok=True)
    whole = options.seeds >= SEEDS and set(options.tasks) == set(TASKS)
    runs = [
        Run(seed, task, level)
        for seed in range(options.seeds)
        for task in options.tasks
        for level in (*LEVELS, *TASKS[task].controls)
    ]
    rows = list(resumed(runs, options.out / "runs.jsonl", options.workers, train_all or in_processes))
    comparisons = list(compare(rows))
    folder = options.docs if whole else options.out
    write_picture(comparisons, folder / "evidence.png")
    write_page(comparisons, rows, folder / "evidence.md")
    print((folder / "evidence.md").read_text())
    return 0 if all(comparison.as_it_must for comparison in comparisons) else 1


if __name__ == "__main__":
    sys.exit(main())
