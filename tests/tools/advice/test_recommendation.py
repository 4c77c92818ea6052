"""The level that the figures speak for: every rule on figures made by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from amp_engine.tools.advice.figures import Comparison, Figures
from amp_engine.tools.advice.recommendation import Recommendation, recommend, why_not

BASE = Figures("O0", steps=20, difference=0.0, agrees=True, seconds=0.1, speed=1.0, bytes=1000, memory=1.0, lost=0.0)
FLOAT16 = ("O1", "O2", "O3")


def level(name: str, speed: float = 1.0, memory: float = 1.0, **changed: Any) -> Figures:
    """A level that trains as O0 does, at another speed and size."""
    fields: dict[str, Any] = {
        "level": name,
        "dtype": "float16" if name in FLOAT16 else "bfloat16",
        "difference": 0.001,
        "seconds": 0.1 / speed,
        "speed": speed,
        "bytes": round(1000 * memory),
        "memory": memory,
    }
    if name in ("O1", "O2"):
        fields |= {"loss_scale": 65536.0, "dynamic": True}
    return dataclasses.replace(BASE, **(fields | changed))


def recommended(*levels: Figures, **changed: Any) -> Recommendation:
    return recommend(Comparison("a machine", BASE, levels, **changed))


def test_the_fastest_that_agrees_is_taken():
    found = recommended(level("O1", 1.5), level("O2", 2.0), level("O4", 1.2))
    assert found.level == "O2"


def test_it_names_the_machine_and_quotes_the_figures():
    sentence = recommended(level("O2", 2.0, memory=0.8), limit=0.03).sentence
    assert sentence.startswith("Take O2 on this machine (a machine): ")
    for figure in ("50.0 ms where O0 takes 100", "2.00 times as fast", "80.0 % of O0's", "by 0.1 %, of 3.0 %", "65536"):
        assert figure in sentence
    assert "\n" not in sentence


def test_less_than_five_percent_faster_is_no_reason():
    assert recommended(level("O2", 1.049)).level == "O0"
    assert recommended(level("O2", 1.05)).level == "O2"


def test_a_level_has_to_be_faster_by_more_than_the_base_drifts():
    found = recommended(level("O2", 1.3), drift=0.4)
    assert found.level == "O0"
    assert "more than the 40.0 % that O0's own two runs differ by" in found.sentence
    assert recommended(level("O2", 1.5), drift=0.4).level == "O2"


def test_speeds_on_a_busy_machine_are_no_reason_to_stay():
    found = recommended(level("O2", 1.3), drift=2.137)
    assert found.level is None
    assert "O0's own two runs differ by 213.7 %" in found.sentence
    assert "Losses agree with O0's at O2." in found.sentence
    assert recommended(level("O2", 3.2), drift=2.137).level == "O2"
    assert recommended(level("O2", 1.3, memory=0.8), drift=2.137).level == "O2"
    assert recommended(level("O2", 3.2, agrees=False), drift=2.137).level == "O0"


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"error": "RuntimeError: no"}, "it failed"),
        ({"steps": 0}, "it had no steps to compare"),
        ({"difference": None}, "it had no steps to compare"),
        ({"is_finite": False, "agrees": False}, "its losses are not finite"),
        ({"skips": 11}, "it skipped 11 of 20 steps"),
        ({"agrees": False, "difference": 0.5}, "its losses differ by 50.0 %"),
        (
            {"agrees": False, "difference": 0.5, "inputs": ("the cast of the argument 'x' changed whole numbers",)},
            "its losses differ by 50.0 %; the cast of the argument 'x' changed whole numbers, see cast_inputs of "
            "amp.initialize",
        ),
        ({"lost": 0.011}, "it loses 1.1 % of gradient values"),
    ],
)
def test_what_does_not_train_as_o0_is_not_taken_however_fast(wrong, why):
    bad = level("O2", 3.0, 0.5, **wrong)
    assert why_not(bad) == why
    assert recommended(bad, level("O4", 1.2)).level == "O4"
    found = recommended(bad)
    assert found.level == "O0"
    assert f"no other level trains as it does: O2 ({why})." in found.sentence


def test_half_of_the_steps_skipped_and_one_percent_lost_are_allowed():
    assert recommended(level("O2", 2.0, skips=10, lost=0.01)).level == "O2"


def test_of_equally_fast_levels_the_one_with_less_memory_is_taken():
    assert recommended(level("O1", 2.0, memory=1.1), level("O2", 1.95, memory=0.9)).level == "O2"
    assert recommended(level("O1", 2.0, memory=1.1), level("O2", 1.90, memory=0.9)).level == "O1"


def test_of_equally_fast_and_small_levels_the_simpler_one_is_taken():
    assert recommended(level("O2", 2.0, memory=1.0), level("O1", 1.96, memory=1.005)).level == "O1"
    assert recommended(level("O1", 2.0), level("O4", 1.96)).level == "O4"


def test_unknown_memory_is_no_reason_either_way():
    unknown = dataclasses.replace(level("O1", 2.0), bytes=None, memory=None)
    assert recommended(level("O2", 2.0, memory=0.5), unknown).level == "O1"


def test_without_speed_a_tenth_less_memory_is_taken_and_the_cost_is_said():
    found = recommended(level("O1", 0.9, memory=1.1), level("O2", 0.8, memory=0.9))
    assert found.level == "O2"
    assert "for memory, with 90.0 % of O0's memory (900 bytes for 1,000 bytes)" in found.sentence
    assert "a step takes 125 ms where O0 takes 100, 0.80 times as fast" in found.sentence
    assert recommended(level("O2", 0.8, memory=0.91)).level == "O0"


def test_of_equally_small_levels_the_faster_one_is_taken():
    assert recommended(level("O2", 0.8, memory=0.80), level("O5", 0.9, memory=0.82)).level == "O5"
    assert recommended(level("O2", 0.8, memory=0.80), level("O5", 0.9, memory=0.83)).level == "O2"


def test_memory_is_not_paid_for_with_more_than_half_of_the_time_again():
    found = recommended(level("O2", 0.66, memory=0.5), level("O4", 0.9))
    assert found.level == "O0"
    assert "the smallest is O2, 0.66 times as fast, with 50.0 % of O0's memory" in found.sentence
    assert recommended(level("O2", 0.67, memory=0.5)).level == "O2"


def test_staying_names_the_fastest_and_those_that_do_not_count():
    found = recommended(level("O1", 0.9), level("O4", 1.01), level("O3", 2.0, agrees=False, difference=0.25))
    assert found.level == "O0"
    assert found.sentence.startswith("Stay at O0 on this machine (a machine): ")
    assert "the fastest is O4, 1.01 times as fast" in found.sentence
    assert "left out: O3 (its losses differ by 25.0 %)" in found.sentence


def test_without_ground_to_compare_nothing_is_recommended():
    found = recommended(level("O3", 2.0, 0.5), obstacle="O0 failed when it was run again: no")
    assert found.level is None
    assert found.sentence.startswith("The levels cannot be compared, and none is recommended: O0 failed when")
    assert "Take" not in found.sentence


def test_without_other_levels_there_is_nothing_to_say():
    assert recommended().sentence == "Stay at O0 on this machine (a machine): no other level was tried."


STATIC = {"loss_scale": 128.0, "dynamic": False, "lost": 0.12}


def test_a_static_scale_that_loses_gradients_is_answered_by_dynamic():
    advice = 'Try O2 with loss_scale="dynamic": at its static 128 it loses 12.0 % of gradient values'
    found = recommended(level("O2", 2.0, **STATIC, lost_dynamic=0.001), level("O4", 1.5))
    assert found.level == "O4"
    assert found.sentence.endswith(f"{advice}; where dynamic scales begin, 0.1 %.")
    assert advice in recommended(level("O2", 2.0, **STATIC, lost_dynamic=0.001)).sentence


@pytest.mark.parametrize(
    "changed",
    [{"lost_dynamic": 0.2}, {"dynamic": True}, {"loss_scale": None}, {"lost": 0.005}, {"error": "no"}],
)
def test_dynamic_is_not_advised_where_it_would_not_help(changed):
    fields = {**STATIC, "lost_dynamic": 0.0} | changed
    assert "dynamic" not in recommended(level("O2", 2.0, **fields), level("O4", 1.5)).sentence


def test_a_level_without_masters_is_never_taken():
    found = recommended(level("O3", 9.0, memory=0.1), level("O5", 2.0))
    assert found.level == "O5"
    alone = recommended(level("O3", 9.0))
    assert alone.level == "O0"
    assert "O3 (it steps float16 weights without FP32 masters, and a few steps do not show what that" in alone.sentence


def test_gradients_that_nobody_counted_are_said():
    assert "gradients were not counted" in recommended(level("O2", 2.0, lost=None)).sentence
    assert "gradient" not in recommended(level("O5", 2.0)).sentence
