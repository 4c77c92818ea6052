"""Saves and restores a process's random number generators, around work that must not change a run."""

from __future__ import annotations

import random
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor


class RandomState(NamedTuple):
    """The generators of torch on CPU and GPUs, of Python, and of NumPy if it is imported."""

    cpu: Tensor
    gpus: list[Tensor] | None
    python: tuple[Any, ...]
    numpy: Any


def random_state() -> RandomState:
    """Return the present state; without GPUs during the capture of a CUDA graph, which has a state of its own."""
    has_gpus = torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing()
    numpy = sys.modules.get("numpy")
    return RandomState(
        torch.get_rng_state(),
        torch.cuda.get_rng_state_all() if has_gpus else None,
        random.getstate(),
        None if numpy is None else numpy.random.get_state(),
    )


def set_random_state(state: RandomState) -> None:
    """Set all generators to `state`."""
    torch.set_rng_state(state.cpu)
    if state.gpus is not None:
        torch.cuda.set_rng_state_all(state.gpus)
    random.setstate(state.python)
    if state.numpy is not None:
        sys.modules["numpy"].random.set_state(state.numpy)
