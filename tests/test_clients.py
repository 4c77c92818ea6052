"""Records that `make clients` accepts, and records that it refuses."""

import sys

import pytest

from tests.clients.run import CLIENTS, HERE, ClientError, Run, all_runs, call, judge_losses, judge_resumed, one_turn

FALLING = [2.0 - step / 100 for step in range(48)]
SAVED = {"loss_scale": 8192.0, "unskipped": 24}
TIMM = next(client for client in CLIENTS if client.name == "timm")


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_losses_that_fall_near_those_of_o0_are_accepted(level):
    assert judge_losses(level, FALLING, 0.009) == ""


@pytest.mark.parametrize(("level", "difference"), [("O1", 0.011), ("O2", 0.011), ("O4", 0.051), ("O5", 0.051)])
def test_losses_that_leave_those_of_o0_are_refused(level, difference):
    assert f"{difference:.4f} away from O0" in judge_losses(level, FALLING, difference)


@pytest.mark.parametrize("level", ["O0", "O1", "O3"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_refused(level, value):
    assert judge_losses(level, [*FALLING, value], 0.0) == f"loss 48 of 49 is {value}"


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O4", "O5"])
def test_losses_without_any_rounding_are_refused(level):
    assert "nothing ran in low precision" in judge_losses(level, FALLING, 0.0)
    assert judge_losses("O0", FALLING, 0.0) == ""


def test_plain_bfloat16_has_to_leave_the_losses_of_o0():
    assert "the updates are not small" in judge_losses("bfloat16", FALLING, 0.049)
    assert judge_losses("bfloat16", FALLING, 0.051) == ""


def test_a_baseline_that_does_not_learn_is_refused():
    assert "does not learn" in judge_losses("O0", [2.0] * 48, 0.0)


def test_a_resume_that_repeats_the_losses_and_finds_the_scaler_is_accepted():
    whole = {"losses": FALLING, "saved": SAVED}
    assert judge_resumed(Run(TIMM, "", "O1"), {"losses": FALLING[24:], "restored": SAVED}, whole) == ""


def test_a_resume_that_repeats_the_losses_only_nearly_is_refused():
    whole = {"losses": FALLING, "saved": SAVED}
    record = {"losses": [*FALLING[24:47], FALLING[47] + 1e-9], "restored": SAVED}
    assert "loss 23 after the checkpoint" in judge_resumed(Run(TIMM, "", "O1"), record, whole)


def test_a_resume_that_starts_again_is_refused():
    whole = {"losses": FALLING, "saved": SAVED}
    assert judge_resumed(Run(TIMM, "", "O1"), {"losses": FALLING, "restored": SAVED}, whole) != ""


@pytest.mark.parametrize(("level", "accepted"), [("O1", False), ("O2", False), ("O4", True), ("O5", True)])
def test_a_static_scale_need_not_count_steps(level, accepted):
    saved = {"loss_scale": 1.0, "unskipped": 0}
    whole = {"losses": FALLING, "saved": saved}
    complaint = judge_resumed(Run(TIMM, "", level), {"losses": FALLING[24:], "restored": saved}, whole)
    assert (complaint == "") == accepted


@pytest.mark.parametrize("saved", [None, SAVED, {**SAVED, "unskipped": 0}])
@pytest.mark.parametrize("restored", [None, {"loss_scale": 65536.0, "unskipped": 24}, {**SAVED, "unskipped": 0}])
def test_a_scaler_that_is_not_restored_is_refused(saved, restored):
    whole = {"losses": FALLING, "saved": saved}
    record = {"losses": FALLING[24:], "restored": restored}
    assert "the scaler was saved as" in judge_resumed(Run(TIMM, "", "O1"), record, whole)


def test_a_program_that_fails_is_reported_with_its_last_line_and_its_log(tmp_path):
    log = tmp_path / "log.txt"
    with pytest.raises(ClientError, match=f"exit status 1, No module named 'apex': {log}"):
        call([sys.executable, "-c", "raise SystemExit(\"No module named 'apex'\")"], log, cwd=tmp_path)


def test_every_run_comes_after_those_it_is_compared_with():
    runs = list(all_runs(CLIENTS))
    for place, run in enumerate(runs):
        assert Run(run.client, run.variant, "O0") in runs[: place + 1]
        assert not run.resumed or Run(run.client, run.variant, run.level) in runs[:place]


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_every_client_has_its_program_and_exact_pins(client):
    assert (HERE / client.program).is_file()
    lines = (HERE / f"requirements-{client.requirements}.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert "torch==2.13.0" in pins
    assert all("==" in pin.partition(";")[0] for pin in pins)


def test_turns_go_through_all_runs():
    runs = list(all_runs(CLIENTS))
    turns = [one_turn(runs, turn) for turn in range(len(runs))]
    assert {run for turn in turns for run in turn} == set(runs)
    assert all(turn[0].level == "O0" and len({(run.client, run.variant) for run in turn}) == 1 for turn in turns)
    assert max(map(len, turns)) == 3
