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
    """A 0-d device tensor on its way to the host. Creating one does not wait; reading one may."""

    def __init__(self, value: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if value.is_cuda:
            self._host = torch.empty((), dtype=value.dtype, device="cpu", pin_memory=True)
            self._host.copy_(value, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(value.device))
        else:
            self._host = value.cpu()

    def is_known_clean(self) -> bool:
        """Whether the value has arrived and is 0. Does not wait."""
        return (self._event is None or self._event.query()) and not self.read()

    def read(self) -> bool:
        """Whether the value is != 0. Waits until it has arrived."""
        if self._event is not None:
            self._event.synchronize()
        return bool(self._host != 0)
