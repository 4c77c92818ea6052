"""Hyperparameters that the kernels take from parameter groups: those of the optimizer's class, and no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from amp_engine.optimizers import FusedAdam, FusedSGD
from amp_engine.optimizers.rules import rule_of

PARAM = nn.Parameter(torch.ones(2))


@pytest.mark.parametrize(
    ("kind", "foreign"),
    [
        (torch.optim.Adam, {"bias_correction": False}),
        (torch.optim.AdamW, {"bias_correction": False}),
        (torch.optim.SGD, {"decay_after_momentum": True}),
    ],
)
def test_entries_that_are_none_of_the_class_say_nothing(kind: Any, foreign: dict[str, Any]) -> None:
    plain, with_foreign = kind([PARAM], lr=0.1), kind([{"params": [PARAM], **foreign}], lr=0.1)
    rule = rule_of(plain)
    assert rule.hyperparameters(with_foreign.param_groups[0]) == rule.hyperparameters(plain.param_groups[0])


@pytest.mark.parametrize(("kind", "name"), [(FusedAdam, "eps"), (FusedSGD, "momentum"), (torch.optim.AdamW, "eps")])
def test_a_hyperparameter_that_is_missing_has_no_other_value(kind: Any, name: str) -> None:
    optimizer = kind([PARAM], lr=0.1)
    del optimizer.param_groups[0][name]
    with pytest.raises(KeyError, match=name):
        rule_of(optimizer).hyperparameters(optimizer.param_groups[0])
