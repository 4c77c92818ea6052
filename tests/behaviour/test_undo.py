"""`close()` and leaving an `Engine` undo everything; an exception anywhere leaves nothing hidden or disabled."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from amp_engine import AmpStateError, Engine, amp
from amp_engine.initialization.initialized import Initialized
from tests.conftest import patched_names
from tests.models import NORMED_MLP
from tests.support import (
    LEVELS,
    MODULE_HOOKS,
    OPTIMIZER_HOOKS,
    WEIGHT_DTYPE,
    assert_bitwise,
    backward,
    frozen,
    masters,
    picture,
    train,
    weights_of,
)


def fresh(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = NORMED_MLP.model(seed)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


# --- close ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_close_right_after_initialize_leaves_no_trace(level: str) -> None:
    model, optimizer = fresh()
    before = picture(model, [optimizer])
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    amp.close()
    after = picture(model, [optimizer])
    if level == "O3":
        for (_, now), (_, then) in zip(after.pop("tensors").values(), before.pop("tensors").values(), strict=True):
            assert now.dtype == then.dtype
            torch.testing.assert_close(now, then, rtol=1e-3, atol=1e-4)
        for side in (before, after):
            side["optimizers"][0]["values"].pop("params")
    assert_bitwise(after, before)
    assert patched_names() == []


@pytest.mark.parametrize("level", LEVELS)
def test_close_restores_types_hooks_and_attributes(level: str) -> None:
    model, optimizer = fresh()
    before = picture(model, [optimizer])
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    train(NORMED_MLP, model, optimizer, "coc")
    amp.close()
    after = picture(model, [optimizer])
    for part in ("module attributes", "module classes", "module hooks"):
        assert after[part] == before[part]
    for part in ("identities", "attributes", "hooks"):
        assert after["optimizers"][0][part] == before["optimizers"][0][part]
    assert {tensor.dtype for _, tensor in after["tensors"].values()} == {
        torch.float32,
        torch.int64,
    }


@pytest.mark.parametrize("first", ["O1", "O2", "O3"])
@pytest.mark.parametrize("second", ["O0", "O1", "O5"])
def test_the_same_model_and_optimizer_can_be_initialized_again_after_close(first: str, second: str) -> None:
    model, optimizer = fresh()
    for level in (first, second, first):
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        losses = train(NORMED_MLP, model, optimizer, "ccc")
        assert model[0].weight.dtype == WEIGHT_DTYPE[level]
        amp.close()
    assert all(loss == loss for loss in losses)


def test_close_undoes_both_of_two_initializes() -> None:
    first, first_optimizer = fresh(0)
    second, second_optimizer = fresh(1)
    amp.initialize(first, first_optimizer, opt_level="O2", verbosity=0)
    amp.initialize(second, second_optimizer, opt_level="O1", verbosity=0)
    amp.close()
    for model, optimizer in ((first, first_optimizer), (second, second_optimizer)):
        assert {param.dtype for param in model.parameters()} == {torch.float32}
        assert all(a is b for a, b in zip(weights_of(optimizer), model.parameters(), strict=True))
        assert not any(getattr(optimizer, hooks) for hooks in OPTIMIZER_HOOKS)
        assert not any(getattr(m, hooks) for m in model.modules() for hooks in MODULE_HOOKS)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_closed_engine_keeps_neither_model_nor_optimizer_alive(level: str) -> None:
    model, optimizer = fresh()
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    train(NORMED_MLP, model, optimizer, "cc")
    amp.close()
    alive = [weakref.ref(model), weakref.ref(optimizer), weakref.ref(model[0].weight)]
    del model, optimizer
    gc.collect()
    assert [ref() for ref in alive] == [None, None, None]


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_an_exception_closes_an_engine_too(level: str) -> None:
    model, optimizer = fresh()

    def fails() -> None:
        with Engine() as engine:
            engine.initialize(model, optimizer, opt_level=level, verbosity=0)
            train(NORMED_MLP, model, optimizer, "c", engine=engine)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert patched_names() == []
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    assert all(a is b for a, b in zip(weights_of(optimizer), model.parameters(), strict=True))


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("zeroes", [False, True])
def test_a_step_after_close_takes_no_gradient_that_overflowed_and_loses_none_of_its_own(
    level: str, zeroes: bool
) -> None:
    model, optimizer = fresh()
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    backward(NORMED_MLP.loss(model, NORMED_MLP.batch()), optimizer, overflow=True)
    before = masters(optimizer)
    amp.close()
    if zeroes:
        optimizer.zero_grad()
        NORMED_MLP.loss(model, NORMED_MLP.batch()).backward()
    optimizer.step()
    assert [not torch.equal(a, b) for a, b in zip(masters(optimizer), before, strict=True)] == [zeroes] * 5


# --- exceptions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("moment", ["before the backward", "after the backward"])
@pytest.mark.parametrize("delay", [False, True])
def test_an_exception_in_the_body_of_scale_loss_is_as_if_the_body_had_not_run(
    level: str, moment: str, delay: bool
) -> None:
    def run(*, interrupted: bool) -> tuple[list[torch.Tensor], Any]:
        model, optimizer = fresh()
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        train(NORMED_MLP, model, optimizer, "c")
        optimizer.zero_grad()
        model.eval()
        backward(NORMED_MLP.loss(model, NORMED_MLP.batch(1)), optimizer)

        def fails() -> None:
            loss = NORMED_MLP.loss(model, NORMED_MLP.batch(2))
            with amp.scale_loss(loss, optimizer, delay_unscale=delay) as scaled_loss:
                if moment == "after the backward":
                    scaled_loss.backward()
                raise ZeroDivisionError

        if interrupted:
            with pytest.raises(ZeroDivisionError):
                fails()
        optimizer.step()
        values = masters(optimizer), amp.state_dict()
        amp.close()
        return values

    (interrupted, numbers), (clean, clean_numbers) = run(interrupted=True), run(interrupted=False)
    if moment == "before the backward" or level != "O5":
        assert_bitwise(interrupted, clean)
    assert numbers == clean_numbers


def test_a_failed_initialize_at_o1_leaves_torch_unpatched() -> None:
    model, optimizer = fresh()
    with pytest.raises(TypeError):
        amp.initialize(model, [optimizer, "sgd"], opt_level="O1", verbosity=0)
    assert patched_names() == []
    assert amp.current_engine() is None
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
def test_a_scripted_part_is_refused_by_name_with_everything_as_before(level: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(torch.jit.script(nn.BatchNorm1d(4))))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(AmpStateError, match=r"Module 1\.0 of Sequential was compiled by torch\.jit.*in its place"):
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert type(model) is nn.Sequential
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not any(getattr(module, hooks) for module in (model, model[0]) for hooks in MODULE_HOOKS)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_an_undo_that_fails_halfway_goes_on_with_the_rest(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise KeyError("the one on the way back")

    model, optimizer = fresh()
    weights = frozen(dict(model.named_parameters()))
    monkeypatch.setattr(Initialized, "_take_in", fail)
    monkeypatch.setattr(Initialized, "_let_go", fail)
    with pytest.raises(KeyError):
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    monkeypatch.undo()
    assert_bitwise(dict(model.named_parameters()), weights)
    assert not any(getattr(module, hooks) for module in model.modules() for hooks in MODULE_HOOKS)
