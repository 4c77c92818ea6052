"""A call that would break the capture of a CUDA graph is refused before it does, and has changed nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from amp_engine import amp, kernels
from amp_engine.errors import AmpStateError
from amp_engine.ground import devices
from amp_engine.optimizers import FusedSGD
from amp_engine.scaling.scaler import LossScaler
from tests.models import MLP
from tests.support import backward, frozen, started, train, weights_of

native_only = pytest.mark.skipif(
    not kernels.has_native(torch.device("cpu")), reason="without kernels torch's optimizers step by themselves"
)


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """A context in which every device says that it captures, as far as a machine without a GPU can tell."""

    @contextmanager
    def capture() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(devices, "is_capturing", lambda device: True)
            yield

    return capture


class OwnStep(torch.optim.SGD):
    """The kernels do not step this class, since it might compute anything."""


def sgd(params: Any) -> Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def own_step(params: Any) -> Optimizer:
    return OwnStep(params, lr=0.1, momentum=0.9)


def refused(capture: Callable[[], Any], call: Callable[[], object], optimizer: Optimizer, match: str) -> None:
    before = frozen([weights_of(optimizer), optimizer.state_dict()])
    with capture(), pytest.raises(AmpStateError, match=match):
        call()
    torch.testing.assert_close(frozen([weights_of(optimizer), optimizer.state_dict()]), before, rtol=0, atol=0)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_that_the_host_decides_is_refused_and_may_follow(capture: Callable[[], Any], level: str) -> None:
    outcomes = []
    for captured in (False, True):
        model, optimizer = started(level, own_step, MLP)
        train(MLP, model, optimizer, "c")
        backward(MLP.loss(model, MLP.batch(1)), optimizer)
        if captured:
            refused(capture, optimizer.step, optimizer, "decided on the host")
        optimizer.step()
        outcomes.append(frozen(weights_of(optimizer)))
        amp.close()
    torch.testing.assert_close(outcomes[0], outcomes[1], rtol=0, atol=0)


@native_only
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_without_one_before_is_refused(capture: Callable[[], Any], level: str) -> None:
    model, optimizer = started(level, sgd, MLP)
    backward(MLP.loss(model, MLP.batch(0)), optimizer)
    refused(capture, optimizer.step, optimizer, "at least one iteration")
    train(MLP, model, optimizer, "cc")
    backward(MLP.loss(model, MLP.batch(2)), optimizer)
    before = frozen(weights_of(optimizer))
    with capture():
        optimizer.step()
    assert not any(torch.equal(p, b) for p, b in zip(weights_of(optimizer), before, strict=True))


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("make", [sgd, own_step])
def test_a_step_outside_of_the_graph_that_has_the_backward_is_refused(
    capture: Callable[[], Any], level: str, make: Callable[[Any], Optimizer]
) -> None:
    model, optimizer = started(level, make, MLP)
    train(MLP, model, optimizer, "c")
    with capture():
        backward(MLP.loss(model, MLP.batch(1)), optimizer)
    before = frozen([weights_of(optimizer), optimizer.state_dict()])
    with pytest.raises(AmpStateError, match="Capture step\\(\\) in the same graph"):
        optimizer.step()
    backward(MLP.loss(model, MLP.batch(1)), optimizer)  # adds to gradients that the capture never computed
    with pytest.raises(AmpStateError, match="Capture step\\(\\) in the same graph"):
        optimizer.step()
    torch.testing.assert_close(frozen([weights_of(optimizer), optimizer.state_dict()]), before, rtol=0, atol=0)
    optimizer.zero_grad()
    backward(MLP.loss(model, MLP.batch(1)), optimizer)
    optimizer.step()


def test_so_is_that_of_a_fused_optimizer_without_amp(capture: Callable[[], Any]) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer = FusedSGD([weight], lr=0.1)
    refused(capture, optimizer.step, optimizer, "at least one iteration")
    optimizer.step()
    assert torch.equal(weight, torch.ones(3) - 0.1)


def test_a_loss_scale_that_is_elsewhere_is_refused(capture: Callable[[], Any]) -> None:
    scaler = LossScaler("dynamic")
    with capture(), pytest.raises(AmpStateError, match="its loss scale is on cpu still"):
        scaler.to(torch.device("meta"))
    assert scaler.scale.device == torch.device("cpu")


def test_an_error_for_a_norm_that_is_not_finite_is_refused(capture: Callable[[], Any]) -> None:
    model, optimizer = started("O2", sgd, MLP)
    train(MLP, model, optimizer, "c")
    backward(MLP.loss(model, MLP.batch(1)), optimizer)
    with capture():
        with pytest.raises(AmpStateError, match="Leave out error_if_nonfinite"):
            amp.clip_grad_norm_(optimizer, 1.0, error_if_nonfinite=True)
        assert amp.clip_grad_norm_(optimizer, 1.0) > 0
