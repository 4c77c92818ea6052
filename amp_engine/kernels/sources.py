"""The digest of the sources of the compiled kernels. setup.py runs this file alone, so it imports nothing of ours."""

from __future__ import annotations

import hashlib
from pathlib import Path

SUFFIXES = (".cpp", ".cu", ".cuh", ".h", ".inl")


def digest(csrc: Path) -> str:
    """Return the SHA-256 of the sources in a clone's `csrc`: their paths and their text."""
    found = hashlib.sha256()
    for path in sorted(path for path in csrc.rglob("*") if path.suffix in SUFFIXES):
        found.update(f"{path.relative_to(csrc).as_posix()}\0".encode() + path.read_bytes())
    return found.hexdigest()
