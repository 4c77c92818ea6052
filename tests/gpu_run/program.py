"""Shared by the measuring stages: arguments, time left, cases that may fail, memory given back in between."""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.gpu.stand_in import cuda_of
from tests.gpu_run.report import Rows

RESERVE = 6.0  # seconds before the limit at which no case is begun any more


@dataclass
class Task:
    """The task of a stage.

    Attributes:
        rows: where results go.
        device: "cuda", or "cpu", which stands in for a GPU to try the stage out.
        tiny: sizes that only show that it works.
        end: time.monotonic() at which the stage should be done.
        module: of the stage.
        skip: how many cases a process before this one has done.
        failed: whether one of those failed.
    """

    rows: Rows
    device: torch.device
    tiny: bool
    end: float
    module: str = ""
    skip: int = 0
    failed: bool = False

    @property
    def cuda(self) -> Any:
        """Return the functions of torch.cuda for this device."""
        return cuda_of(self.device)

    def left(self) -> float:
        """Seconds."""
        return self.end - time.monotonic()

    def run(self, cases: Iterable[tuple[str, float, Callable[[], None]]]) -> None:
        """Run cases, each a name, the seconds that it needs at most, and a function.

        Those that there is no time for are named in the rows. Raises SystemExit if a case failed. An error that the
        device does not recover from, such as an illegal address, costs the process: another one goes on.
        """
        done, failed, omitted = 0, ["one before"] * self.failed, []
        for i, (name, needs, function) in enumerate(cases):
            if i < self.skip:
                continue
            if self.left() < needs:
                omitted.append(name)
                continue
            try:
                function()
                done += 1
            except Exception as error:
                traceback.print_exc()
                failed.append(name)
                self.rows.add(name, "failed", why=f"{type(error).__name__}: {error}"[:300])
            try:
                self.give_back()
            except Exception:
                traceback.print_exc()
                self.go_on_anew(i + 1)
        if omitted:
            self.rows.add("no time for", ", ".join(omitted))
        print(f"{done} cases, {len(omitted)} without time, failed: {', '.join(failed) or 'none'}")
        if failed:
            raise SystemExit(1)

    def go_on_anew(self, skip: int) -> None:
        """Become a process that goes on behind the first `skip` cases. Closed files give the device's memory back."""
        seconds = f"{self.left() + RESERVE:.1f}"
        arguments = ["-m", self.module, *sys.argv[1:], "--skip", str(skip), "--failed", "--seconds", seconds]
        sys.stdout.flush()
        sys.stderr.flush()
        os.closerange(3, 1 << 16)
        os.execv(sys.executable, [sys.executable, *arguments])

    def give_back(self) -> None:
        """Free what the last case held."""
        gc.collect()
        self.cuda.synchronize()
        self.cuda.empty_cache()


def task(module: str, description: str | None) -> Task:
    """The task of a stage's command line."""
    name = module.rpartition(".")[2]
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=(description or "").splitlines()[0])
    parser.add_argument("--rows", type=Path, help="file that a line of JSON is appended to for each result")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes that only show that it works")
    parser.add_argument("--seconds", type=float, default=float(os.environ.get("GPU_RUN_SECONDS", "600")))
    parser.add_argument("--skip", type=int, default=0, help="cases that were done before")
    parser.add_argument("--failed", action="store_true", help="one of which failed")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU")
    if args.tiny:
        torch.set_num_threads(1)
    end = time.monotonic() + args.seconds - RESERVE
    return Task(Rows(args.rows, name), torch.device(args.device), args.tiny, end, module, args.skip, args.failed)
