"""The time of the device and the time of the host, as two numbers.

Before the first event the queue is filled with a kernel that only waits, for longer than the host needs to queue the
work: between the events there is then device time alone. How often that held is reported (`kept_full`); where a
contestant waits for the device by itself it cannot hold, and the device's time contains the host's. The host's time is
measured in calls of their own, on a drained queue.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tests.benchmarks.timing import median_ratio
from tests.gpu.stand_in import calls_of, cuda_of
from tests.gpu_run.program import Task

Run = Callable[[], object]

CYCLES = 2.0e9  # a second of the waiting kernel, at the highest clock
SHORTEST, LONGEST = 3e-4, 0.15  # seconds that it waits
BACK_TO_BACK = 5  # calls behind one another
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cuStreamSynchronize")


@dataclass(frozen=True)
class Contestant:
    """A piece of work that takes turns with others.

    Attributes:
        what: its name in the report.
        run: the work.
        bytes_each: that it must move for a parameter; None where that is not the point.
        peer: whether our times are compared with its.
        counted: whether its launches and syncs are counted.
    """

    what: str
    run: Run
    bytes_each: float | None = None
    peer: bool = False
    counted: bool = False


class Clock:
    """Events and waits of a device."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = cuda_of(device)

    def drain(self) -> None:
        """Wait until the device has nothing to do."""
        self._cuda.synchronize()

    def host(self, run: Run) -> float:
        """Seconds that the host needs to queue `run`."""
        self.drain()
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    def on_device(self, run: Run, wait: float) -> tuple[float, bool]:
        """Milliseconds of the device, and whether the host had queued all of it before the device began."""
        self.drain()
        start, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
        self._cuda._sleep(int(min(max(wait, SHORTEST), LONGEST) * CYCLES))
        start.record()
        run()
        kept_full = not start.query()
        end.record()
        end.synchronize()
        return start.elapsed_time(end), kept_full

    def back_to_back(self, run: Run) -> float:
        """Milliseconds of one of several calls, as in training: the slower of host and device counts."""
        self.drain()
        start = time.perf_counter()
        for _ in range(BACK_TO_BACK):
            run()
        self.drain()
        return (time.perf_counter() - start) * 1e3 / BACK_TO_BACK


def counts(calls: Sequence[str]) -> dict[str, int]:
    """Return how many of these calls of CUDA launch kernels, how many wait for the device, and how many there are."""
    return {
        "launches": sum("Launch" in call for call in calls),
        "syncs": sum(call in WAITS for call in calls),
        "calls": len(calls),
    }


class Race:
    """Contestants of a case that take turns, a copy among them, whose bandwidth theirs is compared with."""

    def __init__(self, task: Task, rounds: int = 20, warmup: int = 3) -> None:
        self._task, self._clock = task, Clock(task.device)
        self._rounds, self._warmup = (2, 1) if task.tiny else (rounds, warmup)
        self._copied = 1_000 if task.tiny else 250_000_000
        source, target = (torch.randn(self._copied, device=task.device) for _ in range(2))
        self._copy = Contestant("copy", lambda: target.copy_(source), 8.0)

    def run(self, case: str, parameters: int, contestants: Sequence[Contestant], seconds: float) -> None:
        """Write a row for each contestant, which work on so many parameters.

        Rounds end early after `seconds`, but not before three of them.
        """
        clock, everyone = self._clock, [self._copy, *contestants]
        for contestant in everyone:
            for _ in range(self._warmup):
                contestant.run()
        device: list[list[float]] = [[] for _ in everyone]
        host: list[list[float]] = [[] for _ in everyone]
        full: list[list[bool]] = [[] for _ in everyone]
        start = time.monotonic()
        for done in range(self._rounds):
            if done >= 3 and time.monotonic() - start > seconds:
                break
            for i, contestant in enumerate(everyone):
                host[i].append(clock.host(contestant.run))
                ms, kept_full = clock.on_device(contestant.run, wait=2 * max(host[i][-3:]))
                device[i].append(ms)
                full[i].append(kept_full)
        peer = next((i for i, contestant in enumerate(everyone) if contestant.peer), None)
        for i, contestant in enumerate(everyone):
            numbers: dict[str, float] = {
                "ms": statistics.median(device[i]),
                "p10": quantile(device[i], 0.1),
                "p90": quantile(device[i], 0.9),
                "host_ms": statistics.median(host[i]) * 1e3,
                "kept_full": sum(full[i]) / len(full[i]),
                **self._bandwidth(contestant, parameters, device[i], device[0]),
            }
            if contestant is not self._copy:
                numbers["back_to_back_ms"] = clock.back_to_back(contestant.run)
            if peer is not None and contestant is not self._copy and i != peer:
                numbers["ratio"] = median_ratio(device[i], device[peer])
            if contestant.counted:
                contestant.run()
                numbers |= counts(calls_of(contestant.run, self._task.device))
            self._task.rows.add(case, contestant.what, **numbers)

    def _bandwidth(
        self, contestant: Contestant, parameters: int, ms: list[float], copy_ms: list[float]
    ) -> dict[str, float]:
        """Bytes over time, and their share of the copy's of the same rounds."""
        if contestant.bytes_each is None:
            return {}
        n_bytes = contestant.bytes_each * (self._copied if contestant is self._copy else parameters)
        numbers = {"bytes_a_parameter": contestant.bytes_each, "gb_per_s": n_bytes / statistics.median(ms) / 1e6}
        if contestant is not self._copy:
            numbers["of_copy"] = n_bytes / (8.0 * self._copied) * median_ratio(copy_ms, ms)
        return numbers


def quantile(values: Sequence[float], q: float) -> float:
    """The value below which a share `q` of them lies."""
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]
