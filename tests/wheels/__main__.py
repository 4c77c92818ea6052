"""`make dist`: the sdist, and a wheel for several versions of torch, each tried in an environment of its own.

Each torch gets an environment, in which pip compiles the sdist; the wheel takes the extension of each. What pip made
of the sdist and the wheel are tried on the first and on the last torch, without a compiler.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from tests.wheels.merge import merge

ROOT = Path(__file__).parents[2]
WORK = ROOT / "build/dist"


def run(*command: str | Path, folder: Path = ROOT, **variables: str) -> None:
    """Run a program. Raises CalledProcessError if it fails."""
    print("$", *command, flush=True)
    subprocess.run(command, cwd=folder, env={**os.environ, **variables}, check=True)


def environment(name: str, *requirements: str) -> Path:
    """Make an environment, and return its Python."""
    venv.create(WORK / name, clear=True, with_pip=True)
    python = WORK / name / "bin/python"
    run(python, "-m", "pip", "install", "--quiet", *requirements)
    return python


def the_only(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


def attempt(python: Path, package: Path) -> None:
    """Install a package, and train with it where neither its sources nor a compiler are."""
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", package)
    program = ROOT / "tests/wheels/trial.py"
    run(python, "-I", program, ROOT / "README.md", folder=WORK, PATH=str(python.parent), AMP_ENGINE_BUILD="")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.wheels", description=__doc__.splitlines()[0])
    parser.add_argument("torches", nargs="+", help="one version of each minor one, oldest first, such as 2.11.0")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="for the two files (default: dist)")
    asked = parser.parse_args()
    shutil.rmtree(WORK, ignore_errors=True)

    tools = environment("tools", "setuptools>=77", "wheel")
    sdist_command = ["egg_info", "--egg-base", WORK, "sdist", "--dist-dir", WORK / "sdist"]
    run(tools, "setup.py", "--quiet", *sdist_command, AMP_ENGINE_BUILD="none")
    sdist = the_only(WORK / "sdist", "*.tar.gz")

    tried = list(dict.fromkeys((asked.torches[0], asked.torches[-1])))
    compiled, pythons = [], {}
    for torch in asked.torches:
        pythons[torch] = environment(f"torch{torch}", f"torch=={torch}")
        run(pythons[torch], "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", WORK / f"wheel{torch}", sdist)
        compiled.append(the_only(WORK / f"wheel{torch}", "*.whl"))
        if torch in tried:
            attempt(pythons[torch], compiled[-1])
        else:
            shutil.rmtree(WORK / f"torch{torch}")  # of gigabytes

    wheel = merge(compiled, WORK, tools)
    for torch in tried:
        attempt(pythons[torch], wheel)
    asked.out.mkdir(exist_ok=True)
    for path in (sdist, wheel):
        shutil.copy(path, asked.out)
        print(f"{asked.out / path.name}: {path.stat().st_size / 1e6:.1f} MB, tried with torch {' and '.join(tried)}")
    shutil.rmtree(WORK)


if __name__ == "__main__":
    sys.exit(main())
