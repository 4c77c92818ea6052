"""The demo in a few steps: its data, its rows, its table, its picture."""

import dataclasses
import json
import signal

import matplotlib.image
import pytest
import torch

from amp_engine import amp, kernels
from examples.demo.__main__ import main, train_all
from examples.demo.budget import FEWEST_STEPS, Budget, even_share, measure
from examples.demo.curves import write_curves
from examples.demo.data import load_topics
from examples.demo.interrupt import Interrupt
from examples.demo.report import render_notes, render_table, write_results
from examples.demo.tasks import digits_cnn, topics_gpt, topics_gpt_wide
from examples.demo.training import Row, Run, left_out, state_bytes, train

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
    "steps",
    "planned_steps",
    "note",
}


def short(task, steps=3, levels=None):
    return dataclasses.replace(task, steps=steps, levels=levels or task.levels)


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    torch.set_num_threads(1)
    return train_all([short(digits_cnn()), short(topics_gpt())], CPU)


def test_a_batch_depends_on_its_step_alone():
    topics = load_topics()
    first = topics.batch(7, batch_size=2, length=16)
    torch.manual_seed(123)
    second = topics.batch(7, batch_size=2, length=16)
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[0], topics.batch(8, batch_size=2, length=16)[0])


def test_rows_have_exactly_the_keys(runs, tmp_path):
    write_results([run.row for run in runs], tmp_path / "results.json")
    rows = json.loads((tmp_path / "results.json").read_text())
    assert len(rows) == 16
    assert all(row.keys() == KEYS for row in rows)
    assert [row["opt_level"] for row in rows[:8]] == ["O0", "O1", "O2", "O3", "O4", "O5", "O5 small", "bfloat16"]


def test_every_level_starts_from_the_same_loss(runs):
    for first in (runs[0], runs[8]):
        same_task = [run for run in runs if run.task.name == first.task.name]
        for run in same_task:
            if run.row.note is not None:
                continue
            assert run.losses[0] == pytest.approx(first.losses[0], rel=1e-2)


def test_speedup_is_relative_to_O0(runs):
    assert runs[0].row.speedup == 1
    expected = runs[0].row.ms_per_step / runs[1].row.ms_per_step
    assert runs[1].row.speedup == pytest.approx(expected)


def test_scales_are_those_of_the_levels(runs):
    scales = {run.row.opt_level: run.row.loss_scale for run in runs[:8]}
    assert scales["O0"] == scales["O3"] == scales["O4"] == scales["O5"] == 1
    for level in ("O1", "O2"):
        (run,) = (run for run in runs[:8] if run.row.opt_level == level)
        assert run.row.loss_scale == 2.0 ** (16 - run.row.skipped)


def test_state_bytes_counts_masters():
    model = torch.nn.Linear(10, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert state_bytes() == 110 * (2 + 4)


def test_state_bytes_are_those_of_each_way_to_train(runs):
    state = {run.row.opt_level: run.row.state_bytes for run in runs[8:]}
    expected = {"O0": 12, "O1": 12, "O2": 14, "O3": 6, "O4": 12, "O5": 14, "O5 small": 8, "bfloat16": 6}
    for level, bytes_a_parameter in expected.items():
        if state[level] is None:
            assert (level, kernels.has_native(CPU)) == ("O5 small", False)
            continue
        assert state[level] / state["O0"] == pytest.approx(bytes_a_parameter / 12, rel=0.01)


def test_small_updates_are_lost_without_masters_alone():
    task = dataclasses.replace(topics_gpt(), steps=30)
    torch.set_num_threads(1)
    last = {level: train(task, level, CPU).row.loss for level in ("O0", "O5", "bfloat16")}
    assert last["bfloat16"] - last["O0"] > 10 * abs(last["O5"] - last["O0"])


def test_table_is_aligned_and_has_a_line_per_row(runs):
    lines = render_table(runs).splitlines()
    assert len(lines) == 1 + 16 + 3  # a header, the rows, three rules
    assert len({len(line) for line in lines}) == 1
    assert lines[0].split() == [
        *("task", "level", "steps", "loss", "metric", "ms/step", "speed", "state", "skipped", "scale")
    ]
    assert lines[2].split()[:2] == ["digits-cnn", "O0"]
    assert lines[3].split()[0] == "O1"
    assert lines[8].split()[:2] == ["O5", "small"]


def row(opt_level, metric, speedup=1.0):
    return Row("digits-cnn", opt_level, 0.1, metric, 1.0, speedup, 100, 0, 1.0, 150, 150, None)


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


def test_picture_is_written_and_not_blank(runs, tmp_path):
    write_curves(runs, tmp_path / "curves.png")
    pixels = matplotlib.image.imread(tmp_path / "curves.png")
    height, width, _ = pixels.shape
    assert width > height > 500
    assert pixels[..., :3].std() > 0.01


class Clock:
    """A clock that goes on when told, and tasks whose steps tell it."""

    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds

    def task(self, task, step_seconds, **changes):
        """`task`, a step of which takes so many seconds."""

        def batch(step):
            self.seconds += step_seconds
            return task.batch(step)

        return dataclasses.replace(task, batch=batch, **changes)


def costs(**seconds):
    """Measures a layer: `float32=1.0` and so on."""
    return lambda layer, dtype, device: seconds[str(dtype).removeprefix("torch.")]


def rows_of(tasks, seconds, clock, **layer_seconds):
    torch.set_num_threads(1)
    budget = Budget(tasks, CPU, seconds, clock, costs(**layer_seconds))
    return {run.row.opt_level: run.row for run in train_all(tasks, CPU, budget)}


def test_a_share_is_what_is_left_by_those_who_need_less():
    assert even_share([1, 2], 10) == float("inf")
    assert even_share([1, 100, 100], 21) == 10
    assert even_share([100, 4, 100, 100], 30) == pytest.approx(26 / 3)
    assert even_share([5], 0) == 0
    assert even_share([], 10) == float("inf")


def test_levels_in_a_type_that_would_take_too_long_are_left_out_and_it_is_said():
    clock = Clock()
    task = clock.task(digits_cnn(), 1.0, steps=10, evaluation_steps=0, levels=("O0", "O1", "O4", "O5"))
    rows = rows_of([task], 150, clock, float32=1.0, float16=1.5, bfloat16=90.0)
    assert [rows[level].steps for level in rows] == [10, 10, 0, 0]
    assert [rows[level].note is None for level in rows] == [True, True, False, False]
    assert rows["O4"].note == "bfloat16 convolutions take 90 times FP32's time on this CPU; a step takes about 90 s"
    assert rows["O4"].loss is rows["O4"].metric is rows["O4"].ms_per_step is rows["O4"].speedup is None
    assert clock.seconds <= 150


def test_a_row_that_turns_out_slower_than_measured_is_cut_at_its_share():
    clock = Clock()
    task = clock.task(digits_cnn(), 4.0, steps=20, evaluation_steps=0, levels=("O0", "O4"))
    rows = rows_of([task], 100, clock, float32=1.0, bfloat16=1.0)
    assert rows["O0"].steps == 20  # all but the second it was thought that O4 needs a step
    assert rows["O4"].steps == 5
    assert rows["O4"].note == "a step takes about 4 s on this CPU"
    assert rows["O4"].metric is None
    assert rows["O4"].loss > 0
    assert rows["O4"].speedup is not None
    assert clock.seconds <= 100


def test_a_row_has_at_least_a_few_steps_or_none():
    clock = Clock()
    task = clock.task(digits_cnn(), 1.0, steps=50, evaluation_steps=0, levels=("O0", "O1"))
    few = rows_of([task], 50 + FEWEST_STEPS * 20, clock, float32=1.0, float16=20.0)
    assert few["O1"].steps >= FEWEST_STEPS
    clock = Clock()
    task = clock.task(digits_cnn(), 1.0, steps=50, evaluation_steps=0, levels=("O0", "O1"))
    assert rows_of([task], 49 + FEWEST_STEPS * 20, clock, float32=1.0, float16=20.0)["O1"].steps == 0


def test_a_shortened_row_is_the_beginning_of_the_whole_one():
    task = short(digits_cnn(), steps=6)
    whole = train(task, "O5", CPU)
    reasons = iter([None, None, "no time"])
    part = train(task, "O5", CPU, shorten=lambda: next(reasons))
    assert part.losses == whole.losses[:3]
    assert (part.row.steps, part.row.planned_steps, part.row.note, part.row.metric) == (3, 6, "no time", None)
    assert (whole.row.steps, whole.row.note) == (6, None)


def test_the_wide_layer_is_measured_in_part_where_it_takes_long(monkeypatch):
    layer, times, rows = topics_gpt_wide().layer, iter([9.0, 0.01, 0.05, 0.07]), []

    def seconds_of(module, layer, count, dtype, device):
        rows.append(count)
        return next(times)

    monkeypatch.setattr("examples.demo.budget._seconds_of", seconds_of)
    assert measure(layer, torch.bfloat16, CPU) == pytest.approx(0.05 * layer.rows / 4)
    assert rows == [1, 1, 4, 4]


def test_table_picture_and_notes_of_rows_that_are_missing(runs, tmp_path):
    cut = dataclasses.replace(runs[2], losses=runs[2].losses[:2])
    cut = dataclasses.replace(cut, row=dataclasses.replace(cut.row, steps=2, metric=None, note="slow"))
    others = [left_out(runs[8].task, level, "slower") for level in ("O0", "O1")]
    missing = [*runs[:2], cut, *others, runs[12]]
    lines = render_table(missing).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[4].split()[:2] == ["O2", "2/3"]
    assert lines[6].split()[:4] == ["topics-gpt", "O0", "0/3", "-"]
    notes = render_notes([run.row for run in missing], "this CPU")
    assert "  digits-cnn O2: 2 of 3 steps: slow.\n  topics-gpt O0, O1: left out: slower." in notes
    assert "O1 end" in notes
    write_curves(missing, tmp_path / "curves.png")
    write_curves(others, tmp_path / "curves.png")
    write_curves([others[0], runs[12]], tmp_path / "curves.png")


@pytest.fixture
def interrupted_main(monkeypatch, tmp_path, capfd):
    """Runs the command, a SIGINT coming from where `at` is called; gives status, rows and what was printed."""

    def run(place):
        tasks = [short(digits_cnn(), steps=3, levels=("O0", "O4")), short(topics_gpt(), steps=2, levels=("O0",))]

        def interrupt():
            signal.raise_signal(signal.SIGINT)

        if place == "step":
            batch = tasks[0].batch
            calls = iter(range(100))
            tasks[0] = dataclasses.replace(
                tasks[0], batch=lambda step: (interrupt() if next(calls) == 4 else None, batch(step))[1]
            )
        monkeypatch.setattr("examples.demo.__main__.all_tasks", lambda: (place == "data" and interrupt(), tasks)[1])
        if place == "measuring":
            monkeypatch.setattr(Budget, "measure_layers", lambda self, goes_on: interrupt())
        if place == "evaluation":
            tasks[0] = dataclasses.replace(tasks[0], evaluate=lambda model: (interrupt(), 0.5)[1])
        if place == "plot":
            monkeypatch.setattr(
                "examples.demo.__main__.write_curves", lambda *args: (interrupt(), write_curves(*args))[1]
            )
        before = signal.getsignal(signal.SIGINT)
        status = main(["--out", str(tmp_path), "--threads", "1"])
        assert signal.getsignal(signal.SIGINT) is before
        assert (tmp_path / "curves.png").stat().st_size > 1000
        return status, json.loads((tmp_path / "results.json").read_text()), capfd.readouterr()

    return run


@pytest.mark.parametrize(
    ("place", "steps"),
    [
        ("data", [0, 0, 0]),
        ("measuring", [0, 0, 0]),
        ("step", [3, 2, 0]),
        ("evaluation", [3, 0, 0]),
        ("plot", [3, 3, 2]),
    ],
)
def test_an_interrupted_demo_writes_what_is_done(interrupted_main, place, steps):
    status, rows, said = interrupted_main(place)
    assert status == 130
    assert [row["steps"] for row in rows] == steps
    assert all(row["note"] in (None, "interrupted") for row in rows)
    assert [row["note"] is None for row in rows] == [row["steps"] == row["planned_steps"] for row in rows]
    assert "digits-cnn" in said.out
    assert "Ctrl-C again ends at once" in said.err


def test_the_second_interrupt_is_left_to_the_system():
    before = signal.getsignal(signal.SIGINT)
    with Interrupt() as interrupt:
        assert not interrupt.came
        signal.raise_signal(signal.SIGINT)
        assert interrupt.came
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is before
