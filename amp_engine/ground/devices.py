"""Tensors on their way between devices and the host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from amp_engine.errors import AmpStateError


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`, without waiting unless the host is where it goes.

    A non-blocking copy to the host may be read before it has arrived.
    """
    # Asked first: `to` takes 20 microseconds for nothing where the caches are full of a model.
    return tensor if tensor.device == device else tensor.to(device, non_blocking=device.type != "cpu")


def number_on(device: torch.device, value: float) -> Tensor:
    """`value` on `device`, rounded to float32, shape []. Filled there: the host would wait for a copy of its number."""
    rounded = float(torch.tensor(value, dtype=torch.float32, device="cpu"))  # `full` refuses what it would round to inf
    return torch.full((), rounded, dtype=torch.float32, device=device)


def is_capturing(device: torch.device) -> bool:
    """Whether what is queued on `device` goes into a CUDA graph now, so that nothing may wait for it."""
    if device.type != "cuda":
        return False
    if device.index in (None, torch.cuda.current_device()):
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):  # torch asks the stream of the current device
        return torch.cuda.is_current_stream_capturing()


def current_streams(devices: Iterable[torch.device]) -> tuple[torch.cuda.Stream, ...]:
    """What work on each of those devices that are GPUs is queued on now."""
    return tuple(torch.cuda.current_stream(device) for device in devices if device.type == "cuda")


def wait_for_readers(owners: Sequence[torch.cuda.Stream]) -> None:
    """Have each stream wait for the current one of its device, if that is another. No host sync.

    What is freed on the host is given to the stream that it was allocated for again, though another one may still read
    it. `Tensor.record_stream` is for that, but does not reach memory that is shared copy-on-write. During a capture
    nothing is done: memory of a graph is not given away, and to wait would draw the stream into the graph.
    """
    for owner in owners:
        reader = torch.cuda.current_stream(owner.device)
        if reader != owner and not is_capturing(owner.device):
            owner.wait_stream(reader)


class HostNumbers:
    """0-d tensors of one device on their way to the host, in one message. Creating it does not wait; reading may.

    While a CUDA graph is captured nothing travels: a replay would not tell the host. Such numbers are never known.

    Attributes:
        count: how many they are.
        values: what they are, once somebody has found that they are there. Whoever looks here asks no device.
        is_captured: whether they are in a CUDA graph.
    """

    def __init__(self, *values: Tensor) -> None:
        self.count = len(values)
        self.values: list[float] | None = None
        self.is_captured = False
        self._event: torch.cuda.Event | None = None
        if values[0].is_cpu:
            self.values = [value.item() for value in values]
            return
        self._device = device = values[0].device
        self.is_captured = is_capturing(device)
        sent = torch.stack(values).detach()
        self._sent: Tensor | None = sent  # until the values are there
        # Not `.is_cuda`, which drivers of tests on a CPU are known to fake.
        if self.is_captured or device.type != "cuda":
            return
        self._sent = torch.empty_like(sent, device="cpu", pin_memory=True)
        self._sent.copy_(sent, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(device))

    def is_known(self) -> bool:
        """Whether the values have arrived. Does not wait. During a capture nothing is known that came from a GPU."""
        if self._event is None:
            return not self.is_captured
        if is_capturing(self._device):  # a query would end the capture
            return False
        if self.values is None and self._event.query():
            self._arrived()
        return self.values is not None

    def read(self, place: int = 0) -> float:
        """One of the values. Waits until it has arrived.

        Raises AmpStateError during a capture, which waiting would break, unless it was known before.
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
        if sent is None:  # another thread was here
            assert values is not None
            return values
        values = sent.tolist()
        if not self.is_captured:  # a replay writes others
            self.values, self._sent = values, None
        return values
