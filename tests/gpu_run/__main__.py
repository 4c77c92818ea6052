"""What `make gpu` runs: compile, test, measure, within ten minutes on a machine with a GPU.

Stages run whatever became of those before them, each for so long at most; the status is 1 at the end if one of them
failed. In the folder --out: gpu.log has what they print, rows.jsonl each result as it comes, clocks.csv the GPU's
clocks; gpu.json and gpu.md, written after each stage, have all of it. `--simulate` goes through the same stages on a
machine without a GPU, tiny, on the CPU, which stands in for one: what is called of torch.cuda is tests/gpu/stand_in.py.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.gpu_run.machine import Clocks, about
from tests.gpu_run.report import ROWS, write_report
from tests.gpu_run.stages import OK, Outcome, Stage, run_all

LOG, CLOCKS = "gpu.log", "clocks.csv"
PYTEST = ("-m", "pytest", "tests/gpu", "-m", "cuda", "-v", "--durations=10", "-p", "no:cacheprovider")
# Another machine has other versions: what pytest does not know there is no error, and neither is a warning.
LENIENT = ("-o", "addopts=", "-W", "default", "-ra")


def stages(rows: Path, simulated: bool) -> list[Stage]:
    """All stages, most valuable first."""

    def module(name: str) -> list[str]:
        return [sys.executable, "-m", f"tests.gpu_run.{name}", "--rows", str(rows)]

    build = [sys.executable, "setup.py", "build_ext", "--inplace"]
    tests = [sys.executable, *PYTEST, *LENIENT]
    tiny, compares = [], module("variants")
    device = "stand-in" if simulated else "gpu"  # without a GPU the tests are to fail, not to try another device
    build_limit, machine_limit, tests_limit = (20, 75, 190) if simulated else (145, 30, 110)  # a busy CPU is slow
    if simulated:
        build = [sys.executable, "-c", "print('nothing is compiled')"]
        compares = [sys.executable, "-c", "print('no GPU to compare variants on')"]
        tiny = ["--device", "cpu", "--tiny"]
    return [
        Stage("build", build, build_limit, {"AMP_ENGINE_BUILD": "cuda"}),
        Stage("machine", module("machine"), machine_limit),
        Stage("tests", tests, tests_limit, {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "GPU_TESTS": device}),
        Stage("steps", module("steps") + tiny, 95, takes_the_rest=True),
        Stage("training", module("training") + tiny, 70, takes_the_rest=True),
        Stage("sanitizers", module("sanitizers") + tiny, 60, takes_the_rest=True),
        Stage("variants", compares, 20),
        Stage("counters", module("counters") + tiny, 40, takes_the_rest=True),
    ]


def chosen(all_stages: Sequence[Stage], args: argparse.Namespace) -> list[Stage]:
    """The stages that were asked for, with those that are to go wrong."""
    names = [stage.name for stage in all_stages]
    for name in (*args.only, *args.fail, *args.overrun):
        if name not in names:
            raise SystemExit(f"there is no stage {name!r}: {', '.join(names)}")
    wanted = [stage for stage in all_stages if not args.only or stage.name in args.only]
    for i, stage in enumerate(wanted):
        if stage.name in args.fail:
            wanted[i] = replace(stage, command=[sys.executable, "-c", "raise SystemExit('told to fail')"])
        if stage.name in args.overrun:
            code = "import time; print('sleeps', flush=True); time.sleep(60)"
            wanted[i] = replace(stage, command=[sys.executable, "-c", code], limit=1.0, takes_the_rest=False)
    return wanted


def names(text: str) -> list[str]:
    """What commas separate."""
    return [name for name in text.split(",") if name]


def main() -> None:
    """Run the stages and report."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_run", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="folder for logs and reports")
    parser.add_argument("--simulate", action="store_true", help="on a machine without a GPU: try the stages out")
    parser.add_argument("--only", type=names, default=[], help="stages to run, with commas in between")
    parser.add_argument("--fail", type=names, default=[], help="stages that are made to fail")
    parser.add_argument("--overrun", type=names, default=[], help="stages that are made to overrun")
    args = parser.parse_args()
    start = time.monotonic()
    folder = args.out.resolve()
    wanted = chosen(stages(folder / ROWS, args.simulate), args)
    folder.mkdir(parents=True, exist_ok=True)
    for name in (ROWS, LOG, CLOCKS):
        (folder / name).unlink(missing_ok=True)

    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the running stage is ended
    machine = about() | ({"on a stand-in": "the CPU, tiny: no number means anything"} if args.simulate else {})
    environment = {"PYTHONUNBUFFERED": "1", "COMMIT": machine["commit"]}
    clocks = Clocks(folder / CLOCKS)

    def before(stage: Stage) -> None:
        clocks.stage = stage.name

    outcomes: list[Outcome] = []
    try:
        for outcome in run_all(wanted, folder / LOG, environment, before, start):
            outcomes.append(outcome)
            write_report(folder, machine, outcomes, clocks.rows())
    finally:
        clocks.close()
        write_report(folder, machine, outcomes, clocks.rows())  # with the rows of a stage that was stopped
    print(f"\n{folder / 'gpu.md'}")
    for outcome in outcomes:
        print(f"{outcome.stage:12} {outcome.outcome:8} {outcome.seconds:6.1f} s  {outcome.note}")
    sys.stdout.flush()
    os._exit(any(outcome.outcome != OK for outcome in outcomes))  # past threads that still read a pipe


if __name__ == "__main__":
    main()
