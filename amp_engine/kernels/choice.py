"""The compiled kernels by type of device, chosen once.

On types without kernels plain PyTorch checks, scales and casts, and steps of the kernels are refused.
"""

from __future__ import annotations

from typing import Any

import torch

from amp_engine.kernels import _native, reference_tensor_lists
from amp_engine.kernels.backend import TensorLists


# Called at import: at each call it took a third of the time of an operation on four tensors.
def native_by_device(module: Any) -> dict[str, Any]:
    """Return a dictionary from each type of device that the compiled `module` computes on to `module`; {} for None."""
    if module is None:
        return {}
    return {"cpu": module, "cuda": module} if module.has_cuda else {"cpu": module}


NATIVE = native_by_device(_native.module)
TENSOR_LISTS: TensorLists = reference_tensor_lists if _native.module is None else _native.module
CASTS: Any = _native.module
"""The compiled casts of O1; None if casting/ does them in Python."""


def has_native(device: torch.device) -> bool:
    """True if the compiled kernels compute on `device`."""
    return device.type in NATIVE


def missing(device: torch.device) -> str | None:
    """Say why no compiled kernels compute on `device`, and what adds them; None if there are some."""
    if has_native(device):
        return None
    if _native.module is None:
        return _native.reason
    if device.type == "cuda":
        return f"none for CUDA, {_native.record.get('reason', 'nobody noted why')}; then run: {_native.INSTALL}"
    return f"there are some for CPUs and for GPUs with CUDA, none for {device}"
