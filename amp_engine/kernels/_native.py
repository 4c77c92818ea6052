"""The compiled kernels, or the reason why there are none. The only file that imports `amp_engine._C`."""

import importlib
import importlib.machinery
import json
import os
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from amp_engine.errors import AmpRuntimeWarning

PACKAGE = Path(__file__).parents[1]
# setup.py leaves its record beside the extension, one per Python.
RECORD = (PACKAGE / f"_C{importlib.machinery.EXTENSION_SUFFIXES[0]}").with_suffix(".json")
if (PACKAGE.parent / "setup.py").exists():
    INSTALL = f"pip install --no-deps --editable {PACKAGE.parent}"
else:
    INSTALL = "pip install --no-deps --force-reinstall . (in the clone of amp_engine)"


def read_record(path: Path) -> dict[str, Any]:
    """Read setup.py's record: the mode that it built, its torch, why it built no better one; {} without a record."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, TypeError, ValueError):
        return {}


def refuse_other_torch(built: str | None) -> str:
    """Return the reason to refuse an extension that was compiled against another torch, and warn of it.

    Other reasons give no warning: nothing was compiled that could be lost, or the user switched it off.
    """
    reason = f"they were compiled against torch {built}, and torch {torch.__version__} is installed; run: {INSTALL}"
    warnings.warn(f"amp_engine does not use its compiled kernels, only speed is lost: {reason}", AmpRuntimeWarning, 2)
    return reason


def load(record: dict[str, Any]) -> tuple[ModuleType | None, str | None]:
    """Return the extension, or the reason why there is none and the remedy. Raises nothing.

    Warns:
        AmpRuntimeWarning: if the extension was compiled against another torch.
    """
    if os.environ.get("AMP_ENGINE_BUILD") == "none":
        return None, "AMP_ENGINE_BUILD=none turns the compiled kernels off; unset it"
    if record.get("mode") == "none":
        return None, f"nothing was compiled: {record.get('reason')}; then run: {INSTALL}"
    if record and record.get("torch") != torch.__version__:
        return None, refuse_other_torch(record.get("torch"))
    try:
        extension = importlib.import_module("amp_engine._C")
        built = extension.build_info()["torch"]
    except ModuleNotFoundError:
        return None, f"nothing was compiled for this Python; run: {INSTALL}"
    except Exception as error:
        if "undefined symbol" in str(error):
            return None, refuse_other_torch(f"another version, {error}")
        return None, f"{error}; run: {INSTALL}"
    if not torch.__version__.startswith(built):
        return None, refuse_other_torch(built)
    return extension, None


record = read_record(RECORD)
module, reason = load(record)
