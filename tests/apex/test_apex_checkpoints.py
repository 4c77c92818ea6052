"""Checkpoints as apex wrote them, in the three dictionaries of its recipe, and scalers that it pickled."""

from __future__ import annotations

import copy
import io
import pickle
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_engine import amp
from amp_engine.apex.amp import scaler as apex_scaler
from amp_engine.scaling.scaler import LossScaler
from tests.models import NORMED_MLP
from tests.support import (
    DYNAMIC_LEVELS,
    LEVELS,
    MASTER_LEVELS,
    assert_bitwise,
    masters,
    scaler_numbers,
    train,
    weights_of,
)

WRITTEN_AT = ("O0", "O2", "O3")  # in FP32, in half but for batch norm, in half
SCALER = {"loss_scale": 2.0**13, "unskipped": 77}
LR, EPS = 1e-2, 1e-4


def half_at(level: str, name: str, value: Tensor) -> bool:
    """True if apex kept this entry in half: batch norm stayed in FP32 at O2."""
    return value.is_floating_point() and (level == "O3" or (level == "O2" and not name.startswith("1.")))


def written_by_apex(level: str) -> dict[str, Any]:
    """Weights widened from what the model held, moments in the type of what was stepped, the scaler of one loss."""
    model = NORMED_MLP.model(5)
    generator = torch.Generator().manual_seed(3)
    weights = {
        name: value.half().float() if half_at(level, name, value) else value.clone()
        for name, value in model.state_dict().items()
    }
    moments_dtype = torch.float16 if level == "O3" else torch.float32
    state = {}
    for index, param in enumerate(model.parameters()):
        first, second = (torch.randn(param.shape, generator=generator) for _ in range(2))
        state[index] = {
            "step": 40,  # a number, in the torch of its time
            "exp_avg": (1e-3 * first).to(moments_dtype),
            "exp_avg_sq": (1e-9 + 1e-6 * second.square()).to(moments_dtype),
        }
    group = {"lr": LR, "betas": (0.9, 0.999), "eps": EPS, "weight_decay": 0, "amsgrad": False}
    return {
        "model": weights,
        "optimizer": {"state": state, "param_groups": [{**group, "params": list(state)}]},
        "amp": {"loss_scaler0": dict(SCALER)},
    }


def started(level: str) -> tuple[nn.Module, torch.optim.Adam]:
    model = NORMED_MLP.model()
    optimizer = torch.optim.Adam(model.parameters(), LR, eps=EPS)
    return model, optimizer


def resumed(saved: dict[str, Any], level: str, first: str) -> tuple[nn.Module, torch.optim.Adam]:
    model, optimizer = started(level)
    if first == "initialize":
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    if first == "load":
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    amp.load_state_dict(saved["amp"])
    return model, optimizer


def through_a_file(saved: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("first", ["initialize", "load"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("written_at", WRITTEN_AT)
def test_a_checkpoint_of_apex_resumes_at_any_level(written_at: str, level: str, first: str) -> None:
    saved = written_by_apex(written_at)
    model, optimizer = resumed(through_a_file(saved), level, first)

    for index, (param, moments) in enumerate(zip(weights_of(optimizer), optimizer.state.values(), strict=True)):
        expected = saved["optimizer"]["state"][index]
        assert float(moments["step"]) == 40.0
        for name in ("exp_avg", "exp_avg_sq"):
            # O3 steps half parameters, and torch keeps their moments in half.
            assert moments[name].dtype == param.dtype == (torch.float16 if level == "O3" else torch.float32)
            assert_bitwise(moments[name], expected[name].to(param.dtype))
    for name, value in zip(dict(model.named_parameters()), masters(optimizer), strict=True):
        assert_bitwise(value, saved["model"][name].to(value.dtype))
    if level in (*MASTER_LEVELS, "O0", "O1", "O4"):
        assert_bitwise(dict(model.state_dict()), saved["model"])
    # A static scale is the level's own.
    expected = (2.0**13, 77) if level in DYNAMIC_LEVELS else (1.0, 0)
    assert scaler_numbers() == expected

    loss = NORMED_MLP.loss(model, NORMED_MLP.batch(50)).item()
    train(NORMED_MLP, model, optimizer, "c" * 12)
    assert NORMED_MLP.loss(model, NORMED_MLP.batch(50)).item() < loss
    assert scaler_numbers()[0] == expected[0]
    assert level not in DYNAMIC_LEVELS or scaler_numbers()[1] == 77 + 12
    assert all(float(state["step"]) == 52.0 for state in optimizer.state.values())


@pytest.mark.parametrize("first", ["initialize", "load"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_the_first_step_after_the_resume_is_that_of_adam_with_these_moments(level: str, first: str) -> None:
    """It is in FP32, from the gradient of the resumed step: the update of step 41."""
    saved = written_by_apex("O2")
    model, optimizer = resumed(saved, level, first)
    with amp.scale_loss(NORMED_MLP.loss(model, NORMED_MLP.batch()), optimizer) as scaled_loss:
        scaled_loss.backward()
    expected = []
    for index, param in enumerate(amp.master_params(optimizer)):
        entry, grad = saved["optimizer"]["state"][index], param.grad.double()
        m = 0.9 * entry["exp_avg"].double() + 0.1 * grad
        v = 0.999 * entry["exp_avg_sq"].double() + 0.001 * grad.square()
        update = LR * (m / (1 - 0.9**41)) / ((v / (1 - 0.999**41)).sqrt() + EPS)
        expected.append((param.detach().double() - update).float())
    optimizer.step()
    torch.testing.assert_close(masters(optimizer), expected, rtol=1e-5, atol=1e-6)


# --- pickled scalers -------------------------------------------------------------------------------


def pickled_by_apex(monkeypatch: pytest.MonkeyPatch, **attributes: Any) -> bytes:
    """The bytes of an object whose class was `apex.amp.scaler.LossScaler`."""
    path = ("apex", "apex.amp", "apex.amp.scaler")
    with monkeypatch.context() as patch:
        for name in path:
            patch.setitem(sys.modules, name, ModuleType(name))
        stand_in = type("LossScaler", (), {"__module__": path[-1]})
        sys.modules[path[-1]].LossScaler = stand_in  # type: ignore[attr-defined]
        instance = stand_in()
        instance.__dict__.update(
            _loss_scale=2.0**13,
            _max_loss_scale=2.0**24,
            _min_loss_scale=None,
            _scale_seq_len=2000,
            _unskipped=77,
            _has_overflow=False,
            _overflow_buf=torch.zeros(1, dtype=torch.int32),
            dynamic=True,
        )
        instance.__dict__.update(attributes)
        return pickle.dumps(instance)


def unpickled(monkeypatch: pytest.MonkeyPatch, data: bytes) -> LossScaler:
    with monkeypatch.context() as patch:
        for name in ("apex", "apex.amp"):
            patch.setitem(sys.modules, name, ModuleType(name))
        patch.setitem(sys.modules, "apex.amp.scaler", apex_scaler)
        return pickle.loads(data)


def test_a_scaler_that_apex_pickled_works_on(monkeypatch: pytest.MonkeyPatch) -> None:
    scaler = unpickled(monkeypatch, pickled_by_apex(monkeypatch, _scale_seq_len=78, _max_loss_scale=2.0**14))
    assert type(scaler) is LossScaler
    assert (scaler.dynamic, scaler.state_dict(), scaler._has_overflow) == (True, SCALER, False)
    assert scaler.update_scale() is False
    assert scaler.state_dict() == {"loss_scale": 2.0**14, "unskipped": 0}
    scaler._unskipped = 77
    scaler.update_scale()
    assert scaler.loss_scale() == 2.0**14
    scaler.record_(torch.tensor(True))
    assert scaler.update_scale() is True
    assert scaler.loss_scale() == 2.0**13


def test_a_pickled_overflow_is_one_still(monkeypatch: pytest.MonkeyPatch) -> None:
    scaler = unpickled(monkeypatch, pickled_by_apex(monkeypatch, _has_overflow=True, _min_loss_scale=2.0**13))
    assert scaler.update_scale() is True
    assert scaler.loss_scale() == 2.0**13


def test_a_static_scaler_stays_static_and_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    scaler = unpickled(monkeypatch, pickled_by_apex(monkeypatch, dynamic=False, _loss_scale=0.1))
    assert (scaler.dynamic, scaler.loss_scale()) == (False, 0.1)


def test_a_scale_that_sank_to_zero_comes_back_at_the_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    scaler = unpickled(monkeypatch, pickled_by_apex(monkeypatch, _loss_scale=0.0))
    assert scaler.loss_scale() == 2.0**-24


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))])
@pytest.mark.parametrize("loss_scale", ["dynamic", 0.1])
def test_a_scaler_of_ours_pickles_and_its_copy_is_its_own(loss_scale: Any, duplicate: Any) -> None:
    scaler = LossScaler(loss_scale, scale_window=3, max_loss_scale=2.0**17)
    scaler.update_scale()
    twin = duplicate(scaler)
    assert (twin.state_dict(), twin.dynamic) == (scaler.state_dict(), scaler.dynamic)
    scaler.record_(torch.tensor(True))
    assert twin.update_scale() is False
    assert twin._unskipped == 2
    twin.update_scale()
    assert twin.loss_scale() == (2.0**17 if loss_scale == "dynamic" else 0.1)


@pytest.mark.parametrize("of_before", [False, True])
def test_the_overflow_of_the_last_update_is_pickled_with_a_scaler_of_ours(of_before: bool) -> None:
    scaler = LossScaler("dynamic")
    scaler.record_(torch.tensor(True))
    assert scaler.update_scale() is True
    if of_before:  # the flag alone
        vars(scaler)["_last_found_inf"] = torch.tensor(1.0)
    twin = pickle.loads(pickle.dumps(scaler))
    assert twin._has_overflow
    twin.update_scale()
    assert not twin._has_overflow
