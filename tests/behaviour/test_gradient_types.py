"""`p.grad_dtype` of half parameters: FP32 gradients are unscaled, clipped and stepped with all of their bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_engine import amp
from tests.support import assert_bitwise

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "SGD": lambda params: torch.optim.SGD(params, lr=1.0),
    "RMSprop": torch.optim.RMSprop,  # by its own step
}
RUNS: dict[str, dict[str, Any]] = {
    "O2": {"opt_level": "O2", "loss_scale": 1024.0},
    "O5": {"opt_level": "O5"},
    "O5, split": {"opt_level": "O5", "master_weights": "split"},
}
SCALE = {"O2": 1024.0, "O5": 1.0, "O5, split": 1.0}
# Two gradients of one backward, and of another: each is exact in half, their sum is not.
PARTS = [1.0, 2.0**-12]


@pytest.fixture(params=[torch.float32, None], ids=["float32", "any"])
def grad_dtype(request: pytest.FixtureRequest) -> Any:
    return request.param


def made(run: str, name: str, grad_dtype: torch.dtype | None) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 2, bias=False)
    optimizer = OPTIMIZERS[name](model.parameters())
    amp.initialize(model, optimizer, verbosity=0, **RUNS[run])
    model.weight.grad_dtype = grad_dtype
    return model, optimizer


def exact(model: nn.Module) -> Tensor:
    return model.state_dict()["weight"].clone()


def plain_step(name: str, weight: Tensor, grad: Tensor) -> Tensor:
    param = nn.Parameter(weight.clone())
    param.grad = grad
    OPTIMIZERS[name]([param]).step()
    return param.detach()


def arrive(scaled_loss: Tensor, model: nn.Module, run: str, value: float) -> None:
    """Run a backward of 0, and add a gradient as code of the user does that makes it in FP32."""
    scaled_loss.backward(retain_graph=True)
    model.weight.grad = model.weight.grad.float() + value * SCALE[run]


def runs(*names: str) -> list[tuple[str, str]]:
    return [(run, name) for run in RUNS for name in names if not (run == "O5, split" and name != "AdamW")]


@pytest.mark.parametrize(("run", "name"), runs("AdamW", "SGD", "RMSprop"))
@pytest.mark.parametrize("how", ["one body", "two bodies", "delayed", "read"])
def test_a_float32_gradient_is_stepped_as_it_is(run: str, name: str, how: str, grad_dtype: Any) -> None:
    model, optimizer = made(run, name, grad_dtype)
    before, total = exact(model), torch.full((2, 3), sum(PARTS))
    bodies = [PARTS] if how == "one body" else [[part] for part in PARTS]
    for i, parts in enumerate(bodies):
        delays = how == "delayed" and i == 0
        with amp.scale_loss(model(torch.zeros(1, 3)).sum(), optimizer, delay_unscale=delays) as scaled_loss:
            for part in parts:
                arrive(scaled_loss, model, run, part)
    if how == "read":
        assert_bitwise([p.grad for p in amp.master_params(optimizer)], [total])
    optimizer.step()
    expected = plain_step(name, before, total)
    if name == "SGD":
        assert_bitwise(exact(model), expected)
    torch.testing.assert_close(exact(model), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("run", "name"), runs("SGD"))
def test_its_norm_and_the_clipped_gradient_have_all_bits(run: str, name: str, grad_dtype: Any) -> None:
    model, optimizer = made(run, name, grad_dtype)
    before, total = exact(model), torch.full((2, 3), sum(PARTS))
    with amp.scale_loss(model(torch.zeros(1, 3)).sum(), optimizer) as scaled_loss:
        arrive(scaled_loss, model, run, sum(PARTS))
    assert amp.clip_grad_norm_(optimizer, 0.5).item() == pytest.approx(total.norm().item(), rel=1e-7)
    optimizer.step()
    torch.testing.assert_close(before - exact(model), total * (0.5 / total.norm()), rtol=3e-6, atol=0.0)


@pytest.mark.parametrize("value", [torch.bfloat16, torch.float32, None], ids=str)
@pytest.mark.parametrize("run", ["O5", "O5, split"])
def test_close_gives_a_waiting_gradient_back(run: str, value: Any) -> None:
    model = nn.Linear(3, 2, bias=False).bfloat16()
    model.weight.grad_dtype = value
    optimizer = torch.optim.AdamW(model.parameters())
    amp.initialize(model, optimizer, verbosity=0, **RUNS[run])
    with amp.scale_loss(model(torch.ones(1, 3)).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    amp.close()
    assert_bitwise(model.weight.grad.float(), torch.ones(2, 3))
