"""Compiles variants.cu, which compares ways through memory, and runs it."""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path

from tests.gpu_run.machine import query
from tests.gpu_run.report import Rows
from toolchain import find_toolkit

SOURCE = Path(__file__).with_suffix(".cu")
FLAGS = ("-O3", "-std=c++20", "-fmad=false", "-Xptxas", "-v")  # as setup.py has them


def compiled(architecture: str, target: Path) -> Path:
    """The program for an architecture, such as "90"."""
    toolkit = find_toolkit()
    if toolkit is None:
        raise SystemExit("no nvcc was found")
    target.parent.mkdir(parents=True, exist_ok=True)
    code = f"-gencode=arch=compute_{architecture},code=sm_{architecture}"
    command = [f"{toolkit.home}/bin/nvcc", *FLAGS, code, "-o", str(target), str(SOURCE)]
    subprocess.run(command, check=True)
    return target


def add_rows(rows: Rows, printed: str) -> int:
    """Write what the program printed, and how much that is."""
    lines = [line for line in printed.splitlines() if line.startswith("{")]
    for line in lines:
        numbers = json.loads(line)
        rows.add("update of 256M parameters", numbers.pop("what"), **numbers)
    return len(lines)


def main() -> None:
    """Compile for the first GPU, and run."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_run.variants", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=Path)
    args = parser.parse_args()
    capability = query("compute_cap").replace(".", "")
    program = compiled(capability if capability.isdigit() else "90", Path("build/variants"))
    done = subprocess.run([str(program)], stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout)
    print(f"{add_rows(Rows(args.rows, 'variants'), done.stdout)} lines")
    raise SystemExit(done.returncode)


if __name__ == "__main__":
    main()
