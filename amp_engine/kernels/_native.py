"""The compiled kernels, or the reason why there are none. The only file that imports `amp_engine._C`."""

import importlib.machinery
import importlib.util
import json
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from amp_engine.errors import AmpRuntimeWarning
from amp_engine.ground.callers import warn
from amp_engine.kernels.sources import digest

PACKAGE = Path(__file__).parents[1]
WITHOUT = (
    "torch's optimizers take their own steps; the fused classes of amp_engine.optimizers, steps of amp_C, split "
    "masters and narrow moments need the kernels"
)


def find(package: Path, version: str) -> Path:
    """Return the path of the extension for this version of torch; setup.py's record is in the same folder.

    A wheel of `make dist` has an extension for each minor version of torch, a build from the sources has one.
    """
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    of_minor = package / f"_C_{'_'.join(version.split('.')[:2])}{suffix}"
    return of_minor if of_minor.exists() else package / f"_C{suffix}"


EXTENSION = find(PACKAGE, torch.__version__)
IS_CLONE = (PACKAGE.parent / "setup.py").exists()


def install(is_clone: bool, has_pip: bool) -> str:
    """Return the command that compiles the kernels: of uv, which hides torch from builds, where there is no pip."""
    start = "" if has_pip else "uv pip install setuptools ninja && uv "
    target = f"--editable {PACKAGE.parent}" if is_clone else "--force-reinstall . (in the clone of amp_engine)"
    return f"{start}pip install {'' if has_pip else '--no-build-isolation '}--no-deps {target}"


# Not importlib.util.find_spec: asked for pip, setuptools gives up its distutils.
INSTALL = install(IS_CLONE, importlib.machinery.PathFinder.find_spec("pip") is not None)


def read_record(extension: Path) -> dict[str, Any]:
    """Read the record of an extension: mode, torch, digest of the sources, why no better mode; {} without a record."""
    try:
        return dict(json.loads(extension.with_suffix(".json").read_text()))
    except (OSError, TypeError, ValueError):
        return {}


def fits(built: str | None) -> bool:
    """True if an extension built for this torch can be loaded: "2.13" fits 2.13.1 and 2.13.0+cu130, no pre-release."""
    return torch.__version__ == built or bool(re.fullmatch(rf"{re.escape(str(built))}\.\d+(\+.*)?", torch.__version__))


def import_from(path: Path) -> ModuleType:
    """Import a file as `amp_engine._C`, whatever its own name is."""
    loader = importlib.machinery.ExtensionFileLoader("amp_engine._C", str(path))
    loaded = importlib.util.module_from_spec(importlib.machinery.ModuleSpec(loader.name, loader, origin=str(path)))
    loader.exec_module(loaded)
    sys.modules[loader.name] = loaded
    return loaded


def refuse_other_torch(built: str | None) -> str:
    """Return the reason to refuse an extension that was compiled against another torch, and warn of it."""
    return _refused(f"they were compiled against torch {built}, and torch {torch.__version__} is installed")


def _refused(why: str) -> str:
    """Return the reason to refuse an extension, and warn of it.

    Other reasons give no warning: nothing was compiled, or the user switched the kernels off.
    """
    reason = f"{why}; run: {INSTALL}"
    warn(f"amp_engine does not use its compiled kernels: {reason}.  Until then {WITHOUT}", AmpRuntimeWarning)
    return reason


def _not_compiled() -> str:
    """Return the reason: a clone that Python imports before an installation with kernels, or nothing was compiled."""
    for folder in [Path(path).resolve() for path in sys.path]:
        if folder != PACKAGE.parent and any((folder / PACKAGE.name).glob("_C*.so")):
            return (
                f"nothing was compiled in {PACKAGE.parent}, which Python looks into before {folder}, where amp_engine "
                f"has kernels: leave that folder, or run: {INSTALL}"
            )
    return f"nothing was compiled for this Python; run: {INSTALL}"


def load(extension: Path, record: dict[str, Any]) -> tuple[ModuleType | None, str | None]:
    """Return the extension, or the reason why there is none and the remedy. Raises nothing.

    Warns:
        AmpRuntimeWarning: if the extension was compiled against another torch, or from other sources than the clone's.
    """
    if os.environ.get("AMP_ENGINE_BUILD") == "none":
        return None, "AMP_ENGINE_BUILD=none turns the compiled kernels off; unset it"
    if record.get("mode") == "none":
        return None, f"{record.get('reason')}; run: {INSTALL}"
    if record and not fits(record.get("torch")):
        return None, refuse_other_torch(record.get("torch"))
    if not extension.exists():
        return None, _not_compiled()
    if IS_CLONE and record.get("sources", sources := digest(PACKAGE.parent / "csrc")) != sources:
        return None, _refused("they were compiled from other sources than csrc has now, as after a git pull")
    try:
        loaded = import_from(extension)
        built = loaded.build_info()["torch"]
    except Exception as error:
        if "undefined symbol" in str(error):
            return None, refuse_other_torch(f"another version, {error}")
        return None, f"{error}; run: {INSTALL}"
    if not (torch.__version__.startswith(built) or built.startswith(f"{record.get('torch')}.")):
        return None, refuse_other_torch(built)
    return loaded, None


record = read_record(EXTENSION)
module, reason = load(EXTENSION, record)
