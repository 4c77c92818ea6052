"""State that is saved, copied or pickled goes on bit by bit, in float32 whatever the parameters' type."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch

from tests.optimizers.support import (
    CLASSES,
    HALVES,
    STATE,
    TYPICAL,
    give,
    gradients,
    made,
    mixed_parameters,
    parameters,
    run,
)
from tests.support import assert_bitwise, frozen, optimizer_values, weights_of

EVERY = pytest.mark.parametrize("name", CLASSES)


def through_a_file(state_dict: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("steps", [0, 1, 4])
@EVERY
def test_a_resumed_run_is_bitwise_the_run_that_was_not_stopped(name: str, steps: int) -> None:
    params, others = mixed_parameters(), mixed_parameters()
    straight, first = made(name, others), made(name, params)
    run(straight, range(steps + 4))
    run(first, range(steps))
    second = CLASSES[name](params, lr=0.9)
    second.load_state_dict(through_a_file(first.state_dict()))
    run(second, range(steps, steps + 4))
    assert_bitwise(params, others)
    assert_bitwise(second.state_dict(), straight.state_dict())


@EVERY
def test_loading_in_the_middle_of_a_run_goes_back_to_there(name: str) -> None:
    params = parameters()
    optimizer = made(name, params)
    run(optimizer, range(3))
    saved, weights = copy.deepcopy(optimizer.state_dict()), frozen(params)
    run(optimizer, range(3, 6))
    truth = frozen(params)
    with torch.no_grad():
        for param, weight in zip(params, weights, strict=True):
            param.copy_(weight)
    optimizer.load_state_dict(saved)
    run(optimizer, range(3, 6))
    assert_bitwise(params, truth)


@EVERY
def test_a_saved_state_dict_does_not_change_when_training_goes_on_from_it(name: str) -> None:
    """As with torch, state tensors are shared with `state_dict`, but loading it elsewhere leaves it alone."""
    params, others = parameters(), parameters()
    first, second = made(name, params), made(name, others)
    run(first, range(2))
    saved = copy.deepcopy(first.state_dict())
    kept = copy.deepcopy(saved)
    second.load_state_dict(saved)
    run(second, range(2, 5))
    assert_bitwise(saved, kept)


@EVERY
def test_a_state_dict_is_in_the_form_of_torchs(name: str) -> None:
    """States by number, tensors of the parameters' shapes, counts that are float32 tensors of shape []."""
    params = parameters([(3, 2), (4,)])
    optimizer = made(name, params)
    run(optimizer, range(3))
    saved = optimizer.state_dict()
    assert list(saved["state"]) == [0, 1]
    assert saved["param_groups"][0]["params"] == [0, 1]
    for row, state in saved["state"].items():
        assert set(state) == {*STATE[name], *(["step"] if name != "FusedSGD" else [])}
        for key in STATE[name]:
            whole = key == "exp_avg_sq" and name == "FusedNovoGrad"
            assert state[key].shape == (() if whole else params[row].shape)
            assert state[key].dtype == torch.float32
        if name != "FusedSGD":
            assert state["step"].dtype == torch.float32
            assert state["step"].shape == ()
            assert state["step"].item() == 3.0
    assert all(saved["param_groups"][0][key] == value for key, value in TYPICAL[name].items())


# --- half parameters ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES)
@EVERY
def test_loading_keeps_the_state_of_half_parameters_in_float32_and_exact(name: str, dtype: torch.dtype) -> None:
    params = parameters(dtype=dtype)
    first = made(name, params)
    for index in range(3):
        give(params, [grad * 1e-4 for grad in gradients(params, index)])
        first.step()
    saved = copy.deepcopy(first.state_dict())
    second = made(name, params)
    second.load_state_dict(through_a_file(saved))
    assert_bitwise(second.state_dict()["state"], saved["state"])
    for param in params:
        for key in STATE[name]:
            assert second.state[param][key].dtype == torch.float32


@pytest.mark.parametrize("dtype", HALVES)
@EVERY
def test_state_that_somebody_saved_in_half_is_widened(name: str, dtype: torch.dtype) -> None:
    params = parameters([(3, 2), (4,)], dtype)
    first = made(name, params)
    run(first, range(3))
    saved = copy.deepcopy(first.state_dict())
    for state in saved["state"].values():
        for key in STATE[name]:
            state[key] = state[key].to(dtype)
    second = made(name, params)
    second.load_state_dict(saved)
    for row, param in enumerate(params):
        for key in STATE[name]:
            assert second.state[param][key].dtype == torch.float32
            assert_bitwise(second.state[param][key], saved["state"][row][key].float())
    run(second, range(3, 5))
    assert all(param.isfinite().all() for param in params)


# --- keys that are missing ------------------------------------------------------------------------


@EVERY
def test_any_setting_missing_from_a_saved_group_is_the_constructors(name: str) -> None:
    params, others = parameters(), parameters()
    straight, first = made(name, others), made(name, params)
    run(straight, range(4))
    run(first, range(2))
    for key in [key for key in first.param_groups[0] if key != "params"]:
        saved = copy.deepcopy(first.state_dict())
        del saved["param_groups"][0][key]
        again = made(name, params)
        again.load_state_dict(saved)
        assert again.param_groups[0][key] == first.param_groups[0][key]
    run(again, range(2, 4))
    assert_bitwise(params, others)


UNKNOWN = {
    "FusedSGD": (torch.optim.SGD, {"lr": 0.05, "maximize": True}),
    "FusedAdam": (torch.optim.AdamW, {"lr": 0.05, "maximize": True}),
    "FusedAdam with amsgrad": (torch.optim.AdamW, {"lr": 0.05, "amsgrad": True}),
    "FusedAdagrad": (torch.optim.Adagrad, {"lr": 0.05, "maximize": True}),
    "FusedAdagrad with lr_decay": (torch.optim.Adagrad, {"lr": 0.05, "lr_decay": 0.5}),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_a_setting_of_torchs_that_it_has_not_is_followed_or_refused_and_not_dropped(case: str) -> None:
    """A run that maximizes must not turn round without a word."""
    cls, settings = UNKNOWN[case]
    params, others = parameters(), parameters()
    run(cls(others, **settings), range(4))
    torchs = cls(params, **settings)
    run(torchs, range(2))
    fused = CLASSES[case.split()[0]](params, lr=0.05)
    try:
        fused.load_state_dict(torchs.state_dict())
        run(fused, range(2, 4))
    except RuntimeError as error:
        assert any(key in str(error) for key in settings if key != "lr")  # noqa: PT017 - either is right
    else:
        torch.testing.assert_close(params, others, rtol=1e-5, atol=1e-6)


# --- copies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))], ids=["copy", "pickle"]
)
@pytest.mark.parametrize("steps", [0, 3])
@EVERY
def test_a_copy_goes_on_like_the_original_and_apart_from_it(name: str, steps: int, copied: Any) -> None:
    params = mixed_parameters()
    original = made(name, params)
    run(original, range(steps))
    other = copied(original)
    assert type(other) is type(original)
    assert not {id(param) for param in weights_of(other)} & {id(param) for param in params}
    before = optimizer_values(original)
    run(other, range(steps, steps + 3))
    assert_bitwise(optimizer_values(original), before)
    run(original, range(steps, steps + 3))
    assert_bitwise(optimizer_values(other), optimizer_values(original))
    assert_bitwise(other.state_dict(), original.state_dict())


@pytest.mark.parametrize("set_grad_none", [True, False])
@EVERY
def test_a_copy_zeroes_gradients_as_the_original_does(name: str, set_grad_none: bool) -> None:
    other = copy.deepcopy(made(name, parameters([(3,)]), set_grad_none=set_grad_none))
    (param,) = weights_of(other)
    param.grad = torch.ones(3)
    other.zero_grad()
    assert (param.grad is None) == set_grad_none


@EVERY
def test_state_written_by_the_user_is_what_the_next_step_reads(name: str) -> None:
    """Tensors of the state replaced or written in place between two steps."""
    params, others = parameters(), parameters()
    optimizer, other = made(name, params), made(name, others)
    run(optimizer, range(2))
    run(other, range(2))
    for param, twin in zip(params, others, strict=True):
        for key in STATE[name]:
            optimizer.state[param][key].mul_(0.5)
            other.state[twin][key] = other.state[twin][key] * 0.5
    run(optimizer, range(2, 4))
    run(other, range(2, 4))
    assert_bitwise(params, others)
    for param, twin in zip(params, others, strict=True):
        for key in STATE[name]:
            assert_bitwise(optimizer.state[param][key], other.state[twin][key])


def _clear(optimizer: Any) -> None:
    optimizer.state.clear()


def _empty(optimizer: Any) -> None:
    for state in optimizer.state.values():
        state.clear()


def _forget_each(optimizer: Any) -> None:
    for state in optimizer.state.values():
        for key in state:
            state[key] = None


@EVERY
@pytest.mark.parametrize("throw_away", [_clear, _empty, _forget_each])
def test_state_thrown_away_starts_anew(name: str, throw_away: Any) -> None:
    params = parameters([(5,), (2, 3)])
    optimizer = made(name, params)
    run(optimizer, range(3))
    throw_away(optimizer)
    others = [torch.nn.Parameter(param.detach().clone()) for param in params]
    fresh = made(name, others)
    run(optimizer, range(3, 5))
    run(fresh, range(3, 5))
    assert_bitwise(params, others)
    assert_bitwise(optimizer.state_dict()["state"], fresh.state_dict()["state"])


@pytest.mark.parametrize("missing", ["exp_avg", "exp_avg_sq", "step"])
@pytest.mark.parametrize("name", ["FusedAdam", "FusedLAMB", "FusedNovoGrad"])
def test_state_that_lacks_an_entry_is_refused_and_nothing_is_stepped(name: str, missing: str) -> None:
    params = parameters([(5,), (2, 3)])
    optimizer = made(name, params)
    run(optimizer, range(2))
    del optimizer.state[params[1]][missing]
    before = frozen(params), frozen(dict(optimizer.state.items())[params[0]])
    with pytest.raises(RuntimeError, match=rf"{name} cannot step: parameter 1 (?s:.*)has .*, but no {missing}"):
        run(optimizer, [2])
    assert_bitwise((params, optimizer.state[params[0]]), before)
