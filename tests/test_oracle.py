"""The oracle itself: its formulas are those of torch.optim in float64, its overflow rule is the one written down."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.models import TASKS
from tests.oracle import AdamW, Float64Training, Scale, Sgd, relative_error, scale_rule, to_float64


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize(
    ("rule", "make"),
    [
        (Sgd(0.05), lambda p: torch.optim.SGD(p, 0.05)),
        (Sgd(0.05, 0.9, 1e-2), lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=1e-2)),
        (AdamW(1e-2), lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=1e-2)),
    ],
    ids=["sgd", "sgd with momentum and decay", "adamw"],
)
def test_float64_training_is_torch_optim_in_float64(name: str, rule: Any, make: Any) -> None:
    task = TASKS[name]
    truth = Float64Training(task.model(), rule, task.loss)
    model = task.model().double()
    optimizer = make(model.parameters())
    for batch in task.batches(4):
        truth.step(batch)
        optimizer.zero_grad()
        task.loss(model, to_float64(batch)).backward()
        optimizer.step()
    assert relative_error(model.parameters(), truth.parameters().values()) < 1e-12


def test_float64_training_sums_the_gradients_of_its_batches() -> None:
    task = TASKS["mlp"]
    truth = Float64Training(task.model(), Sgd(0.1), task.loss)
    start = [value.clone() for value in truth.parameters().values()]
    truth.step(task.batch(0), task.batch(1))
    model = task.model().double()
    for index in range(2):
        task.loss(model, to_float64(task.batch(index))).backward()
    expected = [value - 0.1 * param.grad for value, param in zip(start, model.parameters(), strict=True)]
    assert relative_error(truth.parameters().values(), expected) < 1e-14


def test_float64_training_leaves_the_model_alone() -> None:
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    Float64Training(model, Sgd(0.1), lambda m, batch: m(batch).sum()).step(torch.ones(1, 2))
    assert model.weight.dtype == torch.float32
    assert torch.equal(model.weight, before)


def test_relative_error_is_taken_over_all_tensors_together() -> None:
    truth = [torch.tensor([3.0]), torch.tensor([4.0])]
    assert relative_error([torch.tensor([3.0]), torch.tensor([4.5])], truth) == 0.1


@pytest.mark.parametrize(
    ("script", "start", "keywords", "expected"),
    [
        ("cco", Scale(8.0, 0), {}, [(8.0, 1), (8.0, 2), (4.0, 0)]),
        ("ccc", Scale(8.0, 0), {"window": 2}, [(8.0, 1), (16.0, 0), (16.0, 1)]),
        ("coc", Scale(8.0, 0), {"window": 2}, [(8.0, 1), (4.0, 0), (4.0, 1)]),
        ("oo", Scale(2.0, 5), {"floor": 1.0}, [(1.0, 0), (1.0, 0)]),
        ("c", Scale(2.0**24, 1999), {}, [(2.0**24, 0)]),
    ],
)
def test_the_slow_overflow_rule(
    script: str, start: Scale, keywords: dict[str, Any], expected: list[tuple[float, int]]
) -> None:
    assert [(s.loss_scale, s.unskipped) for s in scale_rule(script, start, **keywords)] == expected


def test_an_unknown_outcome_is_refused() -> None:
    with pytest.raises(ValueError, match="'x'"):
        list(scale_rule("cx"))
