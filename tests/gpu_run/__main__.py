"""The program of `make gpu`: parts, each but F within three minutes on a machine with a GPU (tests/gpu_run/parts.py).

Stages run whatever became of those before them, each for so long at most; the status is 1 at the end if one of them
failed. The first part of a run builds. In the folder --out: A.log has what part A prints, A.jsonl each result as it
comes, A.json what became of the stages, gpu.md all parts that lie there as tables. All of it is whole after each stage,
whatever ends the run. `--simulate` goes through the same stages on a machine without a GPU, tiny, on the CPU,
which stands in for one: tests/gpu/stand_in.py has the functions of torch.cuda.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

from tests.gpu_run.machine import Clocks, about
from tests.gpu_run.page import write_page
from tests.gpu_run.parts import Part, parts, plan
from tests.gpu_run.report import Report
from tests.gpu_run.stages import OK, Stage, run_all


def chosen(every: list[Part], args: argparse.Namespace) -> list[Part]:
    """The parts and stages that were asked for, some with other code in their place."""
    names = {stage.name for part in every for stage in part.stages}
    instead = dict(pair.split("=", 1) for pair in args.instead)
    for name in (*args.only, *instead):
        if name not in names:
            raise SystemExit(f"there is no stage {name!r}: {', '.join(sorted(names))}")
    wanted: list[Part] = []
    for part in every:
        stages = tuple(
            replace(stage, command=[sys.executable, "-c", instead[stage.name]]) if stage.name in instead else stage
            for stage in part.stages
            if (not args.only or stage.name in args.only) and not (wanted and stage.apart)
        )
        if stages and part.name in (args.part or part.name):
            wanted.append(replace(part, stages=stages))
    return wanted


def run(part: Part, folder: Path, machine: dict[str, str]) -> bool:
    """Run a part and report. Whether all of its stages ended well."""
    start = time.monotonic()
    log, clocks = folder / f"{part.name}.log", Clocks()
    report = Report(folder, part, machine)

    def write() -> None:
        report.write(clocks.rows())
        write_page(folder, folder / "gpu.md")

    def before(stage: Stage) -> None:
        clocks.stage = stage.name

    environment = {"PYTHONUNBUFFERED": "1", "COMMIT": machine["commit"]}
    for path in (log, report.rows_file):
        path.unlink(missing_ok=True)
    write()
    try:
        for outcome in run_all(part.stages, log, environment, before, start):
            report.outcomes.append(outcome)
            write()
    finally:
        clocks.close()
        write()  # with the rows of a stage that was stopped
    print(f"\n{folder / 'gpu.md'}: part {part.name}")
    for outcome in report.outcomes:
        print(f"{outcome.stage:12} {outcome.outcome:8} {outcome.seconds:6.1f} s  {outcome.note}")
    return all(outcome.outcome == OK for outcome in report.outcomes)


def main() -> None:
    """Run the parts."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_run", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="folder for logs and reports")
    parser.add_argument("--part", default="", help="A to F, or several, as AB; default: all")
    parser.add_argument("--plan", action="store_true", help="say which parts there are, and their seconds")
    parser.add_argument("--simulate", action="store_true", help="on a machine without a GPU: try the stages out")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], help="stages, with commas in between")
    parser.add_argument(
        "--instead", action="append", default=[], metavar="STAGE=CODE", help="Python that is run in place of a stage"
    )
    args = parser.parse_args()
    folder = args.out.resolve()
    every = parts(folder, args.simulate)
    if unknown := set(args.part) - {part.name for part in every}:
        raise SystemExit(f"there is no part {', '.join(sorted(unknown))}: there are A to F")
    if args.plan:
        return print(plan(every))
    wanted = chosen(every, args)
    folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the running stage is ended
    stand_in = {"on a stand-in": "the CPU, tiny: no number means anything"} if args.simulate else {}
    well = [run(part, folder, about() | stand_in) for part in wanted]
    sys.stdout.flush()
    os._exit(not all(well))  # past threads that still read a pipe


if __name__ == "__main__":
    main()
