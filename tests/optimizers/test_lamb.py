"""FusedLAMB against float64: clipping over all groups, trust ratios, and gradients that stay as they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from amp_engine.optimizers import FusedLAMB
from tests.optimizers.formulas import Formula
from tests.optimizers.support import all_settings, assert_twice_as_good, give, gradients, parameters

CASES: dict[str, dict[str, Any]] = {
    "defaults": {"lr": 1e-3},
    "no weight decay": {"weight_decay": 0.0},
    "no weight decay, nvlamb": {"weight_decay": 0.0, "use_nvlamb": True},
    "nvlamb": {"use_nvlamb": True},
    "L2": {"adam_w_mode": False, "weight_decay": 0.1},
    "no grad averaging": {"grad_averaging": False},
    "no bias correction": {"bias_correction": False},
    "betas and eps": {"betas": (0.5, 0.9), "eps": 1e-3},
    "clipped hard": {"max_grad_norm": 0.01, "weight_decay": 0.0},
    "barely clipped": {"max_grad_norm": 1000.0},
    "not clipped": {"max_grad_norm": 0.0},
}


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_the_error_is_at_most_twice_that_of_the_plain_expression(settings: dict[str, Any]) -> None:
    assert_twice_as_good("FusedLAMB", **settings)


@pytest.mark.parametrize("max_grad_norm", [0.5, 5.0])
def test_gradients_are_clipped_by_their_norm_over_all_groups(max_grad_norm: float) -> None:
    """The gradients of one group are large, which shortens the steps of the other, as eps is not negligible."""

    def enlarge_the_second_group(_: int, grads: list[Tensor]) -> list[Tensor | None]:
        return [grad * 10 if row >= 4 else grad for row, grad in enumerate(grads)]

    second = {"lr": 0.03, "weight_decay": 0.1, "betas": (0.8, 0.95)}
    settings = {"lr": 0.1, "eps": 0.01, "weight_decay": 0.0, "max_grad_norm": max_grad_norm}
    assert_twice_as_good("FusedLAMB", split=4, second=second, change=enlarge_the_second_group, **settings)


def test_a_group_may_be_clipped_to_a_norm_of_its_own() -> None:
    settings = {"lr": 0.1, "eps": 0.01, "max_grad_norm": 0.5}
    assert_twice_as_good("FusedLAMB", split=4, second={"max_grad_norm": 5.0}, **settings)


def test_only_gradients_that_are_there_count_for_the_norm() -> None:
    def every_other(index: int, grads: list[Tensor]) -> list[Tensor | None]:
        return [grad if (row + index) % 2 else None for row, grad in enumerate(grads)]

    assert_twice_as_good("FusedLAMB", lr=0.1, eps=0.01, change=every_other)


def test_a_tensor_of_zeros_and_a_gradient_of_zeros_are_stepped_without_a_ratio() -> None:
    params = parameters([(4,), (4,), (4,)])
    params[0].detach().zero_()
    truth = Formula("FusedLAMB", [(params, all_settings("FusedLAMB", weight_decay=0.1))], torch.float64)
    optimizer = FusedLAMB(params, lr=0.02, weight_decay=0.1)
    for index in range(4):
        grads = gradients(params, index)
        grads[1].zero_()
        truth.step(grads)
        give(params, grads)
        optimizer.step()
    torch.testing.assert_close([param.detach().double() for param in params], truth.params, rtol=1e-5, atol=1e-6)
