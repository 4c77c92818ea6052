"""Runs a script at each level, each time in its own process, one after the other."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from amp_engine.apex import finder
from amp_engine.errors import AmpStateError, AmpValueError
from amp_engine.levels.levels import LEVELS
from amp_engine.tools.advice.advice import Advice
from amp_engine.tools.advice.records import BASE, OWN, Task, Trial

VARIABLE = "AMP_ENGINE_TRIAL"
GRACE = 20.0
"""Seconds that a process may take to end after it has written its trial, or after its deadline."""

SHOWN_LINES = 12
"""The report of a failed script shows this many of the last lines that it printed."""

_CHILD = os.path.join(os.path.dirname(os.path.abspath(__file__)), "child")
_NOTHING_TO_TRY = (
    "The script ended without a loss.backward() of one number and {step} of its optimizer, so there is nothing to try "
    "at other levels.  It has to train in the process that was started: trainings in processes of their own (torchrun, "
    "mp.spawn) are not followed; run the script on one GPU."
)
_NOT_PLAIN = "The script does not call amp.initialize, and cannot be tried as it is: {obstacle}."
_REFUSE_HALF = ("O1", "O4")


def advise(
    argv: Sequence[str],
    *,
    steps: int = 20,
    warmup: int = 5,
    levels: Sequence[str] = tuple(LEVELS),
    seconds: float = 120.0,
    seed: int = 0,
    say: Callable[[str], None] | None = None,
    run: Callable[[Sequence[str], Task], Trial] | None = None,
) -> Advice:
    """Run a few steps of an unmodified training script at each level, and recommend a level.

        print(advise(["train.py", "--data", "cifar"]))
        print(advise(["-m", "package.train"], steps=50, levels=["O0", "O2", "O5"]))

    Each level runs in its own process, with the same arguments, environment, directory and random numbers; SystemExit
    ends the script after its last step. If a script has no amp, the trial initializes its one model and one optimizer
    after their first step, which is not counted, and scales its losses; if its weights are half, its own run is tried,
    too, and O1 and O4, which refuse half weights, are not. In these processes `from apex import amp`
    imports amp_engine's, also if apex is installed. O0 runs twice, first and last, whether it is listed or not.

    Args:
        argv: a script with its arguments, or "-m", a module and its arguments.
        steps: number of steps of the first initialized optimizer.
        warmup: times leave out this many of the first steps.
        levels: the levels to try.
        seconds: a level ends early this long after the start of its process.
        seed: seed of random, numpy, torch and the order of sets, before the script; 0 to 2^32 - 1.
        say: called before each run with a line about it.
        run: does one trial of `argv`; default: in its own process.

    Returns:
        A frozen record: `str()` is a table with the recommendation as its last line, `to_json()` has all records.

    Raises AmpValueError for arguments that are not allowed, AmpStateError if the script fails at O0, if it never calls
    `initialize` and cannot be tried without it, and if several processes would train together.
    """
    check_script(argv)
    _check(steps, warmup, levels, seconds, seed)
    run = run or run_in_process
    others = [level for level in dict.fromkeys(levels) if level != BASE]
    count = len(others) + 2

    def tried(number: int, level: str, steps: int, perturb: bool = False) -> Trial:
        if say is not None:
            say(f"{level}, run {number} of {count}")
        return run(argv, Task(level, steps, time.monotonic() + seconds, seed, perturb))

    base = tried(1, BASE, steps)
    if base.error is not None:
        raise AmpStateError(f"{BASE} failed, with which the other levels are compared:\n{base.error}")
    if base.obstacle is not None:
        raise AmpStateError(_NOT_PLAIN.format(obstacle=base.obstacle))
    if not any(base.losses):
        raise AmpStateError(_NOTHING_TO_TRY.format(step="a second step" if base.asked is None else "a step"))
    if base.came is not None:
        others = [OWN, *(level for level in others if level not in _REFUSE_HALF)]
        count = len(others) + 2
    enough = base.steps  # if the script ends earlier, its last steps are known now
    found = [tried(i, level, enough) for i, level in enumerate(others, 2)]
    again = tried(count, BASE, enough, perturb=True)
    return Advice(tuple(argv), steps, warmup, base, tuple(found), again)


def run_in_process(argv: Sequence[str], task: Task) -> Trial:
    """Do one trial in its own process, which is killed at the latest `GRACE` seconds after its deadline."""
    with tempfile.TemporaryDirectory(prefix="amp_advise_") as folder:
        result, printed = Path(folder, "trial"), Path(folder, "printed")
        told = dataclasses.asdict(dataclasses.replace(task, path=str(result)))
        environment = child_environment(VARIABLE, told, replaces_apex=True)
        environment.setdefault("PYTHONHASHSEED", str(task.seed))  # data may be read in the order of a set
        with printed.open("wb") as output:
            process = subprocess.Popen(
                child_command(argv),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
            try:
                ended = _wait(process, task.deadline, result)
            finally:
                _end(process)
        trial: Trial | None = pickle.loads(result.read_bytes()) if result.exists() else None
        return judged(trial, task, ended, printed.read_text(encoding="utf-8", errors="replace"))


def child_environment(variable: str, told: Mapping[str, object], *, replaces_apex: bool = False) -> dict[str, str]:
    """This process's environment for a script, in which Python first starts the trial or audit of `variable`.

    `import apex` finds amp_engine's there, also in place of an installed NVIDIA apex with amp if `replaces_apex`.
    """
    environment = {**os.environ, variable: json.dumps(told)}
    path = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join([_CHILD, path] if path else [_CHILD])
    finder.add_children(environment, replace=replaces_apex or "replace" in environment.get(finder.VARIABLE, "").split())
    return environment


def child_command(argv: Sequence[str]) -> list[str]:
    """The command that runs a script or a module."""
    # The options of this interpreter, as multiprocessing passes them to its children: -W, -X, -O, ...
    options = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *options, *argv]


def judged(trial: Trial | None, task: Task, status: int | None, printed: str) -> Trial:
    """Add to a trial the error of its process, if it failed.

    Args:
        trial: the trial that the process wrote, or None.
        status: the exit status of the process; None if it did not end in time.
    """
    trial = trial or Trial(task.level)
    if status == 0 or trial.out_of_time or trial.steps >= task.steps:  # even if it ended badly
        return trial
    lines = printed.strip().splitlines()[-SHOWN_LINES:]
    if status is None:
        lines.append(
            f"({trial.level} was ended: it had not done a step, or did not end after its last one, when its time was "
            "over.  Give it more --seconds; training in processes of its own, as with mp.spawn, is not followed.)"
        )
    else:
        how = f"exit status {status}" if status >= 0 else f"ended by signal {-status}"
        printed = "it printed:" if lines else "nothing was printed"
        lines.insert(0, f"({how} after {trial.steps} of {task.steps} steps; {printed})")
    return dataclasses.replace(trial, error="\n".join(lines))


def _wait(process: subprocess.Popen[bytes], deadline: float, result: Path) -> int | None:
    """Wait for the exit status; None if the process does not end in time."""
    latest = deadline + GRACE
    while (now := time.monotonic()) < latest:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(0.2)
        if result.exists():
            latest = min(latest, now + GRACE)
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and all processes that it started, such as data loaders."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def check_script(argv: Sequence[str]) -> None:
    """Raise AmpValueError if there is no such script, AmpStateError if no script can be followed here."""
    if not argv or (argv[0] == "-m" and len(argv) == 1):
        raise AmpValueError("There is no script to run.  Type a script or `-m package.module`, and its arguments.")
    if argv[0].startswith("-") and argv[0] != "-m":
        raise AmpValueError(f"{argv[0]!r} is neither a script nor -m.  Options of the script stand behind the script.")
    if argv[0] != "-m" and not os.path.exists(argv[0]):
        raise AmpValueError(f"There is no file {argv[0]!r} in {os.getcwd()}.  A module is run by `-m package.module`.")
    if int(os.environ.get("WORLD_SIZE", "1") or 1) > 1:
        raise AmpStateError(
            "WORLD_SIZE is above 1: this is one of several processes that train together.  Run it in one, without "
            "torchrun."
        )
    if sys.flags.ignore_environment or sys.flags.no_site:
        raise AmpStateError(
            "Python's -E, -I and -S keep PYTHONPATH and sitecustomize from the script, and with them the trial.  Leave "
            "them out."
        )


def _check(steps: int, warmup: int, levels: Sequence[str], seconds: float, seed: int) -> None:
    unknown = [level for level in levels if level not in LEVELS]
    if unknown or not levels:
        said = f", {', '.join(map(repr, unknown))} unknown" if unknown else ""
        raise AmpValueError(
            f"levels={','.join(levels)!r}{said}: a level is one of {', '.join(LEVELS)}.  Use for example O0,O2,O5."
        )
    if warmup < 0 or steps < warmup + 2 or not seconds > 0:
        raise AmpValueError(
            f"steps={steps}, warmup={warmup}, seconds={seconds:g}: at least two steps have to follow the warm-up, and "
            "seconds are above 0.  Use for example --steps 20 --warmup 5 --seconds 120."
        )
    if not 0 <= seed < 2**32:
        raise AmpValueError(f"seed={seed}: numpy takes seeds from 0 to {2**32 - 1}.  Use for example --seed 0.")
