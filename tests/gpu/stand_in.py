"""What the GPU tests call of torch.cuda, for the CPU: a device that has done its work when a call returns."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext


class Stream:
    """The only queue there is, always empty."""

    def wait_stream(self, other: Stream) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Event:
    """A mark that is reached as soon as it is set."""

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return True


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
