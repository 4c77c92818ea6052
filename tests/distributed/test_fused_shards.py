"""The kernels step what each rank has of DTensors, as they would step the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from amp_engine import amp, kernels
from amp_engine.optimizers.fused_step import StepInput, fused_step_of
from tests.ranks import on_ranks
from tests.support import backward

OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-4),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-3),
}
LEVELS = ("O1", "O2", "O4")

pytestmark = pytest.mark.skipif(
    not kernels.has_native(torch.device("cpu")), reason="torch's classes step shards where no kernels are compiled"
)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 1))  # 7 rows on 3 ranks, and a bias of 1


def stepped(rank: int) -> dict[Any, Any]:
    """Return for each case whole weights after steps of the shards and of the whole, and the state of the shards."""
    results: dict[Any, Any] = {}
    for level in LEVELS:
        for name, make in OPTIMIZERS.items():
            model = net()
            for part in model:
                fully_shard(part, mp_policy=amp.fsdp_policy(level))
            fully_shard(model, mp_policy=amp.fsdp_policy(level, root=True))
            optimizer = make(model.parameters())
            amp.initialize(model, optimizer, opt_level=level, verbosity=0, **_scale(level))
            twin = net()
            whole = make(twin.parameters())
            for index in range(5):
                inputs = torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * index + rank))
                optimizer.zero_grad()
                backward(
                    model(inputs).float().square().mean(), optimizer, overflow=index == 3 and level in ("O1", "O2")
                )
                for theirs, ours in zip(twin.parameters(), model.parameters(), strict=True):
                    theirs.grad = ours.grad.full_tensor()
                optimizer.step()
                if not (index == 3 and level in ("O1", "O2")):
                    _step_whole(whole)
            state = [value for of_one in optimizer.state.values() for k, value in of_one.items() if k != "step"]
            results[level, name] = {
                "shards": [p.detach().full_tensor().clone() for p in model.parameters()],
                "whole": [p.detach().clone() for p in twin.parameters()],
                "kinds": {type(value) for value in state},
                "empty": sum(p.to_local().numel() == 0 for p in model.parameters()),
            }
            amp.close()
    return results


def _scale(level: str) -> dict[str, Any]:
    return {"loss_scale": "dynamic"} if level in ("O1", "O2") else {}


def _step_whole(optimizer: torch.optim.Optimizer) -> None:
    fused = fused_step_of(optimizer)
    params: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
    with torch.no_grad():
        step = fused.plan(StepInput(params, params, [p.grad for p in params], None, bytes(len(params))))
        assert step is not None
        fused.step(step)


@pytest.fixture(scope="module")
def ranks() -> list[dict[Any, Any]]:
    return on_ranks(stepped, 3)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
def test_shards_are_stepped_as_the_whole(ranks: list[Any], level: str, name: str) -> None:
    assert sum(results[level, name]["empty"] for results in ranks) > 0
    for results in ranks:
        found = results[level, name]
        if level in ("O1", "O2"):
            for ours, theirs in zip(found["shards"], found["whole"], strict=True):
                assert torch.equal(ours, theirs)
        else:  # torch's own step, where there is nothing of ours to do
            torch.testing.assert_close(found["shards"], found["whole"], rtol=1e-5, atol=1e-6)
        assert found["kinds"] == {DTensor}
