"""The few questions about types that the other modules ask."""

from __future__ import annotations

import torch
from torch import Tensor

from amp_engine.errors import AmpTypeError

LOW_PRECISION = (torch.float16, torch.bfloat16)

_NAMES = {
    "float16": torch.float16,
    "half": torch.float16,
    "fp16": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float32": torch.float32,
    "float": torch.float32,
    "fp32": torch.float32,
}


def is_low_precision(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is float16 or bfloat16."""
    return tensor.dtype in LOW_PRECISION


def parse_dtype(value: object, argument: str, allow_float64: bool = False) -> torch.dtype:
    """The training dtype that `value` names: a `torch.dtype`, or a string such as ``"float16"``.

    Raises AmpTypeError, which names `argument`, for anything else.
    """
    if isinstance(value, torch.dtype) and (value in _NAMES.values() or (allow_float64 and value is torch.float64)):
        return value
    if isinstance(value, str) and value.removeprefix("torch.") in _NAMES:
        return _NAMES[value.removeprefix("torch.")]
    raise AmpTypeError(
        f"{argument}={value!r} is no type that a model can be trained in.  Allowed are torch.float16, "
        f"torch.bfloat16 and torch.float32.  Use for example {argument}=torch.float16."
    )


def followed(master: Tensor, param: Tensor) -> Tensor:
    """`master` where it still rounds to what `param` has, else `param`: float32, of the same shape. No host sync."""
    return torch.where(param == master.to(param.dtype), master, param.float())
