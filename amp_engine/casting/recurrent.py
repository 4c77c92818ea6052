"""O1 for nn.RNN, nn.LSTM, nn.GRU and their cells, which call `torch._VF` through a name of their module."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from amp_engine.casting import wrappers
from amp_engine.casting.lists import RECURRENT


class RecurrentFunctions:
    """Replaces the module `torch._VF` in `torch.nn.modules.rnn`: casts for recurrent functions, passes others on."""

    def __init__(self, functions: ModuleType, current: wrappers.Current) -> None:
        self._functions = functions
        self.__dict__ |= {name: _recurrent(getattr(functions, name), current) for name in RECURRENT}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._functions, name)


def check_shapes_only(check_input: Callable[..., None], current: wrappers.Current) -> Callable[..., None]:
    """Return an `RNNBase.check_input` that allows an input of another type than the weights if both will be cast."""

    def check(self: nn.RNNBase, input: Tensor, batch_sizes: Tensor | None) -> None:
        weight = self._flat_weights[0]
        both = {input.dtype} if weight is None else {input.dtype, weight.dtype}
        if weight is not None and current() is not None and len(both) == 2 and both.issubset(wrappers.CASTABLE):
            input = torch.empty(input.shape, dtype=weight.dtype, device="meta")
        check_input(self, input, batch_sizes)

    check.__name__ = check_input.__name__
    return check


def cast_chunk(weights: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor] | None:
    """Cast weights that fill one storage by casting the storage's content once; return None if they do not fill one.

    cuDNN needs the weights of a recurrent network in one chunk in its own order, and otherwise compacts them on every
    call. The casts are views of one new chunk at the offsets of the originals, and gradients flow to each weight.
    """
    order = sorted(range(len(weights)), key=lambda i: weights[i].storage_offset())
    end = 0
    for i in order:
        w = weights[i]
        same_storage = w.untyped_storage().data_ptr() == weights[0].untyped_storage().data_ptr()
        if not same_storage or not w.is_contiguous() or w.storage_offset() != end:
            return None
        end += w.numel()
    chunk = torch.cat([weights[i].reshape(-1) for i in order]).to(dtype)
    casts = list(weights)
    for i, piece in zip(order, chunk.split([weights[i].numel() for i in order]), strict=True):
        casts[i] = piece.view_as(weights[i])
    return casts


def _recurrent(fn: wrappers.Function, current: wrappers.Current) -> wrappers.Function:
    cast = wrappers.half(fn, current, f"torch._VF.{fn.__name__}")

    @functools.wraps(fn)
    def wrapper(*args: Any) -> Any:
        casts = current()
        if casts is None or casts.only_observe:
            return cast(*args)
        return cast(*(_chunked(arg, casts.dtype) for arg in args))

    return wrapper


def _chunked(arg: Any, dtype: torch.dtype) -> Any:
    """Cast a list of FP32 weights on CUDA that fill one storage into one chunk; return any other `arg` unchanged."""
    if not isinstance(arg, (list, tuple)) or not arg:
        return arg
    if not all(isinstance(w, nn.Parameter) and w.device.type == "cuda" and w.dtype is torch.float32 for w in arg):
        return arg
    return cast_chunk(arg, dtype) or arg
