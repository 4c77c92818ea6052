"""FusedAdam against float64, beside torch's Adam and AdamW; what it loads, and its own masters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from amp_engine.optimizers import FusedAdam
from tests.optimizers.formulas import Formula
from tests.optimizers.support import (
    LONG,
    SHAPES,
    all_settings,
    assert_at_most_twice,
    assert_twice_as_good,
    formula,
    give,
    gradients,
    made,
    parameters,
    run,
)
from tests.support import assert_bitwise, frozen, weights_of

TORCHS: dict[bool, Any] = {True: torch.optim.AdamW, False: torch.optim.Adam}
CASES: dict[str, dict[str, Any]] = {
    "defaults": {"lr": 1e-3, "weight_decay": 0.0},
    "weight decay": {"weight_decay": 0.1},
    "betas": {"betas": (0.5, 0.9), "weight_decay": 0.01},
    "betas of 0": {"betas": (0.0, 0.0)},
    "large eps": {"eps": 1e-2},
    "large lr": {"lr": 0.5, "weight_decay": 0.1},
}


@pytest.mark.parametrize("adam_w_mode", [True, False], ids=["AdamW", "Adam"])
@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_the_error_is_at_most_twice_that_of_torch(settings: dict[str, Any], adam_w_mode: bool) -> None:
    settings = {"lr": 0.01, "weight_decay": 0.0} | settings
    ours, theirs = parameters(SHAPES + LONG), parameters(SHAPES + LONG)
    start = frozen(ours)
    truth = formula("FusedAdam", ours, adam_w_mode=adam_w_mode, **settings)
    fused = FusedAdam(ours, adam_w_mode=adam_w_mode, **settings)
    torchs = TORCHS[adam_w_mode](theirs, foreach=False, **settings)
    run(torchs, range(20))
    run(fused, range(20), lambda index: truth.step(gradients(ours, index)))
    states = [[optimizer.state[param] for param in weights_of(optimizer)] for optimizer in (fused, torchs)]
    assert_at_most_twice("FusedAdam", (ours, states[0]), (theirs, states[1]), truth, start)
    assert counts(fused) == {20.0}


def counts(optimizer: torch.optim.Optimizer) -> set[float]:
    """The step counts of all parameters that have values."""
    return {state["step"].item() for param, state in optimizer.state.items() if param.numel()}


@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_without_bias_correction(adam_w_mode: bool) -> None:
    assert_twice_as_good("FusedAdam", bias_correction=False, adam_w_mode=adam_w_mode, weight_decay=0.05)


# --- learning rates -------------------------------------------------------------------------------


def test_a_learning_rate_may_be_a_tensor_that_changes_in_place() -> None:
    params, others = parameters(), parameters()
    lr = torch.tensor(2.0**-7)
    by_tensor, by_number = FusedAdam(params, lr=lr, weight_decay=0.1), FusedAdam(others, lr=2.0**-7, weight_decay=0.1)
    for index in range(6):
        if index == 3:
            lr.mul_(0.25)
            by_number.param_groups[0]["lr"] = 2.0**-9
        run(by_tensor, [index])
        run(by_number, [index])
        torch.testing.assert_close(params, others, rtol=1e-6, atol=1e-7)
    assert by_tensor.param_groups[0]["lr"] is lr


def test_a_negative_learning_rate_in_a_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match=r"lr.*-0\.5"):
        FusedAdam(parameters([(2,)]), lr=torch.tensor(-0.5))


# --- loading what others saved --------------------------------------------------------------------


def assert_goes_on(
    params: list[nn.Parameter], optimizer: torch.optim.Optimizer, truth: Formula, first: int, steps: int = 5
) -> None:
    """The steps from `first` on end where the formula does, which was at `first` too."""
    for index in range(first, first + steps):
        truth.step(gradients(params, index))
        give(params, gradients(params, index))
        optimizer.step()
    torch.testing.assert_close(
        [param.detach() for param in params], [value.float() for value in truth.params], rtol=2e-5, atol=2e-6
    )


@pytest.mark.parametrize("adam_w_mode", [True, False], ids=["AdamW", "Adam"])
def test_a_state_dict_of_torch_loads_and_the_trajectory_goes_on(adam_w_mode: bool) -> None:
    params = parameters()
    settings = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    truth = formula("FusedAdam", params, adam_w_mode=adam_w_mode, **settings)
    torchs = TORCHS[adam_w_mode](params, **settings)
    run(torchs, range(4), lambda index: truth.step(gradients(params, index)))
    fused = FusedAdam(params, adam_w_mode=adam_w_mode)
    fused.load_state_dict(torchs.state_dict())
    assert fused.param_groups[0]["lr"] == 0.02
    assert_goes_on(params, fused, truth, first=4)


@pytest.mark.parametrize("adam_w_mode", [True, False], ids=["AdamW", "Adam"])
def test_its_state_dict_loads_into_torch_and_the_trajectory_goes_on(adam_w_mode: bool) -> None:
    params = parameters()
    settings = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    truth = formula("FusedAdam", params, adam_w_mode=adam_w_mode, **settings)
    fused = FusedAdam(params, adam_w_mode=adam_w_mode, **settings)
    run(fused, range(4), lambda index: truth.step(gradients(params, index)))
    torchs = TORCHS[adam_w_mode](params, foreach=False)
    torchs.load_state_dict(fused.state_dict())
    assert counts(torchs) == {4.0}
    assert_goes_on(params, torchs, truth, first=4)


def test_counts_of_parameters_that_started_later_survive_the_way_to_torch_and_back() -> None:
    params = parameters([(5,), (6,)])
    truth = formula("FusedAdam", params)
    fused = made("FusedAdam", params)
    for index in range(4):
        grads = [grad if row == 0 or index >= 2 else None for row, grad in enumerate(gradients(params, index))]
        truth.step(grads)
        give(params, grads)
        fused.step()
    torchs = torch.optim.AdamW(params)
    torchs.load_state_dict(fused.state_dict())
    assert [torchs.state[param]["step"].item() for param in params] == [4.0, 2.0]
    again = FusedAdam(params)
    again.load_state_dict(torchs.state_dict())
    assert_goes_on(params, again, truth, first=4)


@pytest.mark.parametrize("form", [int, lambda n: torch.tensor([n], dtype=torch.int32)], ids=["int", "capturable"])
def test_a_state_dict_of_apex_loads_which_counts_steps_in_its_groups(form: Any) -> None:
    params = parameters()
    truth = formula("FusedAdam", params)
    fused = made("FusedAdam", params)
    run(fused, range(5), lambda index: truth.step(gradients(params, index)))
    saved = copy.deepcopy(fused.state_dict())
    apexs = {
        "state": {
            index: {key: state[key] for key in ("exp_avg", "exp_avg_sq")} for index, state in saved["state"].items()
        },
        "param_groups": [
            {
                "lr": 0.01,
                "bias_correction": True,
                "betas": (0.9, 0.999),
                "eps": 1e-8,
                "weight_decay": 1e-2,
                "step": form(5),
                "params": saved["param_groups"][0]["params"],
            }
        ],
    }
    again = FusedAdam(params)
    again.load_state_dict(apexs)
    assert_goes_on(params, again, truth, first=5)
    assert counts(again) == {10.0}


def test_settings_that_torch_does_not_save_keep_what_the_constructor_was_given() -> None:
    params = parameters()
    torchs = torch.optim.AdamW(params)
    run(torchs, [0])
    fused = FusedAdam(params, bias_correction=False, adam_w_mode=False)
    fused.load_state_dict(torchs.state_dict())
    assert fused.param_groups[0]["bias_correction"] is False
    run(fused, [1])


# --- masters of its own ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_masters_of_its_own_keep_what_a_half_weight_would_lose(dtype: torch.dtype) -> None:
    params = parameters(dtype=dtype)
    truth = Formula("FusedAdam", [(params, all_settings("FusedAdam", lr=1e-5))], torch.float64)
    optimizer = made("FusedAdam", params, lr=1e-5, capturable=True, master_weights=True)
    start = [param.detach().clone() for param in params]
    run(optimizer, range(50), lambda index: truth.step(gradients(params, index)))
    nearest = [value.to(dtype) for value in truth.params]
    different = sum((a != b).sum().item() for a, b in zip(params, nearest, strict=True))
    assert different <= sum(param.numel() for param in params) * 0.002
    assert any((a != b).any() for a, b in zip(params, start, strict=True))


def test_masters_of_its_own_are_saved_and_resumed() -> None:
    settings = {"lr": 1e-4, "capturable": True, "master_weights": True}
    params, others = (parameters(dtype=torch.float16) for _ in range(2))
    straight = made("FusedAdam", others, **settings)
    run(straight, range(8))
    first = made("FusedAdam", params, **settings)
    run(first, range(4))
    second = made("FusedAdam", params, **settings)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    run(second, range(4, 8))
    assert_bitwise(params, others)
    assert_bitwise(second.state_dict(), straight.state_dict())


def test_a_half_weight_that_the_user_wrote_is_where_its_own_master_goes_on() -> None:
    """`model.load_state_dict` writes so."""
    params = parameters([(6,)], torch.float16)
    optimizer = made("FusedAdam", params, capturable=True, master_weights=True)
    run(optimizer, range(2))
    with torch.no_grad():
        params[0].fill_(3.0)
    run(optimizer, [2])
    torch.testing.assert_close(params[0].detach(), torch.full((6,), 3.0, dtype=torch.float16), rtol=0, atol=0.05)
