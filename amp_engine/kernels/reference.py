"""Plain PyTorch as a backend, on any device: the truth of every operation, and what computes without the kernels."""

from __future__ import annotations

from amp_engine.kernels.reference_lists import (
    ListCheck,
    axpby_,
    cast_copy_,
    check,
    l2norm,
    scale_,
    unscale_,
    unscaled,
    update_scale_,
)
from amp_engine.kernels.reference_steps import StepTable

__all__ = [
    "axpby_",
    "built_table",
    "cast_copy_",
    "check",
    "l2norm",
    "repeated_check",
    "scale_",
    "unscale_",
    "unscaled",
    "update_scale_",
]

repeated_check = ListCheck
built_table = StepTable
