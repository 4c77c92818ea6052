"""A batch that is run once more leaves no trace, and none is run that would lose gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from amp_engine import AmpStateError, Engine
from amp_engine.telemetry.gradient_histogram import gradient_histogram
from amp_engine.telemetry.step_times import StepTimes
from tests.models import NORMED_MLP
from tests.ranks import on_ranks
from tests.support import assert_bitwise, backward, started


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_gradients_that_wait_for_a_step_without_a_verdict_are_not_thrown_away(level: str) -> None:
    with Engine() as engine:
        model, optimizer = started(level, engine=engine, loss_scale=2.0**8)
        loss = NORMED_MLP.loss(model, NORMED_MLP.batch(0))
        backward(loss, optimizer, engine=engine, delay_overflow_check=True)
        before = [weight.detach().clone() for weight in engine.master_params(optimizer)]
        for call in (engine.find_overflow, lambda f: gradient_histogram(engine, f)):
            with pytest.raises(AmpStateError, match=r"wait for SGD\.step"):
                call(lambda: NORMED_MLP.loss(model, NORMED_MLP.batch(0)))
        optimizer.step()
        assert all(not torch.equal(a, b) for a, b in zip(before, engine.master_params(optimizer), strict=True))


class Averaging(nn.Module):
    """Puts another tensor in the place of a buffer in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("newest", None)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().float().mean(0)
        self.newest = x.detach()
        return x


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_buffers_that_a_forward_replaces_are_put_back(level: str) -> None:
    model = Averaging()
    with Engine() as engine:
        engine.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, verbosity=0)
        mean = model.mean
        before = mean.clone()
        engine.find_overflow(lambda: model(torch.randn(2, 4)).float().square().mean())
        assert model.mean is mean
        assert torch.equal(mean, before)
        assert model.newest is None
        assert set(dict(model.named_buffers())) == {"mean"}


@pytest.mark.usefixtures("one_process_group")
@pytest.mark.parametrize("level", ["O0", "O1"])
def test_gradients_that_are_views_of_buckets_keep_their_values(level: str) -> None:
    with Engine() as engine:
        model, optimizer = started(level, engine=engine)
        wrapped: Any = DistributedDataParallel(model, gradient_as_bucket_view=True)
        first, second = NORMED_MLP.batches(2)
        backward(NORMED_MLP.loss(wrapped, first), optimizer, engine=engine)
        optimizer.step()
        grads = [(p.grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()]
        engine.find_overflow(lambda: NORMED_MLP.loss(wrapped, second))
        for p, (grad, values) in zip(model.parameters(), grads, strict=True):
            assert p.grad is grad
            assert_bitwise(grad, values)


def test_a_clock_does_not_see_it() -> None:
    with Engine() as engine:
        model, optimizer = started("O2", engine=engine)

        def step() -> None:
            backward(NORMED_MLP.loss(model, NORMED_MLP.batch(0)), optimizer, engine=engine)
            optimizer.step()

        with StepTimes(engine) as times:
            step()
            engine.find_overflow(step)
        assert times.measured().steps == 1
        assert engine.backwards.around is None


def history_of_a_rehearsed_rank(rank: int) -> dict[str, Any]:
    """What the history has of two steps and a batch that is run once more, whose overflow other ranks agree on."""
    found = {}
    for level in ("O1", "O2"):
        with Engine() as engine:
            model, optimizer = started(level, engine=engine, process_group=torch.distributed.group.WORLD)

            def batch(model: nn.Module = model, optimizer: Any = optimizer, engine: Engine = engine) -> None:
                backward(NORMED_MLP.loss(model, NORMED_MLP.batch(rank)), optimizer, engine=engine)

            for _ in range(2):
                batch()
                optimizer.step()
                optimizer.zero_grad()
            engine.find_overflow(batch)
            track = engine._scaling.history.track(0)
            found[level] = track.backwards, [number for number, _ in track.losses]
    return found


def test_a_batch_that_is_run_once_more_on_ranks_is_not_in_the_history() -> None:
    for found in on_ranks(history_of_a_rehearsed_rank, 2):
        assert found == {level: (2, [1, 2]) for level in ("O1", "O2")}
