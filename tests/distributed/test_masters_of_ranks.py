"""Masters of ranks stay together, whoever writes the parameters on one rank or on all."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from amp_engine import AmpStateError, amp
from tests.models import MLP
from tests.ranks import on_ranks
from tests.support import MASTER_LEVELS, assert_bitwise, backward, masters, momentum_sgd

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {"kernels": momentum_sgd, "own step": torch.optim.Adagrad}


def broadcast(model: nn.Module) -> None:
    """As a script does that starts its ranks from other seeds, without a wrapper that would do it."""
    for p in model.parameters():
        dist.broadcast(p.data, 0)


def write_and_broadcast(model: nn.Module, rank: int) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.0 + rank)  # moves a version
            dist.broadcast(p, 0)


def average(model: nn.Module, rank: int) -> None:
    """Through `.data`, as local SGD and DiLoCo: what each rank has was rounded from masters of its own."""
    for p in model.parameters():
        p.data += rank
        dist.all_reduce(p.data)
        p.data /= 2


LATER = {"nothing": lambda model, rank: None, "write and broadcast": write_and_broadcast, "average": average}
CASES = [
    (level, name, before, later)
    for level in MASTER_LEVELS
    for name in OPTIMIZERS
    for before in ("nothing", "broadcast", "load")
    for later in LATER
    if later == "nothing" or before == "broadcast"
]


def trained(rank: int) -> dict[Any, Any]:
    results: dict[Any, Any] = {}
    for level, name, before, later in CASES:
        model = MLP.model(0 if before == "nothing" else rank)
        optimizer = OPTIMIZERS[name](model.parameters())
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        if before == "broadcast":
            broadcast(model)
        ddp = DistributedDataParallel(model)  # which writes the parameters as well, so a checkpoint is loaded after it
        if before == "load":
            model.load_state_dict(MLP.model(7).state_dict())
        seen = []
        for index in range(3):
            optimizer.zero_grad()
            backward(MLP.loss(ddp, MLP.batch(2 * index + rank)), optimizer)
            if index == 0:
                seen.append(masters(optimizer))
            if index == 2:
                LATER[later](model, rank)
            optimizer.step()
        results[level, name, before, later] = [*seen, masters(optimizer), [p.detach() for p in model.parameters()]]
        amp.close()
        del ddp
    return results


@pytest.fixture(scope="module")
def ranks() -> list[dict[Any, Any]]:
    return on_ranks(trained, 2)


@pytest.mark.parametrize("case", [case for case in CASES if case[3] != "average"], ids=", ".join)
def test_ranks_have_the_same_masters_to_the_last_bit(ranks: list[dict[Any, Any]], case: tuple[str, ...]) -> None:
    (first, last, params), theirs = (results[case] for results in ranks)
    assert_bitwise([first, last, params], theirs)
    assert_bitwise(params, [master.to(params[0].dtype) for master in last])


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_an_average_through_data_leaves_less_than_a_unit_of_half_between_ranks(
    ranks: list[dict[Any, Any]], level: str, name: str
) -> None:
    (_, ours, params), (_, theirs, _) = (results[level, name, "broadcast", "average"] for results in ranks)
    _, unwritten, _ = ranks[0][level, name, "broadcast", "nothing"]
    for one, other, param, before in zip(ours, theirs, params, unwritten, strict=True):
        unit = torch.finfo(param.dtype).eps * one.abs().clamp_min(0.5)  # of the values that the average rounded
        assert ((one - other).abs() <= unit).all()
        assert ((one - before - 0.5).abs() <= unit).all(), "what was written has counted"


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_masters_start_from_half_values_unless_they_were_loaded(
    ranks: list[dict[Any, Any]], level: str, name: str
) -> None:
    half = torch.float16 if level == "O2" else torch.bfloat16
    started = ranks[1][level, name, "broadcast", "nothing"][0]
    assert_bitwise(started, [p.detach().to(half).float() for p in MLP.model(0).parameters()])
    loaded = ranks[1][level, name, "load", "nothing"][0]
    assert_bitwise(loaded, [p.detach() for p in MLP.model(7).parameters()])


def replaced(rank: int) -> dict[str, Any]:
    """A model whose second optimizer, with a rate of 0, is made after the first has trained it, or is gone."""
    results: dict[str, Any] = {}
    for first_lives in (True, False):
        model = MLP.model().to(torch.bfloat16)
        amp.initialize(model, opt_level="O5", verbosity=0)
        ddp = DistributedDataParallel(model)
        first = momentum_sgd(model.parameters())
        for optimizer in (first, torch.optim.SGD(model.parameters(), lr=0.0)):
            for index in range(2):
                MLP.loss(ddp, MLP.batch(2 * index + rank)).backward()
                optimizer.step()
                optimizer.zero_grad()
            results[f"{first_lives} {optimizer is first}"] = [m.clone() for _, m in amp.named_masters(model)]
            if optimizer is first and not first_lives:
                del first, optimizer
                gc.collect()
                first = None
        amp.close()
        del ddp
    model = MLP.model().to(torch.bfloat16)
    amp.initialize(model, opt_level="O5", verbosity=0)
    fully_shard(model)
    MLP.loss(model, MLP.batch()).backward()
    try:
        momentum_sgd(model.parameters()).step()
    except AmpStateError as error:
        results["sharded since"] = str(error)
    return results


def test_an_optimizer_that_replaces_another_one_goes_on_from_its_masters() -> None:
    ours, theirs = on_ranks(replaced, 2)
    assert_bitwise(ours, theirs)
    for first_lives in (True, False):
        assert_bitwise(ours[f"{first_lives} False"], ours[f"{first_lives} True"])
    assert "fully_shard has made shards of this" in ours["sharded since"]


def loaded_before(rank: int) -> dict[str, Any]:
    """FP32 weights that are loaded before the wrapper is made, as by a Trainer, on all ranks or on the first."""
    results: dict[str, Any] = {}
    for split in (True, "split"):
        for loads in ("all", "first", "none"):
            model = MLP.model(rank).to(torch.bfloat16)
            amp.initialize(model, opt_level="O5", master_weights=split, verbosity=0)
            if loads == "all" or (loads == "first" and rank == 0):
                model.load_state_dict(MLP.model(7).state_dict())
            ddp = DistributedDataParallel(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            MLP.loss(ddp, MLP.batch(rank)).backward()
            optimizer.step()
            results[f"{split} {loads}"] = [m.clone().detach() for _, m in amp.named_masters(model)]
            amp.close()
            del ddp
    return results


def test_weights_that_were_loaded_before_the_wrapper_was_made_stay_exact() -> None:
    loaded = [p.detach() for p in MLP.model(7).parameters()]
    for results in on_ranks(loaded_before, 2):
        for split in ("True", "split"):
            assert_bitwise(results[f"{split} all"], loaded)
            assert_bitwise(results[f"{split} first"], loaded)
            assert_bitwise(results[f"{split} none"], [p.bfloat16().float() for p in MLP.model(0).parameters()])


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_masters_of_a_single_rank_start_from_the_exact_weights(one_process_group: None, level: str) -> None:
    """As under `torchrun --nproc-per-node 1`."""
    model = MLP.model()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    backward(MLP.loss(model, MLP.batch()), optimizer)
    optimizer.step()
    assert_bitwise([weight.detach() for weight in masters(optimizer)], before)
