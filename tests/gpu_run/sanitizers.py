"""compute-sanitizer over small cases: memcheck, racecheck and initcheck side by side.

A machine that has no compute-sanitizer, or that refuses it, is no failure; an error that it finds is one.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.gpu_run.report import Rows

TOOLS = ("memcheck", "racecheck", "initcheck")
REFUSALS = (
    "Device not supported",
    "not supported on this",
    "Failed to initialize",
    "Unable to find",
    "LibraryNotLoaded",
)
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?)")
SANITIZER = "compute-sanitizer"
RESERVE = 8.0


def command(tool: str) -> list[str]:
    """PyTorch asks CUDA about addresses that are no device's: errors of the API are not counted."""
    options = ["--tool", tool, "--report-api-errors", "no"] if tool == "memcheck" else ["--tool", tool]
    return [SANITIZER, *options, "--print-limit", "20", "--target-processes", "all"]


def verdict(output: str, code: int | None) -> tuple[str, bool]:
    """Return the outcome of a tool, and whether it is a failure. `code` is None where it ran out of time."""
    found = [int(number) for number in SUMMARY.findall(output)]
    if any(found):
        return f"{sum(found)} errors", True
    if any(refusal in output for refusal in REFUSALS):
        return "refused", False
    if code is None:
        return "no verdict in time", True
    if code:
        return f"the program failed with status {code}", True
    return ("no errors", False) if found else ("no summary", True)


def main() -> None:
    """Run the tools at once: each takes a processor core and little of the GPU."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_run.sanitizers", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="accepted, as by the other stages")
    args = parser.parse_args()
    rows = Rows(args.rows, "sanitizers")
    program = [sys.executable, "-m", "tests.gpu_run.small", "--device", args.device]
    if not shutil.which(SANITIZER):
        return rows.add("small cases", f"{SANITIZER} is not installed")
    end = time.monotonic() + float(os.environ.get("GPU_RUN_SECONDS", "600")) - RESERVE
    # Each tensor in memory of its own, so that no other tensor lies behind it.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONUNBUFFERED": "1"}
    outputs = {tool: Path(f"build/sanitizer-{tool}.log") for tool in TOOLS}
    Path("build").mkdir(exist_ok=True)
    running = {}
    for tool in TOOLS:
        with outputs[tool].open("w") as file:
            running[tool] = subprocess.Popen(
                command(tool) + program, stdout=file, stderr=subprocess.STDOUT, env=environment
            )
    failed = []
    for tool, process in running.items():
        try:
            code: int | None = process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            code = None
            process.kill()
            process.wait()
        text = outputs[tool].read_text(errors="replace")
        print(f"--- {tool}\n{text[-6000:]}")
        said, is_failure = verdict(text, code)
        rows.add("small cases", tool, found=said)
        if is_failure:
            failed.append(tool)
    print(f"failed: {', '.join(failed) or 'none'}")
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
