"""Learning rate schedulers made before `initialize`, after it and while a skip is pending, warnings as errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from amp_engine import amp
from tests.models import MLP
from tests.support import backward, masters

pytestmark = pytest.mark.filterwarnings("error")

SCHEDULERS: dict[str, Any] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=20),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
}


def model_and_optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = MLP.model()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def advance(scheduler: Any) -> None:
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step(1.0)
    else:
        scheduler.step()


def rates(when: str, name: str, level: str, outcomes: str) -> tuple[list[float], list[torch.Tensor]]:
    model, optimizer = model_and_optimizer()
    scheduler = SCHEDULERS[name](optimizer) if when == "before" else None
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    if when == "after":
        scheduler = SCHEDULERS[name](optimizer)
    learning_rates = []
    for index, outcome in enumerate(outcomes):
        optimizer.zero_grad()
        backward(MLP.loss(model, MLP.batch(index)), optimizer, overflow=outcome == "o")
        if scheduler is None:
            scheduler = SCHEDULERS[name](optimizer)
        optimizer.step()
        advance(scheduler)
        learning_rates.append(optimizer.param_groups[0]["lr"])
    values = masters(optimizer)
    amp.close()
    return learning_rates, values


@pytest.mark.parametrize("when", ["before", "after", "while a skip is pending"])
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_scheduler_runs_quietly_over_skips(level: str, name: str, when: str) -> None:
    model, optimizer = model_and_optimizer()
    scheduler = SCHEDULERS[name](optimizer)
    expected = []
    for index in range(6):
        optimizer.zero_grad()
        MLP.loss(model, MLP.batch(index)).backward()
        optimizer.step()
        advance(scheduler)
        expected.append(optimizer.param_groups[0]["lr"])
    learning_rates, values = rates(when, name, level, "occocc")
    assert learning_rates == expected
    assert all(value.isfinite().all() for value in values)
