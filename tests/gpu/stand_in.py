"""The functions of torch.cuda that tests and measurements call, for a CPU: work is done when a call returns."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def cuda_of(device: torch.device) -> Any:
    """torch.cuda for a GPU, else this module."""
    return torch.cuda if device.type == "cuda" else sys.modules[__name__]


def captured(body: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Return a replay of `body`, captured in a CUDA graph and let go of. On the stand-in it is `body` itself."""
    if device.type != "cuda":
        return body
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph.replay


def calls_of(body: Callable[[], object], device: torch.device) -> list[str]:
    """The names of the CUDA calls that `body` makes, ours and PyTorch's, as the profiler sees them."""
    cuda_of(device).synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the profiler's own
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            body()
        names = [event.name for event in profiler.events()]
    return [name for name in names if name.startswith("cu")]


class Stream:
    """The only queue there is, always empty."""

    def wait_stream(self, other: Stream) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Event:
    """A mark that is reached as soon as it is set."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._at = 0.0

    def record(self) -> None:
        self._at = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return (end._at - self._at) * 1e3


def current_stream() -> Stream:
    return Stream()


def default_stream() -> Stream:
    return Stream()


def stream(given: Stream) -> AbstractContextManager[None]:
    return nullcontext()


def synchronize() -> None:
    pass


def set_sync_debug_mode(mode: str) -> None:
    pass


def _sleep(cycles: int) -> None:
    pass


def mem_get_info() -> tuple[int, int]:
    """Bytes that are free, and all; as little as a test needs."""
    return 1 << 30, 1 << 30


def set_per_process_memory_fraction(fraction: float) -> None:
    pass


def empty_cache() -> None:
    pass


def reset_peak_memory_stats() -> None:
    pass


def max_memory_allocated() -> int:
    return 0
