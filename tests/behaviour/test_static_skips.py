"""Gradients that are not finite under a static scale: stepped on as in apex, or skipped where they are read anyway."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from amp_engine import amp
from amp_engine.errors import AmpValueError
from tests.support import assert_bitwise

MESSAGE = "Gradient overflow.  Skipping step, loss scaler 0 is static at 1.0"


def steps(level: str, values: list[float], optimizers: int = 1, **keywords: Any) -> tuple[Any, list[bool]]:
    """Train on inputs of these values. Returns the model, and if each step left all weights as they were."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    made = [torch.optim.AdamW(part.parameters(), lr=0.1) for part in ([model] if optimizers == 1 else model)]
    model, made = amp.initialize(model, made, opt_level=level, verbosity=1, **keywords)
    stayed = []
    for value in values:
        before = copy.deepcopy(model.state_dict())
        loss = model(torch.full((3, 4), value)).float().square().mean()
        with amp.scale_loss(loss, made) as scaled_loss:
            scaled_loss.backward()
        for one in made:
            one.step()
            one.zero_grad()
        after = model.state_dict()
        stayed.append(all(torch.equal(after[name], value) for name, value in before.items()))
    return model, stayed


def is_finite(model: nn.Module) -> bool:
    return all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("optimizers", [1, 3])
def test_a_batch_of_nan_is_skipped_at_o5_and_training_goes_on(optimizers: int, capsys: Any) -> None:
    model, stayed = steps("O5", [1.0, float("nan"), 1.0, float("inf"), 1.0], optimizers)
    assert stayed == [False, True, False, True, False]
    assert is_finite(model)
    assert capsys.readouterr().out.count(MESSAGE) == 2 * optimizers


def test_masters_and_moments_are_as_if_the_batch_had_not_been_there() -> None:
    torch.manual_seed(1)
    model, _ = steps("O5", [1.0, float("nan"), 2.0])
    amp.close()  # which gives the masters' values
    torch.manual_seed(1)
    other, _ = steps("O5", [1.0, 2.0])
    amp.close()
    assert_bitwise(model.state_dict(), other.state_dict())


@pytest.mark.parametrize(
    ("level", "keywords"),
    [
        ("O5", {"skip_on_overflow": False}),
        ("O4", {}),  # nothing reads these gradients
        ("O5", {"master_weights": False}),
        ("O5", {"master_weights": "split"}),
        ("O2", {"loss_scale": 1.0}),  # as apex
    ],
    ids=str,
)
def test_elsewhere_the_step_is_taken(level: str, keywords: Any) -> None:
    model, stayed = steps(level, [float("nan")], **keywords)
    assert stayed == [False]
    assert not is_finite(model)


@pytest.mark.parametrize("level", ["O0", "O2", "O4", "O5"])
def test_true_skips_at_every_level(level: str) -> None:
    model, stayed = steps(level, [float("nan"), 1.0], skip_on_overflow=True, loss_scale=1.0)
    assert stayed == [True, False]
    assert is_finite(model)


def test_half_weights_with_masters_at_o4_are_read_and_skip() -> None:
    model = nn.Linear(4, 2).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O4", master_weights=True, verbosity=0)
    with amp.scale_loss(model(torch.full((1, 4), float("nan"))).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert is_finite(model)


def test_another_string_is_refused() -> None:
    with pytest.raises(AmpValueError, match=r"skip_on_overflow='never' is none of True, False and \"auto\""):
        steps("O5", [], skip_on_overflow="never")
