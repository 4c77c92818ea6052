"""What the benchmarks share: interleaved rounds, and records as data."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

Run = Callable[[], object]


@dataclass(frozen=True)
class Record:
    """One comparison, from one run.

    Attributes:
        case: what was timed.
        ours_us: microseconds, median.
        peer: what it was compared with,
        peer_us: and its time, median of the same rounds.
        ratio: median over the rounds of ours / peer.
        bytes_per_param: what ours reads and writes, by design; None where that is not the point.
        bandwidth_fraction: of a plain read-modify-write stream over as many bytes, in the same rounds; None likewise.
    """

    case: str
    ours_us: float
    peer: str
    peer_us: float
    ratio: float
    bytes_per_param: float | None = None
    bandwidth_fraction: float | None = None


def interleaved(runs: Sequence[Run], rounds: int, warmup: int = 3) -> list[list[float]]:
    """Seconds of each of `runs` in each round. A round runs each once, so that all see the same neighbours."""
    for _ in range(warmup):
        for run in runs:
            run()
    seconds: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for run, times in zip(runs, seconds, strict=True):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
    return seconds


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median over the rounds, each of which compares what ran next to each other."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def micros(seconds: Sequence[float]) -> float:
    """Median, in microseconds."""
    return statistics.median(seconds) * 1e6


def write(records: Sequence[Record], path: Path) -> None:
    """Write `records` as JSON and print them as a table."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(record) for record in records], indent=2) + "\n")
    for r in records:
        share = "" if r.bandwidth_fraction is None else f"   {r.bandwidth_fraction:.2f} of the stream's bandwidth"
        print(f"{r.case:56} {r.ours_us:10.0f} us   {r.ratio:.3f} of {r.peer} ({r.peer_us:.0f} us){share}")
    print(path)
