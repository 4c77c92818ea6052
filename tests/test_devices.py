"""Numbers on their way from a device, as far as a machine without one can tell."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch

from amp_engine.errors import AmpStateError
from amp_engine.ground import devices
from amp_engine.ground.devices import HostNumbers, moved, number_on


class Event:
    """A CUDA event that may be asked only while nothing is captured, as CUDA has it."""

    def query(self) -> bool:
        assert not devices.is_capturing(torch.device("cuda"))
        return True

    def synchronize(self) -> None:
        assert not devices.is_capturing(torch.device("cuda"))


@pytest.fixture
def number(monkeypatch: pytest.MonkeyPatch) -> HostNumbers:
    """2.0 on its way from a GPU."""
    with monkeypatch.context() as there:
        there.setattr(torch.Tensor, "is_cpu", False)
        number = HostNumbers(torch.tensor([2.0]))
    number._event = Event()
    return number


@pytest.mark.parametrize("capturing", [False, True])
def test_what_comes_from_a_gpu_is_not_asked_for_during_a_capture(monkeypatch, number, capturing):
    monkeypatch.setattr(devices, "is_capturing", lambda device: capturing)
    assert number.is_known() is not capturing
    with pytest.raises(AmpStateError, match="capture") if capturing else nullcontext():
        assert number.read() == 2.0


def test_what_was_known_before_a_capture_may_be_read_in_it_and_is_asked_for_once(monkeypatch, number):
    asked, capturing = [], []
    monkeypatch.setattr(devices, "is_capturing", lambda device: bool(capturing))
    monkeypatch.setattr(Event, "query", lambda event: not asked.append(event))
    assert number.is_known()
    assert number.is_known()
    capturing.append(True)
    assert not number.is_known()
    assert number.read() == 2.0
    assert len(asked) == 1


@pytest.mark.parametrize("current", [0, 1])
def test_the_stream_of_the_device_is_asked_whether_it_captures(monkeypatch, current):
    asked = []

    @contextmanager
    def device(of: torch.device) -> Iterator[None]:
        before, where[0] = where[0], of.index
        yield
        where[0] = before

    where = [current]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: where[0])
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: asked.append(where[0]) or where[0] == 1)
    assert devices.is_capturing(torch.device("cuda", 1))
    assert not devices.is_capturing(torch.device("cuda", 0))
    assert asked == [1, 0]
    assert not devices.is_capturing(torch.device("cpu"))


def test_a_number_of_the_host_is_known_at_once():
    number = HostNumbers(torch.tensor([2.0]))
    assert number.is_known()
    assert number.read() == 2.0


def test_several_numbers_come_in_one_message():
    numbers = HostNumbers(torch.tensor([0.0, 512.0]))
    assert [numbers.count, numbers.read(0), numbers.read(1)] == [2, 0.0, 512.0]
    elsewhere = HostNumbers(torch.tensor([0.0, 512.0], device="meta"))
    assert elsewhere._sent.shape == (2,)


@pytest.mark.parametrize("value", [0.1, -3.0, 1e-46, 1e60, -1e60, float("inf"), float("nan")])
def test_a_number_is_rounded_on_its_way_to_a_device(value):
    number = number_on(torch.device("cpu"), value)
    assert number.shape == ()
    assert number.dtype == torch.float32
    assert torch.equal(number.view(torch.int32), torch.tensor(value, dtype=torch.float32).view(torch.int32))


def test_what_is_there_is_not_moved():
    t = torch.zeros(3)
    assert moved(t, torch.device("cpu")) is t
