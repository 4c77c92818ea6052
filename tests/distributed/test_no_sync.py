"""Gradients under `no_sync` of DistributedDataParallel: reduced in the end, or refused by name."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from amp_engine import AmpStateError, amp
from tests.models import MLP
from tests.ranks import on_ranks
from tests.support import assert_bitwise, backward, masters, momentum_sgd

REDUCED = ("O0", "O1", "O2", "O5")
WINDOWED = {"O1": {}, "O2": {}, "O3": {"loss_scale": 128.0}}  # where a `scale_loss` sets gradients aside
REFUSED = r"Use amp\.scale_loss\(loss, optimizer, delay_unscale=True\) under no_sync\(\)"


def started(level: str, **options: Any) -> tuple[nn.Module, DistributedDataParallel, Optimizer]:
    model = MLP.model()
    optimizer = momentum_sgd(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    return model, DistributedDataParallel(model), optimizer


def micro_batch(ddp: DistributedDataParallel, optimizer: Optimizer, index: int, sync: bool, **options: Any) -> None:
    with contextlib.nullcontext() if sync else ddp.no_sync():
        backward(MLP.loss(ddp, MLP.batch(index)), optimizer, **options)


def accumulated(rank: int) -> dict[Any, Any]:
    results: dict[Any, Any] = {}
    for level in REDUCED:
        for way in ("delayed", "delayed beside zeros", "not delayed"):
            model, ddp, optimizer = started(level)
            for p in model.parameters() if way == "delayed beside zeros" else ():
                p.grad = torch.zeros_like(p)  # as zero_grad(set_to_none=False) leaves them
            try:
                micro_batch(ddp, optimizer, rank, sync=False, delay_unscale=way != "not delayed")
                micro_batch(ddp, optimizer, rank + 2, sync=True)
                optimizer.step()
                results[level, way] = masters(optimizer)
            except AmpStateError as error:
                results[level, way] = str(error)
            amp.close()
            del ddp
    return results


@pytest.fixture(scope="module")
def ranks() -> list[dict[Any, Any]]:
    return on_ranks(accumulated, 2)


@pytest.mark.parametrize("way", ["delayed", "delayed beside zeros", "not delayed"])
@pytest.mark.parametrize("level", REDUCED)
def test_ranks_agree_on_what_was_accumulated_or_refuse(ranks: list[dict[Any, Any]], level: str, way: str) -> None:
    ours, theirs = (results[level, way] for results in ranks)
    if way == "not delayed" and level in ("O1", "O2"):
        assert "delay_unscale=True" in ours
    else:
        assert all(isinstance(master, Tensor) for master in ours)
        assert_bitwise(ours, ranks[0][level, "delayed"])
    assert_bitwise(ours, theirs)


@pytest.mark.usefixtures("one_process_group")
@pytest.mark.parametrize("is_plain", [True, False])
@pytest.mark.parametrize("make", [momentum_sgd, torch.optim.Adagrad])
@pytest.mark.parametrize("gradient_as_bucket_view", [True, False])
def test_a_wrapper_at_a_scale_of_1_reduces_what_is_added_to_gradients_that_a_step_has_used(
    gradient_as_bucket_view: bool, make: Any, is_plain: bool
) -> None:
    model = MLP.model()
    optimizer = make(model.parameters())
    amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=gradient_as_bucket_view)
    for index in range(3):
        loss = MLP.loss(ddp, MLP.batch(index))
        if is_plain:
            loss.backward()
        else:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)  # float32, of which buckets take none
        optimizer.step()
        optimizer.zero_grad(set_to_none=index > 0)
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    del ddp


@pytest.mark.usefixtures("one_process_group")
@pytest.mark.parametrize("level", WINDOWED)
def test_the_refusal_leaves_gradients_and_goes_after_a_step(level: str) -> None:
    _, ddp, optimizer = started(level, **WINDOWED[level])
    micro_batch(ddp, optimizer, 0, sync=False)
    before = [p.grad.clone() for p in amp.master_params(optimizer) if p.grad is not None]
    with pytest.raises(AmpStateError, match=REFUSED):
        micro_batch(ddp, optimizer, 1, sync=True)
    assert_bitwise([p.grad for p in amp.master_params(optimizer)], before)
    optimizer.step()
    optimizer.zero_grad()
    micro_batch(ddp, optimizer, 1, sync=True)
    micro_batch(ddp, optimizer, 2, sync=True)
    del ddp


@pytest.mark.usefixtures("one_process_group")
@pytest.mark.parametrize("level", WINDOWED)
def test_a_delayed_backward_between_the_two_does_not_hide_it(level: str) -> None:
    _, ddp, optimizer = started(level, **WINDOWED[level])
    micro_batch(ddp, optimizer, 0, sync=False)
    micro_batch(ddp, optimizer, 1, sync=False, delay_unscale=True)
    with pytest.raises(AmpStateError, match=REFUSED):
        micro_batch(ddp, optimizer, 2, sync=True)
    del ddp


@pytest.mark.usefixtures("one_process_group")
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("level", WINDOWED)
def test_gradients_that_were_discarded_need_no_reduction(level: str, set_to_none: bool) -> None:
    _, ddp, optimizer = started(level, **WINDOWED[level])
    micro_batch(ddp, optimizer, 0, sync=False)
    optimizer.zero_grad(set_to_none)
    micro_batch(ddp, optimizer, 1, sync=True)
    optimizer.step()
    del ddp
