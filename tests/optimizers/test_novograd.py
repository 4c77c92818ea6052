"""FusedNovoGrad against float64, and its checkpoints: before the first step, after it, and apex's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from amp_engine.optimizers import FusedNovoGrad
from tests.optimizers.support import (
    assert_follows,
    assert_twice_as_good,
    formula,
    gradients,
    made,
    mixed_parameters,
    parameters,
    run,
)
from tests.support import assert_bitwise

CASES: dict[str, dict[str, Any]] = {
    "defaults": {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0},
    "weight decay": {"weight_decay": 0.1},
    "decay inside the moment": {"weight_decay": 0.1, "reg_inside_moment": True},
    "no grad averaging": {"grad_averaging": False},
    "no grad averaging, decay inside": {"grad_averaging": False, "reg_inside_moment": True, "weight_decay": 0.1},
    "no bias correction": {"bias_correction": False},
    "from zero": {"init_zero": True},
    "infinity norm": {"norm_type": 0},
    "infinity norm from zero": {"norm_type": 0, "init_zero": True},
    "infinity norm, decay inside": {"norm_type": 0, "reg_inside_moment": True, "weight_decay": 0.1},
    "infinity norm by its name": {"norm_type": float("inf")},
    "large eps": {"eps": 0.5},
}


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_the_error_is_at_most_twice_that_of_the_plain_expression(settings: dict[str, Any]) -> None:
    assert_twice_as_good("FusedNovoGrad", **settings)


def test_a_parameter_whose_first_gradient_comes_late_starts_with_its_own_norm() -> None:
    params = parameters([(5,), (6,)])
    truth, optimizer = formula("FusedNovoGrad", params), made("FusedNovoGrad", params)
    for index in range(6):
        grads = [grad if row == 0 or index >= 3 else None for row, grad in enumerate(gradients(params, index))]
        assert_follows(optimizer, truth, grads, f"step {index}")


# --- checkpoints ----------------------------------------------------------------------------------


def test_the_second_moment_is_the_norm_and_not_its_square() -> None:
    params = parameters([(4,)])
    optimizer = FusedNovoGrad(params)
    params[0].grad = torch.tensor([3.0, 0.0, -4.0, 0.0])
    optimizer.step()
    assert_bitwise(optimizer.state[params[0]]["exp_avg_sq"], torch.tensor(5.0))
    assert optimizer.state_dict()["state"][0]["exp_avg_sq"].item() == 5.0


def as_apex(optimizer: torch.optim.Optimizer, params: list[Any], steps: int) -> dict[str, Any]:
    """Return what apex would have saved: the norms of half parameters, then of float32 ones, in the group."""
    saved = copy.deepcopy(optimizer.state_dict())
    norms: list[list[torch.Tensor]] = [[], []]
    for index, param in enumerate(params):
        norms[param.dtype == torch.float32].append(saved["state"][index].pop("exp_avg_sq"))
    (group,) = saved["param_groups"]
    group["exp_avg_sq"] = [torch.stack(each) if each else torch.empty(0) for each in norms]
    group["step"] = steps
    for state in saved["state"].values():
        del state["step"]
    return saved


@pytest.mark.parametrize("kind", ["float32", "half", "mixed"])
def test_a_state_dict_of_apex_loads_with_its_norms_in_the_group(kind: str) -> None:
    def fresh() -> list[Any]:
        if kind == "mixed":
            return [param for param in mixed_parameters() if param.dtype != torch.bfloat16 and param.numel()]
        return parameters([(), (7,), (33, 5)], torch.float32 if kind == "float32" else torch.float16)

    params, others = fresh(), fresh()
    run(made("FusedNovoGrad", others), range(7))
    first = made("FusedNovoGrad", params)
    run(first, range(4))
    second = made("FusedNovoGrad", params)
    second.load_state_dict(as_apex(first, params, steps=4))
    run(second, range(4, 7))
    assert_bitwise(params, others)
    assert {state["step"].item() for param, state in second.state.items() if param.numel()} == {7.0}
