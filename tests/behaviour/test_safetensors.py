"""safetensors' own functions, for the weights of a model at any level."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from amp_engine import amp
from tests.models import NORMED_MLP
from tests.support import assert_bitwise, masters, started, train

safetensors = pytest.importorskip(
    "safetensors.torch", reason="an optional dependency: pip install amp_engine[safetensors]"
)


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
