"""Which arguments of a script's `initialize` a trial at another level keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from amp_engine.advice.records import BASE, Dropped
from amp_engine.errors import AmpError
from amp_engine.levels import LEVELS

_OF_ANOTHER_LEVEL = ("cast_model_type", "patch_torch_functions", "master_weights")
_PROPERTIES = (*_OF_ANOTHER_LEVEL, "keep_batchnorm_fp32", "loss_scale", "cast_model_outputs")


def fitted(arguments: Mapping[str, Any], level: str) -> tuple[dict[str, Any], list[Dropped]]:
    """The arguments of `initialize`, by name, with `level` in place of the script's, and what does not fit it.

    At the script's own level all are kept, errors included: that is the script. O0 is what others are compared with, so
    nothing that would make it other than plain FP32 is kept there. Elsewhere a property that makes another level of it
    is dropped, and so is what `Policy.complaints` is about, and a loss scale where the level scales no losses.
    """
    kept = {**arguments, "enabled": True, "opt_level": level}
    dropped = []
    if not arguments.get("enabled", True):
        dropped.append(Dropped("enabled=False", "each level is tried"))
    if level == arguments.get("opt_level", "O1") and level != BASE:
        return kept, dropped
    for name in _PROPERTIES:
        why = _why_not(name, arguments.get(name), level)
        if why is not None:
            dropped.append(Dropped(f"{name}={kept.pop(name)!r}", why))
    return kept, dropped


def _why_not(name: str, value: Any, level: str) -> str | None:
    """Why `level` is tried without this property; None if it is tried with it."""
    if value is None:
        return None
    defaults = LEVELS[level]
    if level == BASE:
        return None if name == "keep_batchnorm_fp32" else f"{BASE} is plain FP32 here"
    if name == "loss_scale":
        return "the level scales no losses" if defaults.loss_scale == 1.0 else None
    if name in _OF_ANOTHER_LEVEL and (level, value) != ("O5", "split"):
        return None if value == getattr(defaults, name) else "it would make another level of it"
    try:
        complaints = [] if name == "cast_model_outputs" else list(defaults.override(**{name: value}).complaints())
    except (AmpError, AssertionError):
        return None  # what no level takes is an error of the script's
    return "it does not fit the level" if complaints else None
