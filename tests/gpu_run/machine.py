"""The machine, as far as programs tell, and its clocks meanwhile."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shutil
import statistics
import subprocess
import threading

from tests.gpu_run.report import Row

COLUMNS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "utilization.gpu")
REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")  # newer and older drivers
PROGRAMS = ("make", "g++", "nvcc", "compute-sanitizer")
PACKAGES = ("timm", "transformers", "flashoptim", "transformer_engine", "pytest", "setuptools", "numpy", "triton")
IDLE = 0x1  # of the reasons: no work


def output(*command: str, limit: float = 20.0) -> str:
    """Return the output of a program; empty if it cannot run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=limit)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def query(*names: str) -> str:
    """Return what nvidia-smi says of the first GPU."""
    return output("nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits", "--id=0")


def about() -> dict[str, str]:
    """Date, commit, GPU and driver, torch, and what else the stages use."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": os.environ.get("COMMIT") or output("git", "describe", "--always", "--dirty") or "unknown",
        "gpu": query("name", "memory.total") or "none",
        "driver": query("driver_version") or "none",
        "torch": installed("torch"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "programs": ", ".join(name if shutil.which(name) else f"no {name}" for name in PROGRAMS),
        "packages": ", ".join(f"{name} {installed(name)}" for name in PACKAGES),
    }


class Clocks:
    """Asks for clocks, power and what throttles every second, for the stage that runs, unless that is refused."""

    def __init__(self) -> None:
        self.stage = ""
        self._samples: dict[str, list[list[str]]] = {}
        self._process: subprocess.Popen[str] | None = None
        names = next(((*COLUMNS, reason) for reason in REASONS if _is_answered(query(reason))), COLUMNS)
        if not query(*names):
            return
        command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits", "--id=0", "-l", "1"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process
        assert self._process.stdout
        with self._process.stdout as lines:
            for line in lines:
                self._samples.setdefault(self.stage, []).append([part.strip() for part in line.split(",")])

    def close(self) -> None:
        """Stop asking."""
        if self._process:
            self._process.terminate()
            self._process.wait()
            self._reader.join(3.0)

    def rows(self) -> list[Row]:
        """A row for each stage."""
        return [summary(stage, list(samples)) for stage, samples in list(self._samples.items()) if stage]


def _is_answered(answer: str) -> bool:
    return answer.startswith("0x")


def summary(stage: str, samples: list[list[str]]) -> Row:
    """Medians of the clocks and the most of the rest, of the samples in which the GPU worked."""

    def numbers(column: int) -> list[float]:
        found = []
        for sample in samples:
            try:
                found.append(float(sample[column]))
            except (ValueError, IndexError):
                continue
        return found

    utilization = numbers(4)
    if len(utilization) == len(samples) and any(utilization):
        samples = [sample for sample, busy in zip(samples, utilization, strict=True) if busy]
    reasons = 0
    for sample in samples:
        if len(sample) > len(COLUMNS) and sample[-1].startswith("0x"):
            reasons |= int(sample[-1], 16)
    names = ("SM MHz", "memory MHz", "W", "C")
    row: Row = {"stage": stage, "samples": len(samples)}
    for column, (name, of) in enumerate(zip(names, (statistics.median, statistics.median, max, max), strict=True)):
        values = numbers(column)
        row[name] = f"{of(values):.0f}" if values else ""
    return row | {"reasons": hex(reasons & ~IDLE)}


def installed(package: str) -> str:
    """Return its version, or "none" if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"
