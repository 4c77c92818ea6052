"""A trial at another level keeps the arguments of a script's `initialize`, and of its policy, that fit the level."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from amp_engine import amp
from amp_engine.errors import AmpTypeError, AmpValueError
from amp_engine.tools.advice.fitting import fitted
from tests.support import LEVELS


def options(level: str, **passed: Any) -> tuple[dict[str, Any], list[str]]:
    kept, dropped, _ = fitted(passed, level)
    assert kept.pop("enabled") is True
    assert kept.pop("opt_level") == level
    return kept, [one.argument for one in dropped]


@pytest.mark.parametrize("level", LEVELS)
def test_a_loss_scale_is_kept_where_the_level_scales_losses(level):
    kept, dropped = options(level, opt_level="O2", loss_scale="128.0")
    is_kept = level in ("O1", "O2")
    assert kept == ({"loss_scale": "128.0"} if is_kept else {})
    assert dropped == ([] if is_kept else ["loss_scale='128.0'"])


@pytest.mark.parametrize("level", LEVELS)
def test_batch_norm_is_kept_in_fp32_where_the_model_is_cast(level):
    kept, dropped = options(level, opt_level="O2", keep_batchnorm_fp32=True)
    assert dropped == (["keep_batchnorm_fp32=True"] if level in ("O1", "O4") else [])
    assert bool(kept) != bool(dropped)


@pytest.mark.parametrize(
    ("passed", "where"),
    [
        ({"master_weights": True}, ("O1", "O2", "O3", "O4", "O5")),  # at O1 and O4 of half weights alone
        ({"master_weights": "split"}, ("O3", "O5")),
        ({"cast_model_type": torch.float16}, ("O2", "O3")),
        ({"cast_model_type": "float16"}, ("O2", "O3")),  # as a policy has it
        ({"patch_torch_functions": True}, ("O1", "O3", "O4")),
        ({"cast_model_outputs": torch.float16}, ("O1", "O2", "O3", "O4", "O5")),
        ({"moment_dtype": torch.bfloat16}, ("O1", "O2", "O3", "O4", "O5")),
        ({"num_losses": 2, "max_loss_scale": 4.0, "loss_scale": None}, LEVELS),
    ],
)
def test_properties_are_kept_where_they_leave_the_level_what_it_is(passed, where):
    assert tuple(level for level in LEVELS if options(level, opt_level="O3", **passed)[0]) == where
    for level in LEVELS:
        kept, dropped = options(level, opt_level="O3", **passed)
        assert kept == passed if level in where else len(dropped) == 1


# A policy


@pytest.mark.parametrize("level", LEVELS)
def test_a_policy_gives_the_trial_its_modules_and_what_fits_the_level(level, tmp_path):
    policy = amp.RunPolicy("O5", ("encoder.norm",), master_weights="split", moment_dtype="bfloat16", max_loss_scale=8.0)
    path = tmp_path / "policy.json"
    policy.save(path)
    found = fitted({"policy": path, "verbosity": 0}, level)
    kept, dropped, asked = found
    assert asked == "O5"
    assert fitted({"policy": policy, "verbosity": 0}, level) == found
    expected: dict[str, Any] = {"opt_level": level, "enabled": True, "verbosity": 0, "max_loss_scale": 8.0}
    if level != "O0":
        expected |= {"policy": amp.RunPolicy(level, ("encoder.norm",)), "moment_dtype": "bfloat16"}
    if level == "O5":
        expected["master_weights"] = "split"
    assert kept == expected
    left_out = {"O0": ["master_weights='split'", "moment_dtype='bfloat16'"], "O5": []}
    assert [one.argument for one in dropped] == left_out.get(level, ["master_weights='split'"])


def test_arguments_overrule_the_policy_as_in_initialize():
    policy = amp.RunPolicy("O2", loss_scale=128.0, max_loss_scale=8.0)
    kept, _, _ = fitted({"policy": policy, "loss_scale": 4.0, "max_loss_scale": 2.0**24}, "O1")
    assert kept == {"enabled": True, "opt_level": "O1", "loss_scale": 4.0, "max_loss_scale": 2.0**24}


def test_without_a_policy_the_level_of_the_script_is_its_opt_level():
    for passed, asked in (({}, "O1"), ({"opt_level": "O3"}, "O3"), ({"policy": None, "opt_level": "O4"}, "O4")):
        kept, dropped, found = fitted(passed, "O2")
        assert (kept, dropped, found) == ({"enabled": True, "opt_level": "O2"}, [], asked)


def test_what_initialize_refuses_in_a_policy_stays_an_error_of_the_script(tmp_path):
    with pytest.raises(AmpValueError, match="opt_level='O3' was given with a policy for 'O2'"):
        fitted({"policy": amp.RunPolicy("O2"), "opt_level": "O3"}, "O3")
    with pytest.raises(AmpTypeError, match="policy is a int"):
        fitted({"policy": 3}, "O0")
    with pytest.raises(FileNotFoundError):
        fitted({"policy": tmp_path / "nowhere.json"}, "O0")
