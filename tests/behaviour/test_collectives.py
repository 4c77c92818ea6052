"""Weights that collectives of torch.distributed write after `initialize`: masters follow on all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.utils import average_parameters

from amp_engine import amp
from amp_engine.apex.parallel.distributed import flat_dist_call
from tests import support
from tests.models import MLP, NORMED_MLP
from tests.ranks import on_ranks
from tests.support import HALF, MASTER_LEVELS, assert_bitwise, frozen, masters, train

RANKS = 2
Sync = Callable[[nn.Module], Any]


def by_itself(model: nn.Module) -> None:
    for param in model.parameters():
        dist.broadcast(param, 0)


def through_data(model: nn.Module) -> None:
    for param in model.parameters():
        dist.broadcast(param.data, 0)


def detached(model: nn.Module) -> None:
    for param in model.parameters():
        dist.broadcast(param.detach(), 0)


def as_horovod(model: nn.Module) -> None:
    """Broadcast like Horovod's `broadcast_parameters`: start all, then wait for all."""
    handles = [dist.broadcast(param.data, 0, async_op=True) for _, param in sorted(model.named_parameters())]
    for handle in handles:
        handle.wait()


def averaged(model: nn.Module) -> None:
    for param in model.parameters():
        dist.all_reduce(param.data)
        param.data.div_(RANKS)


def in_parts(model: nn.Module) -> None:
    """A view of the parameter is what is written."""
    for param in model.parameters():
        for row in param.data.view(len(param), -1):
            dist.broadcast(row, 0)


def coalesced(model: nn.Module) -> None:
    dist._broadcast_coalesced(dist.group.WORLD, list(model.parameters()), 1 << 20, 0)


def flat_call(model: nn.Module) -> None:
    flat_dist_call([param.data for param in model.parameters()], dist.broadcast, (0,))


def torch_ddp(model: nn.Module) -> None:
    nn.parallel.DistributedDataParallel(model)


def model_averager(model: nn.Module) -> None:
    """Average as `PeriodicModelAverager` does, for one type at a time: one vector is made of the parameters."""
    for dtype in dict.fromkeys(param.dtype for param in model.parameters()):
        average_parameters((p for p in list(model.parameters()) if p.dtype == dtype), dist.group.WORLD)


def copied_into_data(model: nn.Module) -> None:
    flat = torch.cat([param.data.flatten() for param in model.parameters() if param.dtype != torch.float32])
    dist.broadcast(flat, 0)
    for param in model.parameters():
        if param.dtype != torch.float32:
            values, flat = flat.split((param.numel(), flat.numel() - param.numel()))
            param.data.copy_(values.view_as(param))
        else:
            dist.broadcast(param, 0)


def one_by_one_into_data(model: nn.Module) -> None:
    for param in model.parameters():
        value = param.data.clone()
        dist.broadcast(value, 0)
        param.data.copy_(value)


SYNCS: dict[str, Sync] = {
    sync.__name__: sync
    for sync in (
        by_itself,
        through_data,
        detached,
        as_horovod,
        averaged,
        in_parts,
        coalesced,
        flat_call,
        torch_ddp,
        model_averager,
        copied_into_data,
        one_by_one_into_data,
    )
}


def cases() -> Iterator[tuple[str, str, str, Sync]]:
    for level in MASTER_LEVELS:
        for name, sync in SYNCS.items():
            for when in ("before the first step", "between steps"):
                yield level, name, when, sync


def run_cases(rank: int) -> dict[Any, Any]:
    """Run in one of the processes; return weights and masters after each sync, and after a step on the same batch."""
    warnings.simplefilter("error")
    results: dict[Any, Any] = {}
    for level, name, when, sync in cases():
        model = NORMED_MLP.model(seed=rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        if when == "between steps":
            train(NORMED_MLP, model, optimizer, "cc", first=rank)
        with torch.no_grad():  # or torch warns that a gradient passes by the collective of a parameter itself
            sync(model)
        weights = frozen(dict(model.named_parameters()))
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, nn.BatchNorm1d):
                    module.reset_running_stats()
        train(NORMED_MLP, model, optimizer, "c", first=7)
        results[level, name, when] = weights, frozen(dict(enumerate(masters(optimizer))))
        amp.close()
    return results


@pytest.fixture(scope="module")
def ranks() -> list[dict[Any, Any]]:
    return on_ranks(run_cases, RANKS)


@pytest.mark.parametrize("case", list(cases()), ids=lambda case: " ".join(case[:3]))
def test_ranks_that_agree_on_weights_step_the_same_masters(ranks: list[dict[Any, Any]], case: Any) -> None:
    """Between steps the masters of an element that the collective left as it was may differ, by less than its unit."""
    (weights, stepped), (other_weights, other_stepped) = (results[case[:3]] for results in ranks)
    assert_bitwise(weights, other_weights)
    if case[2] == "before the first step":
        assert_bitwise(stepped, other_stepped)
    for before, after, other in zip(weights.values(), stepped.values(), other_stepped.values(), strict=True):
        torch.testing.assert_close(before.float(), after, atol=0.05, rtol=0)  # a step from there, not from elsewhere
        unit = torch.finfo(HALF[case[0]]).eps
        torch.testing.assert_close(after, other, atol=unit / 8, rtol=unit)


# --- one process ----------------------------------------------------------------------------------


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def started(level: str, **keywords: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    return support.started(level, lambda params: torch.optim.SGD(params, lr=0.0), MLP, **keywords)


def versions(tensors: Iterable[Tensor]) -> list[int]:
    return [t._version for t in tensors]


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_a_checkpoint_that_is_loaded_after_a_broadcast_is_exact(group: None, level: str) -> None:
    saved = MLP.model(8).state_dict()
    model, optimizer = started(level)
    one_by_one_into_data(model)
    model.load_state_dict(saved)
    train(MLP, model, optimizer, "c")
    assert_bitwise(masters(optimizer), list(saved.values()))


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_weights_that_are_initialized_through_data_after_initialize_reach_masters(level: str) -> None:
    model, optimizer = started(level, loss_scale=1.0)
    exact = [p.detach().clone() for p in MLP.model().parameters()]
    model[0].weight.data.fill_(0.5)
    model[2].bias.data[1] = 3
    train(MLP, model, optimizer, "c")
    stepped = masters(optimizer)
    assert bool((stepped[0] == 0.5).all())
    assert_bitwise(stepped[1:3], exact[1:3])
    exact[3][1] = 3
    assert_bitwise(stepped[3], exact[3])


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_weights_that_are_initialized_through_data_after_initialize_are_saved(level: str) -> None:
    model, _ = started(level)
    exact = model.state_dict()["0.bias"]
    model[0].weight.data.fill_(0.5)
    saved = model.state_dict()
    assert bool((saved["0.weight"] == 0.5).all())
    assert_bitwise(saved["0.bias"], exact)


@pytest.mark.parametrize("way", ["saved", "closed"])
@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_writes_through_data_are_saved_and_kept_by_close(level: str, way: str) -> None:
    model = MLP.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, adopt_data_writes=True, verbosity=0)
    train(MLP, model, optimizer, "c")
    exact = model.state_dict()["0.weight"]
    model[0].weight.data[1] = 0.5
    exact[1] = 0.5
    if way == "closed":
        amp.close()
    assert_bitwise(model.state_dict()["0.weight"], exact)


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_masters_follow_writes_through_data_where_a_script_moves_versions_itself(level: str) -> None:
    model, optimizer = started(level)
    train(MLP, model, optimizer, "c")
    for param in model.parameters():
        param.data.fill_(0.25)
    torch.autograd.graph.increment_version(model.parameters())
    train(MLP, model, optimizer, "c")
    assert all(bool((master == 0.25).all()) for master in masters(optimizer))
