"""What of a row is beyond its limits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from tests.zoo.reasons import REASONS

LIMIT = 2.0  # of the error at a level, in errors under autocast

SAME = 1.1


def complaints(row: Mapping[str, Any]) -> list[str]:
    """What is beyond its limits and has no reason."""
    reasons = REASONS.get(row["architecture"], {})
    return [f"{what}: {text}" for what, text in findings(row).items() if what not in reasons]


def findings(row: Mapping[str, Any]) -> dict[str, str]:
    """What is beyond its limits: `as loaded`, `exported`, `O5`, `O2`, `training O5` or `training O2`, and how."""
    return dict(_findings(row)) if "error" not in row else {}


def _findings(row: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    loaded = row["as_loaded"]
    if "error" in loaded:
        yield "as loaded", loaded["error"]
    elif "loaded" not in loaded:
        if not loaded["equal"]:
            name, difference = max(loaded["different"].items(), key=lambda item: item[1], default=("no output", 0))
            yield "as loaded", f"{name} differs by {difference:.1e} of its largest element"
        if loaded["exported"]:
            yield "exported", f"{len(loaded['exported'])} tensors in another dtype, first {loaded['exported'][0]}"
    for level in ("O5", "O2"):
        value = ratio(row, level)
        if runs_under_autocast(row, level):
            if isinstance(value, str):
                yield level, value
            elif (value > LIMIT or math.isnan(value)) and not is_that_of_half(row, level):
                yield level, f"{value:.2f} times the error of autocast"
        training = row["training"][level]
        if "error" in training:
            if not isinstance(value, str):
                yield f"training {level}", training["error"]
        elif not training["finite"]:
            yield f"training {level}", "weights are not finite"


def is_that_of_half(row: Mapping[str, Any], level: str) -> bool:
    """True if the model in plain half, with FP32 buffers, is as far off: then no choice of casts is the cause."""
    half = row["errors"].get(f"half {level}", {})
    return "rms" in half and row["errors"][level]["rms"] <= SAME * half["rms"]


def ratio(row: Mapping[str, Any], level: str) -> float | str:
    """The error at a level in errors under autocast, or what was raised."""
    errors = row["errors"]
    if "error" in errors:
        return errors["error"]
    own, autocast = errors[level], errors[f"autocast {level}"]
    if "error" in own:
        return own["error"]
    if "error" in autocast:
        return f"autocast: {autocast['error']}"
    if not own["rms"] and not autocast["rms"]:
        return 1.0
    return own["rms"] / autocast["rms"] if autocast["rms"] else math.nan


def runs_under_autocast(row: Mapping[str, Any], level: str) -> bool:
    """False if autocast raises, or does not stay finite."""
    autocast = row["errors"].get(f"autocast {level}", {})
    return "error" not in autocast and math.isfinite(autocast.get("rms", math.nan))
