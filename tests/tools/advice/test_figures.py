"""From trials to figures: how far losses are apart, medians, noise, lost gradients, and how it all looks."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest

from amp_engine.tools.advice import Advice
from amp_engine.tools.advice.figures import compared, loss_difference
from amp_engine.tools.advice.records import Dropped, Trial
from amp_engine.tools.telemetry.magnitudes import Magnitudes
from amp_engine.tools.telemetry.receipt.memory import Memory


def trial(name: str, losses: Any, seconds: Any = (), **changed: Any) -> Trial:
    return Trial(name, "O1", tuple((one,) for one in losses), tuple(seconds), machine="a machine", **changed)


BASE = trial("O0", [9.0, 5.0, 4.0, 4.0], [1.0, 2.0, 2.0], memory=(Memory("parameters", "cpu", 1, 400),))


def test_the_second_half_counts_relative_to_the_mean_of_the_base():
    assert loss_difference(trial("O1", [0.0, 0.0, 5.0, 3.0]), BASE) == pytest.approx((1.0 + 1.0) / 8.0)
    assert loss_difference(BASE, BASE) == 0.0


def test_a_run_that_ended_early_is_compared_as_far_as_it_came():
    assert loss_difference(trial("O1", [9.0, 6.0]), BASE) == pytest.approx(1.0 / 5.0)
    assert loss_difference(trial("O1", []), BASE) is None


def test_losses_of_one_step_are_compared_one_by_one():
    base = Trial("O0", losses=((1.0, -1.0), (1.0, -1.0)))
    assert loss_difference(Trial("O1", losses=((1.0, -1.0), (1.5, -1.5))), base) == pytest.approx(0.5)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_agrees_with_nothing(value):
    one = trial("O1", [9.0, 5.0, 4.0, value])
    assert loss_difference(one, BASE) == math.inf
    (figures,) = compared(BASE, [one], None, 0).levels
    assert (figures.is_finite, figures.agrees) == (False, False)


def test_losses_of_zero_are_no_division():
    zero = trial("O0", [0.0, 0.0])
    assert loss_difference(zero, zero) == 0.0
    assert loss_difference(trial("O1", [0.0, 1.0]), zero) == math.inf


def test_skipped_steps_put_a_run_behind_and_are_no_rounding():
    base = trial("O0", [8.0, 4.0, 2.0, 1.0])
    late = trial("O2", [8.0, 8.0, 4.0, 2.0], skips=1)
    assert loss_difference(late, base) == 0.0
    assert loss_difference(trial("O2", [8.0, 8.0, 4.0, 2.0]), base) == pytest.approx(3.0 / 3.0)
    # On other batches in each step the step itself is the better match.
    assert loss_difference(trial("O2", [8.0, 4.0, 2.0, 1.0], skips=1), base) == 0.0
    assert loss_difference(trial("O2", [8.0, 8.0], skips=2), base) is not None


def test_noise_widens_what_agrees_and_never_narrows_it():
    one = trial("O1", [9.0, 5.0, 4.4, 4.4])  # 10 %
    assert not compared(BASE, [one], None, 0).levels[0].agrees
    noisy = compared(BASE, [one], trial("O0", [9.0, 5.0, 4.3, 4.3]), 0)
    assert (noisy.noise, noisy.limit) == (pytest.approx(0.075), pytest.approx(0.15))
    assert noisy.levels[0].agrees
    assert compared(BASE, [one], BASE, 0).limit == 0.02
    assert compared(BASE, [one], trial("O0", [9.0, 5.0, math.nan, 4.0]), 0).limit == 0.02
    assert compared(BASE, [one], Trial("O0", error="no"), 0).limit == 0.02


CHAOTIC = [9.0, 5.0, 5.0, 4.0]


@pytest.mark.parametrize(
    ("base", "again", "why"),
    [
        ([9.0, 5.0, 4.0, 4.0], [3.0, 2.5, 2.2, 2.0], r"first loss is 9, and 3 when.*checkpoint"),  # goes on
        ([9.0, 5.0, 4.0, 4.0], [9.1, 5.1, 4.1, 4.1], r"first loss is 9, and 9.1 when"),  # draws what no seed fixes
        ([-9.0, -5.0, -4.0, -4.0], [-9.1, -5.0, -4.0, -4.0], r"first loss is -9, and -9.1 when"),
        ([9.0, 5.0, 4.0, 4.0], CHAOTIC, r"differ by 12.5 % from its own"),
        ([math.nan] * 4, [math.nan] * 4, r"own losses are not finite"),
        ([9.0, 5.0, math.inf, 4.0], [9.0, 5.0, 4.0, 4.0], r"own losses are not finite"),
        ([9.0, 5.0, 4.0, 4.0], [9.0, 5.0, math.nan, 4.0], r"not all of them when it is run again"),
        ([9.0], [9.0], r"ran 1 of at least 3 steps"),
        ([9.0, 5.0, 4.0, 4.0], [9.0], r"ran 4 steps, and 1 when it was run again.*checkpoint"),
        ([9.0, 5.0, 4.0, 4.0], [], r"ran 4 steps, and 0 when it was run again"),
        ([2.5] * 4, [2.5] * 4, r"loss is 2.5 in each step"),
        ([0.0] * 4, [0.0] * 4, r"loss is 0 in each step"),
    ],
)
def test_without_ground_to_compare_no_level_agrees_and_none_is_recommended(base, again, why):
    levels = [trial("O3", base, [0.1] * 3), trial("O5", again, [0.1] * 3)]
    first = trial("O0", base, [1.0] * 3)
    found = Advice(("train.py",), 4, 1, first, tuple(levels), trial("O0", again, [1.0] * 3))
    assert found.level is None
    assert re.search(why, found.comparison.obstacle)
    assert not any(one.agrees for one in found.comparison.levels)
    assert "agree" not in [line.split()[1] for line in str(found).splitlines() if line.startswith(("O3  ", "O5  "))]
    assert str(found).split("\n\n")[-1].startswith("The levels cannot be compared, and none is recommended: O0")
    assert json.loads(found.to_json())["recommendation"]["level"] is None


@pytest.mark.parametrize("losses", [[9.0, 5.0, 4.0, 4.0], [-9.0, -5.0, -4.0, -4.0], [0.1, -0.2, 0.1, -0.2]])
def test_small_noise_is_ground_enough_whatever_the_sign_of_losses(losses):
    again = trial("O0", [losses[0], *(loss * 1.01 for loss in losses[1:])])
    assert compared(trial("O0", losses), [], again, 0).obstacle is None


def test_a_second_run_that_failed_or_had_no_time_is_told_apart():
    assert compared(BASE, [], Trial("O0", error="Traceback\nOSError: exists"), 0).obstacle.endswith("OSError: exists")
    assert compared(BASE, [], trial("O0", [9.0, 5.0], out_of_time=True), 0).obstacle is None


def test_the_warm_up_is_left_out_and_the_median_taken():
    base = trial("O0", range(1, 6), [50.0, 2.0, 9.0, 1.0])  # of steps 2 to 5
    one = trial("O1", range(1, 6), [70.0, 1.0, 4.0, 1.0])
    found = compared(base, [one], None, 2)
    assert (found.base.seconds, found.levels[0].seconds, found.levels[0].speed) == (2.0, 1.0, 2.0)
    assert compared(base, [trial("O1", [1.0])], None, 2).levels[0].speed is None


def test_both_runs_of_the_base_count_for_its_time():
    again = trial("O0", [9.0, 5.0, 4.0, 4.0], [4.0, 4.0, 4.0])
    found = compared(BASE, [], again, 0)
    assert (found.base.seconds, found.drift) == (3.0, 1.0)
    assert compared(BASE, [], None, 0).drift is None


def test_memory_is_a_share_of_the_base_and_the_peak_where_there_is_one():
    half = trial("O2", [1.0], memory=(Memory("parameters", "cpu", 1, 150), Memory("gradients", "cpu", 1, 50)))
    assert compared(BASE, [half], None, 0).levels[0].memory == 0.5
    base, one = (trial("O0", [1.0], memory=BASE.memory, peak_bytes=n) for n in (1000, 700))
    assert compared(base, [one], None, 0).levels[0].memory == 0.7


def test_lost_gradients_are_those_of_the_base_at_the_scale_of_the_level():
    # 2^-30 is lost in float16 without a scale, and at 16; at 2^16 nothing is.
    again = trial("O0", [1.0], gradients=Magnitudes(((-30, 1), (0, 3))))
    levels = [
        trial("O3", [1.0], dtype="float16", loss_scales=(1.0,)),
        trial("O2", [1.0], dtype="float16", loss_scales=(65536.0, 16.0), dynamic=True),
        trial("O1", [1.0], dtype="float16", loss_scales=(65536.0,), dynamic=True),
        trial("O5", [1.0], dtype="bfloat16", loss_scales=(1.0,)),
    ]
    found = compared(BASE, levels, again, 0).levels
    assert [one.lost for one in found] == [0.25, 0.25, 0.0, 0.0]
    assert [one.lost_dynamic for one in found] == [0.0, 0.0, 0.0, 0.0]
    assert [one.loss_scale for one in found] == [None, 16.0, 65536.0, None]
    assert [one.lost for one in compared(BASE, levels, None, 0).levels] == [None, None, None, 0.0]


# How it looks


def advice(*levels: Trial, again: Trial | None = None, steps: int = 4) -> Advice:
    return Advice(("train.py", "--name", "a b"), steps, 1, BASE, levels, again)


def test_the_page_is_a_table_then_notes_then_the_recommendation():
    fast = trial("O5", [9.0, 5.0, 4.0, 4.0], [0.5, 0.5, 0.5], dtype="bfloat16", memory=BASE.memory)
    page = str(advice(fast, again=BASE))
    lines = page.splitlines()
    assert lines[0] == "train.py --name 'a b'  (a machine)"
    row = next(line for line in lines if line.startswith("O5"))
    assert " ".join(row.split()) == "O5 agree 0.0 % 500 4.00x 400 bytes 100.0 % - 4 0 -"
    assert "The script asks for O1." in lines
    assert page.split("\n\n")[-1].startswith("Take O5 on this machine (a machine): ")
    assert page.count("\n\n") >= 2
    assert all(len(line) <= 108 for line in lines)


def test_the_page_says_what_rounding_does_to_the_losses_or_that_it_is_unknown():
    assert "float16 does: that is 0.0 %" in " ".join(str(advice(again=BASE)).split())
    assert "float16 does: that could not be measured" in " ".join(str(advice()).split())


def test_what_was_dropped_is_said_once_with_its_levels():
    dropped = (Dropped("loss_scale=128.0", "the level scales no losses"),)
    page = str(advice(trial("O4", [1.0] * 4, dropped=dropped), trial("O5", [1.0] * 4, dropped=dropped)))
    assert page.count("loss_scale=128.0") == 1
    assert "Tried without loss_scale=128.0 at O4, O5: the level scales no losses." in page


def test_a_failed_level_has_no_figures_and_its_last_words_below():
    page = str(
        advice(trial("O2", [1.0], error="Traceback\nRuntimeError: no float16 here"), again=Trial("O0", error="?"))
    )
    row = next(line for line in page.splitlines() if line.startswith("O2"))
    assert row.split() == ["O2", "failed", *["-"] * 9]
    assert "O2 failed:\n    Traceback\n    RuntimeError: no float16 here\n" in page
    assert "O0, once more failed:\n    ?\n" in page


def test_runs_that_ended_early_are_said():
    page = str(advice(trial("O2", [1.0, 1.0], out_of_time=True), trial("O4", [1.0]), trial("O5", [1.0] * 4), steps=6))
    assert "O0 ran 4 of 6 steps: the script ended." in page
    assert "O2 ran 2 of 4 steps: its time was over (--seconds)." in page
    assert "O4 ran 1 of 4 steps: the script ended." in page
    assert "O5 ran" not in page
    assert " steps: " not in str(advice(trial("O2", [1.0] * 4)))


def test_a_busy_machine_is_said():
    assert "seems to use this machine" in str(advice(again=trial("O0", [9.0, 5.0, 4.0, 4.0], [4.0, 4.0, 4.0])))
    assert "seems to use this machine" not in str(advice(again=BASE))


def test_json_has_all_of_it_and_is_json_where_numbers_are_not_finite():
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    found = json.loads(advice(trial("O3", [1.0, math.nan]), again=BASE).to_json(), parse_constant=refuse)
    assert found["format"] == 1
    assert found["script"] == ["train.py", "--name", "a b"]
    assert found["levels"][0]["losses"] == [[1.0], ["nan"]]
    assert found["comparison"]["base"]["seconds"] == 2.0
    assert found["recommendation"]["level"] == "O0"
    assert found["recommendation"]["sentence"].startswith("Stay at O0")
