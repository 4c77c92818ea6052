"""The extension for the GPU that is there: one that lies there already, where it fits, else it is compiled.

`make gpu-carry` compiles on a machine without a GPU what fits on another one: the same torch, Python, GPU and sources.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import subprocess
import sys
import time
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

from tests.gpu_run.machine import output, query
from tests.gpu_run.report import Rows

ROOT = Path(__file__).parents[2]
EXTENSION = ROOT / f"amp_engine/_C{EXTENSION_SUFFIXES[0]}"  # its name has the version of Python
RECORD = EXTENSION.with_suffix(".json")  # of setup.py: mode, torch's version and sources; here, GPUs are added


def sources_hash() -> str:
    """Return the digest of the sources, as setup.py records it; an import refuses kernels of any other."""
    digest: str = runpy.run_path(str(ROOT / "amp_engine/kernels/sources.py"))["digest"](ROOT / "csrc")
    return digest


def read_record() -> dict[str, Any]:
    """Return the record beside the extension; {} if there is none."""
    try:
        return dict(json.loads(RECORD.read_text())) if EXTENSION.exists() else {}
    except (OSError, ValueError):
        return {}


def misfit(record: dict[str, Any], torch_version: str, capability: str) -> str:
    """Why the extension of this record can't be used with this torch, GPU and sources; "" if it can."""
    if not record:
        return f"there is no {EXTENSION.name}"
    wanted = {"mode": "cuda", "torch": torch_version, "sources": sources_hash(), "gpu": capability}
    return ", ".join(
        f"{name} {record.get(name)} instead of {it}" for name, it in wanted.items() if record.get(name) != it
    )


def compile_for(capability: str) -> None:
    """Compile for a compute capability, such as "9.0". Raises CalledProcessError if that fails."""
    variables = {**os.environ, "AMP_ENGINE_BUILD": "cuda", "TORCH_CUDA_ARCH_LIST": capability}
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    subprocess.run(command, cwd=ROOT, env=variables, check=True)
    record = json.loads(RECORD.read_text()) | {"gpu": capability}
    RECORD.write_text(json.dumps(record) + "\n")


def carry(capability: str) -> None:
    """Compile for another machine, without debug information, and say how large it is. Raises if it does not load."""
    compile_for(capability)
    subprocess.run(["strip", "--strip-debug", str(EXTENSION)], check=True)
    if "CPU and CUDA" not in (found := loaded()):
        raise SystemExit(f"What was compiled does not load: {found}")
    for path in (EXTENSION, RECORD):
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1e6:.2f} MB")


def loaded() -> str:
    """Return what `python -m amp_engine info` says of the compiled kernels."""
    info = output(sys.executable, "-m", "amp_engine", "info", limit=60.0)
    lines = [line.removeprefix("kernels").strip() for line in info.splitlines() if line.startswith("kernels")]
    return lines[0] if lines else "unknown"


def build(rows: Rows) -> None:
    """Compile if need be, and write what is there in the end as a row."""
    import torch

    start, capability = time.monotonic(), query("compute_cap") or "9.0"
    why = misfit(read_record(), torch.__version__, capability)
    if not why and "CPU and CUDA" not in (found := loaded()):
        why = f"it does not load: {found}"
    if why:
        compile_for(capability)
    what = f"compiled, since {why}" if why else "nothing was compiled: what lies there fits"
    rows.add("extension", what, kernels=loaded(), seconds=time.monotonic() - start)


def main() -> None:
    """Build for this machine's GPU, or for another's."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_run.build", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--carry", metavar="CAPABILITY", help="compile for another machine's GPU, such as 9.0")
    args = parser.parse_args()
    if args.carry:
        carry(args.carry)
    else:
        build(Rows(args.rows, "build"))


if __name__ == "__main__":
    main()
