"""safetensors' own functions, for the weights of a model at any level."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from amp_engine import amp
from tests.models import NORMED_MLP
from tests.support import assert_bitwise, frozen, masters, started, train

safetensors = pytest.importorskip(
    "safetensors.torch", reason="an optional dependency: pip install amp_engine[safetensors]"
)


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight

    def forward(self, x: Any) -> Any:
        return self.second(self.first(x))


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("target", ["O0", "O2"])
def test_exact_weights_go_through_a_file(tmp_path: Path, level: str, target: str) -> None:
    path = tmp_path / "model.safetensors"
    model, optimizer = started(level)
    train(NORMED_MLP, model, optimizer, "cc")
    weights = [value.float() for value in masters(optimizer)]
    safetensors.save_model(model, path)
    assert {t.dtype for t in safetensors.load_file(path).values()} == {torch.float32, torch.int64}
    amp.close()
    model, optimizer = started(target, seed=77)
    assert safetensors.load_model(model, path) == (set(), [])
    assert_bitwise(masters(optimizer), weights)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_shared_weights_too(tmp_path: Path, level: str) -> None:
    path = tmp_path / "model.safetensors"
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    with amp.scale_loss(model(torch.ones(2, 8)).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    truth = frozen(dict(model.state_dict()))
    safetensors.save_model(model, path)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    safetensors.load_model(model, path)
    assert_bitwise(dict(model.state_dict()), truth)
