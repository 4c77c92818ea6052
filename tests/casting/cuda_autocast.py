"""torch.autocast's kernels for CUDA, run on a machine without one.

Every build of PyTorch has them, at the dispatch key AutocastCUDA. They take tensors that claim to be on CUDA: here a
wrapper around a CPU tensor, and a mode that computes what arrives below autocast and autograd on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Questions about the device and the fused kernels that it has, answered for one that has none.
_ANSWERS = {"_fused_sdp_choice": 0, "_use_cudnn_ctc_loss": False, "_use_miopen_ctc_loss": False}
# Kernels that only a GPU has; shapes and types of their results are enough here.
_STAND_INS = {
    "_thnn_fused_gru_cell": lambda gates, _, h, *rest: (h.to(gates.dtype), gates.clone()),
    "_thnn_fused_lstm_cell": lambda gates, _, c, *rest: (c.to(gates.dtype), c.to(gates.dtype), gates.clone()),
}
# They change no value, or only its type.
_COPIES = {"_to_copy", "_unsafe_view", "clone", "copy_", "detach", "empty_like", "empty_strided", "lift_fresh"}
_CPU = torch.device("cpu")


class OnCuda(Tensor):
    """A CPU tensor that says it is on CUDA."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnCuda:
        tensor = Tensor._make_wrapper_subclass(
            cls, inner.size(), inner.stride(), inner.storage_offset(), dtype=inner.dtype, device="cuda:0"
        )
        tensor.inner = inner
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} outside of Computation")


class Computation(TorchDispatchMode):
    """Computes on the CPU and notes each operator with the floating types of its results."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[tuple[str, tuple[torch.dtype, ...]]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or every operator would take a turn through the compiler's guards

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if func is torch.ops.prim.device.default:
            return args[0].device
        if name in _ANSWERS:
            return _ANSWERS[name]
        given: dict[int, OnCuda] = {}

        def to_cpu(value: Any) -> Any:
            if isinstance(value, OnCuda):
                given[id(value.inner)] = value
                return value.inner
            return _CPU if isinstance(value, torch.device) and value.type == "cuda" else value

        result = _STAND_INS.get(name, func)(*mapped(to_cpu, args), **mapped(to_cpu, kwargs))
        # What was written in place is the very tensor that was given.
        result = mapped(lambda t: on_cuda(t) if id(t) not in given else given[id(t)], result)
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if not is_view and name not in _COPIES:
            self.operators.append((name, floating_types(result)))
        return result


def on_cuda(value: Any) -> Any:
    """`value` as a tensor on CUDA if it is a floating tensor."""
    return OnCuda(value) if isinstance(value, Tensor) and value.is_floating_point() else value


def mapped(function: Callable[[Any], Any], values: Any) -> Any:
    """`values` with `function` applied to what is in its lists, tuples and dictionaries (pytree is slow)."""
    if isinstance(values, (list, tuple)):
        items = [mapped(function, value) for value in values]
        return type(values)(*items) if hasattr(values, "_fields") else type(values)(items)
    if isinstance(values, dict):
        return {key: mapped(function, value) for key, value in values.items()}
    return function(values)


def tensors_in(values: Any) -> list[Tensor]:
    """The tensors among `values`, in their order."""
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, (list, tuple)):
        return [tensor for value in values for tensor in tensors_in(value)]
    return [values] if isinstance(values, Tensor) else []


def floating_types(values: Any) -> tuple[torch.dtype, ...]:
    """Types of the floating tensors among `values`, in their order."""
    return tuple(t.dtype for t in tensors_in(values) if t.is_floating_point())


@contextmanager
def pretended_cuda() -> Iterator[None]:
    """A machine on which CUDA can be initialized, so that factories come as far as `Computation`."""
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr(torch.cuda, "_lazy_init", lambda: None)
        yield


@contextmanager
def cuda_autocast(dtype: torch.dtype) -> Iterator[None]:
    """`torch.autocast("cuda", dtype)`, which would switch itself off where there is no GPU."""
    enabled, before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", enabled)
        torch.set_autocast_dtype("cuda", before)
        torch.set_autocast_cache_enabled(cached)
