"""Shared by the GPU tests: the device, tensors at any alignment, twins on the CPU, and a count of kernel launches.

Where torch finds no GPU, or GPU_TESTS=stand-in, the CPU stands in for one: kernels are compared with themselves, but
what the tests call, expect and tolerate is tried out. GPU_TESTS=gpu asks for a GPU: without one no test is run.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from tests.gpu import stand_in

WANTED = os.environ.get("GPU_TESTS", "")
if WANTED not in ("", "gpu", "stand-in"):
    raise RuntimeError(f"GPU_TESTS={WANTED}: it may be gpu or stand-in")
if WANTED == "gpu" and not torch.cuda.is_available():
    raise RuntimeError("GPU_TESTS=gpu, and torch finds no GPU")
STANDS_IN = WANTED == "stand-in" or not torch.cuda.is_available()

GPU = torch.device("cpu" if STANDS_IN else "cuda")
GPUS = [GPU, GPU] if STANDS_IN else [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
OTHER_DEVICE = torch.device("meta" if STANDS_IN else "cpu")
cuda = stand_in.cuda_of(GPU)

needs_queue = pytest.mark.skipif(STANDS_IN, reason="needs a GPU: the stand-in has no queue of kernels")
needs_two_gpus = pytest.mark.skipif(len(GPUS) < 2, reason="needs two GPUs")

HALVES = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, *HALVES)

# `-k small` is what the sanitizers run: all paths, few elements.
SIZES = [
    pytest.param((0, 1, 31, 4096), id="small"),
    pytest.param((65537, 32768, 40_001 if STANDS_IN else 300_001), id="large"),
]


def memory(numel: int, dtype: torch.dtype, device: torch.device, offset: int = 0) -> Tensor:
    """An uninitialized tensor of shape [numel] that starts `offset` elements behind an aligned address."""
    return torch.empty(numel + offset, dtype=dtype, device=device)[offset:]


def randn(numel: int, dtype: torch.dtype = torch.float32, offset: int = 0) -> Tensor:
    """Normal values on the CPU, shape [numel]."""
    return memory(numel, dtype, torch.device("cpu"), offset).copy_(torch.randn(numel))


def on_gpu(value: object, device: torch.device = GPU) -> object:
    """A copy on the GPU of a tensor of shape [n], or of each in nested lists; of the same alignment."""
    if isinstance(value, list):
        return [on_gpu(item, device) for item in value]
    if isinstance(value, Tensor):
        return memory(value.numel(), value.dtype, device, value.storage_offset()).copy_(value)
    return value


def assert_same_bits(ours: object, theirs: object, what: str = "") -> None:
    """Assert that tensors on any devices hold equal values, or equal NaNs; through sequences."""
    if isinstance(ours, Tensor):
        assert isinstance(theirs, Tensor)
        assert ours.dtype == theirs.dtype
        a, b = ours.cpu(), theirs.cpu()
        assert a.shape == b.shape, what
        assert ((a == b) | (a.isnan() & b.isnan())).all(), what
    elif isinstance(ours, Sequence):
        assert isinstance(theirs, Sequence)
        assert len(ours) == len(theirs)
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert_same_bits(a, b, f"{what}[{i}]")
    else:
        assert ours == theirs


@contextmanager
def no_sync() -> Iterator[None]:
    """In this context any host sync that PyTorch knows of raises; on the stand-in nothing does."""
    cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "a prototype feature"
        cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        cuda.set_sync_debug_mode("default")


def captured(body: Callable[[], object]) -> Callable[[], object]:
    """Return a replay of `body`, captured in a CUDA graph and let go of. On the stand-in it is `body` itself."""
    return stand_in.captured(body, GPU)


def calls(body: Callable[[], object]) -> list[str]:
    """The names of the CUDA calls that `body` makes, ours and PyTorch's. Skips the test where no profiler sees them."""
    if not _launches(stand_in.calls_of(lambda: torch.ones(1, device=GPU), GPU)):
        pytest.skip("the profiler sees no CUDA calls")
    return stand_in.calls_of(body, GPU)


def launches(body: Callable[[], object]) -> int:
    """Return how many kernels `body` launches."""
    return _launches(calls(body))


def _launches(names: list[str]) -> int:
    return sum("Launch" in name for name in names)
