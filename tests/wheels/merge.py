"""Make one wheel of several, each of which was compiled for another torch."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

LACKS_CUDA = "this wheel is for the CPU: install nvcc, and a torch that is built with CUDA"


def kind_of(wheel: Path) -> str:
    """The kernels in a wheel that pip made, by its name: "cpu", "cu13" for a major version of CUDA, or "none"."""
    found = re.search(r"-1(cpu|cu\d\d)\d?\.torch", wheel.name)
    return found[1] if found else "none"


def write_record(extension: Path, kind: str, torch: str) -> None:
    """Write setup.py's record beside an extension, for a minor version of torch instead of one version."""
    mode, reason = ("cpu", LACKS_CUDA) if kind == "cpu" else ("cuda", None)
    extension.with_suffix(".json").write_text(json.dumps({"mode": mode, "torch": torch, "reason": reason}) + "\n")


def collect(packages: list[Path], kind: str) -> None:
    """Move the extension of each package into the last one, named for its minor version of torch.

    The record `_C.*.json` stays, for a torch that has none: it names those that have one.
    """
    minors = []
    for package in packages:
        (record,) = package.glob("_C.*.json")
        minor = re.match(r"\d+\.\d+", json.loads(record.read_text())["torch"])[0]
        name = record.name.replace("_C.", f"_C_{minor.replace('.', '_')}.", 1)
        extension = shutil.move(record.with_suffix(".so"), (packages[-1] / name).with_suffix(".so"))
        write_record(extension, kind, minor)
        minors.append(minor)
    write_record(record, kind, re.sub(r", (\S+)$", r" and \1", ", ".join(minors)))


def merge(wheels: list[Path], work: Path, python: Path) -> Path:
    """Pack the extensions of all wheels into one wheel, stripped.

    Args:
        wheels: made by `pip wheel`, for one torch each, the newest last.
        work: a folder, for what is made.
        python: one with the package `wheel`.

    Raises:
        ValueError: if the wheels have kernels of several kinds, or none.
    """
    kinds = {kind_of(wheel) for wheel in wheels}
    if len(kinds) > 1 or "none" in kinds:
        raise ValueError(
            f"The kernels of the wheels are {', '.join(sorted(kinds))}, and must be of one kind. "
            "Set AMP_ENGINE_BUILD to cpu, or to cuda with versions of torch for one CUDA."
        )
    (kind,) = kinds
    folders = []
    for wheel in wheels:
        subprocess.run([python, "-m", "wheel", "unpack", "--dest", work / "unpacked" / wheel.stem, wheel], check=True)
        (folder,) = (work / "unpacked" / wheel.stem).iterdir()
        folders.append(folder)
    collect([folder / "amp_engine" for folder in folders], kind)
    for extension in folders[-1].glob("amp_engine/_C_*.so"):
        subprocess.run(["strip", "--strip-unneeded", extension], check=True)
    (work / "merged").mkdir()
    pack = ["pack", "--build-number", f"1{kind}", "--dest-dir", work / "merged", folders[-1]]
    subprocess.run([python, "-m", "wheel", *pack], check=True)
    (merged,) = (work / "merged").iterdir()
    return merged
