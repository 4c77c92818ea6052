"""In bfloat16, at a scale of 1, all ranks skip a step or none does, also in loops without `scale_loss`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from amp_engine import amp
from tests.ranks import on_ranks

BAD = 2  # the step before which one rank has a gradient that is not finite


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def trained(kind: str, level: str, is_plain: bool, **options: Any) -> tuple[list[bool], bool]:
    """Return which of four steps were skipped on this rank, and if all parameters are finite."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    if kind == "FSDP2":
        model = fully_shard(model, mp_policy=amp.fsdp_policy(level, root=True))
    elif kind == "FSDP1":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    called = DistributedDataParallel(model) if kind == "DDP" else model
    skipped = []
    for index in range(4):
        loss = called(torch.full((3, 4), 1.0 + dist.get_rank())).float().square().mean()
        if is_plain:
            loss.backward()
        else:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        if index == BAD and (kind == "DDP" or dist.get_rank() == 1):  # what DDP reduces is the same on all ranks
            shards = [local(p.grad) for p in model.parameters() if p.grad is not None]
            next(shard for shard in shards if shard.numel()).view(-1)[0] = math.nan
        optimizer.step()
        skipped.append(amp.last_step().skipped)
        optimizer.zero_grad()
    finite = all(bool(local(p.detach()).isfinite().all()) for p in model.parameters())
    amp.close()
    return skipped, finite


CASES = {
    f"{kind} {level}, {'plain' if is_plain else 'scale_loss'}": (kind, level, is_plain)
    for kind, level in (("FSDP2", "O4"), ("FSDP2", "O5"), ("DDP", "O4"), ("FSDP1, named", "O4"))
    for is_plain in (False, True)
}


def run_cases(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (kind, level, is_plain) in CASES.items():
        options = {"process_group": dist.group.WORLD} if kind.endswith("named") else {}
        found[name] = trained(kind.partition(",")[0], level, is_plain, **options)
    found["FSDP1"] = trained("FSDP1", "O4", False)
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return on_ranks(run_cases, 2)


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_skip_the_step(found: list[dict[str, Any]], name: str) -> None:
    assert [results[name] for results in found] == [([False, False, True, False], True)] * 2


def test_ranks_that_cannot_agree_step_as_in_torch(found: list[dict[str, Any]]) -> None:
    assert [results["FSDP1"] for results in found] == [([False] * 4, False)] * 2
