"""The dynamic loss scale over every branch of its rule."""

import math

import pytest
import torch

from amp_engine import kernels
from amp_engine.errors import AmpValueError

from . import oracle
from .conftest import NATIVE

RULES = {
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 3,
    "min_scale": 1.0,
    "max_scale": 16.0,
}


def f32(value):
    return torch.tensor(value, dtype=torch.float32)


def i32(value):
    return torch.tensor(value, dtype=torch.int32)


@pytest.mark.parametrize(
    ("flags", "scale", "count"),
    [
        ([0, 0], 4.0, 2),
        ([0, 0, 0], 8.0, 0),
        ([0, 0, 1], 2.0, 0),
        ([0, 1, 0, 0, 0], 4.0, 0),
        ([1, 1, 1, 1], 1.0, 0),  # the floor
        ([0] * 12, 16.0, 0),  # the ceiling
        ([2.0], 2.0, 0),  # a flag that was summed over ranks
        ([math.nan], 2.0, 0),
        ([math.inf], 2.0, 0),
    ],
)
def test_scale_follows_its_rule(flags, scale, count):
    state, tracker = f32(4.0), i32(0)
    for flag in flags:
        found_inf = f32(float(flag))
        kernels.update_scale_(state, tracker, found_inf, **RULES)
        assert found_inf.item() == pytest.approx(flag, nan_ok=True)
    assert (state.item(), tracker.item()) == (scale, count)
    assert (state.dtype, tracker.dtype) == (torch.float32, torch.int32)


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_every_history_of_seven_backwards_with_hysteresis(hysteresis):
    for history in range(2**7):
        expected = (4.0, 0, hysteresis)
        state, tracker, left = f32(4.0), i32(0), i32(hysteresis)
        for turn in range(7):
            flag = float(history >> turn & 1)
            expected = oracle.scale_rule(*expected, flag, hysteresis=hysteresis)
            kernels.update_scale_(state, tracker, f32(flag), hysteresis_tracker=left, hysteresis=hysteresis, **RULES)
            assert (state.item(), tracker.item(), left.item()) == expected


def test_growth_that_is_not_finite_does_not_happen():
    state, tracker = f32(3e38), i32(2)
    kernels.update_scale_(state, tracker, f32(0.0), **{**RULES, "max_scale": math.inf})
    assert (state.item(), tracker.item()) == (f32(3e38).item(), 0)


def test_factors_are_applied_in_float64():
    state, tracker = f32(1 / 3), i32(0)
    rules = {**RULES, "growth_interval": 1, "growth_factor": 1.0 + 2**-30, "min_scale": 0.0}
    kernels.update_scale_(state, tracker, f32(0.0), **rules)
    assert state.item() == f32(f32(1 / 3).item() * (1.0 + 2**-30)).item()
    kernels.update_scale_(state, tracker, f32(1.0), **{**rules, "backoff_factor": 0.7})
    assert state.item() == f32(f32(1 / 3).item() * 0.7).item()


@pytest.mark.parametrize("flag", [0.0, 1.0])
def test_a_static_scale_counts_and_stays(flag):
    state, tracker, left = f32(4.0), i32(5), i32(1)
    for _ in range(3):
        kernels.update_scale_(state, tracker, f32(flag), dynamic=False, hysteresis_tracker=left, **RULES)
    assert (state.item(), tracker.item(), left.item()) == (4.0, 8, 1)


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("flag", [0.0, 3.0])
@pytest.mark.parametrize("used", [None, 12.0])
def test_what_the_backward_used_and_what_comes_of_it_is_told(flag, dynamic, used):
    state, tracker, found_inf = f32(3.0), i32(2), f32(flag)
    inverse, outcome = f32(math.nan), torch.full((4,), math.nan)
    told = {} if used is None else {"scale_used": f32(used), "loss": f32(0.25)}
    kernels.update_scale_(
        state, tracker, found_inf, inv_scale_used=inverse, outcome=outcome, dynamic=dynamic, **told, **RULES
    )
    assert inverse.item() == f32(1 / 3).item()
    after = 3.0 if not dynamic else 1.5 if flag else 6.0
    assert (state.item(), found_inf.item()) == (after, 0.0)
    assert outcome.tolist() == [flag, after, *((3.0, 0.0) if used is None else (used, 0.25))]


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("scale", torch.zeros((), dtype=torch.float64)),
        ("scale", torch.zeros(2)),
        ("growth_tracker", torch.zeros((), dtype=torch.int64)),
        ("growth_tracker", torch.zeros(())),
        ("found_inf", torch.zeros((), dtype=torch.bool)),
        ("found_inf", torch.zeros((), device="meta")),
        ("hysteresis_tracker", torch.zeros(())),
        ("inv_scale_used", torch.zeros((), dtype=torch.float16)),
        ("scale_used", torch.zeros(2)),
        ("loss", torch.zeros((), dtype=torch.float16)),
    ],
)
def test_other_tensors_are_refused_by_name(name, given):
    named = {"scale": f32(4.0), "growth_tracker": i32(0), "found_inf": f32(1.0), name: given}
    others = {key: tensor for key, tensor in named.items() if key != "scale"}
    with pytest.raises(AmpValueError, match=f"update_scale_: {name} is"):
        kernels.update_scale_(named["scale"], **others, **RULES)
    if name != "scale":
        assert named["scale"].item() == 4.0
    if name != "growth_tracker":
        assert named["growth_tracker"].item() == 0


@NATIVE
@pytest.mark.parametrize("outcome", [torch.zeros(3), torch.zeros(4, dtype=torch.int32)])
def test_another_outcome_is_refused_by_the_kernel(outcome):
    with pytest.raises(AmpValueError, match="update_scale_: outcome is"):
        kernels.update_scale_(f32(4.0), i32(0), f32(1.0), outcome=outcome, **RULES)
