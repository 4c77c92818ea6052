"""Checkpoints of models on a GPU: through amp.save, and through torch.distributed.checkpoint."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from amp_engine import AmpStateError, amp
from tests.gpu.support import GPU, assert_same_bits
from tests.gpu.test_levels import model_and_batch, steps
from tests.support import LEVELS

pytestmark = pytest.mark.cuda


def made(level: str, seed: int) -> tuple[Any, ...]:
    torch.manual_seed(seed)
    model, x, y = model_and_batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    return model, optimizer, x, y


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    state = get_optimizer_state_dict(model, optimizer)["state"]
    moments = [torch.as_tensor(value).clone() for of in state.values() for value in of.values()]
    return [*(value.clone() for value in model.state_dict().values()), *moments]


def through_amp(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, save: bool) -> None:
    if save:
        amp.save(folder / "checkpoint.pt", model=model, optimizer=optimizer)
    else:
        amp.load(folder / "checkpoint.pt", model=model, optimizer=optimizer)


def through_dcp(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, save: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        call = dcp.save if save else dcp.load
        call({"training": amp.training_state(model, optimizer)}, checkpoint_id=folder, no_dist=True)


@pytest.mark.parametrize("through", [through_amp, through_dcp])
@pytest.mark.parametrize("level", LEVELS)
def test_what_is_loaded_is_what_was_saved_and_stays_on_the_gpu(tmp_path: Path, level: str, through: Any) -> None:
    model, optimizer, x, y = made(level, 0)
    steps(model, optimizer, x, y, 3)
    through(tmp_path, model, optimizer, True)
    saved, scale = values(model, optimizer), amp.state_dict()
    amp.close()
    model, optimizer, _, _ = made(level, 1)
    through(tmp_path, model, optimizer, False)
    assert_same_bits(values(model, optimizer), saved)
    assert amp.state_dict() == scale
    assert {p.device.type for p in amp.master_params(optimizer)} == {GPU.type}
    assert {state["exp_avg"].device.type for state in optimizer.state.values()} == {GPU.type}
    losses = steps(model, optimizer, x, y, 30)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("level", LEVELS)
def test_a_refusal_puts_everything_back(tmp_path: Path, level: str) -> None:
    model, optimizer, x, y = made(level, 0)
    steps(model, optimizer, x, y, 3)
    amp.save(tmp_path / "other.pt", model=model, optimizer=torch.optim.SGD(nn.Linear(1, 1).parameters()))
    steps(model, optimizer, x, y, 1)
    before = values(model, optimizer)
    with pytest.raises(AmpStateError, match="nothing of it was loaded"):
        amp.load(tmp_path / "other.pt", model=model, optimizer=optimizer)
    assert_same_bits(values(model, optimizer), before)
    assert {p.device.type for p in amp.master_params(optimizer)} == {GPU.type}
