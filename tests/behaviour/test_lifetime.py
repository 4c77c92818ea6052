"""Function casts are one engine's, until its `close`. Until then other levels say that they go on."""

from __future__ import annotations

import collections
import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from amp_engine import AmpStateError, Engine, amp
from tests.models import MLP
from tests.support import CAST_LEVELS, FUNCTION_LEVELS, HALF, LEVELS, backward, train

ONES = torch.ones(2, 2)
MM = torch.mm


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


# --- how long they last ---------------------------------------------------------------------------


def test_casts_last_until_close(level: str) -> None:
    model, optimizer = started(level)
    amp.register_half_function(torch, "tanh")
    del model, optimizer
    gc.collect()
    assert is_cast()
    assert torch.tanh(ONES).dtype == HALF[level]
    amp.close()
    assert not is_cast()
    assert torch.tanh(ONES).dtype == torch.float32
    assert not hasattr(amp._amp_state, "handle")


def test_a_second_engine_is_refused_and_changes_nothing(level: str) -> None:
    other_level = {"O1": "O4", "O4": "O1"}[level]
    first, _ = started(level)
    with Engine() as engine:
        model, optimizer = fresh(1)
        for _ in range(2):
            with pytest.raises(AmpStateError, match=rf"Another Engine casts functions \({level}\).*close\(\)"):
                engine.initialize(model, optimizer, opt_level=other_level, verbosity=0)
            assert engine.policy is None
            assert torch.mm(ONES, ONES).dtype == HALF[level]
        engine.initialize(model, optimizer, opt_level="O0", verbosity=0)
        amp.close()
        engine.initialize(fresh(2)[0], opt_level=other_level, verbosity=0)
        assert torch.mm(ONES, ONES).dtype == HALF[other_level]
    assert not is_cast()


@pytest.mark.parametrize("what", ["close", "initialize"])
def test_casts_of_an_engine_that_was_freed_without_close_end_with_the_next_call(what: str, level: str) -> None:
    gc.disable()
    try:
        engine: Any = Engine()
        engine.itself = engine
        started(level, engine)
        del engine
        if what == "initialize":
            started(level)
            assert is_cast()
        gc.collect()
        amp.close()
    finally:
        gc.enable()
    assert not is_cast()


def test_casts_of_the_older_interface_last_until_they_are_deactivated(capsys: pytest.CaptureFixture[str]) -> None:
    handle = amp.init()
    torch.mm(ONES, ONES)
    amp.initialize(MLP.model(), opt_level="O0")
    assert is_cast()
    assert "Warning:  amp.init() goes on casting functions to float16, process-wide." in capsys.readouterr().out
    handle._deactivate()
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


def test_another_level_with_function_casts_says_that_earlier_models_change_type(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, _ = started("O1")
    second = MLP.model()
    amp.initialize(second, opt_level="O4")
    assert "earlier models (O1) compute in bfloat16 from now on (O4)" in capsys.readouterr().out
    assert first(MLP.batch()[0]).dtype == torch.bfloat16
    amp.initialize(MLP.model(), opt_level="O4")
    assert "Warning" not in capsys.readouterr().out


# --- engines, threads, graphs ---------------------------------------------------------------------


def test_a_decorated_function_is_not_cast_after_their_end(level: str) -> None:
    @amp.half_function
    def mine(x: Tensor) -> torch.dtype:
        return x.dtype

    model, _ = started(level)
    assert mine(ONES) == HALF[level]
    amp.close()
    assert mine(ONES) == torch.float32


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


LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]


@pytest.mark.parametrize("any_level", LEVELS)
def test_a_layer_that_was_taken_out_of_its_model_and_groups_is_free_after_the_next_step(any_level: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=any_level, verbosity=0)
    references = []
    for _ in range(3):
        references.append(weakref.ref(model[1].weight))
        del optimizer.param_groups[0]["params"][2:]
        model[1] = nn.Linear(4, 4).to(model[0].weight.dtype)
        optimizer.param_groups[0]["params"] += model[1].parameters()
        for _ in range(2):
            optimizer.zero_grad()
            backward(model(torch.ones(2, 4)).float().square().mean(), optimizer)
            optimizer.step()
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


@pytest.mark.parametrize("any_level", LEVELS)
def test_moments_that_a_checkpoint_replaces_are_free_at_once(any_level: str) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), eps=1e-4)
    amp.initialize(model, optimizer, opt_level=any_level, verbosity=0)
    for _ in range(2):
        optimizer.zero_grad()
        backward(model(torch.ones(2, 4)).float().square().mean(), optimizer)
        optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    references = [weakref.ref(state["exp_avg"]) for state in optimizer.state.values()]
    optimizer.load_state_dict(saved)
    assert [reference() for reference in references] == [None] * 2


@pytest.mark.parametrize("any_level", LEVELS)
def test_an_optimizer_without_state_steps_after_a_checkpoint(any_level: str) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=any_level, verbosity=0)
    for _ in range(3):
        before = model.weight.detach().clone()
        optimizer.zero_grad()
        backward(model(torch.ones(2, 4)).float().square().mean(), optimizer)
        optimizer.step()
        assert not torch.equal(model.weight, before)
        optimizer.load_state_dict(optimizer.state_dict())


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
