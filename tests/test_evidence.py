"""`make evidence` without its training: statistics, verdicts, the exit status, and a run that goes on where it was."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

from tests.evidence.__main__ import main
from tests.evidence.runs import Run, setting
from tests.evidence.tasks import CONTROLS, LEVELS, Data, Task, train
from tests.evidence.verdict import compare, interval

TASK = "fine-tuning"


def row(seed, level, loss, task=TASK):
    found = {"seed": seed, "task": task, "level": level, "loss": loss, "accuracy": 0.5, "seconds": 1.0}
    return {**found, "setting": setting(found)}


class Trained:
    """Stands in for the training: seeds lie 0.1 apart, levels by what `shifts` says."""

    def __init__(self, **shifts):
        self.shifts = {"O3": math.nan, "pure bfloat16": 1.0, **shifts}
        self.runs = []

    def __call__(self, runs, workers):
        for run in runs:
            self.runs.append(run)
            yield row(run.seed, run.level, 1 + 0.1 * run.seed + self.shifts.get(run.level, 0.0), run.task)


@pytest.fixture
def evidence(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.evidence.__main__.write_picture", lambda comparisons, path: None)

    def run(trained, *arguments):
        folders = ("--out", str(tmp_path / "out"), "--docs", str(tmp_path))
        return main([*folders, "--tasks", TASK, "--seeds", "3", *arguments], trained)

    return run


def test_the_interval_of_known_numbers():
    # Deviations -1, 0, 1: a standard deviation of 1, of the mean 1 / sqrt(3); t is 4.303.
    assert interval([1.0, 2.0, 3.0]) == (2.0, pytest.approx(2.4843, abs=1e-4))
    # Squares add up to 82.5, over 9 is 9.1667; sqrt(9.1667 / 10) is 0.95743; t is 2.262.
    assert interval([float(number) for number in range(10)]) == (4.5, pytest.approx(2.1657, abs=1e-4))


@pytest.mark.parametrize(("shift", "equivalent"), [(0.09, True), (-0.09, True), (0.11, False), (-0.11, False)])
def test_equivalence_asks_for_a_difference_within_the_spread_of_fp32(shift, equivalent):
    rows = [
        row(seed, level, 0.1 * seed + (shift if level == "O2" else 0)) for seed in range(3) for level in ("O0", "O2")
    ]
    _, level = compare(rows)
    assert (level.margin, level.difference) == (pytest.approx(0.1), pytest.approx(shift))
    assert level.equivalent is equivalent


def test_equivalence_asks_for_the_whole_interval():
    shifts = (-0.05, 0.05, 0.0)  # a mean of 0, a half width of 0.05 * 4.303 / sqrt(3) = 0.124
    rows = [row(seed, "O0", 0.1 * seed) for seed in range(3)]
    rows += [row(seed, "O2", 0.1 * seed + shift) for seed, shift in enumerate(shifts)]
    assert not list(compare(rows))[1].equivalent


def test_a_loss_that_is_no_number_is_not_equivalent():
    rows = [
        row(seed, level, math.nan if (level, seed) == ("O2", 1) else seed)
        for level in ("O0", "O2")
        for seed in range(3)
    ]
    assert not list(compare(rows))[1].equivalent


def test_levels_that_pass_and_controls_that_fail_are_a_success(evidence, tmp_path):
    assert evidence(Trained()) == 0
    page = (tmp_path / "out/evidence.md").read_text()
    assert "10 of 10 pairs of a level and a task are equivalent to FP32; 2 of 2 controls fail" in page


@pytest.mark.parametrize("shift", [{"O5": 0.2}, {"pure bfloat16": 0.0}], ids=["a level fails", "a control does not"])
def test_anything_else_is_a_failure(evidence, shift):
    assert evidence(Trained(**shift)) == 1


def test_a_run_goes_on_where_it_was(evidence, tmp_path):
    assert evidence(Trained()) == 0
    path = tmp_path / "out/runs.jsonl"
    first, second, *others = path.read_text().splitlines()
    stale = {**json.loads(second), "setting": "of another torch"}
    path.write_text("\n".join([json.dumps(stale), *others]) + "\n")
    again = Trained()
    assert evidence(again) == 0
    assert again.runs == [Run(0, TASK, "O0"), Run(0, TASK, "O1")]
    assert evidence(again, "--seeds", "4") == 0
    assert len(again.runs) == 2 + len(LEVELS) + len(CONTROLS)


def test_training_follows_from_the_seed_alone():
    torch.set_num_threads(1)
    inputs, targets = torch.randn(64, 8), torch.arange(64) % 4
    task = Task("", "", lambda: Data((inputs, targets), (inputs, targets)), lambda: nn.Linear(8, 4), 8, 5, 0.1)
    first, other, again = (train(task, "O5", seed) for seed in (0, 1, 0))
    assert first == again != other
