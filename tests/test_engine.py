"""What an engine does with optimizers that overlap, repeat, or are not its own."""

import pytest
import torch
from torch import nn

from amp_engine import AmpIndexError, AmpStateError, AmpTypeError, Engine


@pytest.fixture
def engine():
    with Engine() as engine:
        yield engine


def linear():
    torch.manual_seed(0)
    return nn.Linear(4, 2, bias=False)


INPUTS = torch.linspace(-1, 1, 12).reshape(3, 4)


def gradient():
    model = linear()
    model(INPUTS).square().sum().backward()
    return model.weight.grad


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_parameter_of_two_optimizers_is_unscaled_once(engine, level):
    model = linear()
    both = [torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(model.parameters(), 0.1)]
    engine.initialize(model, both, opt_level=level, loss_scale=1024.0, verbosity=0)
    with engine.scale_loss(model(INPUTS).square().sum(), both) as scaled_loss:
        scaled_loss.backward()
    for optimizer in both:
        (param,) = engine.master_params(optimizer)
        torch.testing.assert_close(param.grad, gradient(), rtol=1e-2, atol=1e-2)


def test_masters_of_two_optimizers_follow_each_other_exactly(engine):
    model = linear()
    both = [torch.optim.SGD(model.parameters(), 1e-3), torch.optim.SGD(model.parameters(), 1e-3)]
    engine.initialize(model, both, opt_level="O2", loss_scale=1024.0, verbosity=0)
    with engine.scale_loss(model(INPUTS).square().sum(), both) as scaled_loss:
        scaled_loss.backward()
    first, second = (next(engine.master_params(o)) for o in both)
    grad, start = first.grad.clone(), first.detach().clone()
    both[0].step()
    both[1].step()
    assert torch.equal(second, start - 1e-3 * grad - 1e-3 * grad)


def test_an_optimizer_listed_twice_counts_once(engine):
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    engine.initialize(model, optimizer, opt_level="O2", loss_scale=128.0, verbosity=0)
    with engine.scale_loss(model(INPUTS).square().sum(), [optimizer, optimizer]) as scaled_loss:
        scaled_loss.backward()
    torch.testing.assert_close(next(engine.master_params(optimizer)).grad, gradient(), rtol=1e-2, atol=1e-2)


def test_a_foreign_optimizer_is_named(engine):
    model = linear()
    engine.initialize(model, torch.optim.SGD(model.parameters(), 0.1), opt_level="O2", verbosity=0)
    stranger = torch.optim.Adam(model.parameters())
    with pytest.raises(AmpTypeError, match="This Adam was not passed to amp.initialize"):
        engine.scale_loss(torch.ones(()), stranger).__enter__()
    with pytest.raises(AmpTypeError, match="This str was not passed"):
        engine.scale_loss(torch.ones(()), "optimizer").__enter__()


def test_a_loss_id_without_scaler_is_told_how_many_there_are(engine):
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    engine.initialize(model, optimizer, opt_level="O2", num_losses=2, verbosity=0)
    with pytest.raises(AmpIndexError, match=r"loss_id=2, but there are 2 loss scalers \(loss_id 0 to 1\)"):
        engine.scale_loss(torch.ones(()), optimizer, loss_id=2).__enter__()


def test_entering_scale_loss_inside_of_itself_is_refused_and_undone(engine):
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    engine.initialize(model, optimizer, opt_level="O2", loss_scale=128.0, verbosity=0)
    loss = model(INPUTS).square().sum()
    with (
        pytest.raises(AmpStateError, match="entered again for SGD"),
        engine.scale_loss(loss, optimizer),
        engine.scale_loss(loss, optimizer),
    ):
        pass
    with engine.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    torch.testing.assert_close(next(engine.master_params(optimizer)).grad, gradient(), rtol=1e-2, atol=1e-2)


def test_verdicts_do_not_pile_up_without_a_step(engine):
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    engine.initialize(model, optimizer, opt_level="O2", loss_scale=128.0, verbosity=0)
    for _ in range(20):
        with engine.scale_loss(model(INPUTS).square().sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
    assert len(optimizer._amp_stash._stepped.verdicts) == 1


def test_bad_input_leaves_the_verbosity(engine):
    with pytest.raises(AmpStateError):
        engine.initialize(linear(), opt_level="O9", verbosity=0)
    assert engine.reporter.verbosity == 1
