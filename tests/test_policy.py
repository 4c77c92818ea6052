"""Levels are values, and overrides are judged in one place."""

import dataclasses

import pytest
import torch

from amp_engine import AmpTypeError, AmpValueError, Policy
from amp_engine.levels.levels import BRIEFS, LEVELS, level
from amp_engine.levels.policy import parse_loss_scale


@pytest.mark.parametrize("name", LEVELS)
def test_levels_know_their_names_and_have_no_complaints(name):
    assert level(name).opt_level == name
    assert list(level(name).complaints()) == []
    head, _, text = BRIEFS[name].partition(":  ")
    assert head == name
    assert not any(other in text for other in LEVELS), "says what the level does, not which other it is like"


@pytest.mark.parametrize(("half", "twin"), [("O1", "O4"), ("O2", "O5")])
def test_bfloat16_twins_differ_in_type_scale_and_name_only(half, twin):
    differing = {
        f.name for f in dataclasses.fields(Policy) if getattr(LEVELS[half], f.name) != getattr(LEVELS[twin], f.name)
    }
    assert differing <= {"opt_level", "loss_scale", "cast_model_type", "patch_torch_functions_type"}
    assert LEVELS[twin].loss_scale == 1.0


@pytest.mark.parametrize(
    ("name", "overrides", "dtype"),
    [
        ("O1", {}, torch.float16),
        ("O1", {"cast_model_type": torch.float32}, torch.float16),
        ("O4", {}, torch.bfloat16),
        ("O4", {"patch_torch_functions": False}, None),
        ("O5", {}, torch.bfloat16),
        ("O5", {"cast_model_type": False}, None),
        ("O0", {}, None),
    ],
)
def test_a_policy_computes_in_the_type_that_it_casts_to(name, overrides, dtype):
    assert level(name).override(**overrides).low_precision is dtype


def test_none_overrides_nothing():
    assert level("O2").override(loss_scale=None, master_weights=None) == level("O2")


@pytest.mark.parametrize(("given", "parsed"), [("dynamic", "dynamic"), ("128.0", 128.0), (True, 1.0), (2, 2.0)])
def test_loss_scales_are_parsed(given, parsed):
    assert parse_loss_scale(given) == parsed


@pytest.mark.parametrize("given", ["abc", float("nan"), float("inf"), 0, -1, None, [], "nan"])
def test_what_is_no_loss_scale_is_named(given):
    with pytest.raises(AmpValueError) as error:
        parse_loss_scale(given)
    assert f"loss_scale={given!r}" in str(error.value)


@pytest.mark.parametrize("given", [torch.int32, torch.float64, "float8", 16, True])
def test_what_is_no_training_type_is_named(given):
    with pytest.raises(AmpTypeError) as error:
        level("O2").override(cast_model_type=given)
    assert f"cast_model_type={given!r}" in str(error.value)


def test_types_may_be_strings():
    assert level("O2").override(cast_model_type="bfloat16").cast_model_type is torch.bfloat16
    assert level("O2").override(cast_model_type="torch.float16").cast_model_type is torch.float16
