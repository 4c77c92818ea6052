"""`amp.scale` and `amp.unscale`: gradients of `torch.autograd.grad`, and penalties made from them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_engine import Engine, amp
from amp_engine.errors import AmpIndexError, AmpStateError, AmpTypeError
from tests.support import backward

SCALED_LEVELS = ("O1", "O2")  # those whose scale is dynamic unless told otherwise


def critic(level: str, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    # 1 times 2**16, where dynamic scales begin, is no float16.
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, **{"max_loss_scale": 2.0**10, **options})
    return model, optimizer


def batch() -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()


def loss_scale(loss_id: int = 0) -> float:
    return amp.state_dict()[f"loss_scaler{loss_id}"]["loss_scale"]


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_gradient_of_a_scaled_loss_comes_back_as_that_of_the_loss(level: str) -> None:
    truth_model, x = critic("O0")[0], batch()
    (truth,) = torch.autograd.grad(truth_model(x).sum(), x)
    amp.close()
    model, _ = critic(level)
    scaled = torch.autograd.grad(amp.scale(model(x).sum()), x)
    (slope,) = amp.unscale(scaled)
    assert slope.dtype == torch.float32
    assert (slope - truth).norm() <= (0.02 if level in ("O4", "O5") else 2e-3) * truth.norm()


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("level", SCALED_LEVELS)
def test_an_overflow_that_the_penalty_hides_skips_the_step_and_lowers_the_scale(level: str, bad: float) -> None:
    model, optimizer = critic(level)
    before, weights = loss_scale(), [p.detach().clone() for p in model.parameters()]
    x = batch()
    outputs = model(x).float().sum()
    amp.scale(outputs)
    slope = amp.unscale([torch.full((4, 8), bad), None])[0]
    penalty = slope.norm(dim=1).nan_to_num(0.0).clamp(max=1.0).mean()
    assert penalty.isfinite()
    backward(outputs + penalty, optimizer)
    optimizer.step()
    assert loss_scale() == before / 2
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))
    backward(model(batch()).float().sum(), optimizer)  # and it counts once
    optimizer.step()
    assert loss_scale() == before / 2
    assert not all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))


@pytest.mark.parametrize(
    "overflow",
    [
        torch.tensor([1.0, math.inf]).half(),
        torch.tensor([1.0, math.nan], dtype=torch.float64),
        torch.tensor([[1.0, math.inf, 1.0]]).expand(2, 3),
        torch.tensor([0.0, math.inf]).to_sparse(),
        torch._neg_view(torch.tensor([math.inf])),
    ],
    ids=["half", "double", "expanded", "sparse", "negative view"],
)
def test_an_overflow_is_seen_in_any_tensor(overflow: Tensor) -> None:
    model, optimizer = critic("O1", loss_scale="dynamic")
    before = loss_scale()
    loss = model(batch()).float().sum()
    amp.scale(loss)
    amp.unscale(overflow)
    backward(loss, optimizer)
    assert loss_scale() == before / 2


def test_values_containers_and_types_come_back_as_they_were_given() -> None:
    critic("O1", loss_scale=8.0)
    loss = torch.tensor(3.0, requires_grad=True)
    assert amp.scale(loss.half()).dtype == torch.float32
    assert amp.scale(loss).item() == 24.0
    half, double = torch.tensor([16.0]).half(), torch.tensor([8.0], dtype=torch.float64)
    one = amp.unscale(half)
    assert (one.dtype, one.item()) == (torch.float32, 2.0)
    pair = amp.unscale((half, None))
    assert type(pair) is tuple
    assert pair[1] is None
    listed = amp.unscale([half, double])
    assert type(listed) is list
    assert [g.dtype for g in listed] == [torch.float32, torch.float64]
    assert [g.item() for g in listed] == [2.0, 1.0]
    assert amp.unscale(()) == ()


def test_a_scale_that_moved_in_between_is_no_silent_mistake() -> None:
    model, optimizer = critic("O1")
    loss = model(batch()).float().sum()
    scaled = amp.scale(loss)
    backward(model(batch()).float().sum(), optimizer)
    with pytest.raises(AmpStateError, match=r"amp\.scale\(\) was not called for loss_id=0 since"):
        amp.unscale(torch.autograd.grad(scaled, list(model.parameters())))


def test_each_loss_id_has_its_own() -> None:
    model, optimizer = critic("O1", num_losses=2)
    loss = model(batch()).float().sum()
    amp.scale(loss, loss_id=1)
    with pytest.raises(AmpStateError, match="loss_id=0"):
        amp.unscale(loss.detach())
    backward(model(batch()).float().sum(), optimizer)  # of loss_id 0
    amp.unscale(torch.tensor(math.inf), loss_id=1)
    assert loss_scale(1) == loss_scale(0)
    with amp.scale_loss(model(batch()).float().sum(), optimizer, loss_id=1) as scaled_loss:
        scaled_loss.backward()
    assert loss_scale(1) == loss_scale(0) / 2
    with pytest.raises(AmpIndexError, match="loss_id=2"):
        amp.scale(loss, loss_id=2)


def test_a_loss_that_delay_unscale_left_has_the_same_scale() -> None:
    model, optimizer = critic("O2")
    loss = model(batch()).float().sum()
    scaled = amp.scale(loss)
    with amp.scale_loss(model(batch()).float().sum(), optimizer, delay_unscale=True) as scaled_loss:
        scaled_loss.backward()
    amp.unscale(torch.autograd.grad(scaled, list(model.parameters())))


def test_what_is_refused() -> None:
    engine = Engine()
    with pytest.raises(AmpStateError, match=r"amp\.scale\(\) was called before amp\.initialize"):
        engine.scale(torch.ones(()))
    with pytest.raises(AmpStateError, match=r"amp\.unscale\(\) was called before amp\.initialize"):
        engine.unscale(torch.ones(()))
    critic("O1")
    with pytest.raises(AmpTypeError, match=r"scale\(\) takes the loss as a tensor, not a float"):
        amp.scale(1.0)  # type: ignore[arg-type]
    amp.scale(torch.ones(()))
    with pytest.raises(AmpTypeError, match=r"not a tensor of torch\.int64"):
        amp.unscale(torch.ones(2, dtype=torch.int64))
    with pytest.raises(AmpTypeError, match="not a str"):
        amp.unscale([torch.ones(2), "x"])  # type: ignore[list-item]
    with pytest.raises(AmpTypeError, match="not a NoneType"):
        amp.unscale(None)  # type: ignore[type-var]


def test_disabled_changes_nothing() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, enabled=False)
    loss, gradients = torch.ones((), dtype=torch.float16), (torch.ones(2), None)
    assert amp.scale(loss) is loss
    assert amp.unscale(gradients) is gradients
