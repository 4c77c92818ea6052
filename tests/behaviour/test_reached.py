"""`amp.scale_loss(loss)`: the optimizers that the loss reaches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from amp_engine import AmpStateError, amp
from tests.support import assert_bitwise, masters


def two(level: str) -> tuple[nn.Module, nn.Module, SGD, SGD]:
    torch.manual_seed(0)
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    of_a, of_b = SGD(a.parameters(), lr=0.1), SGD(b.parameters(), lr=0.1)
    amp.initialize([a, b], [of_a, of_b], opt_level=level, verbosity=0)
    return a, b, of_a, of_b


def x() -> Tensor:
    return torch.linspace(-1, 1, 12).view(3, 4)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_the_step_is_that_of_the_named_optimizer(level: str) -> None:
    outcomes = []
    for is_named in (True, False):
        a, _, of_a, of_b = two(level)
        loss = a(x()).float().square().mean()
        with amp.scale_loss(loss, of_a) if is_named else amp.scale_loss(loss) as scaled_loss:
            scaled_loss.backward()
        of_a.step()
        outcomes.append((masters(of_a), masters(of_b)))
        amp.close()
    assert_bitwise(outcomes[0], outcomes[1])


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_skips_the_reached_optimizer_alone(level: str) -> None:
    a, b, of_a, of_b = two(level)
    for model, factor in ((a, 1e30), (b, 1.0)):
        with amp.scale_loss(model(x()).float().square().mean() * factor) as scaled_loss:
            scaled_loss.backward()
    of_a.step()
    of_b.step()
    engine = amp.current_engine()
    assert engine is not None
    assert (engine.step_was_skipped(of_a), engine.step_was_skipped(of_b)) == (True, False)


def test_parameters_behind_a_reentrant_checkpoint_are_reached() -> None:
    a, b, of_a, _ = two("O2")
    before = masters(of_a)
    with amp.scale_loss(b(checkpoint(a, x().requires_grad_(), use_reentrant=True)).square().mean()) as scaled_loss:
        scaled_loss.backward()
    of_a.step()
    assert not torch.equal(before[0], masters(of_a)[0])


@pytest.mark.parametrize("level", ["O0", "O2"])
@pytest.mark.parametrize("kind", ["constant", "of another parameter", "detached"])
def test_a_loss_that_reaches_none_is_refused(level: str, kind: str) -> None:
    a, *_ = two(level)
    loss = {"constant": torch.ones(()), "of another parameter": nn.Parameter(torch.ones(())) * 2}.get(kind)
    if loss is None:
        loss = a(x()).detach().sum()
    with pytest.raises(AmpStateError, match=r"reaches no parameter of any: SGD, SGD\.  .*amp\.scale_loss\(loss, optim"):
        amp.scale_loss(loss)


def test_disabled_it_asks_for_no_optimizer() -> None:
    amp.initialize(nn.Linear(2, 2), enabled=False)
    loss = torch.ones(())
    with amp.scale_loss(loss) as scaled_loss:
        assert scaled_loss is loss
