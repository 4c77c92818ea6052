"""One weight that two optimizers step, each with a loss and a scale of its own: every order gives the right sums."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from amp_engine import amp
from amp_engine.errors import AmpStateError

GRADIENTS = (1.0, 4.0)  # of the two losses
SCALES = [(64.0, 1024.0), (1024.0, 64.0)]
# b0: backward of loss 0 for optimizer 0; b01: for both; a trailing d: delay_unscale. s0: step. z0: zero_grad.
ORDERS = [
    "b0 b1 s0 s1",
    "b0d b1 b0 s0 s1",
    "b0d b1d b0 b1 s0 s1",
    "b0d b1 s1 s0",
    "b0d s1 s0",
    "b0d b1 s1 z1 b0 s0",
    "b0d z1 b0 s0 s1",
    "b01d s0 s1",
    "b01d b0 s0 s1",
    "b01d b1 s1 s0",
    "b0d b01 s0 s1",
    "b0d b01d b0 b1 s1 s0",
]


def plain(order: str) -> list[float]:
    """The weight after each step."""
    weight, grad, seen = 0.0, 0.0, []
    for what in order.split():
        if what[0] == "b":
            grad += GRADIENTS[int(what[1])]
        elif what[0] == "z":
            grad = 0.0
        else:
            weight -= grad
            seen.append(weight)
    return seen


def start(level: str, scales: tuple[float, float]) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for _ in GRADIENTS]
    amp.initialize(model, optimizers, opt_level=level, num_losses=2, loss_scale="dynamic", verbosity=0)
    for scaler, scale in zip(amp.current_engine().scalers, scales, strict=True):
        scaler.load_state_dict({"loss_scale": scale, "unskipped": 0})
    return model, optimizers


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("level", ["O1", "O3"])
def test_a_weight_of_two_optimizers_gets_the_gradients_of_both_losses(
    level: str, order: str, scales: tuple[float, float]
) -> None:
    model, optimizers = start(level, scales)
    seen = []
    for what in order.split():
        which = [int(digit) for digit in what[1:].rstrip("d")]
        if what[0] == "b":
            loss = model(torch.ones(1, 1)).float().sum() * GRADIENTS[which[0]]
            own = [optimizers[o] for o in which]
            with amp.scale_loss(
                loss, own, loss_id=0 if "01" in order else which[0], delay_unscale="d" in what
            ) as scaled:
                scaled.backward()
        elif what[0] == "s":
            optimizers[which[0]].step()
            seen.append(float(model.state_dict()["weight"]))
        else:
            optimizers[which[0]].zero_grad()
    assert seen == plain(order)


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_a_scale_loss_inside_of_another_that_shares_parameters_is_refused(level: str) -> None:
    model, optimizers = start(level, (64.0, 1024.0))
    loss = model(torch.ones(1, 1)).float().sum()
    with amp.scale_loss(loss, optimizers[0], loss_id=0) as scaled:
        with (
            pytest.raises(AmpStateError, match=r"parameters in common with SGD.*\[optimizer, other_optimizer\]"),
            amp.scale_loss(loss, optimizers[1], loss_id=1),
        ):
            pass
        scaled.backward()
    optimizers[0].step()
    assert float(model.state_dict()["weight"]) == -1.0
