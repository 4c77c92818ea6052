"""The demo in a few steps: its data, its rows, its table, its picture."""

import dataclasses
import json

import matplotlib.image
import numpy as np
import pytest
import torch

from amp_engine import amp
from examples.demo.__main__ import main, train_all
from examples.demo.curves import smooth, write_curves
from examples.demo.data import load_digits, load_topics
from examples.demo.models import GPT
from examples.demo.report import render_notes, render_table, write_results
from examples.demo.tasks import all_tasks, digits_cnn, topics_gpt
from examples.demo.training import Row, Run, state_bytes, train, warmup_then_cosine

CPU = torch.device("cpu")
KEYS = {
    "task",
    "opt_level",
    "loss",
    "metric",
    "ms_per_step",
    "speedup",
    "state_bytes",
    "skipped",
    "loss_scale",
}


def short(task, steps=3, levels=None):
    return dataclasses.replace(task, steps=steps, levels=levels or task.levels)


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    torch.set_num_threads(1)
    return train_all([short(digits_cnn()), short(topics_gpt())], CPU)


def test_digits_are_split_once_and_for_all():
    digits, again = load_digits(), load_digits()
    assert digits.train_images.shape == (1198, 1, 8, 8)
    assert digits.test_images.shape == (599, 1, 8, 8)
    assert digits.test_images.max() == 1
    assert torch.equal(digits.test_labels, again.test_labels)


def test_a_batch_depends_on_its_step_alone():
    topics = load_topics()
    first = topics.batch(7, batch_size=2, length=16)
    torch.manual_seed(123)
    second = topics.batch(7, batch_size=2, length=16)
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[0], topics.batch(8, batch_size=2, length=16)[0])


def test_targets_are_one_character_ahead_and_the_test_text_is_held_out():
    topics = load_topics()
    inputs, targets = topics.test_windows(count=4, length=16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    held_out = "".join(topics.vocabulary[i] for i in topics.test_ids[:500])
    assert held_out not in "".join(topics.vocabulary[i] for i in topics.train_ids)


def test_the_gpt_cannot_see_the_future():
    model = GPT(vocabulary=11, length=8, layers=2, width=16, heads=2)
    ids = torch.randint(11, (1, 8))
    changed = ids.clone()
    changed[0, 5:] = (ids[0, 5:] + 1) % 11
    before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_every_task_has_its_levels():
    levels = {task.name: task.levels for task in all_tasks()}
    assert levels == {
        "digits-cnn": ("O0", "O1", "O2", "O3", "O4", "O5"),
        "topics-gpt": ("O0", "O1", "O2", "O3", "O4", "O5"),
        "topics-gpt-wide": ("O0", "O4", "O5"),
    }


def test_learning_rate_warms_up_and_ends_at_zero():
    factor = warmup_then_cosine(100)
    assert factor(0) == pytest.approx(0.1)
    assert max(factor(step) for step in range(101)) == pytest.approx(factor(9))
    assert factor(100) == 0


def test_rows_have_exactly_the_keys(runs, tmp_path):
    write_results([run.row for run in runs], tmp_path / "results.json")
    rows = json.loads((tmp_path / "results.json").read_text())
    assert len(rows) == 12
    assert all(row.keys() == KEYS for row in rows)
    assert [row["opt_level"] for row in rows[:6]] == ["O0", "O1", "O2", "O3", "O4", "O5"]


def test_every_level_starts_from_the_same_loss(runs):
    for first in (runs[0], runs[6]):
        same_task = [run for run in runs if run.task.name == first.task.name]
        for run in same_task:
            assert run.losses[0] == pytest.approx(first.losses[0], rel=1e-2)


def test_speedup_is_relative_to_O0(runs):
    assert runs[0].row.speedup == 1
    expected = runs[0].row.ms_per_step / runs[1].row.ms_per_step
    assert runs[1].row.speedup == pytest.approx(expected)


def test_scales_are_those_of_the_levels(runs):
    scales = {run.row.opt_level: run.row.loss_scale for run in runs[:6]}
    assert scales["O0"] == scales["O3"] == scales["O4"] == scales["O5"] == 1
    for level in ("O1", "O2"):
        (run,) = (run for run in runs[:6] if run.row.opt_level == level)
        assert run.row.loss_scale == 2.0 ** (16 - run.row.skipped)


def test_state_bytes_counts_each_storage_once():
    model = torch.nn.Linear(10, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    parameters = 110 * 4
    assert state_bytes(model, optimizer) == parameters
    model(torch.ones(1, 10)).sum().backward()
    optimizer.step()
    assert state_bytes(model, optimizer) == 2 * parameters


def test_state_bytes_counts_masters():
    model = torch.nn.Linear(10, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert state_bytes(model, optimizer) == 110 * (2 + 4)


def test_training_leaves_amp_closed():
    train(short(digits_cnn(), steps=1), "O1", CPU)
    assert amp.current_engine() is None


def test_table_is_aligned_and_has_a_line_per_row(runs):
    lines = render_table(runs).splitlines()
    assert len(lines) == 1 + 12 + 3  # a header, the rows, three rules
    assert len({len(line) for line in lines}) == 1
    assert lines[0].split() == [*("task", "level", "loss", "metric", "ms/step", "speed", "state", "skipped", "scale")]
    assert lines[2].split()[:2] == ["digits-cnn", "O0"]
    assert lines[3].split()[0] == "O1"


def row(opt_level, metric, speedup=1.0):
    return Row("digits-cnn", opt_level, 0.1, metric, 1.0, speedup, 100, 0, 1.0)


def test_notes_say_when_float16_is_slower_and_only_then():
    fast = [row("O0", 0.9), row("O1", 0.9, speedup=2.0)]
    slow = [row("O0", 0.9), row("O1", 0.9, speedup=0.25), row("O2", 0.9, speedup=0.5)]
    assert "slower" not in render_notes(fast, "this GPU")
    notes = render_notes(slow, "this CPU")
    assert "float16 is slower than FP32 on this CPU" in notes
    assert "x0.25 to x0.50 in 2 of these rows" in notes


def test_notes_name_the_level_that_is_farthest_from_O0():
    near = render_notes([row("O0", 0.90), row("O1", 0.91), row("O3", 0.1)], "this CPU")
    assert "end within 2% of O0's metric (farthest: O1 on digits-cnn, by 1.11%)" in near
    far = render_notes([row("O0", 0.90), row("O1", 0.91), row("O5", 0.5)], "this CPU")
    assert "end NOT within 2% of O0's metric (farthest: O5 on digits-cnn, by 44.44%)" in far


def test_smooth_is_the_mean_of_the_last_steps():
    np.testing.assert_allclose(smooth([4.0, 2.0, 0.0, 2.0], window=2), [4.0, 3.0, 1.0, 1.0])


def test_picture_is_written_and_not_blank(runs, tmp_path):
    write_curves(runs, tmp_path / "curves.png")
    pixels = matplotlib.image.imread(tmp_path / "curves.png")
    height, width, _ = pixels.shape
    assert width > height > 500
    assert pixels[..., :3].std() > 0.01


def test_command_writes_results_and_picture(monkeypatch, tmp_path, capsys):
    tasks = [short(digits_cnn(), steps=1, levels=("O0", "O4"))]
    monkeypatch.setattr("examples.demo.__main__.all_tasks", lambda: tasks)
    main(["--out", str(tmp_path / "demo")])
    assert sorted(path.name for path in (tmp_path / "demo").iterdir()) == [
        "curves.png",
        "results.json",
    ]
    assert "digits-cnn" in capsys.readouterr().out
