"""A checkpoint of shards goes on with any number of ranks bit for bit, and a resumed run as one that was not cut."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from amp_engine import amp
from tests.ranks import on_ranks
from tests.support import assert_bitwise, backward, scaler_numbers

LEVELS = ("O1", "O2")
OVERFLOWS = (1, 4)  # of these steps
CUT, END = 3, 7


def made(level: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Odd sizes: neither 2 nor 3 ranks divide them all."""
    torch.manual_seed(seed)
    layers = [nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 5)]
    for layer in layers:
        fully_shard(layer, mp_policy=amp.fsdp_policy(level))
    model = fully_shard(nn.Sequential(*layers), mp_policy=amp.fsdp_policy(level, root=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale="dynamic")
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for step in range(first, last):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step * ranks + rank))
        backward(model(x).square().mean(), optimizer, overflow=step in OVERFLOWS and rank == step % ranks)
        amp.clip_grad_norm_(optimizer, 0.1)
        optimizer.step()
        optimizer.zero_grad()


def whole(value: Tensor) -> Tensor:
    return value.detach().full_tensor().clone() if isinstance(value, DTensor) else value.detach().clone()


def picture(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Everything, whole: weights, moments, steps; scale and count."""
    values = [whole(p) for p in model.parameters()]
    for p in model.parameters():
        values += [whole(torch.as_tensor(value)) for _, value in sorted(optimizer.state[p].items())]
    return [*values, torch.tensor(scaler_numbers(), dtype=torch.float64)]


def save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    state_dict_saver.save({"training": amp.training_state(model, optimizer)}, checkpoint_id=folder)


def load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    state_dict_loader.load({"training": amp.training_state(model, optimizer)}, checkpoint_id=folder)


def begun(rank: int, folder: Path) -> dict[str, Any]:
    """A run that is saved on its way, and one that goes on from there."""
    results = {}
    for level in LEVELS:
        model, optimizer = made(level, seed=0)
        train(model, optimizer, 0, CUT)
        save(model, optimizer, folder / level / str(dist.get_world_size()))
        at_cut = picture(model, optimizer)
        train(model, optimizer, CUT, END)
        uncut = picture(model, optimizer)
        amp.close()
        model, optimizer = made(level, seed=1)
        load(model, optimizer, folder / level / str(dist.get_world_size()))
        train(model, optimizer, CUT, END)
        results[level] = at_cut, uncut, picture(model, optimizer)
        amp.close()
    return results


def passed_on(rank: int, folder: Path, before: int) -> dict[str, Any]:
    """Return the checkpoint of `before` ranks as these ranks load it, after they have saved it again."""
    results = {}
    for level in LEVELS:
        model, optimizer = made(level, seed=before)
        load(model, optimizer, folder / level / str(before))
        results[level] = picture(model, optimizer)
        save(model, optimizer, folder / level / str(dist.get_world_size()))
        amp.close()
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    results = {2: on_ranks(functools.partial(begun, folder=folder), 2)}
    for before, count in ((2, 3), (3, 1)):
        results[count] = on_ranks(functools.partial(passed_on, folder=folder, before=before), count)
    return results


@pytest.mark.parametrize("level", LEVELS)
def test_a_resumed_run_is_the_one_that_was_not_cut_overflows_included(ranks: Any, level: str) -> None:
    for results in ranks[2]:
        at_cut, uncut, resumed = results[level]
        assert_bitwise(resumed, uncut)
        assert not torch.equal(at_cut[0], uncut[0])
        assert uncut[-1][0] == 2.0**14  # two of the steps were skipped


@pytest.mark.parametrize("count", [3, 1])
@pytest.mark.parametrize("level", LEVELS)
def test_another_number_of_ranks_has_every_bit(ranks: Any, level: str, count: int) -> None:
    at_cut = ranks[2][0][level][0]
    for results in ranks[count]:
        assert_bitwise(results[level], at_cut)
