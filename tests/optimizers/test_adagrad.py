"""FusedAdagrad against float64; state of torch.optim.Adagrad."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from amp_engine.optimizers import FusedAdagrad
from tests.optimizers.support import (
    assert_twice_as_good,
    parameters,
    run,
)

CASES: dict[str, dict[str, Any]] = {
    "defaults": {"lr": 1e-2, "weight_decay": 0.0},
    "L2": {"weight_decay": 0.1},
    "decoupled": {"weight_decay": 0.1, "adagrad_w_mode": True},
    "large eps": {"eps": 0.5},
}


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_the_error_is_at_most_twice_that_of_the_plain_expression(settings: dict[str, Any]) -> None:
    assert_twice_as_good("FusedAdagrad", **settings)


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
