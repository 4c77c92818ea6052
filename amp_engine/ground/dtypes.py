"""Functions about types that many modules use."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
    """True if `tensor` is float16 or bfloat16."""
    return tensor.dtype in LOW_PRECISION


def dtype_name(dtype: torch.dtype) -> str:
    """`float16` for torch.float16."""
    return str(dtype).removeprefix("torch.")


# Flags of torch.cpu.get_capabilities, and Arm's of /proc/cpuinfo where they differ, with the names of the instructions.
_INSTRUCTIONS: dict[torch.dtype, dict[str, dict[str, str]]] = {
    torch.bfloat16: {
        "x86": {"avx512_bf16": "AVX-512 BF16", "amx_bf16": "AMX"},
        "arm": {"bf16": "BF16"},
    },
    torch.float16: {
        "x86": {"avx512_fp16": "AVX-512 FP16", "amx_fp16": "AMX-FP16"},
        "arm": {"fp16_arith": "FP16 arithmetic", "asimdhp": "FP16 arithmetic"},
    },
}
# Limits that exclude these instructions: https://uxlfoundation.github.io/oneDNN/dev_guide_cpu_dispatcher_control.html
_BELOW_BFLOAT16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")
_BELOW_FLOAT16 = (*_BELOW_BFLOAT16, "AVX512_CORE_BF16")


def cpu_lacks(dtype: torch.dtype) -> str | None:
    """Return the names of instructions for `dtype` if this CPU has none of them and emulates it, else None.

    Takes ONEDNN_MAX_CPU_ISA into account, which limits oneDNN, torch's library for the CPU.
    """
    if dtype not in _INSTRUCTIONS:
        return None
    is_arm = platform.machine().lower() in ("aarch64", "arm64")
    names = _INSTRUCTIONS[dtype]["arm" if is_arm else "x86"]
    isa = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or ""
    is_below = isa.upper() in (_BELOW_FLOAT16 if dtype is torch.float16 else _BELOW_BFLOAT16)
    flags = cpu_flags()
    if not is_below and any(flags.get(flag) for flag in names):
        return None
    return " or ".join(dict.fromkeys(names.values()))


def cpu_flags() -> Mapping[str, Any]:
    """Return the flags of this CPU by name; true for features that it has."""
    capabilities = getattr(torch.cpu, "get_capabilities", None)
    if capabilities is not None:
        return capabilities()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {}
    words = (line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features")))
    return dict.fromkeys(next(words, []), True)


def parse_dtype(value: object, argument: str, allow_float64: bool = False) -> torch.dtype:
    """Return the training dtype that `value` names: a `torch.dtype`, or a string such as ``"float16"``.

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


def followed(master: Tensor, param: Tensor, half: torch.dtype | None = None) -> Tensor:
    """Return `master` where it still rounds to `param`, else `param`: float32, of the same shape. No host sync.

    Args:
        half: the type in which `param` was rounded, before other code converted it; None: its own.
    """
    return torch.where(param == master.to(half or param.dtype).to(param.dtype), master, param.float())
