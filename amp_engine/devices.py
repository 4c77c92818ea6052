"""Tensors on their way between devices and the host."""

from __future__ import annotations

import torch
from torch import Tensor


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`, without waiting unless the host is where it goes.

    A non-blocking copy to the host may be read before it has arrived.
    """
    return tensor.to(device, non_blocking=device.type != "cpu")


class HostFlag:
    """A 0-d device tensor on its way to the host. Creating one does not wait; reading one may.

    While a CUDA graph is captured nothing travels: a replay would not tell the host. Such a flag is never known.
    """

    def __init__(self, value: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self.is_captured = value.is_cuda and torch.cuda.is_current_stream_capturing()
        if self.is_captured:
            self._host = value
        elif value.is_cuda:
            self._host = torch.empty((), dtype=value.dtype, device="cpu", pin_memory=True)
            self._host.copy_(value, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(value.device))
        else:
            self._host = value.cpu()

    def is_known(self) -> bool:
        """Whether the value has arrived. Does not wait."""
        return not self.is_captured and (self._event is None or self._event.query())

    def is_known_clean(self) -> bool:
        """Whether the value has arrived and is 0. Does not wait."""
        return self.is_known() and not self.read()

    def read(self) -> bool:
        """Whether the value is != 0. Waits until it has arrived."""
        if self._event is not None:
            self._event.synchronize()
        return bool(self._host != 0)
