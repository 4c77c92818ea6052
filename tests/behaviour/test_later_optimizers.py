"""Optimizers that are made after `initialize`, as trainers make them: looked after from their first step on."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_engine import AmpStateError, AmpTypeError, AmpWarning, Engine, amp
from amp_engine.stepping.exact import exact_of
from tests.models import MLP
from tests.support import assert_bitwise, momentum_sgd


def adamw(params: Any) -> Optimizer:
    return torch.optim.AdamW(params, lr=1e-4)


KINDS: dict[str, Callable[..., Optimizer]] = {
    "AdamW": adamw,
    "SGD": momentum_sgd,
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-4),
}


def half_model() -> nn.Module:
    """A model that came in bfloat16."""
    return MLP.model().to(torch.bfloat16)


def initialized(model: nn.Module, optimizer: Any = None, level: str = "O5", **options: Any) -> nn.Module:
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    return model


def train(model: nn.Module, optimizer: Optimizer, steps: int = 3, first: int = 0) -> None:
    """A plain loop."""
    for index in range(first, first + steps):
        inputs, targets = MLP.batch(index)
        MLP.criterion(model(inputs.to(next(model.parameters()).dtype)).float(), targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def float32(model: nn.Module) -> dict[str, Tensor]:
    return {name: master.detach().clone() for name, master in amp.named_masters(model)}


@pytest.mark.parametrize(("kind", "split"), [*((kind, False) for kind in KINDS), ("AdamW", True), ("SGD", True)])
def test_it_trains_as_one_that_was_passed(kind: str, split: bool) -> None:
    options = {"master_weights": "split"} if split else {}
    model = half_model()
    passed = KINDS[kind](model.parameters())
    train(initialized(model, passed, **options), passed)
    expected, state = float32(model), passed.state_dict()
    amp.close()
    model = initialized(half_model(), **options)
    later = KINDS[kind](model.parameters())
    train(model, later)
    assert_bitwise(float32(model), expected)
    assert_bitwise(later.state_dict()["state"], state["state"])
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    assert not amp.last_step(later).skipped


def test_its_first_step_runs_after_the_users_hooks_and_reads_what_they_wrote() -> None:
    model = initialized(half_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = [p.detach().clone() for p in model.parameters()]

    def zero(*args: Any) -> None:
        for p in model.parameters():
            p.grad.zero_()

    optimizer.register_step_pre_hook(zero)
    train(model, optimizer, steps=1)
    assert_bitwise(list(model.parameters()), before)


@pytest.mark.parametrize("level", ["O4", "O5"])
def test_its_first_step_is_skipped_where_gradients_are_not_finite(level: str) -> None:
    model = MLP.model()
    before = copy.deepcopy(initialized(model, level=level)).state_dict()
    optimizer = momentum_sgd(model.parameters())
    (MLP.loss(model, MLP.batch()) * float("inf")).backward()
    optimizer.step()
    assert amp.last_step(optimizer).skipped
    assert_bitwise(model.state_dict(), before)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_where_losses_are_scaled_scale_loss_takes_it(level: str) -> None:
    results = []
    for passes in (True, False):
        model = MLP.model().half().float()  # so that masters start from the same values
        optimizer = momentum_sgd(model.parameters()) if passes else None
        initialized(model, optimizer, level=level)
        optimizer = momentum_sgd(model.parameters()) if optimizer is None else optimizer
        for index in range(2):
            with amp.scale_loss(MLP.loss(model, MLP.batch(index)), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(float32(model))
        amp.close()
    assert_bitwise(*results)


def test_where_losses_are_scaled_a_step_without_scale_loss_is_refused() -> None:
    model = initialized(MLP.model(), level="O2")
    optimizer = momentum_sgd(model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    MLP.loss(model, MLP.batch()).backward()
    with pytest.raises(AmpStateError, match="passed neither to amp.initialize nor to amp.scale_loss"):
        optimizer.step()
    assert_bitwise(list(model.parameters()), before)


def test_at_a_scale_of_1_scale_loss_needs_no_optimizer_yet() -> None:
    model = initialized(half_model())
    with amp.scale_loss(MLP.loss(model, MLP.batch())) as scaled_loss:
        scaled_loss.backward()
    optimizer = momentum_sgd(model.parameters())
    optimizer.step()
    assert len(list(amp.named_masters(model))) == len(list(model.parameters()))


@pytest.mark.parametrize("again", ["made again", "copied", "the first is gone"])
def test_masters_go_on_where_an_optimizer_is_made_again(again: str) -> None:
    model = half_model()
    first = momentum_sgd(model.parameters())
    train(initialized(model, first), first)
    before = float32(model)
    second = copy.copy(first) if again == "copied" else torch.optim.SGD(model.parameters(), lr=0.0)
    if again == "copied":
        for group in second.param_groups:
            group["lr"] = 0.0
    if again == "the first is gone":
        del first
        gc.collect()
        assert_bitwise(float32(model), before)
    train(model, second, steps=1)
    assert_bitwise(float32(model), before)


def test_the_masters_that_an_optimizer_of_some_parameters_leaves_stay() -> None:
    model = half_model()
    first = momentum_sgd(model.parameters())
    train(initialized(model, first), first)
    before = float32(model)
    second = torch.optim.SGD(list(model.parameters())[:2], lr=0.0)
    train(model, second, steps=1)
    assert_bitwise(float32(model), before)
    del first, second
    gc.collect()
    assert_bitwise(float32(model), before)
    third = momentum_sgd(model.parameters())
    initialized(model, third)
    assert_bitwise(float32(model), before)
    del third
    amp.close()
    assert_bitwise(
        {name: p.float() for name, p in model.named_parameters()}, {k: v.bfloat16().float() for k, v in before.items()}
    )


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_model_saves_exact_weights_after_its_trainer_is_gone(level: str) -> None:
    def finetuned() -> tuple[nn.Module, dict[str, Tensor]]:
        model = MLP.model()
        optimizer = momentum_sgd(model.parameters())
        initialized(model, optimizer, level=level)
        for index in range(3):
            with amp.scale_loss(MLP.loss(model, MLP.batch(index)), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
        return model, {name: master.clone() for name, master in float32(model).items()}

    model, masters = finetuned()
    gc.collect()
    assert_bitwise(dict(model.state_dict()), masters)
    amp.close()
    assert_bitwise(dict(model.named_parameters()), masters)


def test_masters_that_no_optimizer_has_go_with_their_model() -> None:
    model = half_model()
    optimizer = momentum_sgd(model.parameters())
    train(initialized(model, optimizer), optimizer)
    master = weakref.ref(next(master for _, master in amp.named_masters(model)))
    del optimizer
    gc.collect()
    assert master() is not None
    del model
    gc.collect()
    assert master() is None


def test_an_earlier_optimizer_that_steps_again_gets_its_masters_back() -> None:
    model = half_model()
    first = momentum_sgd(model.parameters())
    train(initialized(model, first), first, steps=2)
    second = torch.optim.SGD(model.parameters(), lr=0.0)
    train(model, second, steps=1, first=9)
    train(model, first, steps=2, first=2)
    result = float32(model)
    amp.close()
    model = half_model()
    first = momentum_sgd(model.parameters())
    train(initialized(model, first), first, steps=4)
    assert_bitwise(result, float32(model))


def test_gradients_that_an_earlier_optimizer_was_to_clip_are_clipped() -> None:
    model = half_model()
    first = momentum_sgd(model.parameters())
    train(initialized(model, first), first)
    before = float32(model)
    MLP.loss(model, MLP.batch()).backward()
    amp.clip_grad_norm_(first, 1e-3)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    moved = [before[name] - master for name, master in float32(model).items()]
    assert torch.nn.utils.get_total_norm(moved) <= 1.01e-3


@pytest.mark.parametrize("again", ["replaced", "gone", "passed"])
def test_a_parameter_that_is_frozen_meanwhile_keeps_its_master(again: str) -> None:
    model = half_model()
    first = momentum_sgd(model.parameters())
    train(initialized(model, first), first)
    before = float32(model)
    frozen = next(model.parameters()).requires_grad_(False)
    if again == "gone":
        del first
        gc.collect()
    second = torch.optim.SGD(model.parameters(), lr=0.0)
    if again == "passed":
        del first
        initialized(model, second)
    train(model, second, steps=1)
    assert_bitwise(float32(model), before)
    frozen.requires_grad_(True)
    train(model, second, steps=1)
    assert_bitwise(float32(model), before)


def test_an_optimizer_that_is_refused_takes_no_masters_away() -> None:
    model = initialized(half_model(), master_weights="split")
    first = adamw(model.parameters())
    train(model, first)
    before = float32(model)
    float16 = nn.Parameter(torch.ones(3, dtype=torch.float16))
    refused = adamw([*model.parameters(), float16])
    float16.grad = torch.ones_like(float16)
    with pytest.raises(AmpStateError, match="has no split master"):
        refused.step()
    assert_bitwise(float32(model), before)
    train(model, first)
    assert not amp.last_step(first).skipped


def test_an_initialize_that_is_refused_takes_no_masters_away() -> None:
    model = initialized(half_model())
    train(model, momentum_sgd(model.parameters()))
    gc.collect()
    before = float32(model)
    with pytest.raises(AmpStateError, match="is stepped by two optimizers"):
        initialized(model, [momentum_sgd(model.parameters()), momentum_sgd(model[0].parameters())])
    assert_bitwise(float32(model), before)
    train(model, torch.optim.SGD(model.parameters(), lr=0.0), steps=1)
    assert_bitwise(float32(model), before)


def test_masters_of_several_models_stay_with_each() -> None:
    models = MLP.model(0), MLP.model(1)
    for model in models:
        amp.initialize(model.to(torch.bfloat16), opt_level="O5", verbosity=0)
    optimizer = momentum_sgd([p for model in models for p in model.parameters()])
    for model in models:
        MLP.loss(model, MLP.batch()).backward()
    optimizer.step()
    before = float32(models[1])
    del optimizer, models
    gc.collect()
    assert_bitwise(float32(model), before)


def test_parameters_that_join_an_optimizer_get_the_masters_that_another_one_left() -> None:
    model = initialized(half_model())
    train(model, momentum_sgd(model[0].parameters()))
    gc.collect()
    before = float32(model[0])
    later = torch.optim.SGD(model[2].parameters(), lr=0.0)
    train(model, later, steps=1)
    later.add_param_group({"params": list(model[0].parameters())})
    train(model, later, steps=1)
    assert_bitwise(float32(model[0]), before)


def test_one_whose_parameters_join_after_its_first_step_is_looked_after() -> None:
    model = initialized(half_model())
    other = nn.Parameter(torch.ones(3))
    optimizer = momentum_sgd([other])
    other.grad = torch.ones(3)
    optimizer.step()
    optimizer.add_param_group({"params": list(model.parameters())})
    train(model, optimizer)
    assert len(list(amp.named_masters(model))) == len(list(model.parameters()))
    assert amp.last_step(optimizer).is_known


def test_a_rehearsal_before_its_first_step_leaves_it_as_it_was() -> None:
    model = initialized(half_model())
    optimizer = momentum_sgd(model.parameters())
    before = copy.deepcopy(model.state_dict())
    amp.find_overflow(lambda: train(model, optimizer, steps=1))
    assert_bitwise(model.state_dict(), before)
    assert not optimizer.state
    train(model, optimizer)
    assert not amp.last_step(optimizer).skipped


def test_clipping_looks_after_it() -> None:
    results = []
    for passes in (True, False):
        model = half_model()
        optimizer = momentum_sgd(model.parameters())
        initialized(model, optimizer if passes else None)
        for index in range(3):
            MLP.loss(model, MLP.batch(index)).backward()
            amp.clip_grad_norm_(optimizer, 0.01)
            optimizer.step()
            optimizer.zero_grad()
        results.append(float32(model))
        amp.close()
    assert_bitwise(*results)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.* is deprecated")  # in torch's compiler
def test_a_compiled_step_is_looked_after(dynamo: None) -> None:
    model = initialized(half_model())
    optimizer = momentum_sgd(model.parameters())
    step = torch.compile(optimizer.step, backend="eager")
    for index in range(2):
        MLP.loss(model, MLP.batch(index)).backward()
        step()
        optimizer.zero_grad()
    assert len(list(amp.named_masters(model))) == len(list(model.parameters()))
    assert not amp.last_step(optimizer).skipped


def test_where_losses_are_scaled_gradients_of_unknown_scale_are_refused() -> None:
    model = initialized(MLP.model(), level="O2", loss_scale=64.0)
    first = momentum_sgd(model.parameters())
    with amp.scale_loss(MLP.loss(model, MLP.batch()), first, delay_unscale=True) as scaled_loss:
        scaled_loss.backward()
    del first
    gc.collect()
    second = momentum_sgd(model.parameters())
    with pytest.raises(AmpStateError, match=r"Call its zero_grad\(\) before its first amp.scale_loss"):
        amp.scale_loss(MLP.loss(model, MLP.batch()), second)
    second.zero_grad()
    with amp.scale_loss(MLP.loss(model, MLP.batch()), second) as scaled_loss:
        scaled_loss.backward()
    second.step()


@pytest.mark.parametrize("kind", ["RMSprop", "AdamW"])
def test_optimizers_that_are_replaced_leave_nothing(kind: str) -> None:
    model = initialized(half_model())
    optimizers = [KINDS[kind](model.parameters()) for _ in range(4)]
    for optimizer in optimizers:
        train(model, optimizer, steps=2)
    gone = [weakref.ref(optimizer) for optimizer in optimizers]
    params = [weakref.ref(p) for p in model.parameters()]
    del optimizer, optimizers
    gc.collect()
    assert [ref() for ref in gone] == [None] * 4
    del model
    gc.collect()
    assert [ref() for ref in params] == [None] * len(params)


def test_a_model_and_optimizer_that_are_unpickled_are_initialized_and_trained_like_new_ones() -> None:
    model = initialized(half_model())
    optimizer = momentum_sgd(model.parameters())
    train(model, optimizer)
    other, again = pickle.loads(pickle.dumps((model, optimizer)))
    initialized(other)
    train(other, again, steps=1)
    assert len(list(amp.named_masters(other))) == len(list(other.parameters()))


def test_close_ends_it() -> None:
    model = initialized(MLP.model())
    optimizer = momentum_sgd(model.parameters())
    train(model, optimizer)
    expected = float32(model)
    amp.close()
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert_bitwise(dict(model.named_parameters()), expected)
    train(model, optimizer, steps=1)
    assert not hasattr(optimizer, "_amp_stash")


def test_an_optimizer_of_other_parameters_is_let_be() -> None:
    initialized(half_model())
    other = MLP.model().to(torch.bfloat16)
    optimizer = momentum_sgd(other.parameters())
    train(other, optimizer)
    assert not hasattr(optimizer, "_amp_stash")
    with pytest.raises(AmpTypeError, match="was not passed to amp.initialize"):
        amp.last_step(optimizer)


def test_one_that_steps_a_copy_is_warned_of_until_it_is_initialized() -> None:
    model = initialized(half_model())
    copied = copy.deepcopy(model)
    optimizer = momentum_sgd(copied.parameters())
    with pytest.warns(AmpWarning, match="SGD steps 4 parameters in bfloat16, without FP32 masters, of a copy of an in"):
        train(copied, optimizer)
    train(copied, optimizer)
    amp.initialize(copied, optimizer, opt_level="O5", verbosity=0)
    train(copied, optimizer)
    assert all(master.dtype == torch.float32 for master in amp.master_params(optimizer))


def test_one_that_steps_a_copy_is_let_be_at_a_level_without_masters() -> None:
    model = MLP.model()
    amp.initialize(model, opt_level="O3", verbosity=0)
    copied = copy.deepcopy(model)
    train(copied, momentum_sgd(copied.parameters()))


def test_the_engine_whose_model_it_steps_takes_it() -> None:
    with Engine() as one, Engine() as other:
        models = half_model(), half_model()
        for engine, model in zip((one, other), models, strict=True):
            engine.initialize(model, opt_level="O5", verbosity=0)
        optimizer = momentum_sgd(models[1].parameters())
        train(models[1], optimizer)
        assert not other.last_step(optimizer).skipped
        with pytest.raises(AmpTypeError):
            one.last_step(optimizer)


def test_one_that_cannot_have_what_the_level_gives_is_refused() -> None:
    model = initialized(half_model())
    optimizer = torch.optim.LBFGS(model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(AmpStateError, match=r"LBFGS.step\(closure\) runs backwards of its own"):
        optimizer.step(lambda: MLP.loss(model, MLP.batch()))
    assert_bitwise(list(model.parameters()), before)


def test_messages_say_what_masters_start_from(capsys: pytest.CaptureFixture[str]) -> None:
    amp.replace_engine(Engine())  # which has said nothing yet
    model = half_model()
    amp.initialize(model, opt_level="O5")
    assert "gets FP32 masters at its first step, from the bfloat16 parameters." in capsys.readouterr().out
    train(model, momentum_sgd(model.parameters()), steps=1)
    said = capsys.readouterr().out
    assert "SGD, which was made after amp.initialize, is looked after from here on." in said
    assert said.rstrip().endswith("start from the parameters.")
    amp.close()
    amp.initialize(MLP.model(), opt_level="O5")
    assert "which this call rounds: pass the optimizer to start from the FP32 values." in capsys.readouterr().out


def test_a_state_that_was_saved_in_half_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    amp.replace_engine(Engine())
    model = half_model()
    first = adamw(model.parameters())
    train(model, first)
    state = first.state_dict()
    assert state["state"][0]["exp_avg"].dtype is torch.bfloat16
    model = half_model()
    amp.initialize(model, opt_level="O5")
    later = adamw(model.parameters())
    later.load_state_dict(state)
    train(model, later, steps=1)
    said = capsys.readouterr().out
    assert "Warning:  the state of AdamW was in half when its masters were made: it was saved so, or torch " in said
    assert "If it was saved in FP32, pass the AdamW to amp.initialize, then load it, to resume exactly." in said


def checkpoint() -> dict[str, Tensor]:
    """FP32 weights of a run whose model came in bfloat16."""
    model = half_model()
    optimizer = momentum_sgd(model.parameters())
    train(initialized(model, optimizer), optimizer)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    amp.close()
    assert any(not torch.equal(value, value.bfloat16().float()) for value in saved.values())
    return saved


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("loads", ["model", "part"])
def test_masters_start_from_the_checkpoint_that_was_loaded_before_it_was_made(loads: str, split: bool) -> None:
    saved = checkpoint()
    options = {"master_weights": "split"} if split else {}
    model = initialized(half_model(), **options)
    if loads == "model":
        model.load_state_dict(saved)
    else:
        for prefix, part in model.named_children():
            part.load_state_dict({k[len(prefix) + 1 :]: v for k, v in saved.items() if k.startswith(prefix + ".")})
    assert_bitwise(dict(model.state_dict()), saved)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    train(model, optimizer, steps=1)
    assert_bitwise(dict(model.state_dict()), saved)
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())


def test_a_checkpoint_that_is_loaded_again_replaces_what_the_first_one_left() -> None:
    saved = checkpoint()
    model = initialized(half_model())
    model.load_state_dict({name: value + 1.0 for name, value in saved.items()})
    model.load_state_dict(saved)
    assert_bitwise(dict(model.state_dict()), saved)
    model.load_state_dict({name: value.bfloat16() for name, value in saved.items()})
    assert_bitwise(dict(model.state_dict()), {name: value.bfloat16().float() for name, value in saved.items()})


def test_what_is_written_after_a_checkpoint_counts() -> None:
    saved = checkpoint()
    model = initialized(half_model())
    model.load_state_dict(saved)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert not any(bool(value.any()) for value in model.state_dict().values())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    train(model, optimizer, steps=1)
    assert not any(bool(value.any()) for value in float32(model).values())


@pytest.mark.parametrize("came_in", [torch.bfloat16, torch.float32])
def test_close_gives_the_checkpoint_back_to_a_model_that_came_in_fp32(came_in: torch.dtype) -> None:
    saved = checkpoint()
    model = initialized(MLP.model().to(came_in))
    model.load_state_dict(saved)
    amp.close()
    assert_bitwise(dict(model.named_parameters()), {name: value.to(came_in) for name, value in saved.items()})
    assert_bitwise(dict(model.state_dict()), {name: value.to(came_in) for name, value in saved.items()})


def test_only_what_torch_rounds_and_an_optimizer_may_step_gets_a_master_at_load() -> None:
    saved = checkpoint()
    model = half_model()
    first = next(iter(saved))
    model.get_parameter(first).requires_grad_(False)
    initialized(model)
    model.load_state_dict({name: value if name == first else value.bfloat16() for name, value in saved.items()})
    assert not any(True for p in model.parameters() for _ in exact_of(p))


def test_a_model_at_a_level_without_masters_keeps_no_checkpoint() -> None:
    saved = checkpoint()
    model = initialized(half_model(), level="O3")
    model.load_state_dict(saved)
    assert_bitwise(
        {name: value.float() for name, value in model.state_dict().items()},
        {name: value.half().float() for name, value in saved.items()},
    )


def test_a_checkpoint_goes_with_its_model() -> None:
    saved = checkpoint()
    model = initialized(half_model())
    model.load_state_dict(saved)
    master = weakref.ref(next(exact_of(next(model.parameters()))))
    assert master() is not None
    del model
    gc.collect()
    assert master() is None


def test_parts_that_join_keep_a_checkpoint_too() -> None:
    saved = checkpoint()
    model = nn.Sequential()
    initialized(nn.Sequential(nn.Linear(2, 2).to(torch.bfloat16), model))
    model.append(half_model())
    model.load_state_dict({"0." + name: value for name, value in saved.items()})
    assert_bitwise(dict(model[0].state_dict()), saved)
