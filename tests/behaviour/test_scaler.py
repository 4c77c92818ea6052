"""The numbers of the loss scalers after scripted sequences of clean and overflowing backwards."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from amp_engine import AmpIndexError, AmpStateError, amp
from amp_engine.ground import devices
from amp_engine.scaling.scaler import LossScaler
from tests.models import MLP
from tests.oracle import Scale, scale_rule
from tests.support import backward, scaler_numbers, train

SCRIPTS = ["ccoccoc", "ococococ", "cccoooccc"]


def start(level: str = "O1", **keywords: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = MLP.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, **keywords)
    return model, optimizer


def follow(model: torch.nn.Module, optimizer: torch.optim.Optimizer, script: str) -> list[tuple[float, int]]:
    numbers = []
    for index, outcome in enumerate(script):
        train(MLP, model, optimizer, outcome, first=index)
        numbers.append(scaler_numbers())
    return numbers


def expected(script: str, *args: Any, **bounds: float) -> list[tuple[float, int]]:
    return [(s.loss_scale, s.unskipped) for s in scale_rule(script, *args, **bounds)]


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_the_scale_follows_the_slow_rule(script: str, level: str) -> None:
    assert follow(*start(level), script) == expected(script)


@pytest.mark.parametrize("unskipped", [1998, 1999])
@pytest.mark.parametrize("script", ["ccc", "oc", "coc"])
def test_the_scale_doubles_after_2000_clean_backwards_in_a_row(script: str, unskipped: int) -> None:
    model, optimizer = start()
    amp._amp_state.loss_scalers[0]._unskipped = unskipped
    assert follow(model, optimizer, script) == expected(script, Scale(2.0**16, unskipped))


@pytest.mark.parametrize("ceiling", [2.0**16, 2.0**17, 2.0**24])
def test_the_ceiling_stops_the_growth(ceiling: float) -> None:
    model, optimizer = start("O0", loss_scale="dynamic", max_loss_scale=ceiling)
    scaler = amp._amp_state.loss_scalers[0]
    for _ in range(10):
        scaler._unskipped = 1999
        train(MLP, model, optimizer, "c")
    assert scaler_numbers() == (ceiling, 0)


@pytest.mark.parametrize("floor", [2.0**15, 1.0, 2.0**-3])
def test_the_floor_stops_the_fall(floor: float) -> None:
    script = "o" * 22
    assert follow(*start(min_loss_scale=floor), script) == expected(script, floor=floor)


def test_a_half_loss_is_widened_before_it_is_scaled() -> None:
    model, optimizer = start("O2", cast_model_outputs=torch.float16)
    loss = model(MLP.batch()[0]).float().square().mean().half()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss.dtype == torch.float32
        assert scaled_loss.isfinite()
        scaled_loss.backward()


def test_an_assigned_scale_is_used_from_the_next_backward_on() -> None:
    model, optimizer = start("O2")
    scaler = amp._amp_state.loss_scalers[0]
    scaler._loss_scale = 8.0
    assert scaler.loss_scale() == 8.0
    loss = MLP.loss(model, MLP.batch())
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss.item() == pytest.approx(8 * loss.item(), rel=1e-6)
        scaled_loss.backward()
    optimizer.step()
    assert scaler_numbers() == (8.0, 1)
    train(MLP, model, optimizer, "o")
    assert scaler_numbers() == (4.0, 0)


# --- several losses -------------------------------------------------------------------------------


def test_each_loss_has_its_own_scaler() -> None:
    model, optimizer = start("O2", num_losses=3)
    scripts = {0: "ccoc", 1: "oooo", 2: "cccc"}
    for index in range(4):
        for loss_id, script in scripts.items():
            loss = MLP.loss(model, MLP.batch(index))
            backward(loss, optimizer, loss_id=loss_id, overflow=script[index] == "o")
        optimizer.step()
        optimizer.zero_grad()
    for loss_id, script in scripts.items():
        assert scaler_numbers(loss_id) == expected(script)[-1]


# --- delay_overflow_check -------------------------------------------------------------------------


def test_delay_overflow_check_leaves_the_scale_to_the_caller() -> None:
    model, optimizer = start("O2")
    scaler = amp._amp_state.loss_scalers[0]
    backward(MLP.loss(model, MLP.batch()), optimizer, delay_overflow_check=True)
    assert scaler_numbers() == (65536.0, 0)
    assert scaler.update_scale() is False
    assert scaler_numbers() == (65536.0, 1)
    backward(MLP.loss(model, MLP.batch()), optimizer, delay_overflow_check=True, overflow=True)
    assert scaler_numbers() == (65536.0, 1)
    assert scaler.update_scale() is True
    assert scaler_numbers() == (32768.0, 0)


# --- the snapshot of the next backward -----------------------------------------------------------


def test_the_next_snapshot_is_the_last_updates_until_the_scale_moves() -> None:
    scaler = LossScaler("dynamic", scale_window=1)
    scaler.update_()
    assert scaler.snapshot() is scaler.snapshot()
    assert scaler.snapshot().scale == scaler.scale == 2.0**17
    scaler.load_state_dict({"loss_scale": 2.0, "unskipped": 1})
    assert scaler.snapshot().scale == 2.0
    scaler.update_()
    twin = copy.deepcopy(scaler)
    twin.scale.fill_(8.0)
    assert (twin.snapshot().scale, scaler.snapshot().scale) == (8.0, 4.0)


def test_replays_of_a_cuda_graph_move_the_scale_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    scaler = LossScaler("dynamic")
    scaler.update_()
    eager = scaler.snapshot()
    with monkeypatch.context() as capture:
        capture.setattr(devices, "is_capturing", lambda device: True)
        assert scaler.snapshot() is not eager
        scaler.update_()
    scaler.scale.data.fill_(8.0)  # moves no version, as a replay moves none
    assert scaler.snapshot().scale == 8.0
    scaler.update_()
    scaler.scale.data.fill_(16.0)
    assert scaler.snapshot().scale == 16.0


# --- an update that waits for other ranks ---------------------------------------------------------

ASKS: dict[str, Callable[[LossScaler], Any]] = {
    "loss_scale": lambda s: s.loss_scale(),
    "snapshot": lambda s: s.snapshot(),
    "state_dict": lambda s: s.state_dict(),
    "load_state_dict": lambda s: s.load_state_dict({"loss_scale": 2.0, "unskipped": 1}),
    "record_": lambda s: s.record_(torch.tensor([False])),
    "update_": lambda s: s.update_(),
    "update_scale": lambda s: s.update_scale(),
    "clear_overflow_state": lambda s: s.clear_overflow_state(),
    "_loss_scale": lambda s: s._loss_scale,
    "_loss_scale = ": lambda s: setattr(s, "_loss_scale", 4.0),
    "_unskipped": lambda s: s._unskipped,
    "_unskipped = ": lambda s: setattr(s, "_unskipped", 3),
    "_has_overflow": lambda s: s._has_overflow,
    "_has_overflow = ": lambda s: setattr(s, "_has_overflow", False),
    "_overflow_buf": lambda s: s._overflow_buf,
    "_overflow_buf = ": lambda s: setattr(s, "_overflow_buf", torch.zeros(1)),
    "copy": copy.deepcopy,
    "another": lambda s: s.owe(lambda: None),
}


@pytest.mark.parametrize("name", ASKS)
def test_an_owed_update_comes_before_whatever_is_asked_and_once(name: str) -> None:
    scaler = LossScaler("dynamic")
    calls: list[float] = []
    scaler.owe(lambda: calls.append(scaler.loss_scale()))
    ASKS[name](scaler)
    assert calls == [65536.0]
    ASKS[name](scaler)
    assert calls == [65536.0]


def test_get_scale_is_what_the_next_loss_is_multiplied_by() -> None:
    with pytest.raises(AmpStateError, match=r"amp.get_scale\(\) was called before amp.initialize"):
        amp.get_scale()
    model, optimizer = start("O2", num_losses=2)
    before = amp.get_scale()
    assert (before.dtype, before.shape) == (torch.float32, ())
    with amp.scale_loss(torch.ones(()), optimizer) as scaled_loss:
        assert scaled_loss == before == 2.0**16
    train(MLP, model, optimizer, "o")
    assert before == 2.0**16  # a copy
    assert amp.get_scale() == 2.0**15
    amp.get_scale().fill_(3.0)
    assert amp.get_scale() == 2.0**15
    assert amp.get_scale(loss_id=1) == 2.0**16
    with pytest.raises(AmpIndexError, match="loss_id=2"):
        amp.get_scale(2)
    amp.close()
    amp.initialize(model, optimizer, enabled=False)
    assert amp.get_scale() == 1.0


@pytest.mark.parametrize("loss_scale", ["dynamic", "auto", 8.0])
def test_all_of_a_scaler_moves_to_the_device_of_the_losses(loss_scale: Any) -> None:
    scaler = LossScaler(loss_scale)
    before = {name: value for name, value in vars(scaler).items() if isinstance(value, torch.Tensor)}
    scaler.to(torch.device("meta"))
    assert len(before) >= 4
    assert {name: getattr(scaler, name).device.type for name in before} == dict.fromkeys(before, "meta")


def test_an_owed_update_that_was_interrupted_stays_owed() -> None:
    scaler, calls = LossScaler("dynamic"), []

    def update() -> None:
        calls.append(len(calls))
        if len(calls) == 1:
            raise KeyboardInterrupt

    scaler.owe(update)
    with pytest.raises(KeyboardInterrupt):
        scaler.settle()
    scaler.settle()
    scaler.settle()
    assert calls == [0, 1]
