"""FusedSGD is torch.optim.SGD to the bit, and starts every momentum buffer at its own tensor's first gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from amp_engine.optimizers import FusedSGD
from tests.optimizers.support import (
    LONG,
    SHAPES,
    assert_twice_as_good,
    give,
    gradients,
    parameters,
)
from tests.support import assert_bitwise

SETTINGS = {
    "plain": {},
    "weight decay": {"weight_decay": 0.01},
    "momentum": {"momentum": 0.9},
    "momentum, decay": {"momentum": 0.9, "weight_decay": 0.01},
    "dampening": {"momentum": 0.9, "dampening": 0.1},
    "dampening of 1": {"momentum": 0.5, "dampening": 1.0, "weight_decay": 0.1},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "nesterov, decay": {"momentum": 0.95, "nesterov": True, "weight_decay": 0.01},
}


def buffers(optimizer: torch.optim.Optimizer, params: list[Any]) -> list[Any]:
    return [optimizer.state[param].get("momentum_buffer") if param in optimizer.state else None for param in params]


@pytest.mark.parametrize("foreach", [False, True], ids=["loop", "foreach"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_twenty_steps_are_bitwise_those_of_torch(settings: dict[str, Any], foreach: bool) -> None:
    ours, theirs = parameters(SHAPES + LONG), parameters(SHAPES + LONG)
    fused = FusedSGD(ours, lr=0.1, **settings)
    torchs = torch.optim.SGD(theirs, lr=0.1, foreach=foreach, **settings)
    for index in range(20):
        for params, optimizer in ((ours, fused), (theirs, torchs)):
            give(params, gradients(params, index))
            optimizer.step()
    assert_bitwise(ours, theirs)
    assert_bitwise(buffers(fused, ours), buffers(torchs, theirs))


@pytest.mark.parametrize("late", [0, 3, -1], ids=["first", "middle", "last"])
def test_a_first_gradient_that_comes_late_starts_its_own_buffer_and_no_other(late: int) -> None:
    ours, theirs = parameters(), parameters()
    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    fused, torchs = FusedSGD(ours, **settings), torch.optim.SGD(theirs, **settings)
    for index in range(8):
        for params, optimizer in ((ours, fused), (theirs, torchs)):
            give(params, gradients(params, index))
            if index < 4:
                params[late].grad = None
            optimizer.step()
        assert_bitwise(ours, theirs)
    assert_bitwise(buffers(fused, ours), buffers(torchs, theirs))


@pytest.mark.parametrize(
    "settings",
    [
        {"momentum": 0.0, "weight_decay": 0.05},
        {"momentum": 0.9, "weight_decay": 0.05},
        {"momentum": 0.9, "weight_decay": 0.05, "dampening": 0.2},
        {"momentum": 0.9, "weight_decay": 0.05, "nesterov": True},
    ],
    ids=["no momentum", "momentum", "dampening", "nesterov"],
)
def test_weight_decay_after_the_momentum_stays_out_of_the_buffer(settings: dict[str, Any]) -> None:
    assert_twice_as_good("FusedSGD", wd_after_momentum=True, **settings)


def test_settings_may_change_on_the_way_as_in_torch() -> None:
    ours, theirs = parameters(), parameters()
    fused = FusedSGD(ours, lr=0.1, momentum=0.9)
    torchs = torch.optim.SGD(theirs, lr=0.1, momentum=0.9)
    changes = {2: {"lr": 0.03}, 4: {"momentum": 0.5}, 6: {"weight_decay": 0.1}, 8: {"nesterov": True}}
    for index in range(10):
        for params, optimizer in ((ours, fused), (theirs, torchs)):
            optimizer.param_groups[0].update(changes.get(index, {}))
            give(params, gradients(params, index))
            optimizer.step()
    assert_bitwise(ours, theirs)


def test_momentum_switched_on_later_is_bitwise_torch() -> None:
    ours, theirs = parameters(), parameters()
    fused, torchs = FusedSGD(ours, lr=0.1), torch.optim.SGD(theirs, lr=0.1)
    for index in range(6):
        for params, optimizer in ((ours, fused), (theirs, torchs)):
            optimizer.param_groups[0]["momentum"] = 0.9 if index >= 3 else 0.0
            give(params, gradients(params, index))
            optimizer.step()
    assert_bitwise(ours, theirs)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_state_dict_of_torch_loads_and_goes_back(momentum: float) -> None:
    settings = {"lr": 0.1, "momentum": momentum}
    whole, theirs, ours, back = (parameters() for _ in range(4))
    straight = torch.optim.SGD(whole, **settings)
    optimizers = [torch.optim.SGD(theirs, **settings), FusedSGD(ours, lr=0.7), torch.optim.SGD(back, lr=0.7)]
    for index in range(9):
        give(whole, gradients(whole, index))
        straight.step()
        part = index // 3
        params = (theirs, ours, back)[part]
        if part and index % 3 == 0:
            optimizers[part].load_state_dict(optimizers[part - 1].state_dict())
            with torch.no_grad():
                for param, source in zip(params, (theirs, ours, back)[part - 1], strict=True):
                    param.copy_(source)
        give(params, gradients(params, index))
        optimizers[part].step()
    assert_bitwise(back, whole)
