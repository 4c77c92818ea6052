"""`advise` and its command line: what it runs, in which order; and unmodified scripts in processes of their own."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from amp_engine import __main__ as amp_engine_main
from amp_engine.errors import AmpStateError, AmpValueError
from amp_engine.tools.advice import advise, command, running
from amp_engine.tools.advice.records import OWN, Task, Trial

SCRIPT = __file__  # exists; nothing runs it


class Runs:
    """Does trials without a process, and remembers them."""

    def __init__(self, **changed: Any) -> None:
        self.tasks: list[Task] = []
        self.argv: list[Sequence[str]] = []
        self._changed = changed

    def __call__(self, argv: Sequence[str], task: Task) -> Trial:
        self.argv.append(argv)
        self.tasks.append(task)
        losses = tuple((1.0 + 1.0 / step,) for step in range(1, task.steps + 1))
        fields: dict[str, Any] = {"asked": "O1", "losses": losses, "seconds": (1.0,) * (task.steps - 1)}
        return Trial(task.level, **(fields | self._changed.get(task.level, {})))


def test_o0_runs_first_and_again_with_perturbed_weights_after_the_others():
    runs = Runs()
    said: list[str] = []
    advice = advise([SCRIPT, "-x"], levels=["O5", "O0", "O2", "O5"], run=runs, say=said.append, seed=7)
    assert [task.level for task in runs.tasks] == ["O0", "O5", "O2", "O0"]
    assert [task.perturb for task in runs.tasks] == [False, False, False, True]
    assert {task.seed for task in runs.tasks} == {7}
    assert runs.argv == [[SCRIPT, "-x"]] * 4
    assert said == ["O0, run 1 of 4", "O5, run 2 of 4", "O2, run 3 of 4", "O0, run 4 of 4"]
    assert advice.script == (SCRIPT, "-x")
    assert [trial.level for trial in advice.levels] == ["O5", "O2"]
    assert advice.level == "O0"


def test_what_the_cpu_lacks_is_said_of_slower_levels_and_where_to_look_of_those_whose_losses_differ():
    emulated = {"dtype": "float16", "lacks": "AVX-512 FP16 or AMX-FP16", "machine": "a CPU"}
    far = {"losses": tuple((1.0 + 2.0 / step,) for step in range(1, 21))}
    runs = Runs(O1=emulated | {"seconds": (4.0,) * 19}, O2=emulated | far | {"seconds": (2.5,) * 19}, O3=emulated)
    text = " ".join(str(advise([SCRIPT], levels=["O1", "O2", "O3"], run=runs)).split())
    assert (
        "This CPU emulates float16, as it has no AVX-512 FP16 or AMX-FP16. So a step takes longer than O0's: 4.0 times "
        "at O1, 2.5 times at O2. A GPU may reverse this; run it there."
    ) in text
    assert 'Losses differ at O2: amp.find_fp32_modules(model, step_fn, "O2") names' in text
    text = str(advise([SCRIPT], levels=["O1"], run=Runs(O1={"seconds": (4.0,) * 19})))
    assert "emulates" not in text
    assert "find_fp32_modules" not in text


def test_all_levels_are_tried_unless_some_are_named():
    runs = Runs()
    advise([SCRIPT], run=runs)
    assert [task.level for task in runs.tasks] == ["O0", "O1", "O2", "O3", "O4", "O5", "O0"]
    assert {task.steps for task in runs.tasks} == {20}


def test_the_others_run_as_many_steps_as_o0_had():
    runs = Runs(O0={"losses": ((1.0,),) * 9})
    advise([SCRIPT], levels=["O1"], run=runs)
    assert [task.steps for task in runs.tasks] == [20, 9, 9]


def test_each_run_has_its_own_deadline():
    runs = Runs()
    before = time.monotonic()
    advise([SCRIPT], levels=["O1"], seconds=1e6, run=runs)
    deadlines = [task.deadline for task in runs.tasks]
    assert deadlines == sorted(deadlines)
    assert deadlines[0] >= before + 1e6


def test_a_level_that_fails_leaves_the_others():
    advice = advise([SCRIPT], levels=["O1", "O2"], run=Runs(O1={"error": "no"}))
    assert [trial.error for trial in advice.levels] == ["no", None]


def test_a_script_that_fails_at_o0_is_not_tried_further():
    runs = Runs(O0={"error": "ValueError: no data"})
    with pytest.raises(AmpStateError, match="O0 failed(.|\n)*ValueError: no data"):
        advise([SCRIPT], run=runs)
    assert len(runs.tasks) == 1


@pytest.mark.parametrize(
    ("seen", "what"),
    [
        ({"asked": None, "losses": ()}, r"without a loss.backward\(\) of one number and a second step"),
        ({"asked": None, "losses": ((), ())}, r"without a loss.backward\(\) of one number and a second step"),
        ({"losses": ()}, r"without a loss.backward\(\) of one number and a step"),
        ({"losses": ((), ())}, r"without a loss.backward\(\) of one number and a step"),
    ],
)
def test_a_script_without_amp_is_told_what_is_missing(seen, what):
    runs = Runs(O0=seen)
    with pytest.raises(AmpStateError, match=what) as error:
        advise([SCRIPT], run=runs)
    assert "torchrun, mp.spawn" in str(error.value)
    assert len(runs.tasks) == 1


def test_a_script_without_amp_is_tried_and_told_what_to_write():
    text = " ".join(str(advise([SCRIPT], levels=["O2"], run=Runs(O0={"asked": None}))).split())
    assert "The script has no amp. It was tried with amp.initialize(model, optimizer, opt_level=...) after" in text
    assert "To train at O4 or O5 type this line before the loop" in text
    of_trainer = {"asked": None, "before": "the Trainer is made"}
    text = " ".join(str(advise([SCRIPT], levels=["O2"], run=Runs(O0=of_trainer))).split())
    assert "type amp.initialize(model, opt_level=...) before the Trainer is made; O1 and O2 scale losses" in text
    runs = Runs(O0={"asked": None, "losses": (), "obstacle": "it steps several optimizers, Adam and SGD"})
    with pytest.raises(AmpStateError) as error:
        advise([SCRIPT], run=runs)
    assert str(error.value) == (
        "The script does not call amp.initialize, and cannot be tried as it is: it steps several optimizers, Adam and "
        "SGD."
    )
    assert len(runs.tasks) == 1


def test_the_own_run_of_half_weights_is_a_row_and_is_not_recommended():
    own = {"dtype": "bfloat16", "seconds": (0.1,) * 19}
    runs = Runs(O0={"asked": None, "came": "bfloat16"}, **{OWN: own})
    advice = advise([SCRIPT], run=runs)
    assert [task.level for task in runs.tasks] == ["O0", OWN, "O2", "O3", "O5", "O0"]
    text = " ".join(str(advice).split())
    assert "Its weights are bfloat16: `as it is` is its own run, without FP32 masters." in text
    assert advice.level == "O0"
    assert "Take O0 on this machine" in text
    assert "left out: as it is (it steps bfloat16 weights without FP32 masters, and a few steps do not show" in text


@pytest.mark.parametrize(
    ("argv", "keywords", "says"),
    [
        ([], {}, "no script to run"),
        (["-m"], {}, "no script to run"),
        (["-c", "pass"], {}, "'-c' is neither a script nor -m"),
        (["nowhere.py"], {}, "no file 'nowhere.py'"),
        ([SCRIPT], {"levels": ["O2", "O6"]}, "a level is one of O0, O1"),
        ([SCRIPT], {"levels": []}, "a level is one of O0, O1"),
        (
            [SCRIPT],
            {"levels": ["O2", "mxfp4", "O7"]},
            "levels='O2,mxfp4,O7', 'mxfp4', 'O7' unknown: a level is one of O0.* +Use for example O0,O2,O5",
        ),
        ([SCRIPT], {"steps": 6}, "at least two steps have to follow"),
        ([SCRIPT], {"warmup": -1}, "at least two steps have to follow"),
        ([SCRIPT], {"seconds": 0}, "seconds are above 0"),
        ([SCRIPT], {"seed": -1}, "seeds from 0 to 4294967295"),
    ],
)
def test_what_is_not_allowed_is_refused_before_anything_runs(argv, keywords, says):
    runs = Runs()
    with pytest.raises(AmpValueError, match=says):
        advise(argv, run=runs, **keywords)
    assert runs.tasks == []


def test_one_of_several_processes_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(AmpStateError, match="without torchrun"):
        advise([SCRIPT], run=Runs())


# What a process left behind

TASK = Task("O2", 3, math.inf)
DONE = Trial("O2", "O1", ((1.0,),) * 3)


def test_a_trial_with_all_steps_counts_however_its_process_ended():
    for status in (0, 1, None):
        assert running.judged(DONE, TASK, status, "Traceback") == DONE


def test_a_script_that_ended_by_itself_did_not_fail():
    short = Trial("O2", "O1", ((1.0,),))
    assert running.judged(short, TASK, 0, "Traceback") == short
    assert running.judged(None, TASK, 0, "") == Trial("O2")


def test_the_end_of_what_a_failed_script_printed_is_its_error():
    printed = "\n".join(f"line {i}" for i in range(100))
    error = running.judged(None, TASK, 1, printed).error
    assert error is not None
    first, *rest = error.splitlines()
    assert first == f"(exit status 1 after 0 of {TASK.steps} steps; it printed:)"
    assert rest == [f"line {i}" for i in range(100 - running.SHOWN_LINES, 100)]
    short = Trial("O2", "O1", ((1.0,), (0.5,)))
    said = f"(ended by signal 9 after 2 of {TASK.steps} steps; nothing was printed)"
    assert running.judged(short, TASK, -9, " ").error == said


def test_a_process_that_had_to_be_ended_failed_for_lack_of_time():
    error = running.judged(None, TASK, None, "epoch 1").error
    assert error is not None
    assert error.startswith("epoch 1\n(O2 was ended: ")
    assert "--seconds" in error
    assert "mp.spawn" in error
    late = Trial("O2", "O1", ((1.0,),), out_of_time=True)
    assert running.judged(late, TASK, None, "") == late


# The command line


@pytest.fixture
def called(monkeypatch) -> list[tuple[list[str], dict[str, Any]]]:
    calls: list[tuple[list[str], dict[str, Any]]] = []

    def stand_in(argv: list[str], **keywords: Any) -> Any:
        calls.append((argv, {name: keywords[name] for name in ("steps", "warmup", "levels", "seconds", "seed")}))
        return advise(argv, run=Runs(), **keywords)

    monkeypatch.setattr(command, "advise", stand_in)
    return calls


def test_our_options_stand_before_the_script_and_its_own_behind(called, capsys):
    line = f"advise --steps 30 --levels=O0,O2 --seconds 5 --warmup=3 --seed 4 {SCRIPT} --steps 7 --json x -m y"
    assert amp_engine_main.main(line.split()) == 0
    ((argv, keywords),) = called
    assert argv == [SCRIPT, "--steps", "7", "--json", "x", "-m", "y"]
    assert keywords == {"steps": 30, "warmup": 3, "levels": ["O0", "O2"], "seconds": 5.0, "seed": 4}
    out, err = capsys.readouterr()
    assert out.split("\n\n")[-1].startswith("Stay at O0 on this machine")
    assert "amp_engine advise: O2, run 2 of 3" in err


def test_a_module_is_run_as_python_runs_it(called):
    assert command.main(["--steps", "30", "-m", "package.train", "--help"]) == 0
    assert called[0][0] == ["-m", "package.train", "--help"]


def test_json_is_written_beside_the_table(called, tmp_path):
    path = tmp_path / "advice.json"
    assert command.main(["--levels", "O2", "--json", str(path), SCRIPT]) == 0
    found = json.loads(path.read_text())
    assert [found["recommendation"]["level"], len(found["levels"])] == ["O0", 1]


def test_json_that_cannot_be_written_is_told_after_the_advice(called, capsys):
    assert command.main(["--levels", "O2", "--json", "/dev/full", SCRIPT]) == 1
    out, err = capsys.readouterr()
    assert out.split("\n\n")[-1].startswith("Stay at O0 on this machine")
    assert err.splitlines()[-1] == (
        "python -m amp_engine advise: --json /dev/full could not be written: No space left on device."
    )


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "there is no script"),
        ("--steps 30", "there is no script"),
        ("--step 30 train.py", "unrecognized arguments: --step"),
        ("--steps many train.py", "invalid int value"),
        (f"--json nowhere/at/all.json {SCRIPT}", "there is no directory nowhere/at"),
        (f"--json {Path(SCRIPT).parent} {SCRIPT}", "advice is a directory: type the path of a file"),
    ],
)
def test_a_command_line_that_is_not_understood_is_refused(line, says, called, capsys):
    with pytest.raises(SystemExit) as end:
        command.main(line.split())
    assert end.value.code == 2
    assert says in capsys.readouterr().err
    assert called == []


def test_errors_are_one_message_and_an_exit_status(called, capsys):
    assert command.main(["--levels", "O9", SCRIPT]) == 2
    assert "a level is one of" in capsys.readouterr().err


def test_the_command_and_its_options_are_in_the_help(capsys):
    amp_engine_main.main([])
    assert "advise" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        amp_engine_main.main(["advise", "--help"])
    out = capsys.readouterr().out
    assert all(option in out for option in ("--steps", "--warmup", "--levels", "--seconds", "--json", "--seed"))


# Scripts

PARTS = """
    import os, random, subprocess, sys
    os.environ["OMP_NUM_THREADS"] = "1"
    assert "torch" not in sys.modules and "amp_engine" not in sys.modules
    import numpy, torch
    from apex import amp

    def main():
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1", loss_scale=128.0)
        for _ in range(1000):
            x, y = torch.randn(64, 4), float(numpy.random.rand()) + random.random()
            loss = (model(x).float() - y).square().mean()
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()
"""
TRAIN = dedent(PARTS) + dedent("""
    assert sys.argv[1:] == ["--steps", "3", "-m", "a b"], sys.argv
    assert __name__ == "__main__" and os.path.basename(os.getcwd()) == "work", os.getcwd()
    assert os.environ["OF_THE_USER"] == "yes"
    print("trained by", os.getpid())
    if amp._amp_state.engine._task.level == "O2":
        raise ValueError("no O2 here")
    main()
""")


@pytest.fixture
def work(tmp_path, monkeypatch):
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("OF_THE_USER", "yes")
    return folder


@pytest.mark.slow
def test_an_unmodified_script_is_tried_level_by_level(work, capfd):
    (work / "train.py").write_text(TRAIN)
    line = ["advise", "--steps", "6", "--warmup", "2", "--levels", "O2,O5", "--json", "out.json", "train.py"]
    assert amp_engine_main.main([*line, "--steps", "3", "-m", "a b"]) == 0
    out, _ = capfd.readouterr()
    found = json.loads((work / "out.json").read_text())
    o2, o5 = found["levels"]
    assert (found["base"]["asked"], len(found["base"]["losses"]), len(found["again"]["losses"])) == ("O1", 6, 6)
    assert o2["error"].splitlines()[-1] == "ValueError: no O2 here"
    assert "ValueError: no O2 here" in out
    assert "trained by" in out, "the end of what a failed script printed is shown"
    assert out.count("trained by") == 1, "and that of the others is not"
    assert (o5["error"], o5["dtype"], len(o5["seconds"])) == (None, "bfloat16", 5)
    # Nothing was seeded by the script: equal data and weights are the seeds'.
    assert o5["losses"][0] == pytest.approx(found["base"]["losses"][0], rel=0.02)
    assert found["again"]["losses"][0] == found["base"]["losses"][0]
    assert found["again"]["losses"][1:] != found["base"]["losses"][1:]
    assert found["again"]["gradients"]["counts"]
    assert "Tried without loss_scale=128.0 at O0, O5" not in out, "the reasons differ"
    assert "Tried without loss_scale=128.0 at O5: the level scales no losses." in out
    # Which it is depends on how busy the machine is.
    assert re.search("on this machine|Speeds cannot be compared", out.split("\n\n")[-1])


@pytest.mark.slow
def test_a_module_that_catches_system_exit_ends_and_its_children_have_no_trial(work):
    package = work / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text(
        dedent(PARTS)
        + dedent("""
        child = "import os, sys; assert 'AMP_ENGINE_TRIAL' not in os.environ; assert 'apex' not in sys.modules; "
        child += "from apex import amp; assert type(amp._amp_state.engine).__name__ == 'Engine'"
        subprocess.run([sys.executable, "-c", child], check=True)
        while True:
            try:
                main()
            except BaseException as e:
                print("caught", repr(e))
        """)
    )
    task = Task("O4", 3, time.monotonic() + 300)
    trial = running.run_in_process(["-m", "package.train"], task)
    assert (trial.error, trial.steps, trial.level) == (None, 3, "O4")


def test_a_script_that_has_nothing_to_do_with_amp_leaves_no_trial(work, monkeypatch):
    own = work / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("is_of_the_user = True")
    monkeypatch.setenv("PYTHONPATH", str(own))
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    (work / "plain.py").write_text(
        "import os, random, sitecustomize\nassert sitecustomize.is_of_the_user\n"
        "assert os.environ['PYTHONHASHSEED'] == '0'\nvalue = random.random()\nrandom.seed(0)\n"
        "assert value == random.random()\nprint('hello')"
    )
    assert running.run_in_process(["plain.py"], Task("O0", 3, time.monotonic() + 300)) == Trial("O0")


def test_a_script_that_does_not_end_is_ended_with_what_it_started(work, monkeypatch):
    monkeypatch.setattr(running, "GRACE", 0.0)
    (work / "loops.py").write_text(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "open('child', 'w').write(str(child.pid))\ntime.sleep(600)"
    )

    class Started:
        """Stands in for `time`: the deadline has come once the script has started its child."""

        @staticmethod
        def monotonic() -> float:
            return 2.0 if (work / "child").exists() and (work / "child").read_text() else 0.0

    monkeypatch.setattr(running, "time", Started)
    trial = running.run_in_process(["loops.py"], Task("O0", 3, 1.0))
    assert trial.error is not None
    assert "was ended" in trial.error
    child = Path("/proc") / (work / "child").read_text() / "stat"
    while is_running(child):  # the kernel ends what was killed when it comes to it
        time.sleep(0.01)


def is_running(stat: Path) -> bool:
    """True if the process of this file of /proc is there, and not dead."""
    try:
        return stat.read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_the_command_waits_for_nothing_that_only_advise_needs():
    code = "import sys, amp_engine.__main__; print([m for m in sys.modules if m.startswith('amp_engine.')])"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert "'amp_engine.amp'" in done.stdout
    assert "'amp_engine.tools" not in done.stdout
    assert "'amp_engine.apex'" not in done.stdout
