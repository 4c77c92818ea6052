"""Stages: programs that run one after the other, each for so long at most, whatever became of those before."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = f"{Path(__file__).parents[2]}/"

GRACE = 3.0  # seconds between asking a program to end and killing it
TAIL = 30  # lines of a failed stage's output that the report keeps

OK, FAILED, OVERRAN, UNFINISHED = "ok", "failed", "overran", "unfinished"


@dataclass(frozen=True)
class Stage:
    """A program and its limit.

    Attributes:
        name: one word.
        command: what is run, in the root of the repository.
        limit: seconds.
        expected: seconds that it takes on an H200.
        environment: what is set besides.
        takes_the_rest: whether it is also given the time that earlier stages left.
        apart: whether its time is not shared with the others.
    """

    name: str
    command: Sequence[str]
    limit: float
    expected: int = 0
    environment: dict[str, str] = field(default_factory=dict)
    takes_the_rest: bool = False
    apart: bool = False


@dataclass(frozen=True)
class Outcome:
    """The outcome of a stage.

    Attributes:
        stage: its name.
        outcome: OK, FAILED or OVERRAN.
        seconds, limit: that it took, and that it was given.
        note: the last line that it printed.
        tail: its last lines, if it did not end well.
    """

    stage: str
    outcome: str
    seconds: float
    limit: float
    note: str
    tail: list[str] = field(default_factory=list)


def run(stage: Stage, limit: float, log: Path, environment: dict[str, str]) -> Outcome:
    """Run a stage to its end or its limit, and append what it prints to `log` line by line."""
    start = time.monotonic()
    lines: list[str] = []
    with log.open("a") as file:

        def say(line: str) -> None:
            file.write(line)
            file.flush()
            print(line, end="", flush=True)

        say(f"\n=== {stage.name}: at most {limit:.0f} s\n=== {' '.join(stage.command)}\n")
        variables = {**os.environ, **environment, **stage.environment, "GPU_RUN_SECONDS": f"{limit:.1f}"}
        try:
            process = subprocess.Popen(
                stage.command,
                env=variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            say(f"{error}\n")
            return Outcome(stage.name, FAILED, time.monotonic() - start, limit, str(error), [str(error)])
        reader = threading.Thread(target=_read, args=(process, lines, say), daemon=True)
        reader.start()
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_group(process)
        reader.join(GRACE)  # not for ever: a process that left the group may hold the pipe
        outcome = OVERRAN if code is None else OK if code == 0 else FAILED
        seconds = time.monotonic() - start
        say(f"=== {stage.name}: {outcome} after {seconds:.1f} s\n")
    said = [line for line in lines if line]
    note = said[-1][:200] if said else ""
    return Outcome(stage.name, outcome, seconds, limit, note, [] if outcome == OK else said[-TAIL:])


def _read(process: subprocess.Popen[str], lines: list[str], say: Callable[[str], None]) -> None:
    assert process.stdout
    with process.stdout:
        for line in process.stdout:
            line = line.replace(ROOT, "")  # of warnings and tracebacks
            lines.append(line.rstrip())
            with contextlib.suppress(ValueError):  # the log is closed: the stage is over
                say(line)


def end_group(process: subprocess.Popen[str]) -> None:
    """End a program that leads a group, and what it started. Those that do not listen are killed."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sent)
        except ProcessLookupError:
            break
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    process.wait()


def run_all(
    stages: Sequence[Stage],
    log: Path,
    environment: dict[str, str],
    before: Callable[[Stage], None],
    start: float,
) -> Iterator[Outcome]:
    """Run stages in order, each after a call of `before`; they began at `start`, of time.monotonic().

    Unused time goes to those that take the rest, and what is missing comes from them, up to half of their own.
    """
    planned = 0.0
    for stage in stages:
        left = planned - (time.monotonic() - start)
        limit = max(stage.limit / 2, stage.limit + left) if stage.takes_the_rest else stage.limit
        before(stage)
        outcome = run(stage, limit, log, environment)
        yield outcome
        if stage.apart:
            start += outcome.seconds
        else:
            planned += stage.limit
