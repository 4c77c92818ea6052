"""apex's older interface: amp.init(), wrap_optimizer, and a scaler for each loss between two steps."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from amp_engine import amp
from amp_engine.apex_private.handle import Handle, NoOpHandle, OptimWrapper
from amp_engine.errors import AmpIndexError, AmpStateError, AmpTypeError
from tests.models import MLP
from tests.support import assert_bitwise, frozen, optimizer_values

SKIPPED = "Gradient overflow, skipping update\n"


def wrapped(make: Any = torch.optim.SGD, num_loss: int = 1) -> tuple[nn.Module, Any]:
    model = MLP.model()
    handle = amp.init()
    return model, handle.wrap_optimizer(make(model.parameters(), 0.1), num_loss)


def backward(model: nn.Module, optimizer: Any, index: int = 0, overflow: bool = False) -> None:
    with optimizer.scale_loss(MLP.loss(model, MLP.batch(index))) as scaled_loss:
        (scaled_loss * float("inf") if overflow else scaled_loss).backward()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters()]


def test_init_returns_a_handle_that_wraps() -> None:
    handle = amp.init()
    assert isinstance(handle, Handle)
    assert isinstance(handle.wrap_optimizer(torch.optim.SGD(MLP.model().parameters(), 0.1)), OptimWrapper)
    assert handle.is_active()


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop])
def test_a_loss_is_scaled_and_gradients_are_unscaled_and_training_learns(make: Any) -> None:
    model = MLP.model()
    optimizer = amp.init().wrap_optimizer(make(model.parameters(), 0.01))
    losses = []
    for index in range(12):
        optimizer.zero_grad()
        loss = MLP.loss(model, MLP.batch(index % 2))
        with optimizer.scale_loss(loss) as scaled_loss:
            assert scaled_loss.item() == loss.item() * 2.0**16
            scaled_loss.backward()
        assert max(float(grad.abs().max()) for grad in gradients(model)) < 10
        optimizer.step()
        losses.append(loss.item())
    assert losses[-2] < losses[0]


def test_the_step_is_that_of_the_engine_at_o1() -> None:
    def trained(use_handle: bool) -> list[torch.Tensor]:
        model = MLP.model()
        optimizer: Any = torch.optim.Adam(model.parameters(), 0.01)
        if use_handle:
            optimizer = amp.init().wrap_optimizer(optimizer)
        else:
            amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
        for index in range(4):
            optimizer.zero_grad()
            loss = MLP.loss(model, MLP.batch(index))
            with optimizer.scale_loss(loss) if use_handle else amp.scale_loss(loss, optimizer) as scaled_loss:
                (scaled_loss * (float("inf") if index == 1 else 1)).backward()
            optimizer.step()
        amp.close()
        return [p.detach().clone() for p in model.parameters()]

    assert_bitwise(trained(True), trained(False))


def test_several_losses_add_up_each_by_its_own_scaler() -> None:
    model, optimizer = wrapped(num_loss=2)
    backward(model, optimizer, 0)
    first = gradients(model)
    backward(model, optimizer, 1)
    both = gradients(model)
    optimizer.step()
    optimizer.zero_grad()
    amp.close()
    model, optimizer = wrapped(num_loss=2)
    backward(model, optimizer, 1)
    second = gradients(model)
    torch.testing.assert_close(both, [a + b for a, b in zip(first, second, strict=True)])


def test_each_loss_has_a_scale_of_its_own_in_the_order_of_the_calls() -> None:
    model, optimizer = wrapped(num_loss=2)
    for _ in range(2):
        backward(model, optimizer)
        backward(model, optimizer, overflow=True)
        optimizer.step()
        optimizer.zero_grad()
    scales = []
    for _ in range(2):
        with optimizer.scale_loss(torch.ones(())) as scaled_loss:
            scales.append(float(scaled_loss))
    assert scales == [2.0**16, 2.0**14]


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop])
@pytest.mark.parametrize("which", [0, 1])
def test_one_loss_that_overflows_skips_the_step_and_says_so(
    which: int, make: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = wrapped(make, num_loss=2)
    for index in range(2):
        backward(model, optimizer, index, overflow=index == which)
    before = optimizer_values(optimizer)
    assert optimizer.step() is None
    assert_bitwise(optimizer_values(optimizer), before)
    assert capsys.readouterr().out == SKIPPED
    optimizer.zero_grad()
    for index in range(2):
        backward(model, optimizer, index)
    optimizer.step()
    assert capsys.readouterr().out == ""
    assert not torch.equal(next(model.parameters()).detach(), before["params"][0])


def test_casts_of_weights_are_forgotten_after_the_backward() -> None:
    model, optimizer = wrapped()
    loss = MLP.loss(model, MLP.batch())
    cache = amp._amp_state.engine.function_casts.casts.cache
    assert len(cache) > 0
    with optimizer.scale_loss(loss) as scaled_loss:
        scaled_loss.backward()
    assert len(cache) == 0


def test_more_losses_than_were_announced_are_refused() -> None:
    model, optimizer = wrapped(num_loss=1)
    backward(model, optimizer)
    with pytest.raises(AmpIndexError, match=r"loss number 2 since the last step.*num_loss=2"):
        optimizer.scale_loss(torch.ones(())).__enter__()
    optimizer.step()
    backward(model, optimizer)


def test_a_closure_is_refused_and_nothing_moves() -> None:
    model, optimizer = wrapped()
    before = frozen(list(model.parameters()))
    with pytest.raises(NotImplementedError, match="Currently, Amp does not support closure use with optimizers"):
        optimizer.step(lambda: torch.ones(()))
    assert_bitwise(list(model.parameters()), before)


def test_an_exception_in_the_body_puts_the_gradients_back() -> None:
    model, optimizer = wrapped(num_loss=2)
    backward(model, optimizer)
    before = gradients(model)

    def interrupted() -> None:
        with optimizer.scale_loss(MLP.loss(model, MLP.batch(3))) as scaled_loss:
            scaled_loss.backward()
            raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        interrupted()
    assert_bitwise(gradients(model), before)
    backward(model, optimizer)
    optimizer.step()


def test_the_optimizer_shows_through() -> None:
    model, optimizer = wrapped()
    inner = optimizer._optimizer
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    assert repr(optimizer) == repr(inner)
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert len(inner.param_groups) == 2
    optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        optimizer.nonsense  # noqa: B018
    assert not hasattr(copy.copy(object.__new__(OptimWrapper)), "anything")


def test_a_scheduler_of_a_skipped_first_step_is_quiet() -> None:
    model, optimizer = wrapped()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer._optimizer, 1)
    backward(model, optimizer, overflow=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        scheduler.step()


def test_the_step_runs_without_casts() -> None:
    seen = []

    class Notes(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            seen.append(F.softmax(torch.ones(2).half(), -1).dtype)
            return super().step(closure)

    model, optimizer = wrapped(Notes)
    backward(model, optimizer)
    optimizer.step()
    assert seen[0] == torch.float16
    assert F.softmax(torch.ones(2).half(), -1).dtype == torch.float32


def test_after_deactivate_the_loss_is_the_loss() -> None:
    model, optimizer = wrapped()
    amp._amp_state.handle._deactivate()
    loss = torch.ones(())
    with optimizer.scale_loss(loss) as scaled_loss:
        assert scaled_loss is loss
    before = next(model.parameters()).detach().clone()
    MLP.loss(model, MLP.batch()).backward()
    optimizer.step(lambda: torch.ones(()))
    assert not torch.equal(next(model.parameters()).detach(), before)


def test_close_gives_the_optimizer_back() -> None:
    model = MLP.model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = dict(vars(optimizer))
    wrapper = amp.init().wrap_optimizer(optimizer)
    with pytest.raises(AmpStateError, match=r"should only be passed through amp\.initialize once"):
        amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    amp.close()
    assert vars(optimizer) == before
    loss = torch.ones(())
    with wrapper.scale_loss(loss) as scaled_loss:
        assert scaled_loss is loss
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)


@pytest.mark.parametrize("wrong", ["sgd", []])
def test_what_is_no_optimizer_is_not_wrapped(wrong: Any) -> None:
    with pytest.raises(
        AmpTypeError, match=f"wrap_optimizer takes one torch.optim.Optimizer, not a {type(wrong).__name__}"
    ):
        amp.init().wrap_optimizer(wrong)


def test_scale_loss_of_the_handle_says_that_it_is_gone() -> None:
    optimizer = torch.optim.SGD(MLP.model().parameters(), 0.1)
    with pytest.raises(RuntimeError, match=r"^The old Amp API is no longer supported\.  Please move to the new API, "):
        amp.init().scale_loss(torch.ones(()), optimizer)


def test_a_handle_that_does_nothing_scales_and_skips_nothing() -> None:
    handle = amp.init(enabled=False)
    assert isinstance(handle, NoOpHandle)
    model, loss = MLP.model(), torch.ones(())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    wrapper = handle.wrap_optimizer(optimizer, num_loss=2)
    assert not hasattr(optimizer, "_amp_stash")
    with wrapper.scale_loss(loss) as scaled_loss, handle.scale_loss(loss, optimizer) as other, handle._disable_casts():
        assert scaled_loss is other is loss
    assert float(wrapper.step(lambda: torch.ones(()))) == 1.0
    assert handle.is_active() is False
    handle._clear_cache()
    handle._deactivate()
