"""Numbers on their way from a device, as far as a machine without one can tell."""

import pytest
import torch

from amp_engine.devices import HostNumber, moved


class Event:
    """A CUDA event that may be asked only while nothing is captured, as CUDA has it."""

    def query(self) -> bool:
        assert not torch.cuda.is_current_stream_capturing()
        return True

    def synchronize(self) -> None:
        assert not torch.cuda.is_current_stream_capturing()


@pytest.mark.parametrize("capturing", [False, True])
def test_what_comes_from_a_gpu_is_not_asked_for_during_a_capture(monkeypatch, capturing):
    number = HostNumber(torch.tensor(2.0))
    number._event = Event()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    assert number.is_known() is not capturing


def test_a_number_of_the_host_is_known_at_once():
    number = HostNumber(torch.tensor(2.0))
    assert number.is_known()
    assert number.read() == 2.0


def test_what_is_there_is_not_moved():
    t = torch.zeros(3)
    assert moved(t, torch.device("cpu")) is t
