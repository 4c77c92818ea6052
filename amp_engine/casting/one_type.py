"""Layers of torch take inputs in the type of their weights; an error says where a forward mixes types all the same."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from amp_engine.errors import AmpError, AmpStateError
from amp_engine.ground.containers import cast_tensors
from amp_engine.ground.dtypes import LOW_PRECISION, dtype_name
from amp_engine.ground.torch_private import BatchNormBase

_TYPES = (*LOW_PRECISION, torch.float32, torch.float64)
# Norms compute half inputs with FP32 weights: batch norms everywhere, the others on the CPU.
_NORMS = (nn.LayerNorm.forward, nn.GroupNorm.forward)
_BATCH_NORMS = (BatchNormBase.forward, nn.SyncBatchNorm.forward, nn.InstanceNorm1d.forward)
_LAYERS = (
    *(getattr(nn, f"{kind}{n}d").forward for kind in ("Conv", "ConvTranspose") for n in (1, 2, 3)),
    *(kind.forward for kind in (nn.RNN, nn.LSTM, nn.GRU, nn.RNNCell, nn.LSTMCell, nn.GRUCell)),
    *(kind.forward for kind in (nn.Linear, nn.Bilinear, nn.PReLU, nn.EmbeddingBag, nn.MultiheadAttention)),
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
    r"same (scalar |d)?type|dtypes? match|mixed dtype|expected (scalar type|dtype)|types? .*(should|must) be the same"
    r"|match weight dtype|promoting not|dtype to be equal|equal dtype",
    re.IGNORECASE,
)


_NO_LAYERS = (nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def is_layer(module: nn.Module) -> bool:
    """True for a layer of torch or of a class derived from one: it computes with buffers and weights in one type."""
    return any(kind.__module__.startswith("torch.") and kind not in _NO_LAYERS for kind in type(module).__mro__)


def mixed_types(error: RuntimeError, model: nn.Module, dtype: torch.dtype | None) -> AmpStateError | None:
    """Return an error that names the module in which FP32 met `dtype`; None if `error` says something else.

    Args:
        dtype: the type that the model was cast to; None or FP32 gives None.
    """
    if dtype not in LOW_PRECISION or isinstance(error, AmpError) or _MIXED.search(str(error)) is None:
        return None
    innermost, place = _where(error, model)
    name = next((name for name, module in model.named_modules() if module is innermost), "")
    module = f"model.{name}" if name else "model"
    half = dtype_name(dtype)
    other = "O4" if dtype is torch.bfloat16 else "O1"
    return AmpStateError(
        f"{type(innermost).__name__}{f' {name!r}' if name else ''} gave an operation both float32 and {half}, at "
        f"{place}: {str(error).rstrip('.')}.  The model computes in {half}, and its forward has made or kept float32.  "
        f"Write .to(torch.{half}) there, or call amp.keep_float({module}) before amp.initialize, or choose "
        f"opt_level={other!r}, which casts functions."
    )


def _where(error: RuntimeError, model: nn.Module) -> tuple[nn.Module, str]:
    """Return the innermost module whose forward raised `error`, and file and line, outside of torch."""
    innermost, place = model, "a compiled function"
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        one = frame.f_locals.get("self")
        if isinstance(one, nn.Module):
            innermost = one
        if not frame.f_globals.get("__name__", "").startswith(("torch.", "amp_engine.")):
            place = f"{frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return innermost, place
