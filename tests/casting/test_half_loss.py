"""A loss that the model's forward computes in half is warned of, once, and so are outputs that stay half."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_engine import AmpWarning, Engine
from tests.support import HALF, LEVELS


class OwnLoss(nn.Module):
    """Returns its loss, as nanoGPT does."""

    def __init__(self, is_exact: bool = False) -> None:
        super().__init__()
        self.body, self.is_exact = nn.Linear(4, 3), is_exact

    def forward(self, x: Tensor, targets: Tensor) -> dict[str, Any]:
        logits = self.body(x)
        return {"logits": logits, "loss": F.cross_entropy(logits.float() if self.is_exact else logits, targets)}


X, Y = torch.ones(2, 4), torch.tensor([0, 2])


def said(model: nn.Module, calls: int = 3) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(calls):
            model(X, Y)
    return found


@pytest.mark.parametrize("level", LEVELS)
def test_a_loss_in_half_is_warned_of_once_at_the_users_line(level: str) -> None:
    with Engine() as engine:
        found = said(engine.initialize(OwnLoss(), opt_level=level, verbosity=0))
    if level in ("O0", "O1", "O4"):
        assert found == []
        return
    (one,) = found
    name, bits = str(HALF[level]).removeprefix("torch."), {"O5": 8}.get(level, 11)
    assert f"OwnLoss returns a number that its forward computed in {name}, with {bits} significant" in str(one.message)
    assert "logits.float()" in str(one.message)
    assert (one.category, one.filename) == (AmpWarning, __file__)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_what_the_warning_advises_gives_the_loss_in_fp32(level: str) -> None:
    with Engine() as engine:
        model = engine.initialize(OwnLoss(is_exact=True), opt_level=level, verbosity=0)
        assert said(model) == []
        found = model(X, Y)
        assert found["loss"].item() == F.cross_entropy(found["logits"], Y).item()


def test_an_evaluation_before_the_training_says_nothing_and_hides_nothing() -> None:
    with Engine() as engine:
        model = engine.initialize(OwnLoss(), opt_level="O5", verbosity=0)
        with torch.no_grad():
            assert said(model, 9) == []
        assert len(said(model)) == 1


class Plain:
    """No container that casts look into."""

    def __init__(self, logits: Tensor) -> None:
        self.name, self.logits = "plain", logits


class Field(nn.Module):
    """Returns its logits in an object."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.body, self.kind = nn.Linear(4, 3), kind

    def forward(self, x: Tensor, targets: Tensor) -> Any:
        return self.kind(logits=self.body(x))


@pytest.mark.parametrize("level", LEVELS)
def test_half_tensors_in_an_object_that_no_cast_reaches_are_warned_of_once(level: str) -> None:
    with Engine() as engine:
        found = said(engine.initialize(Field(Plain), opt_level=level, verbosity=0))
    if level in ("O0", "O1", "O4"):  # their forwards give what functions give
        assert found == []
        return
    (one,) = found
    assert "Field returns a Plain, whose attributes no cast reaches: logits stays" in str(one.message)
    assert (one.category, one.filename) == (AmpWarning, __file__)


def test_what_that_warning_advises_gives_fp32() -> None:
    with Engine() as engine:
        model = engine.initialize(Field(dataclasses.make_dataclass("Out", ["logits"])), opt_level="O5", verbosity=0)
        assert said(model) == []
        assert model(X, Y).logits.dtype is torch.float32
