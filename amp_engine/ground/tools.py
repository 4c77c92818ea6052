"""Which tools there are, and the only way from here to them: they are loaded when they are called."""

from __future__ import annotations

import importlib
from typing import Any

OF_ENGINE = {
    "audit_updates": "telemetry.update_audit",
    "explain": "explanation",
    "find_overflow": "diagnosis.find_overflow",
    "gradient_histogram": "telemetry.gradient_histogram",
    "overflow_report": "diagnosis.overflow_watch",
    "receipt": "telemetry.receipt",
    "scalars": "telemetry.scalars",
    "step_times": "telemetry.step_times",
    "watch_gradients": "telemetry.gradient_watch",
}
"""Function, whose first argument is an engine -> its module in `amp_engine.tools`."""

OTHERS = {
    "RunPolicy": "policy_file",
    "compare_levels": "telemetry.compare_levels",
    "find_fp32_modules": "telemetry.fp32_modules",
}
"""Function or class that needs no engine -> its module in `amp_engine.tools`."""


def tool(module: str) -> Any:
    """Load a module of `amp_engine.tools`."""
    return importlib.import_module(f"amp_engine.tools.{module}")
