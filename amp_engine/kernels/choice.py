"""The compiled kernels by type of device, chosen once. On types without kernels plain PyTorch computes."""

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
