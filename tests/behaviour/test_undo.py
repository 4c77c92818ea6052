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
from tests.models import MLP, NORMED_MLP
from tests.support import (
    LEVELS,
    MASTER_LEVELS,
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

ONES = torch.ones(2, 2)


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


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_close_gives_the_model_the_exact_values_of_its_masters(level: str) -> None:
    model, optimizer = fresh()
    params = list(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    train(NORMED_MLP, model, optimizer, "cccc")
    exact = masters(optimizer)
    amp.close()
    assert_bitwise([param.detach() for param in model.parameters()], exact)
    assert all(a is b for a, b in zip(model.parameters(), params, strict=True))
    assert all(a is b for a, b in zip(weights_of(optimizer), params, strict=True))
    assert set(optimizer.state) == set(params)


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


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_training_goes_on_in_fp32_after_close(level: str) -> None:
    model, optimizer = fresh()
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    train(NORMED_MLP, model, optimizer, "ccc")
    saved_model = frozen(dict(model.state_dict()))
    saved_optimizer = optimizer.state_dict()
    twin, twin_optimizer = fresh(5)
    twin.load_state_dict(saved_model)
    twin_optimizer.load_state_dict(frozen(saved_optimizer))
    amp.close()
    for net, opt in ((model, optimizer), (twin, twin_optimizer)):
        opt.zero_grad()
        NORMED_MLP.loss(net, NORMED_MLP.batch(3)).backward()
        opt.step()
    assert_bitwise(
        [param.detach() for param in model.parameters()],
        [param.detach() for param in twin.parameters()],
    )


def test_close_after_a_regrouping_gives_exact_values_back() -> None:
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, 0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    optimizer.param_groups[0]["params"].pop(0)
    optimizer.add_param_group({"params": [model.weight]})
    amp.close()
    assert model.weight.eq(torch.tensor(0.1)).all()


def test_close_is_idempotent_and_harmless_before_initialize() -> None:
    amp.close()
    amp.initialize(*fresh(), verbosity=0)
    amp.close()
    amp.close()


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


def test_a_pending_skip_does_not_outlive_close() -> None:
    model, optimizer = fresh()
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    backward(NORMED_MLP.loss(model, NORMED_MLP.batch()), optimizer, overflow=True)
    amp.close()
    before = masters(optimizer)
    optimizer.zero_grad()
    NORMED_MLP.loss(model, NORMED_MLP.batch()).backward()
    optimizer.step()
    assert not torch.equal(masters(optimizer)[0], before[0])


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


# --- Engine ---------------------------------------------------------------------------------------


def test_leaving_the_context_of_an_engine_closes_it() -> None:
    model, optimizer = fresh()
    before = picture(model, [optimizer])
    with Engine() as engine:
        returned = engine.initialize(model, optimizer, opt_level="O1", verbosity=0)
        assert returned[0] is model
        assert returned[1] is optimizer
        assert torch.mm(ONES, ONES).dtype == torch.float16
    assert torch.mm(ONES, ONES).dtype == torch.float32
    assert_bitwise(picture(model, [optimizer]), before)


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


def test_an_engine_leaves_the_module_level_api_alone() -> None:
    model, optimizer = fresh()
    with Engine() as engine:
        engine.initialize(model, optimizer, opt_level="O2", verbosity=0)
        assert amp.current_engine() is None
        loss = NORMED_MLP.loss(model, NORMED_MLP.batch())
        with (
            pytest.raises(RuntimeError, match="has not been initialized"),
            amp.scale_loss(loss, optimizer),
        ):
            pass


def test_an_optimizer_of_one_engine_is_refused_by_another() -> None:
    model, optimizer = fresh()
    with Engine() as one, Engine() as other:
        one.initialize(model, optimizer, opt_level="O2", verbosity=0)
        with pytest.raises(RuntimeError, match="only be passed through amp.initialize once"):
            other.initialize(model, optimizer, opt_level="O2", verbosity=0)
        train(NORMED_MLP, model, optimizer, "cc", engine=one)


def test_an_engine_has_the_whole_interface() -> None:
    model, optimizer = fresh()
    with Engine() as engine:
        engine.initialize(model, optimizer, opt_level="O2", verbosity=0)
        train(NORMED_MLP, model, optimizer, "co", engine=engine)
        assert engine.step_was_skipped(optimizer)
        assert engine.state_dict(format="apex") == {"loss_scaler0": {"loss_scale": 32768.0, "unskipped": 0}}
        engine.load_state_dict({"loss_scaler0": {"loss_scale": 64.0, "unskipped": 1}})
        assert engine.state_dict(format="apex") == {"loss_scaler0": {"loss_scale": 64.0, "unskipped": 1}}
        assert len(list(engine.master_params(optimizer))) == 5


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


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_an_exception_in_forward_leaves_the_model_and_the_casts_at_work(level: str) -> None:
    class Fragile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)
            self.broken = True

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            hidden = self.layer(inputs)
            if self.broken:
                raise OSError("broken")
            return hidden

    model = Fragile()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    with pytest.raises(OSError, match="broken"):
        model(MLP.batch()[0])
    model.broken = False
    expected = {"O1": torch.float16, "O4": torch.bfloat16}.get(level, torch.float32)
    assert model(MLP.batch()[0]).dtype == expected
    train(MLP, model, optimizer, "c")


def test_a_failed_initialize_at_o1_leaves_torch_unpatched() -> None:
    model, optimizer = fresh()
    with pytest.raises(TypeError):
        amp.initialize(model, [optimizer, "sgd"], opt_level="O1", verbosity=0)
    assert patched_names() == []
    assert amp.current_engine() is None
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)


def test_a_second_optimizer_that_is_refused_leaves_the_first_as_it_was() -> None:
    model, optimizer = fresh()
    other_model, other = fresh(1)
    amp.initialize(other_model, other, opt_level="O2", verbosity=0)
    before = picture(model, [optimizer])
    with pytest.raises(RuntimeError, match="once"):
        amp.initialize([model, other_model], [optimizer, other], opt_level="O2", verbosity=0)
    assert_bitwise(picture(model, [optimizer]), before)


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
