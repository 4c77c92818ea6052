"""What the GPU tests share: tensors at any alignment, twins on the CPU, and a count of kernel launches."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

needs_gpu = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

GPU = torch.device("cuda")
HALVES = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, *HALVES)

# `-k small` is what the sanitizers run: all paths, few elements.
SIZES = [pytest.param((0, 1, 31, 4096), id="small"), pytest.param((65537, 32768, 300_001), id="large")]


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
    """That tensors on any devices hold equal values, or equal NaNs; through sequences."""
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


def assert_rounded(ours: Tensor, exact: Tensor, slack: float = 1e-6) -> None:
    """That `ours` is the float64 value `exact`, but for rounding to its type and `slack` of float32 arithmetic."""
    rtol = {torch.float32: slack, torch.float16: 2.0**-11 + slack, torch.bfloat16: 2.0**-8 + slack}[ours.dtype]
    torch.testing.assert_close(ours.cpu().double(), exact, rtol=rtol, atol=slack)


@contextmanager
def no_sync() -> Iterator[None]:
    """Any host sync that PyTorch knows of raises."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "a prototype feature"
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def calls(body: Callable[[], object]) -> list[str]:
    """The names of the CUDA calls that `body` makes, as the profiler sees them; ours and PyTorch's."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the profiler's own
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
            body()
            torch.cuda.synchronize()
    return [event.name for event in recorded.events() if event.name.startswith(("cuda", "cu"))]


def launches(body: Callable[[], object]) -> int:
    """How many kernels `body` launches."""
    return sum("Launch" in name for name in calls(body))
