"""Every level end to end on a GPU."""

from __future__ import annotations

import pytest
import torch

from amp_engine import amp
from tests.gpu.support import GPU
from tests.support import LEVELS, assert_bitwise

pytestmark = pytest.mark.cuda


def model_and_batch():
    layers = [torch.nn.Linear(16, 64, bias=False), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 4)]
    model = torch.nn.Sequential(*layers).to(GPU)
    x = torch.randn(256, 16, device=GPU)
    return model, x, torch.tanh(x[:, :4] + x[:, 4:8])


def steps(model, optimizer, x, y, count):
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x).float(), y)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


@pytest.mark.parametrize("level", LEVELS)
def test_the_loss_falls_and_masters_are_float32(level):
    model, x, y = model_and_batch()
    eps = 1e-3 if level == "O3" else 1e-8  # which float16 rounds to 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=eps)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    losses = steps(model, optimizer, x, y, 60)
    assert losses[-1] < 0.5 * losses[0]
    if level != "O3":
        assert {p.dtype for p in amp.master_params(optimizer)} == {torch.float32}
    for state in optimizer.state.values():
        assert state["exp_avg"].device.type == GPU.type


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_skips_the_step_and_lowers_the_scale(level):
    model, x, y = model_and_batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    steps(model, optimizer, x, y, 5)
    before = [p.detach().clone() for p in amp.master_params(optimizer)]
    scale = amp.state_dict()["loss_scaler0"]["loss_scale"]
    loss = torch.nn.functional.mse_loss(model(x).float(), y)
    with amp.scale_loss(loss * float("inf"), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(amp.master_params(optimizer), before, strict=True))
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == scale / 2
    losses = steps(model, optimizer, x, y, 30)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("option", ["release_gradients", "masters_on"])
@pytest.mark.parametrize("moments", [torch.float32, "8bit"], ids=str)
def test_released_gradients_and_masters_on_the_cpu_give_the_same_run(option, moments):
    ends = []
    for value in ({"release_gradients": True, "masters_on": "cpu"}[option], None):
        torch.manual_seed(0)
        model, x, y = model_and_batch()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        given = {} if value is None else {option: value}
        amp.initialize(model, optimizer, opt_level="O5", verbosity=0, moment_dtype=moments, **given)
        losses = steps(model, optimizer, x, y, 5)
        ends.append([losses, {name: value.to(GPU) for name, value in model.state_dict().items()}])
        assert {p.device.type for p in model.parameters()} == {GPU.type}
        amp.close()
    assert_bitwise(*ends)
