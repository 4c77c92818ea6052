"""The cost of explanations of overflows in a clean step: `make bench` writes build/bench/diagnosis.json.

A step of two layers of 16, in one thread of a CPU, where Python is nearly all of it, is timed as it is and without all
that only the post-mortem and the history of the scale ask for. Both are the same model in the same process.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor, nn

from amp_engine import Engine
from amp_engine.scaling.history import ScaleHistory
from amp_engine.scaling.outcome import Outcome
from amp_engine.stepping.backward import Backward
from amp_engine.stepping.records import Records
from tests.benchmarks.processes import Block, interleaved
from tests.benchmarks.timing import Judged, judged, write
from tests.benchmarks.train import LEARNING_RATE, Step, checked

LIMIT = 1.02
LEVELS = ("O1", "O2", "O4", "O5")  # O4 checks and scales nothing: its loss alone is looked at
# Of a block. CPython specializes code that calls a replaced method anew, after some 50 calls that miss.
WARM, STEPS = 100, 30
LOWER_THIRD = STEPS // 3


@contextmanager
def clean_step(level: str) -> Iterator[Step]:
    """A step that never overflows, as every user has it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    inputs = torch.randn(8, 16)
    with Engine() as engine:
        engine.initialize(model, optimizer, opt_level=level, verbosity=0)

        def step() -> None:
            optimizer.zero_grad()
            loss = model(inputs).float().square().mean()
            with engine.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()

        yield checked(step, model)


@contextmanager
def undiagnosed() -> Iterator[None]:
    """In this context a step leaves nothing that would explain its skip."""

    def nothing(*_: object) -> None:
        return None

    def conclude(backward: Backward, outcome: Tensor) -> None:
        backward.outcome = Outcome(outcome, skips=backward.skips)

    with ExitStack() as off:
        for name in ("number", "note_loss", "note_unchecked"):
            off.enter_context(patch.object(Records, name, nothing))
        off.enter_context(patch.object(ScaleHistory, "note", nothing))
        off.enter_context(patch.object(Backward, "conclude", conclude))
        yield


@contextmanager
def timed(step: Step, around: Callable[[], AbstractContextManager[None]]) -> Iterator[Block]:
    """A block of steps that gives the seconds of one that nothing disturbed much."""

    def block() -> float:
        for _ in range(WARM):
            step()
        seconds = []
        for _ in range(STEPS):
            start = time.process_time()
            step()
            seconds.append(time.process_time() - start)
        return sorted(seconds)[LOWER_THIRD]

    with around():
        yield block


def compare(level: str, rounds: int) -> Judged:
    """Run both in turn. The median counts: the lower quartile of ratios so near to 1 would be that of the noise."""
    with clean_step(level) as step:
        mine, bare = interleaved([partial(timed, step, around) for around in (nullcontext, undiagnosed)], rounds)
    record = judged(f"a clean step of two layers, {level}", mine, "the same step undiagnosed", bare, LIMIT)
    return replace(record, ratio=record.median_ratio)


def main() -> None:
    """Run the cases and write build/bench/diagnosis.json."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.diagnosis", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=201, help="the median counts")
    parser.add_argument("--out", type=Path, default=Path("build/bench/diagnosis.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    write([compare(level, args.rounds) for level in LEVELS], args.out)


if __name__ == "__main__":
    main()
