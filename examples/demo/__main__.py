"""Train both models at every level; print the table, write results.json and curves.png."""

import argparse
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from examples.demo.curves import write_curves
from examples.demo.report import render_notes, render_table, write_results
from examples.demo.tasks import Task, all_tasks
from examples.demo.training import Run, train


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the demo; `arguments` are those of the command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=2, help="of the CPU; default: %(default)s")
    parser.add_argument("--device", default="cpu", help="default: %(default)s")
    options = parser.parse_args(arguments)

    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    hardware = describe(device, options.threads)
    print(f"torch {torch.__version__} on {hardware}")
    started = time.perf_counter()
    runs = train_all(all_tasks(), device)
    rows = [run.row for run in runs]
    where = "this GPU" if device.type == "cuda" else "this CPU"

    print(f"\n{render_table(runs)}\n\n{render_notes(rows, where)}")
    options.out.mkdir(parents=True, exist_ok=True)
    write_results(rows, options.out / "results.json")
    write_curves(runs, options.out / "curves.png")
    seconds = time.perf_counter() - started
    print(f"\n{options.out}/results.json and curves.png written; {seconds:.0f} s in all.")


def train_all(tasks: Sequence[Task], device: torch.device) -> list[Run]:
    """Every task at every one of its levels, O0 first, behind one progress bar."""
    runs = []
    total = sum(task.steps * len(task.levels) for task in tasks)
    # No estimate of the time that is left: a step costs 2 ms at one level and 300 at another.
    layout = "{desc} {percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} steps, {elapsed}"
    every = 0.1 if sys.stderr.isatty() else 10.0  # seconds; a log file needs no animation
    with tqdm(total=total, bar_format=layout, mininterval=every, dynamic_ncols=True) as bar:
        for task in tasks:
            baseline = None
            for opt_level in task.levels:
                bar.set_description_str(f"{task.name:15} {opt_level}", refresh=False)
                run = train(task, opt_level, device, baseline, on_step=bar.update)
                baseline = baseline or run.row
                runs.append(run)
    return runs


def describe(device: torch.device, threads: int) -> str:
    """The hardware that the numbers belong to."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    capability = torch.backends.cpu.get_cpu_capability()
    waiting = os.environ.get("OMP_WAIT_POLICY", "default")
    return f"{platform.machine()} CPU, {capability}, {threads} threads (OpenMP wait policy: {waiting})"


if __name__ == "__main__":
    main()
