"""Tensors on their way between devices and the host."""

from __future__ import annotations

import torch
from torch import Tensor

from amp_engine.errors import AmpStateError

_HOST = torch.device("cpu")


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return `tensor` on `device`. Waits if `device` is the host, which could otherwise read an unfinished copy."""
    # Compare first: `to` takes 20 microseconds to do nothing when a model fills the caches.
    return tensor if tensor.device == device else tensor.to(device, non_blocking=device.type != "cpu")


def number_on(device: torch.device, value: float) -> Tensor:
    """Return `value` on `device`, rounded to float32, shape []. Does not wait: the device fills it, without a copy."""
    rounded = float(torch.tensor(value, dtype=torch.float32, device="cpu"))  # `full` refuses to round to inf
    return torch.full((), rounded, dtype=torch.float32, device=device)


def is_capturing(device: torch.device) -> bool:
    """True if work queued on `device` now goes into a CUDA graph, so that nothing may wait for it."""
    if device == _HOST or device.type != "cuda":  # the first test is cheaper
        return False
    if device.index in (None, torch.cuda.current_device()):
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):  # torch asks the stream of the current device
        return torch.cuda.is_current_stream_capturing()


class Downloads:
    """Copies from one device to the host, beside the work of the device. A GPU has a stream for them."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, memory: Tensor, values: Tensor) -> torch.cuda.Event | None:
        """Begin to copy `values`, as the work that is queued now leaves them, into pinned memory of the host.

        Neither may be written, or freed, before the copy has arrived. Returns the event of that; None: it has.
        """
        stream = self._stream
        if stream is None:
            memory.copy_(values)
            return None
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            memory.copy_(values, non_blocking=True)
        arrival = torch.cuda.Event()
        arrival.record(stream)
        return arrival


class HostNumbers:
    """Numbers of one device on their way to the host, in one message. Creating it does not wait; reading may.

    During the capture of a CUDA graph nothing is sent, as replays would not send: such numbers are never known.

    Args:
        values: shape [n]; sent without a copy, so must not be written again.

    Attributes:
        count: number of numbers.
        values: the numbers, once a call has found that they have arrived; else None. Reading this asks no device.
        is_captured: True if the numbers are in a CUDA graph.
    """

    def __init__(self, values: Tensor) -> None:
        self.count = values.shape[0]
        self.values: list[float] | None = None
        self.is_captured = False
        self._event: torch.cuda.Event | None = None
        if values.is_cpu:
            self.values = values.tolist()
            return
        self._device = device = values.device
        self.is_captured = is_capturing(device)
        sent = values.detach()
        self._sent: Tensor | None = sent  # until the values are there
        # Not `.is_cuda`, which drivers of tests on a CPU are known to fake.
        if self.is_captured or device.type != "cuda":
            return
        self._sent = torch.empty_like(sent, device="cpu", pin_memory=True)
        self._sent.copy_(sent, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(device))

    def is_known(self) -> bool:
        """True if the values have arrived. Does not wait. False during a capture on their GPU."""
        if self._event is None:
            return not self.is_captured
        if is_capturing(self._device):  # a query would end the capture
            return False
        if self.values is None and self._event.query():
            self._arrived()
        return self.values is not None

    def read(self, place: int = 0) -> float:
        """Return one of the values. Waits for the device until it has arrived.

        Raises AmpStateError during a capture, which waiting would break, unless the value was known before.
        """
        values = self.values
        return (self._wait() if values is None else values)[place]

    def _wait(self) -> list[float]:
        if self._event is not None:
            if is_capturing(self._device):
                raise AmpStateError(
                    "Whether a step is skipped, or a loss scale, was asked for inside of a CUDA graph's capture, where "
                    "nothing may wait for the GPU.  Ask before the capture, or after it."
                )
            self._event.synchronize()
        return self._arrived()

    def _arrived(self) -> list[float]:
        sent, values = self._sent, self.values
        if sent is None:  # another thread has read the values
            assert values is not None
            return values
        values = sent.tolist()
        if not self.is_captured:  # a replay writes other values
            self.values, self._sent = values, None
        return values
