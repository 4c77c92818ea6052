"""Layers of torch take inputs in the type of their weights; an error says where a forward mixes types all the same."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from amp_engine.errors import AmpError, AmpStateError, AmpWarning
from amp_engine.ground.containers import cast_tensors
from amp_engine.ground.dtypes import LOW_PRECISION, dtype_name
from amp_engine.ground.messages import users_stacklevel
from amp_engine.ground.torch_private import BatchNormBase

_TYPES = (*LOW_PRECISION, torch.float32, torch.float64)
# Norms compute half inputs with FP32 weights: batch norms everywhere, the others on the CPU.
_NORMS = (nn.LayerNorm.forward, nn.GroupNorm.forward)
_BATCH_NORMS = (BatchNormBase.forward, nn.SyncBatchNorm.forward, nn.InstanceNorm1d.forward)
_LAYERS = (
    *(getattr(nn, f"{kind}{n}d").forward for kind in ("Conv", "ConvTranspose") for n in (1, 2, 3)),
    *(kind.forward for kind in (nn.RNN, nn.LSTM, nn.GRU, nn.RNNCell, nn.LSTMCell, nn.GRUCell)),
    *(kind.forward for kind in (nn.Linear, nn.Bilinear, nn.PReLU, nn.MultiheadAttention)),
)


def of_one_type(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return `forward` with inputs in the type of the weights if it is that of a layer of torch, else `forward`.

    A half layer casts inputs of other types; an FP32 layer casts half inputs, and its outputs to the type of these.
    Any other class may mix types on purpose, and so may a class that is derived from one of torch's.
    """
    if forward not in (*_LAYERS, *_NORMS, *_BATCH_NORMS):
        return forward
    takes_half_on_cpu, takes_half = forward in _NORMS, forward in _BATCH_NORMS

    @functools.wraps(forward)
    def in_one_type(self: Any, *args: Any, **kwargs: Any) -> Any:
        weight = self._parameters.get("weight")
        if weight is not None and len(args) == 1 and not kwargs and getattr(args[0], "dtype", None) is weight.dtype:
            return forward(self, args[0])  # nearly every call
        weight = _weight_of(self)
        if weight is None or weight.dtype not in _TYPES:
            return forward(self, *args, **kwargs)
        dtype = weight.dtype
        other = None
        for tensor in _tensors((*args, *kwargs.values())):
            if tensor.dtype is not dtype and tensor.dtype in _TYPES:
                other = tensor
                break
        if other is None:
            return forward(self, *args, **kwargs)
        if dtype in LOW_PRECISION:
            return forward(self, *cast_tensors(args, dtype), **cast_tensors(kwargs, dtype))
        if takes_half or (takes_half_on_cpu and other.is_cpu):
            return forward(self, *args, **kwargs)
        output = forward(self, *cast_tensors(args, dtype), **cast_tensors(kwargs, dtype))
        return cast_tensors(output, other.dtype)

    return in_one_type


def _weight_of(module: nn.Module) -> nn.Parameter | None:
    for param in module._parameters.values():  # `module.weight` would compute a parametrization
        if param is not None:
            return param
    return next(module.parameters(), None)


def _tensors(values: tuple[Any, ...]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):  # states of an RNN, packed sequences
            yield from (item for item in value if isinstance(item, Tensor))


_MIXED = re.compile(
    r"same d?type|dtypes? match|mixed dtype|expected scalar type|should be the same|match weight dtype|promoting not"
    r"|dtype to be equal|same type|equal dtype",
    re.IGNORECASE,
)


class MixedTypes:
    """An operation in a forward was given FP32 and half.

    Attributes:
        module: the innermost module whose forward ran.
        place: file and line, outside of torch.
        buffers: names of the module's own FP32 buffers, which may be the cause.
    """

    def __init__(self, error: RuntimeError, model: nn.Module) -> None:
        self.module, self.place = model, "a compiled function"
        trace = error.__traceback__
        while trace is not None:
            frame = trace.tb_frame
            one = frame.f_locals.get("self")
            if isinstance(one, nn.Module):
                self.module = one
            if not frame.f_globals.get("__name__", "").startswith(("torch.", "amp_engine.")):
                self.place = f"{frame.f_code.co_filename}:{trace.tb_lineno}"
            trace = trace.tb_next
        self.buffers = _fp32_buffers(self.module)


def _fp32_buffers(module: nn.Module) -> list[str]:
    if is_layer(module):
        return []
    return [name for name, b in module.named_buffers(recurse=False) if b.dtype in (torch.float32, torch.float64)]


_NO_LAYERS = (nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def is_layer(module: nn.Module) -> bool:
    """True for a layer of torch or of a class derived from one: it computes with buffers and weights in one type."""
    return any(kind.__module__.startswith("torch.") and kind not in _NO_LAYERS for kind in type(module).__mro__)


def is_of_mixed_types(error: RuntimeError) -> bool:
    """True if torch raised `error` since an operation was given two floating types."""
    return not isinstance(error, AmpError) and _MIXED.search(str(error)) is not None


class CastBuffers:
    """FP32 buffers that a forward gave to an operation beside half, cast to `dtype`.

    Args:
        found: the operation.
        model: all of its modules that have the class of the one that was found are cast: they run the same lines.
    """

    def __init__(self, found: MixedTypes, model: nn.Module, dtype: torch.dtype) -> None:
        self._found, self._dtype = found, dtype
        alike = [one for one in model.modules() if type(one) is type(found.module)]
        self._before = [(one, name, one._buffers[name]) for one in alike for name in _fp32_buffers(one)]
        for one, name, buffer in self._before:
            assert buffer is not None
            one._buffers[name] = buffer.to(dtype)

    def undo(self) -> None:
        """Put the FP32 buffers back."""
        for one, name, buffer in self._before:
            one._buffers[name] = buffer

    def warn(self) -> None:
        """Tell the user."""
        names, half = ", ".join(self._found.buffers), dtype_name(self._dtype)
        warnings.warn(
            f"{type(self._found.module).__name__} gave its FP32 buffers {names} to an operation beside {half}, at "
            f"{self._found.place}: they are {half} from now on.  To compute in FP32 there, call amp.keep_float on this "
            "module before amp.initialize.",
            AmpWarning,
            stacklevel=users_stacklevel(),
        )


def cast_buffers(error: RuntimeError, module: nn.Module, dtype: torch.dtype) -> CastBuffers | None:
    """Cast the FP32 buffers of the innermost module that ran in a forward of `module`, or else those of `module`.

    Returns None if `error` is not of mixed types, or if there are no such buffers.
    """
    if not is_of_mixed_types(error):
        return None
    found = MixedTypes(error, module)
    if not found.buffers:
        found.module, found.buffers = module, _fp32_buffers(module)
    return CastBuffers(found, module, dtype) if found.buffers else None


def mixed_types(error: RuntimeError, model: nn.Module, dtype: torch.dtype | None) -> AmpStateError | None:
    """Return an error that names the module in which FP32 met `dtype`; None if `error` says something else.

    Args:
        dtype: the type that the model was cast to; None or FP32 gives None.
    """
    if dtype not in LOW_PRECISION or not is_of_mixed_types(error):
        return None
    found = MixedTypes(error, model)
    name = next((name for name, module in model.named_modules() if module is found.module), "")
    module = f"model.{name}" if name else "model"
    stay = f"  Its FP32 buffers may be the cause: {', '.join(found.buffers[:3])}." if found.buffers else ""
    half = dtype_name(dtype)
    other = "O4" if dtype is torch.bfloat16 else "O1"
    return AmpStateError(
        f"{type(found.module).__name__}{f' {name!r}' if name else ''} gave an operation both float32 and {half}, at "
        f"{found.place}: {error}.  The model computes in {half}, and its forward has made or kept float32.{stay}  "
        f"Write .to(torch.{half}) there, or call amp.keep_float({module}) before amp.initialize, or choose "
        f"opt_level={other!r}, which casts functions."
    )
