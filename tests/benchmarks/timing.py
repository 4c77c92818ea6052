"""Shared by the benchmarks: interleaved rounds, and records as data."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

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

    def __str__(self) -> str:
        of_stream = self.bandwidth_fraction
        share = "" if of_stream is None else f"   {of_stream:.2f} of the stream's bandwidth"
        return (
            f"{self.case:56} {self.ours_us:10.0f} us   {self.ratio:.3f} of {self.peer} ({self.peer_us:.0f} us){share}"
        )


@dataclass(frozen=True)
class Judged(Record):
    """A comparison with a limit. Its `ratio` is the 25th percentile over the rounds, which the limit is for.

    Attributes:
        median_ratio: the median over the same rounds.
        limit: the largest `ratio` that is good enough; None where the figure is for information.
    """

    median_ratio: float = math.nan
    limit: float | None = None

    def __str__(self) -> str:
        verdict = "  " if self.limit is None else f"{self.limit:.2f} {'ok' if self.ratio <= self.limit else 'over'}"
        times = f"{self.ours_us:10.2f} us {self.ratio:6.3f} {self.median_ratio:6.3f}"
        return f"{self.case:64} {times}   {verdict:9}   of {self.peer} ({self.peer_us:.2f} us)"


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


def judged(
    case: str,
    ours: Sequence[float],
    peer: str,
    theirs: Sequence[float],
    limit: float | None,
    base: Sequence[float] = (),
) -> Judged:
    """A record of seconds that were measured in the same rounds.

    Args:
        case, peer, limit: as in the record.
        ours, theirs: seconds, one a round.
        base: taken off both sides first, where given. A round in which nothing is left of the peer counts as infinite.
    """
    if base:
        ours, theirs = ([a - b for a, b in zip(side, base, strict=True)] for side in (ours, theirs))
    ratios = [a / b if b > 0 else math.inf for a, b in zip(ours, theirs, strict=True)]
    return Judged(
        case=case,
        ours_us=micros(ours),
        peer=peer,
        peer_us=micros(theirs),
        ratio=sorted(ratios)[(len(ratios) - 1) // 4],
        median_ratio=statistics.median(ratios),
        limit=limit,
    )


def micros(seconds: Sequence[float]) -> float:
    """Median, in microseconds."""
    return statistics.median(seconds) * 1e6


INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile")


def machine() -> dict[str, Any]:
    """The machine that the records were measured on."""
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    found = dict(line.split(":", 1) for line in cpuinfo.splitlines() if ":" in line)
    fields = {key.strip(): value.strip() for key, value in found.items()}
    flags = fields.get("flags", "").split()
    return {
        "cpu": fields.get("model name", platform.processor() or platform.machine()),
        "instructions": [
            flag for flag in ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile") if flag in flags
        ],
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def write(records: Sequence[Any], path: Path) -> None:
    """Write `records`, dataclasses, and the machine as JSON; print them as a table."""
    path.parent.mkdir(parents=True, exist_ok=True)
    found = machine()
    data = {"machine": found, "records": [asdict(record) for record in records]}
    path.write_text(json.dumps(data, indent=2) + "\n")
    print(f"{found['date']}, {found['cpu']} ({', '.join(found['instructions'])}), torch {found['torch']}")
    if any(isinstance(record, Judged) for record in records):
        print(f"{'':64} {'ours':>13} {'p25':>6} {'median':>6}   limit")
    for record in records:
        print(record)
    print(path)
