"""Which backend computes: chosen once, by what is compiled.

No operation asks whether there are compiled kernels: it has `backend_for` a device, or `TENSOR_LISTS` on the host.
"""

from __future__ import annotations

from typing import Any

import torch

from amp_engine.kernels import _native, reference, reference_tensor_lists
from amp_engine.kernels.backend import Backend, CompiledCasts, TensorLists
from amp_engine.kernels.native import NativeBackend, NativeTensorLists


# At import, not at each call: asking took a third of a call over four tensors.
def native_backends(module: Any) -> dict[str, Backend]:
    """By the type of a device what the native `module` computes there, if there is a module."""
    if module is None:
        return {}
    native = NativeBackend(module)
    return {"cpu": native, "cuda": native} if module.has_cuda else {"cpu": native}


REFERENCE: Backend = reference
TENSOR_LISTS: TensorLists = reference_tensor_lists if _native.module is None else NativeTensorLists(_native.module)
CASTS: CompiledCasts | None = _native.module
_NATIVE = native_backends(_native.module)


def backend_for(device: torch.device) -> Backend:
    """What computes on tensors that are on `device`."""
    return _NATIVE.get(device.type, REFERENCE)


def has_native(device: torch.device) -> bool:
    """Whether tensors on `device` are computed by the compiled kernels."""
    return device.type in _NATIVE
