"""Train small models at every level; print the table, write results.json and curves.png."""

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from amp_engine import AmpStateError
from examples.demo.budget import Budget
from examples.demo.curves import write_curves
from examples.demo.interrupt import Interrupt
from examples.demo.report import render_notes, render_table, write_results
from examples.demo.tasks import Task, all_tasks
from examples.demo.training import Row, Run, left_out, train


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; `arguments` are those of the command line. Returns an exit status."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=2, help="of the CPU; default: %(default)s")
    parser.add_argument("--device", default="cpu", help="default: %(default)s")
    options = parser.parse_args(arguments)

    with Interrupt() as interrupt:
        torch.set_num_threads(options.threads)
        device = torch.device(options.device)
        hardware = describe(device, options.threads)
        print(f"torch {torch.__version__} on {hardware}")
        started = time.perf_counter()
        tasks = all_tasks()
        runs = train_all(tasks, device, Budget(tasks, device), lambda: interrupt.came)
        rows = [run.row for run in runs]
        where = "this GPU" if device.type == "cuda" else "this CPU"

        print(f"\n{render_table(runs)}\n\n{render_notes(rows, where)}")
        options.out.mkdir(parents=True, exist_ok=True)
        write_results(rows, options.out / "results.json")
        write_curves(runs, options.out / "curves.png")
        seconds = time.perf_counter() - started
        print(f"\n{options.out}/results.json and curves.png written; {seconds:.0f} s in all.")
    return Interrupt.STATUS if interrupt.came else 0


def train_all(
    tasks: Sequence[Task],
    device: torch.device,
    budget: Budget | None = None,
    interrupted: Callable[[], bool] = lambda: False,
) -> list[Run]:
    """Train every task at each of its levels, O0 first, with one progress bar.

    Args:
        tasks: what to train.
        device: where.
        budget: the time for the rows; None: `budget.SECONDS` for these tasks.
        interrupted: returns True once nothing more is to be trained.
    """
    budget = budget or Budget(tasks, device)
    runs = []
    total = sum(task.steps * len(task.levels) for task in tasks)
    layout = "{desc} {percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} steps, {elapsed}{postfix}"
    every = 0.1 if sys.stderr.isatty() else 10.0  # seconds; a log file needs no animation
    with tqdm(total=total, bar_format=layout, mininterval=every, dynamic_ncols=True, desc="measuring") as bar:
        budget.measure_layers(lambda: not interrupted())
        for task in tasks:
            baseline = None
            for opt_level in task.levels:
                bar.set_description_str(f"{task.name:15} {opt_level}", refresh=False)
                run = _train_within(budget, task, opt_level, device, baseline, interrupted, bar)
                baseline = baseline or run.row
                runs.append(run)
    return runs


def _train_within(
    budget: Budget,
    task: Task,
    opt_level: str,
    device: torch.device,
    baseline: Row | None,
    interrupted: Callable[[], bool],
    bar: tqdm,
) -> Run:
    """Train one row, whole, shortened or not at all; the bar always advances by the whole row."""
    if interrupted():
        return left_out(task, opt_level, Interrupt.WORD)
    share = budget.take(task, opt_level)
    if share is None:
        bar.update(task.steps)
        return left_out(task, opt_level, budget.why(task, opt_level))
    needed_by_others = budget.needed()
    allowed = share * task.steps / (task.steps + task.evaluation_steps)
    started = budget.clock()
    done = 0

    def shorten() -> str | None:
        nonlocal done
        done += 1
        gone = budget.clock() - started
        budget.seen(task, opt_level, gone / done)
        own = min(allowed - gone, gone / done * (task.steps - done + task.evaluation_steps))
        bar.set_postfix_str(f"about {tqdm.format_interval(max(0.0, own) + needed_by_others)} left", refresh=False)
        bar.update()
        if interrupted():
            return Interrupt.WORD
        return budget.why(task, opt_level) if gone / done * (done + 1) > allowed else None

    try:
        run = train(task, opt_level, device, baseline, shorten)
    except AmpStateError as error:  # split masters need the compiled kernels
        run = left_out(task, opt_level, str(error).partition(":")[0])
    bar.update(task.steps - done)
    return run


def describe(device: torch.device, threads: int) -> str:
    """The hardware that the numbers were measured on."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    capability = torch.backends.cpu.get_cpu_capability()
    waiting = os.environ.get("OMP_WAIT_POLICY", "default")
    return f"{platform.machine()} CPU, {capability}, {threads} threads (OpenMP wait policy: {waiting})"


if __name__ == "__main__":
    sys.exit(main())
