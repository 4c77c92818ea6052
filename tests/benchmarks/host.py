"""The host's time in a step, whatever the device: `make bench` writes build/bench/host.json.

Tensors have one element each, so that hardly any arithmetic is in it: what is left is Python, the loops over lists of
tensors, and the tables that a kernel is given. On a GPU it is the step where tensors are many or small: `make gpu`
measures it there (`tests/gpu_run/host.py`).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from amp_engine import Engine
from tests.benchmarks.timing import write
from tests.gpu.stand_in import cuda_of

CPU = torch.device("cpu")
LIMITS_US = {300: 200.0, 10_000: 2000.0}


@dataclass(frozen=True)
class HostRecord:
    """Microseconds of one case, medians.

    Attributes:
        case: level and number of tensors.
        enter_us, exit_us: of `scale_loss`.
        clip_us: `amp.clip_grad_norm_`.
        step_us: AdamW's `step`.
        total_us: of the four.
        limit_us: what `total_us` should not exceed.
    """

    case: str
    enter_us: float
    exit_us: float
    clip_us: float
    step_us: float
    total_us: float
    limit_us: float

    def __str__(self) -> str:
        parts = f"enter {self.enter_us:.0f}, exit {self.exit_us:.0f}, clip {self.clip_us:.0f}, step {self.step_us:.0f}"
        verdict = "ok" if self.total_us <= self.limit_us else "over"
        return f"{self.case:24} {self.total_us:8.0f} us of {self.limit_us:.0f} {verdict:5} ({parts})"


def iterations(level: str, count: int, device: torch.device = CPU) -> Iterator[list[float]]:
    """Seconds of entry, exit, clip and step, one iteration after the other, each on a device that has nothing to do."""
    model = nn.ParameterList(torch.randn(1, device=device) for _ in range(count))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    with Engine() as engine:
        engine.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale="dynamic")
        params, loss = list(model.parameters()), torch.zeros((), device=device)
        gradients = [torch.randn_like(p) for p in params]
        while True:
            backward = engine.scale_loss(loss, optimizer)
            cuda_of(device).synchronize()
            start = time.perf_counter()
            backward.__enter__()
            entered = time.perf_counter()
            for p, g in zip(params, gradients, strict=True):
                p.grad = g.clone()
            left = time.perf_counter()
            backward.__exit__(None, None, None)
            exited = time.perf_counter()
            engine.clip_grad_norm_(optimizer, 1.0)
            clipped = time.perf_counter()
            optimizer.step()
            stepped = time.perf_counter()
            yield [entered - start, exited - left, clipped - exited, stepped - clipped]
            optimizer.zero_grad()


def medians(level: str, count: int, rounds: int, device: torch.device = CPU) -> dict[str, float]:
    """Microseconds of the parts of an iteration and of all of it, after eight iterations that are not counted."""
    runs = iterations(level, count, device)
    seconds = [next(runs) for _ in range(8 + rounds)][8:]
    columns = [*zip(*seconds, strict=True), [sum(parts) for parts in seconds]]
    names = ("enter_us", "exit_us", "clip_us", "step_us", "total_us")
    return {name: statistics.median(column) * 1e6 for name, column in zip(names, columns, strict=True)}


def measured(level: str, count: int, rounds: int) -> HostRecord:
    """Return one record."""
    return HostRecord(f"{level}, {count} tensors", **medians(level, count, rounds), limit_us=LIMITS_US[count])


def main() -> None:
    """Run the cases and write build/bench/host.json."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.host", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=51, help="iterations, of which the median counts")
    parser.add_argument("--out", type=Path, default=Path("build/bench/host.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    records = [measured(level, count, args.rounds) for level in ("O2", "O1", "O5", "O4") for count in LIMITS_US]
    write(records, args.out)


if __name__ == "__main__":
    main()
