"""FusedAdagrad against float64 and torch.optim.Adagrad."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from amp_engine.optimizers import FusedAdagrad
from tests.optimizers.support import (
    assert_at_most_twice,
    assert_twice_as_good,
    formula,
    gradients,
    made,
    parameters,
    run,
)
from tests.support import frozen, weights_of

CASES: dict[str, dict[str, Any]] = {
    "defaults": {"lr": 1e-2, "weight_decay": 0.0},
    "L2": {"weight_decay": 0.1},
    "decoupled": {"weight_decay": 0.1, "adagrad_w_mode": True},
    "large eps": {"eps": 0.5},
}


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_the_error_is_at_most_twice_that_of_the_plain_expression(settings: dict[str, Any]) -> None:
    assert_twice_as_good("FusedAdagrad", **settings)


def test_the_error_is_at_most_twice_that_of_torch() -> None:
    ours, theirs = parameters(), parameters()
    start, truth = frozen(ours), formula("FusedAdagrad", ours)
    fused, torchs = made("FusedAdagrad", ours), torch.optim.Adagrad(theirs, lr=0.05, weight_decay=1e-3)
    run(torchs, range(20))
    run(fused, range(20), lambda index: truth.step(gradients(ours, index)))
    states = [[optimizer.state[param] for param in weights_of(optimizer)] for optimizer in (fused, torchs)]
    assert_at_most_twice("FusedAdagrad", (ours, states[0]), (theirs, states[1]), truth, start)


def test_a_state_dict_of_torch_loads_and_goes_back() -> None:
    params, others = parameters(), parameters()
    run(torch.optim.Adagrad(others, lr=0.05), range(9))
    first = torch.optim.Adagrad(params, lr=0.05)
    run(first, range(3))
    second = FusedAdagrad(params)
    second.load_state_dict(first.state_dict())
    assert second.param_groups[0]["lr"] == 0.05
    run(second, range(3, 6))
    third = torch.optim.Adagrad(params, lr=0.7)
    third.load_state_dict(second.state_dict())
    run(third, range(6, 9))
    torch.testing.assert_close(params, others, rtol=1e-5, atol=1e-6)
