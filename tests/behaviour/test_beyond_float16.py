"""Weights that float16 cannot hold are told of at `initialize`, where they become infinite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from amp_engine import amp

WORDS = "become infinite"


def model_with(value: float, at: int = 0) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model.get_parameter(f"{at}.weight").detach().view(-1)[1] = value
    return model


def said_of(model: nn.Module, capsys: Any, level: str) -> str:
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level)
    return capsys.readouterr().out


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("value", [65520.0, -1e30])
def test_weights_that_become_infinite_are_named(level: str, value: float, capsys: Any) -> None:
    model = model_with(value)
    said = said_of(model, capsys, level)
    assert f"Warning:  at {level} values beyond 65504" in said
    assert f"{WORDS}, of 0.weight.  Take opt_level='O5'" in said
    assert model.get_parameter("0.weight").isinf().any()


@pytest.mark.parametrize(
    ("level", "value", "at"),
    [
        ("O2", 65519.0, 0),  # is rounded to 65504
        ("O2", float("inf"), 0),  # was infinite before
        ("O2", float("nan"), 0),
        ("O2", 1e6, 1),  # of a batch norm, which stays FP32
        ("O5", 1e6, 0),
        ("O1", 1e6, 0),
    ],
)
def test_nothing_is_said_where_nothing_becomes_infinite(level: str, value: float, at: int, capsys: Any) -> None:
    assert WORDS not in said_of(model_with(value, at), capsys, level)
