"""Every example runs and does what its docstring says."""

import os
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from amp_engine import amp

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def run_example(monkeypatch, capsys):
    """Runs an example in this process, as `python -m examples.NAME ARGUMENTS`; its printed lines."""

    def run(name: str, *arguments: object) -> list[str]:
        torch.set_num_threads(1)  # models this small gain nothing from two
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_module(f"examples.{name}", run_name="__main__")
        amp.close()
        return capsys.readouterr().out.splitlines()

    return run


def numbers(lines: list[str], pattern: str) -> list[float]:
    return [float(value) for line in lines for value in re.findall(pattern, line)]


def test_minimal_is_thirty_lines_at_most():
    assert len((ROOT / "examples/minimal.py").read_text().splitlines()) <= 30


def test_minimal_lowers_its_loss_as_a_script_from_anywhere(tmp_path):
    command = [sys.executable, ROOT / "examples/minimal.py"]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, check=True, capture_output=True, text=True)
    losses = numbers(done.stdout.splitlines(), r"loss +([\d.]+)")
    assert len(losses) == 4
    assert losses[-1] < losses[0] / 100


THREADS_AT_THE_END = """
import os, runpy
runpy.run_path("examples/ddp.py", run_name="__main__")
names = [open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")]
print("left:", [name for name in names if "gloo" in name])
"""


def printed_by_ranks(tmp_path: Path, *command: str) -> list[list[str]]:
    """Return the lines that each of two ranks printed."""
    logs = tmp_path / "logs"  # a file for each: lines that two write to one pipe can run into each other
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--redirects=1", "--log-dir", logs]
    subprocess.run([sys.executable, *launcher, *command], cwd=ROOT, env=ENVIRONMENT, check=True, capture_output=True)
    return [log.read_text().splitlines() for log in sorted(logs.rglob("stdout.log"))]


@pytest.mark.slow
def test_ddp_trains_keeps_masters_equal_and_ends_its_group(tmp_path):
    # A thread of gloo's that is there while Python ends may abort the process.
    script = tmp_path / "ddp_and_threads.py"
    script.write_text(THREADS_AT_THE_END)
    printed = printed_by_ranks(tmp_path, str(script))
    assert len(printed) == 2
    losses = numbers(printed[0], r"loss +([\d.]+)")
    assert losses[-1] < losses[0] / 100
    assert "masters of 2 ranks: equal" in printed[0]
    assert all("left: []" in lines for lines in printed)


@pytest.mark.slow
def test_fsdp2_trains_and_resumes_bitwise(tmp_path):
    first, second = printed_by_ranks(tmp_path, "examples/fsdp2.py", "--opt-level", "O2")
    assert second == []
    losses = numbers(first, r"loss +([\d.]+)")
    assert losses[-1] < losses[0] / 20
    assert "resumed: bitwise equal" in first
    assert "parameters of this rank: 16833 of 33601" in first


def assert_float16_closes_most_of_the_gap_and_all_learn(lines: list[str]) -> None:
    printed = r"{} .* gap ([\d.e-]+), at most ([\d.e-]+)  reward ([\d.]+), at the end ([\d.]+)  0 skips"
    matches = [re.match(printed.format(level), line) for level, line in zip(("O0", "O5", "O2"), lines, strict=True)]
    mean, most, before, after = zip(*(map(float, match.groups()) for match in matches), strict=True)
    float32, bfloat16, float16 = mean
    assert bfloat16 > 4 * float16 > 400 * float32  # float16 has 3 bits more, FP32 13 more than those
    assert most[1] > most[2] > most[0]
    assert min(after) > 2 * max(before)


def test_float16_for_rl(run_example):
    assert_float16_closes_most_of_the_gap_and_all_learn(run_example("float16_for_rl", "--steps", 8))


@pytest.mark.slow
def test_float16_for_rl_in_shards(tmp_path):
    first, second = printed_by_ranks(tmp_path, "examples/float16_for_rl.py", "--steps", "8")
    assert second == []
    assert_float16_closes_most_of_the_gap_and_all_learn(first)


def test_gan_finds_the_circle(run_example):
    (summary,) = (line for line in run_example("gan", "--opt-level", "O4") if "centers hit" in line)
    (distance,) = numbers([summary], r"center ([\d.]+)")
    assert distance < 0.3  # a point in the middle of the circle is 1 away


def test_wgan_gp_finds_the_circle(run_example):
    lines = run_example("wgan_gp", "--opt-level", "O1", "--steps", 250, "--batch-size", 128)
    (distance,) = numbers(lines, r"center ([\d.]+)")
    assert distance < 0.4  # a point in the middle of the circle is 1 away
    assert 0.8 < numbers(lines, r"slope ([\d.]+)")[-1] < 1.3  # what the penalty asks for is 1


def test_half_weights_stand_still_without_masters(run_example):
    lines = run_example("half_weights", "--width", 16, "--steps", 20, "--length", 8)
    norms = {line[:24].strip(): numbers([line], r"([\d.]+)%")[1] for line in lines if "%" in line}
    assert norms == {"FP32": 0.0, "bfloat16, FP32 masters": 0.0, "pure bfloat16": 100.0}


def test_finetune_half_saves_in_the_type_that_it_loaded(run_example, tmp_path):
    first, second = tmp_path / "first.pt", tmp_path / "second.pt"
    run_example("finetune_half", "--save", first, "--steps", 20)
    lines = run_example("finetune_half", "--checkpoint", first, "--save", second, "--steps", 20)
    (moved,) = numbers(lines, r"bfloat16; (\d+)% of the weights moved")
    assert moved > 40
    saved = torch.load(second)
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    assert saved.keys() == torch.load(tmp_path / "base.pt").keys()
    assert saved["head.weight"].data_ptr() == saved["token_embedding.weight"].data_ptr()


def test_from_apex_differs_from_an_apex_script_by_its_import_only():
    source = (ROOT / "examples/from_apex.py").read_text()
    assert re.findall(r"^.*import amp$", source, re.MULTILINE) == ["from amp_engine import amp"]
    assert source.count("amp_engine") == 1


@pytest.mark.parametrize(("opt_level", "loss_scale"), [("O1", "dynamic"), ("O2", "128.0")])
def test_from_apex_learns(run_example, opt_level, loss_scale):
    lines = run_example("from_apex", "--opt-level", opt_level, "--loss-scale", loss_scale)
    assert ("Overrides:  loss_scale=128.0" in lines) == (loss_scale == "128.0")
    accuracy = numbers(lines, r"\* Epoch \d Loss [\d.]+ Prec@1 ([\d.]+)")
    assert accuracy[1] > accuracy[0] > 15  # percent; chance is 10


def test_from_apex_resumes_where_it_stopped_and_learns(run_example, tmp_path):
    arguments = ("--opt-level", "O2", "--checkpoint", tmp_path / "checkpoint.pt")
    lines = run_example("from_apex", *arguments, "--epochs", 1)
    resumed = run_example("from_apex", *arguments, "--resume", tmp_path / "checkpoint.pt")
    epochs = [line for line in resumed if line.startswith(" * Epoch")]
    assert [line[:10] for line in epochs] == [" * Epoch 1"]
    before, after = numbers(lines + resumed, r"\* Epoch \d Loss [\d.]+ Prec@1 ([\d.]+)")
    assert after > before > 15


def final_state(path: Path) -> dict:
    """The checkpoint, flat: a name for every tensor and number in it."""

    def flatten(value, name):
        if isinstance(value, dict):
            for key, item in value.items():
                yield from flatten(item, f"{name}.{key}")
        elif isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                yield from flatten(item, f"{name}.{index}")
        else:
            yield name, value

    return dict(flatten(torch.load(path), path.stem))


def assert_bitwise_equal(path: Path, expected_path: Path) -> None:
    actual, expected = final_state(path), final_state(expected_path)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == actual[name].dtype, name
            assert torch.equal(actual[name], value), name
        else:
            assert actual[name] == value, name


TINY_GPT = ("--width", 16, "--layers", 1, "--batch-size", 4, "--length", 16)


@pytest.mark.parametrize("opt_level", ["O1", "O2", "O5"])
def test_train_gpt_stopped_and_resumed_is_the_run_that_was_not(run_example, tmp_path, opt_level):
    arguments = ("--opt-level", opt_level, "--steps", 6, *TINY_GPT, "--checkpoint")
    (tmp_path / "whole").mkdir()
    whole, resumed = tmp_path / "whole" / "gpt.pt", tmp_path / "gpt.pt"

    expected = run_example("train_gpt", *arguments, whole)
    run_example("train_gpt", *arguments, resumed, "--stop-after", 3)
    lines = run_example("train_gpt", *arguments, resumed, "--resume")

    assert "resumed at step 3" in lines
    assert lines[-1] == expected[-1]
    assert lines[-1].startswith("step    6")
    assert_bitwise_equal(resumed, whole)


@pytest.mark.slow
def test_train_gpt_killed_and_resumed_is_the_run_that_was_not(run_example, tmp_path):
    def arguments(folder: str) -> list[str]:
        (tmp_path / folder).mkdir(exist_ok=True)
        checkpoint = ("--checkpoint", tmp_path / folder / "gpt.pt")
        return list(map(str, ("--steps", 60, "--save-every", 10, *TINY_GPT, *checkpoint)))

    command = [sys.executable, "-m", "examples.train_gpt", *arguments("killed")]
    killed = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL)
    while not (tmp_path / "killed/gpt.pt").exists():
        assert killed.poll() is None
        time.sleep(0.005)
    os.kill(killed.pid, signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL

    resumed, whole = (
        run_example("train_gpt", *arguments(folder), *more) for folder, *more in (("killed", "--resume"), ("whole",))
    )
    assert resumed[-1] == whole[-1]
    assert_bitwise_equal(tmp_path / "killed/gpt.pt", tmp_path / "whole/gpt.pt")
