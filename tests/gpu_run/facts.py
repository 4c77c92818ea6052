"""What the machine has: programs, packages, and its GPU as torch sees it."""

from __future__ import annotations

import platform
import shutil

import torch

from tests.gpu_run.machine import installed, output
from tests.gpu_run.program import task
from tests.gpu_run.report import ABOUT

PROGRAMS = ("make", "g++", "nvcc", "ncu", "compute-sanitizer")
PACKAGES = ("timm", "transformers", "pytest", "setuptools", "ninja", "numpy", "triton")


def main() -> None:
    """Write them as a row, and print what the tools say of themselves."""
    for command in (("nvidia-smi",), ("nvcc", "--version"), ("g++", "--version")):
        print(output(*command), flush=True)
    asked = task("tests.gpu_run.facts", __doc__)
    facts = {
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
        "system": platform.platform(),
        "programs": ", ".join(name if shutil.which(name) else f"no {name}" for name in PROGRAMS),
        "packages": ", ".join(f"{name} {installed(name)}" for name in PACKAGES),
    }
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        facts["gpu"] = f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, {gpu.multi_processor_count} SMs"
    asked.rows.write({"stage": "facts", ABOUT: facts})
    print("\n".join(f"{name}: {value}" for name, value in facts.items()))


if __name__ == "__main__":
    main()
