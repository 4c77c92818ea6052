"""Function casts end with the last model that they are for. Until then other levels say that they go on."""

from __future__ import annotations

import collections
import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from amp_engine import Engine, amp
from amp_engine.casting.engine_casts import EngineCasts
from tests.models import MLP
from tests.support import CAST_LEVELS, FUNCTION_LEVELS, HALF, LEVELS, STAND_IN, backward, train

ONES = torch.ones(2, 2)
MM = torch.mm
WAIT = 60.0  # seconds until a deadlock is called one


def fresh(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = MLP.model(seed)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def started(level: str, engine: Any = amp, **keywords: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = fresh()
    engine.initialize(model, optimizer, opt_level=level, **{"verbosity": 0, **keywords})
    train(MLP, model, optimizer, "c", engine=engine)
    return model, optimizer


def is_cast() -> bool:
    dtype = torch.mm(ONES, ONES).dtype
    assert (torch.mm is MM) == (dtype == torch.float32)
    return dtype != torch.float32


@pytest.fixture(params=FUNCTION_LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# --- what ends them -------------------------------------------------------------------------------


def test_casts_end_with_their_model(level: str) -> None:
    model, optimizer = started(level)
    assert is_cast()
    del model
    assert not is_cast()
    assert amp.current_engine().function_casts.casts is None
    assert not hasattr(amp._amp_state, "handle")


@pytest.mark.parametrize("later", CAST_LEVELS)
def test_a_later_model_computes_as_its_level_says(level: str, later: str) -> None:
    truth = MLP.loss(fresh(1)[0], MLP.batch()).item()
    model, optimizer = started(level)
    del model, optimizer
    model, optimizer = fresh(1)
    amp.initialize(model, optimizer, opt_level=later, verbosity=0)
    assert torch.mm is MM
    if later == "O0":
        assert MLP.loss(model, MLP.batch()).item() == truth


def test_a_model_that_amp_is_not_enabled_for_computes_as_it_is(level: str) -> None:
    model, optimizer = started(level)
    del model, optimizer
    model, optimizer = fresh()
    amp.initialize(model, optimizer, enabled=False, verbosity=0)
    assert not is_cast()
    assert model(MLP.batch()[0]).dtype == torch.float32


def test_a_model_in_a_cycle_is_over_when_it_is_collected(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = started(level)
    object.__setattr__(model, "itself", model)
    gc.disable()
    try:
        del model, optimizer
        assert is_cast()
        amp.initialize(fresh()[0], opt_level="O0")  # which looks
    finally:
        gc.enable()
    assert not is_cast()
    assert "Warning" not in capsys.readouterr().out


def test_casts_end_with_the_last_of_several_models(level: str) -> None:
    models = [MLP.model(i) for i in range(3)]
    amp.initialize(models, opt_level=level, verbosity=0)
    while models:
        assert is_cast()
        models.pop()
    assert not is_cast()


def test_casts_end_with_the_last_model_of_several_calls(level: str) -> None:
    first, second = MLP.model(0), MLP.model(1)
    amp.initialize(first, opt_level=level, verbosity=0)
    amp.initialize(second, opt_level=level, verbosity=0)
    assert is_cast()
    del second
    assert is_cast()
    del first
    assert not is_cast()


def test_an_optimizer_alone_keeps_no_casts_and_training_on_with_it_is_told(
    level: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = started(level, verbosity=1)
    policy, scalers = amp.current_engine().policy, amp.current_engine().scalers
    other = copy.deepcopy(model)
    other.load_state_dict(model.state_dict())
    del model
    assert not is_cast()
    capsys.readouterr()
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    for _ in range(2):
        with amp.scale_loss(sum(p.square().sum() for p in weights), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    output = capsys.readouterr().out
    assert output.count("Note:") == 1
    assert f"the model that was initialized at {level} is gone" in output
    assert amp.current_engine().policy is policy
    assert amp.current_engine().scalers is scalers
    assert amp._amp_state.opt_properties.patch_torch_functions
    with amp.explain() as explanation:
        other(MLP.batch()[0])
    assert f"initialized at {level} is gone" in str(explanation)


def test_a_deepcopy_keeps_no_casts(level: str) -> None:
    model, _ = started(level)
    twin = copy.deepcopy(model)
    assert twin(MLP.batch()[0]).dtype == HALF[level]
    del model
    assert twin(MLP.batch()[0]).dtype == torch.float32


def test_the_same_model_at_another_level_ends_them(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    for options in ({"opt_level": "O0"}, {"opt_level": "O5"}, {"enabled": False}):
        model = MLP.model()
        amp.initialize(model, opt_level=level, verbosity=0)
        assert is_cast()
        amp.initialize(model, **options)
        assert not is_cast()
        assert "Warning" not in capsys.readouterr().out


def test_a_model_around_the_same_modules_decides_for_them(level: str) -> None:
    model = MLP.model()
    amp.initialize(model, opt_level=level, verbosity=0)
    whole = nn.Sequential(model, nn.Linear(4, 4))
    amp.initialize(whole, opt_level="O0", verbosity=0)
    assert not is_cast()
    amp.initialize(whole[0], opt_level=level, verbosity=0)
    assert is_cast()


# --- what does not --------------------------------------------------------------------------------


def test_a_module_that_was_taken_out_of_its_model_is_enough(level: str) -> None:
    model, _ = started(level)
    taken = model[2]
    del model
    assert is_cast()
    taken = nn.ModuleDict({"head": taken})
    assert is_cast()
    del taken
    assert not is_cast()


def test_a_wrapper_around_a_model_is_enough(level: str) -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: Tensor) -> Tensor:
            return self.module(x)

    wrapper = Wrapper(started(level)[0])
    assert wrapper(MLP.batch()[0]).dtype == HALF[level]


def test_losses_outside_of_a_model_that_lives_go_on_being_cast(level: str) -> None:
    model, _ = started(level)
    del _
    low = torch.ones(2, 3, dtype=HALF[level])
    assert F.cross_entropy(low, torch.tensor([0, 1])).dtype == torch.float32
    assert model is not None


def test_a_model_that_is_gone_before_anything_was_cast_was_a_switch(level: str) -> None:
    """As in apex, the casts stay until something else is initialized."""
    amp.initialize(MLP.model(), opt_level=level, verbosity=0)
    gc.collect()
    for _ in range(2):
        assert is_cast()
    amp.register_half_function(torch, "tanh")
    assert torch.tanh(ONES).dtype == HALF[level]
    amp.initialize(MLP.model(), opt_level="O0", verbosity=0)
    assert not is_cast()


def test_a_switch_of_one_engine_ends_with_an_initialize_of_another(
    level: str, capsys: pytest.CaptureFixture[str]
) -> None:
    amp.initialize(MLP.model(), opt_level=level, verbosity=0)
    assert is_cast()
    with Engine() as engine:
        engine.initialize(MLP.model(), opt_level="O0")
        assert not is_cast()
    assert "Warning" not in capsys.readouterr().out


def test_casts_without_a_model_last_until_close(level: str) -> None:
    amp.initialize([], [fresh()[1]], opt_level=level, verbosity=0)
    assert is_cast()
    gc.collect()
    assert is_cast()
    model, _ = started(level)
    del model
    assert is_cast()
    amp.close()
    assert not is_cast()


def test_casts_of_the_older_interface_last_until_they_are_deactivated(capsys: pytest.CaptureFixture[str]) -> None:
    handle = amp.init()
    torch.mm(ONES, ONES)
    amp.initialize(MLP.model(), opt_level="O0")
    assert is_cast()
    assert "Warning:  amp.init() goes on casting functions to float16, process-wide.  " in capsys.readouterr().out
    handle._deactivate()
    assert not is_cast()


def test_a_registration_while_they_are_on_changes_nothing_about_their_end(level: str) -> None:
    model, _ = started(level)
    amp.register_half_function(torch, "tanh")
    assert torch.tanh(ONES).dtype == HALF[level]
    del model
    assert not is_cast()
    amp.register_half_function(torch, "atan")
    assert torch.tanh(ONES).dtype == torch.float32
    model, _ = started(level)
    assert torch.tanh(ONES).dtype == torch.atan(ONES).dtype == HALF[level]


def test_a_class_whose_objects_are_equal_counts_each(level: str) -> None:
    class Same(nn.Linear):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        __hash__ = nn.Module.__hash__

        def __eq__(self, other: object) -> bool:
            return True

    first, second = Holder(), Holder()
    amp.initialize([first, second], opt_level=level, verbosity=0)
    assert is_cast()
    del first
    assert is_cast()
    del second
    assert not is_cast()


# --- what is said ---------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"opt_level": o} for o in CAST_LEVELS] + [{"enabled": False}], ids=str)
def test_an_initialize_that_will_feel_them_says_so_once_a_call(
    level: str, options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = started(level)
    for _ in range(2):
        amp.initialize(MLP.model(), **options)
        output = capsys.readouterr().out
        assert output.count("Warning:") == 1
        assert f"Warning:  {level} goes on casting functions to {str(HALF[level])[6:]}, process-wide" in output
        assert f"({options.get('opt_level', 'enabled=False')})" in output
        assert "Call amp.close()" in output
    assert is_cast()
    amp.initialize(MLP.model(), verbosity=0, **options)
    assert capsys.readouterr().out == ""
    train(MLP, model, optimizer, "c")
    amp.close()
    amp.initialize(MLP.model(), **options)
    assert "Warning" not in capsys.readouterr().out


def test_a_model_under_the_name_of_the_one_before_is_free_of_its_casts(level: str) -> None:
    """The model before is there until the call returns."""
    model = amp.initialize(MLP.model(), opt_level=level, verbosity=0)
    model = amp.initialize(MLP.model(), opt_level="O0", verbosity=0)
    assert not is_cast()
    assert model(MLP.batch()[0]).dtype == torch.float32


def test_another_level_with_function_casts_says_that_earlier_models_change_type(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, _ = started("O1")
    second = MLP.model()
    amp.initialize(second, opt_level="O4")
    assert "earlier models (O1) compute in bfloat16 from now on (O4)" in capsys.readouterr().out
    assert first(MLP.batch()[0]).dtype == torch.bfloat16
    amp.initialize([first, second], opt_level="O1")
    assert "Warning" not in capsys.readouterr().out


# --- engines, threads, graphs ---------------------------------------------------------------------


def test_each_engine_ends_its_own(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    other_level = {"O1": "O4", "O4": "O1"}[level]
    with Engine() as one, Engine() as other:
        first, second = started(level, one)[0], started(other_level, other)[0]
        assert torch.mm(ONES, ONES).dtype == HALF[other_level]
        del second
        assert torch.mm(ONES, ONES).dtype == HALF[level]
        amp.initialize(MLP.model(), opt_level="O0")
        assert f"{level} goes on casting" in capsys.readouterr().out
        del first
        assert not is_cast()


def test_a_model_that_goes_in_another_thread_ends_them(level: str) -> None:
    models = [started(level)[0]]
    thread = threading.Thread(target=models.clear)
    thread.start()
    thread.join(WAIT)
    assert not is_cast()


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_model_that_goes_while_another_one_is_initialized_ends_only_its_own(
    level: str, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [started(level)[0]]
    install: Callable[..., Any] = EngineCasts._install

    def installed(*args: Any) -> Any:
        if moment == "before":
            models.clear()
        casts = install(*args)
        models.clear()
        return casts

    monkeypatch.setattr(EngineCasts, "_install", installed)
    model = MLP.model()
    amp.initialize(model, opt_level=level, verbosity=0)
    assert is_cast()
    del model
    assert not is_cast()


def test_a_graph_that_outlives_its_model_runs_backward(level: str) -> None:
    model, optimizer = started(level)
    loss = MLP.loss(model, MLP.batch())
    weights = list(model.parameters())
    expected = torch.autograd.grad(loss, weights, retain_graph=True)
    del model
    assert not is_cast()
    assert all(map(torch.equal, torch.autograd.grad(loss, weights), expected))


def test_disable_casts_may_be_left_after_their_end(level: str) -> None:
    model, _ = started(level)
    with amp.disable_casts():
        del model
        assert torch.mm(ONES, ONES).dtype == torch.float32
    assert not is_cast()
    model, _ = started(level)
    assert is_cast()


def test_a_decorated_function_is_not_cast_after_their_end(level: str) -> None:
    @amp.half_function
    def mine(x: Tensor) -> torch.dtype:
        return x.dtype

    model, _ = started(level)
    assert mine(ONES) == HALF[level]
    del model
    assert mine(ONES) == torch.float32


def test_a_stand_in_that_lives_is_a_model_like_any_other(level: str) -> None:
    amp.initialize(STAND_IN, opt_level=level, verbosity=0)
    torch.mm(ONES, ONES)
    gc.collect()
    assert is_cast()


def test_a_step_after_the_end_of_the_casts_steps(level: str) -> None:
    model, optimizer = started(level)
    backward(MLP.loss(model, MLP.batch()), optimizer)
    weight = model[0].weight
    before = weight.detach().clone()
    del model
    optimizer.step()
    assert not torch.equal(weight, before)


# --- nothing grows --------------------------------------------------------------------------------


def census() -> collections.Counter[str]:
    gc.collect()
    return collections.Counter(type(o).__name__ for o in gc.get_objects())


def once(level: str, own_engine: bool, closed: bool) -> None:
    model, optimizer = fresh()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    engine: Any = Engine() if own_engine else amp
    engine.initialize(model, optimizer, opt_level=level, verbosity=0)
    train(MLP, model, optimizer, "c", engine=engine)
    scheduler.step()
    if closed:
        engine.close()


@pytest.mark.parametrize("closed", [False, True], ids=["dropped", "closed"])
@pytest.mark.parametrize("own_engine", [False, True], ids=["amp", "Engine"])
@pytest.mark.parametrize("any_level", LEVELS)
def test_no_object_is_left_of_models_and_optimizers_that_come_and_go(
    any_level: str, own_engine: bool, closed: bool
) -> None:
    times, counts, finalizers = 4, [], []
    for _ in range(3):
        for _ in range(times):
            once(any_level, own_engine, closed)
        counts.append(census())
        finalizers.append(len(weakref.finalize._registry))  # type: ignore[attr-defined]
    first, second, third = counts  # what is made once, at the first use of something, may fall in one of them
    grew = [name for name in third if third[name] - second[name] >= times and second[name] - first[name] >= times]
    assert grew == []
    assert finalizers[2] - finalizers[1] < times


def test_an_engine_that_is_collected_while_a_module_registers_parameters_does_not_disturb_it() -> None:
    engines: list[Engine] = []

    def collect(*_: Any) -> None:
        engines.clear()
        gc.collect()

    handle = register_module_parameter_registration_hook(collect)
    try:
        engines.append(Engine())
        engines[0].initialize(MLP.model(0), opt_level="O2", verbosity=0)
        nn.Linear(2, 2)
    finally:
        handle.remove()
    assert not engines
