"""Finds out which kernels can be built here, for setup.py, which installs less rather than nothing."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

MODES = ("none", "cpu", "cuda")


class Toolkit(NamedTuple):
    """A CUDA toolkit: its folder and its version, such as "13.0"."""

    home: str
    version: str


def find_torch() -> ModuleType | None:
    """The torch that the extension will run with. Pip's build isolation hides it from this process's path."""
    if importlib.util.find_spec("torch") is None:
        code = "import json, sys; print(json.dumps(sys.path[1:]))"
        sys.path += json.loads(subprocess.check_output([sys.executable, "-Ec", code]))
    return importlib.import_module("torch") if importlib.util.find_spec("torch") else None


def find_compiler() -> str | None:
    """The C++ compiler that torch will call."""
    return shutil.which(os.environ.get("CXX", "c++").split()[0])


def find_toolkit() -> Toolkit | None:
    """The CUDA toolkit. The nvcc on the PATH may be a script outside of the toolkit, so the headers decide."""
    nvcc = Path(os.path.realpath(shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"))
    for home in (os.environ.get("CUDA_HOME"), str(nvcc.parent.parent), "/usr/local/cuda"):
        if home and Path(home, "bin/nvcc").exists() and Path(home, "include/cuda_runtime_api.h").exists():
            text = subprocess.check_output([f"{home}/bin/nvcc", "--version"], text=True)
            return Toolkit(home, text.split("release ")[1].split(",")[0])
    return None


def best_mode(torch: ModuleType | None, compiler: str | None, toolkit: Toolkit | None) -> tuple[str, str | None]:
    """The best of MODES that can be built, and what a better one needs."""
    if torch is None:
        return "none", (
            "the build saw no torch: it has to be installed before, and uv hides it without --no-build-isolation"
        )
    if compiler is None:
        return "none", "no C++ compiler was found: install g++, or set CXX"
    cuda = torch.version.cuda
    if cuda is None:
        return "cpu", f"torch {torch.__version__} is built without CUDA: install one that is built with it"
    if toolkit is None:
        return "cpu", f"no nvcc was found: install the CUDA toolkit {cuda}, or set CUDA_HOME"
    if toolkit.version.split(".")[0] != cuda.split(".")[0]:
        return "cpu", f"nvcc is of CUDA {toolkit.version} and torch of CUDA {cuda}: install the CUDA toolkit {cuda}"
    return "cuda", None


def plan(forced: str, best: str, why: str | None) -> tuple[list[str], str | None]:
    """The modes to try, best first, and why there is no better one.

    Raises:
        SystemExit: if AMP_ENGINE_BUILD, which is `forced`, is no mode, or one that cannot be built.
    """
    if forced not in ("", *MODES):
        raise SystemExit(f"AMP_ENGINE_BUILD is {forced!r}; allowed are {', '.join(MODES)}")
    if not forced:
        return list(MODES[MODES.index(best) :: -1]), why
    if MODES.index(forced) > MODES.index(best):
        raise SystemExit(f"AMP_ENGINE_BUILD={forced} is impossible: {why}")
    switched = f"AMP_ENGINE_BUILD was {forced}: unset it"
    if forced == "none":
        return [forced], f"{switched}; besides, {why}" if why and best == "none" else switched
    return [forced], why if forced == best else switched
