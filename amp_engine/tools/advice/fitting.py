"""Fits the arguments of a script's `initialize` to the level of a trial."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from amp_engine.errors import AmpError
from amp_engine.levels.levels import LEVELS
from amp_engine.tools.advice.records import BASE, Dropped
from amp_engine.tools.policy_file import RunPolicy, completed

_OF_ANOTHER_LEVEL = ("cast_model_type", "patch_torch_functions", "master_weights")
_PROPERTIES = (*_OF_ANOTHER_LEVEL, "keep_batchnorm_fp32", "loss_scale", "cast_model_outputs", "moment_dtype")


def fitted(arguments: Mapping[str, Any], level: str) -> tuple[dict[str, Any], list[Dropped], str]:
    """Replace the script's level by `level`, and leave out the arguments that do not fit it.

    Arguments in a policy count as if they had been passed; a trial also keeps the policy's modules in FP32. At the
    script's own level all arguments stay, wrong ones too. At O0, the reference, only arguments stay that leave it plain
    FP32. Other levels drop a property that would make it another level, a property that `Policy.complaints` is about,
    and a loss scale if the level scales no losses.

    Args:
        arguments: the arguments of the script's call, by name.
        level: the level of the trial.

    Returns:
        Arguments for `Engine.initialize`; the dropped ones; and the level that the script asks for, by its policy or
        `opt_level`. Raises like `policy_file.completed` and `RunPolicy.load` for a policy that `initialize` refuses.
    """
    asked, said, names = completed(arguments)
    kept = {**said, "enabled": True, "opt_level": level}
    if names and level != BASE:
        kept["policy"] = RunPolicy(level, names)
    dropped = []
    if not arguments.get("enabled", True):
        dropped.append(Dropped("enabled=False", "each level is tried"))
    if level == asked and level != BASE:
        return kept, dropped, asked
    for name in _PROPERTIES:
        why = _why_not(name, kept.get(name), level)
        if why is not None:
            dropped.append(Dropped(f"{name}={kept.pop(name)!r}", why))
    return kept, dropped, asked


def _why_not(name: str, value: Any, level: str) -> str | None:
    """The reason why `level` is tried without this property; None if it is tried with it."""
    if value is None:
        return None
    defaults = LEVELS[level]
    if level == BASE:
        return None if name == "keep_batchnorm_fp32" else f"{BASE} is plain FP32 here"
    if name == "loss_scale":
        return "the level scales no losses" if defaults.loss_scale == 1.0 else None
    if name in ("cast_model_outputs", "moment_dtype"):
        return None
    try:
        changed = defaults.override(**{name: value})
    except (AmpError, AssertionError):
        return None  # the script's error at every level
    if name in _OF_ANOTHER_LEVEL and (level, value) not in (("O5", "split"), ("O1", True), ("O4", True)):
        return None if getattr(changed, name) == getattr(defaults, name) else "it would make another level of it"
    return "it does not fit the level" if list(changed.complaints()) else None
