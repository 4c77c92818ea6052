"""torch.distributed.checkpoint over replicas and shards: what two ranks save, two fresh ones resume bit for bit."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from amp_engine import amp
from tests.distributed.test_shards import base, iterate, tensor_parallel, whole
from tests.ranks import on_ranks
from tests.support import assert_bitwise, scaler_numbers

RANKS = 2
CASES = [
    *((level, "ddp") for level in ("O1", "O2", "O5")),
    *((level, "fsdp2") for level in ("O0", "O1", "O2", "O4", "O5")),
    *((level, "tensor parallel") for level in ("O1", "O4")),
]


def made(level: str, kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model as `base` makes it, on ranks, and AdamW."""
    model = base()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.01 * seed)
    if kind == "fsdp2":
        fully_shard(model[0], mp_policy=amp.fsdp_policy(level))  # type: ignore[index]
        model = fully_shard(model, mp_policy=amp.fsdp_policy(level, root=True))
    elif kind == "tensor parallel":
        model = tensor_parallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    return (DistributedDataParallel(model) if kind == "ddp" else model), optimizer


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    iterate(model, optimizer)


def ends(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    state = get_optimizer_state_dict(model, optimizer)["state"]
    moments = {f"{name}.{key}": whole(value).clone() for name, of in state.items() for key, value in of.items()}
    return [{name: whole(p.detach()).clone() for name, p in amp.named_masters(model)}, moments, scaler_numbers()]


def saved_and_resumed(folder: str, rank: int) -> list[list[Any]]:
    """Return for each case the end of the run that went on, and of the one that resumed."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    results = []
    for i, (level, kind) in enumerate(CASES):
        model, optimizer = made(level, kind, 0)
        for _ in range(2):
            one_step(model, optimizer)
        training = amp.training_state(model, optimizer)
        dcp.save({"training": training}, checkpoint_id=f"{folder}/{i}")
        one_step(model, optimizer)
        truth = ends(model, optimizer)
        amp.close()
        del model, training
        model, optimizer = made(level, kind, 1)
        training = amp.training_state(model, optimizer)
        dcp.load({"training": training}, checkpoint_id=f"{folder}/{i}")
        one_step(model, optimizer)
        results.append([truth, ends(model, optimizer)])
        amp.close()
        del model, training
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder: Path = tmp_path_factory.mktemp("checkpoints")
    return on_ranks(partial(saved_and_resumed, str(folder)), RANKS)


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs Gloo")
@pytest.mark.parametrize(
    ("i", "case"), list(enumerate(CASES)), ids=lambda x: "-".join(x) if isinstance(x, tuple) else ""
)
def test_a_run_on_ranks_resumes_bitwise(results: list[Any], i: int, case: tuple[str, str]) -> None:
    for rank in range(RANKS):
        truth, resumed = results[rank][i]
        assert_bitwise(resumed, truth, f"{case} on rank {rank}")
        assert len(truth[0]) == 4
        assert all(moments.abs().sum() > 0 for moments in truth[1].values())
    assert_bitwise(results[1][i], results[0][i])
