"""A training program that is killed and resumes, and a process that starts it as often as one likes.

`Nursery` starts Python once; each run is a fork of it, which takes milliseconds where an import of torch takes seconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amp_engine import amp
from amp_engine.saving import checkpoint_file
from tests.models import NORMED_MLP
from tests.support import started, train

ROOT = Path(__file__).parent.parent


def adamw(params: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-4)


def rmsprop(params: Any) -> torch.optim.RMSprop:
    return torch.optim.RMSprop(params, lr=1e-3, momentum=0.9)


SEVEN_BYTES = {"opt_level": "O5", "master_weights": "24bit", "moment_dtype": "8bit"}
FORMS: dict[str, dict[str, Any]] = {
    "O2": {"opt_level": "O2"},
    "seven bytes": SEVEN_BYTES,
    "released gradients": {**SEVEN_BYTES, "release_gradients": True},
    "masters on the CPU": {"opt_level": "O5", "masters_on": "cpu", "moment_dtype": "8bit"},
    "24 bits, the class's step": {"opt_level": "O5", "master_weights": "24bit", "make": rmsprop},
}


@dataclasses.dataclass(frozen=True)
class Order:
    """An order for one run.

    Attributes:
        path: the checkpoint, from which the run resumes if it is there, and which it writes after each step.
        last: the step after which it ends.
        kill_before: the number of the operation of its first save before which it kills itself, from 0.
        kill_after: seconds after its start, or after the beginning of its first save, at which it is killed.
        saving: True if `kill_after` counts from the beginning of the first save.
        form: a key of FORMS.
    """

    path: str
    last: int
    kill_before: int | None = None
    kill_after: float | None = None
    saving: bool = False
    form: str = "O2"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a run.

    Attributes:
        digests: of everything, by the number of steps done; the first is what was resumed from.
        saved: the last step whose save was seen to end.
        in_save: whether it ended between the beginning and the end of a save.
        operations: those of the first save that were begun, by name.
        killed: whether a SIGKILL ended it.
    """

    digests: dict[int, str]
    saved: int
    in_save: bool
    operations: list[str]
    killed: bool


def digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """SHA-256 of every bit that the run goes on from."""
    found = hashlib.sha256()
    feed(found, [model.state_dict(), optimizer.state_dict(), amp.state_dict(), list(model.parameters())])
    return found.hexdigest()


def feed(found: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        found.update(str((value.dtype, value.shape)).encode())
        found.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        feed(found, list(value.items()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            feed(found, item)
    else:
        found.update(repr(value).encode())


def run(order: Order, say: Any, watch: AbstractContextManager[None]) -> None:
    """Resume, train, save after each step; an overflow now and then moves the scale, or leaves parameters out."""
    options = dict(FORMS[order.form])
    seed = 77 if os.path.exists(order.path) else 0
    model, optimizer = started(options.pop("opt_level"), options.pop("make", adamw), seed=seed, **options)
    step = 0
    if os.path.exists(order.path):
        step = amp.load(order.path, model=model, optimizer=optimizer)["step"]
    say("step", step, digest(model, optimizer))
    while step < order.last:
        train(NORMED_MLP, model, optimizer, "o" if step % 5 == 1 else "c", first=step)
        step += 1
        say("step", step, digest(model, optimizer))
        say("saving", step)
        with watch:
            amp.save(order.path, model=model, optimizer=optimizer, step=step)
        say("saved", step)
        watch = contextlib.nullcontext()


@contextlib.contextmanager
def operations(kill_before: int | None, say: Any) -> Iterator[None]:
    """Say each operation of a save, and kill this process before one of them. Never undone: the process is a fork."""
    count = 0

    def counted(owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def replacement(*args: Any, **keywords: Any) -> Any:
            nonlocal count
            if count == kill_before:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1
            say("operation", name)
            return call(*args, **keywords)

        setattr(owner, name, replacement)

    for name in ("open", "close", "fsync", "replace", "unlink"):
        counted(os, name)
    counted(fcntl, "flock")
    counted(checkpoint_file, "_check_that_it_loads")
    for name in ("write", "finish"):
        counted(checkpoint_file._Checked, name)
    yield


def main() -> None:
    """Run once for each order on standard input; print its outcome."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:  # what torch and we import late, once for all forks
        for last in (1, 2):
            run(Order(f"{folder}/checkpoint.pt", last), lambda *event: None, contextlib.nullcontext())
            amp.close()
    for line in sys.stdin:
        print(json.dumps(dataclasses.asdict(start(Order(**json.loads(line))))), flush=True)


def start(order: Order) -> Outcome:
    """Start one run in a fork of this process."""
    reading, writing = os.pipe()
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        write = os.write  # since operations are counted
        status = 1
        try:

            def say(*event: Any) -> None:
                write(writing, json.dumps(event).encode() + b"\n")

            run(order, say, operations(order.kill_before, say))
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    kill_at = None if order.kill_after is None or order.saving else began + order.kill_after
    text = b""
    while True:
        wait = None if kill_at is None else max(0.0, kill_at - time.monotonic())
        ready, _, _ = select.select([reading], [], [], wait)
        if not ready:
            os.kill(pid, signal.SIGKILL)
            kill_at = None
            continue
        block = os.read(reading, 2**16)
        if not block:
            break
        text += block
        if order.saving and order.kill_after is not None and kill_at is None and b'"saving"' in block:
            kill_at = time.monotonic() + order.kill_after
    os.close(reading)
    _, status = os.waitpid(pid, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) != 0:
        raise SystemExit(f"a run failed: {order}")
    events = [json.loads(line) for line in text.splitlines()]
    kinds = [event[0] for event in events if event[0] != "operation"]
    return Outcome(
        digests={event[1]: event[2] for event in events if event[0] == "step"},
        saved=max((event[1] for event in events if event[0] == "saved"), default=-1),
        in_save=kinds[-1:] == ["saving"],
        operations=[event[1] for event in events if event[0] == "operation"],
        killed=os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL,
    )


class Nursery:
    """Starts runs, one after the other, from a process that has torch and no threads."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.interrupted"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=environment,
            text=True,
        )

    def run(self, path: Path, last: int, **keywords: Any) -> Outcome:
        """Run `Order(path, last, ...)` to its end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(dataclasses.asdict(Order(str(path), last, **keywords))) + "\n")
        self._process.stdin.flush()
        outcome = json.loads(self._process.stdout.readline())
        outcome["digests"] = {int(step): value for step, value in outcome["digests"].items()}
        return Outcome(**outcome)

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def damaged(data: bytes, chance: random.Random) -> tuple[str, bytes]:
    """`data` with one bit turned, or its end cut off, and what was done."""
    if chance.random() < 0.5:
        size = chance.randrange(len(data))
        return f"cut to {size}", data[:size]
    return flipped(data, chance.randrange(8 * len(data)))


def flipped(data: bytes, bit: int) -> tuple[str, bytes]:
    """`data` with this bit turned."""
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return f"bit {bit}", bytes(changed)


if __name__ == "__main__":
    main()
