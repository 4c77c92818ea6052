"""Tensors on their way between devices and the host."""

from __future__ import annotations

import torch
from torch import Tensor


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`, without waiting unless the host is where it goes.

    A non-blocking copy to the host may be read before it has arrived.
    """
    # Asked first: `to` takes 20 microseconds for nothing where the caches are full of a model.
    return tensor if tensor.device == device else tensor.to(device, non_blocking=device.type != "cpu")


class HostNumber:
    """A 0-d device tensor on its way to the host. Creating one does not wait; reading one may.

    While a CUDA graph is captured nothing travels: a replay would not tell the host. Such a number is never known.
    """

    def __init__(self, value: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        is_cuda = value.device.type == "cuda"  # not `.is_cuda`, which drivers of tests on a CPU are known to fake
        self.is_captured = is_cuda and torch.cuda.is_current_stream_capturing()
        self._host: Tensor | float
        if value.is_cpu:
            self._host = value.item()
            return
        if self.is_captured or not is_cuda:
            self._host = value.detach().clone()
            return
        self._host = torch.empty((), dtype=value.dtype, device="cpu", pin_memory=True)
        self._host.copy_(value, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(value.device))

    def is_known(self) -> bool:
        """Whether the value has arrived. Does not wait. During a capture nothing is known that came from a GPU."""
        if self._event is None:
            return not self.is_captured
        return not torch.cuda.is_current_stream_capturing() and self._event.query()  # a query would end the capture

    def read(self) -> float:
        """The value. Waits until it has arrived."""
        if self._event is not None:
            self._event.synchronize()
        return float(self._host)
