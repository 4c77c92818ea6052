"""A collective writes the weight itself and moves no version of it; the next forward runs what it wrote."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from amp_engine import amp
from tests.ranks import on_ranks
from tests.support import FUNCTION_LEVELS, backward

RANKS = 2
X = torch.tensor([[1.0, 2.0, -1.0], [0.0, 1.0, 3.0]])


def rank() -> int:
    return dist.get_rank()


def coalesced(w: nn.Parameter) -> None:
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(w.detach())
    manager.wait()


def received(w: nn.Parameter) -> None:
    if rank() == 0:
        dist.send(w.detach().clone(), 1)
    else:
        dist.recv(w, 0)


def received_later(w: nn.Parameter) -> None:
    work = dist.isend(w.detach().clone(), 1) if rank() == 0 else dist.irecv(w, 0)
    assert work is not None
    work.wait()


def batched(w: nn.Parameter) -> None:
    operation = dist.P2POp(dist.isend, w.detach().clone(), 1) if rank() == 0 else dist.P2POp(dist.irecv, w, 0)
    for work in dist.batch_isend_irecv([operation]):
        work.wait()


def functional(w: nn.Parameter) -> None:
    name = dist.group.WORLD.group_name
    torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce_(w.detach(), "sum", name))


def awaited(work: Any) -> None:
    work.wait()


def part(w: Tensor) -> Tensor:
    """Return the part [2, 3] that a rank gives to w [4, 3]."""
    return w.detach()[2 * rank() :][:2] + 1.0


COLLECTIVES: dict[str, Callable[[nn.Parameter], Any]] = {
    "all_reduce": dist.all_reduce,
    "all_reduce, async": lambda w: awaited(dist.all_reduce(w, async_op=True)),
    "all_reduce of detach": lambda w: dist.all_reduce(w.detach()),
    "all_reduce of data": lambda w: dist.all_reduce(w.data),
    "broadcast": lambda w: dist.broadcast(w, 0),
    "broadcast, async": lambda w: awaited(dist.broadcast(w, 0, async_op=True)),
    "reduce": lambda w: dist.reduce(w, 0),
    "all_gather": lambda w: dist.all_gather([w.detach(), torch.empty_like(w).detach()], w.detach() + 1),
    "all_gather_into_tensor": lambda w: dist.all_gather_into_tensor(w.detach(), part(w)),
    "scatter": lambda w: dist.scatter(w, [w.detach() + r + 1 for r in range(RANKS)] if rank() == 0 else None),
    "all_to_all_single": lambda w: dist.all_to_all_single(w.detach(), w.detach() + 1.0),
    "recv": received,
    "irecv": received_later,
    "batch_isend_irecv": batched,
    "coalescing manager": coalesced,
    "broadcast_coalesced": lambda w: dist._broadcast_coalesced(dist.group.WORLD, [w.detach()], 2**20, 0),
    "functional": functional,
    "of the backend": lambda w: awaited(
        dist.group.WORLD._get_backend(torch.device("cpu")).allreduce([w], dist.AllreduceOptions())
    ),
}


def is_fresh(model: nn.Linear, low: torch.dtype) -> bool:
    """True if the weight is fresh in training, in evaluation, and in training after it."""
    with amp.disable_casts(), torch.no_grad():
        expected = X.to(low) @ model.weight.to(low).t()
    outputs = [model(X)]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            outputs.append(model(X).clone())
    return all(torch.equal(output, expected) for output in (*outputs, model(X)))


def run(this_rank: int) -> dict[Any, tuple[bool, bool]]:
    """Run in one of the processes; write after which collectives the weight was new, and after which it was used."""
    warnings.simplefilter("ignore")
    results = {}
    for level in FUNCTION_LEVELS:
        for optimizer_class in (torch.optim.SGD, torch.optim.RMSprop):
            model = nn.Linear(3, 4, bias=False)
            nn.init.constant_(model.weight, 1.0 + this_rank)
            optimizer = optimizer_class(model.parameters(), lr=0.5)
            amp.initialize(model, optimizer, opt_level=level, loss_scale=1.0, verbosity=0)
            low = amp.current_engine().function_casts.casts.dtype
            for name, collective in COLLECTIVES.items():
                moved, fresh = False, True
                for evaluates in (False, True):
                    with torch.no_grad():
                        model.weight.fill_(1.0 + this_rank)
                    for _ in range(3):
                        optimizer.zero_grad()
                        backward(model(X * (1 + this_rank)).float().mean(), optimizer)
                        optimizer.step()
                    if evaluates:
                        is_fresh(model, low)  # which leaves a copy
                    before = model.weight.detach().clone()
                    collective(model.weight)
                    moved |= not torch.equal(model.weight, before)
                    fresh &= is_fresh(model, low)
                results[level, optimizer_class.__name__, name] = moved, fresh
            amp.close()
    return results


@pytest.fixture(scope="module")
def ranks() -> list[dict[Any, tuple[bool, bool]]]:
    return on_ranks(run, RANKS)


@pytest.mark.slow
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("optimizer", ["SGD", "RMSprop"])
@pytest.mark.parametrize("level", FUNCTION_LEVELS)
def test_a_weight_that_a_collective_wrote_is_cast_anew(
    level: str, optimizer: str, collective: str, ranks: list[dict[Any, tuple[bool, bool]]]
) -> None:
    results = [rank[level, optimizer, collective] for rank in ranks]
    assert any(moved for moved, _ in results), "it wrote nothing"
    assert all(fresh for _, fresh in results)
