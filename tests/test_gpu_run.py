"""`make gpu` where there is no GPU: every stage runs whatever became of the others, and the report says all of it."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from amp_engine.kernels.sources import digest
from tests.gpu_run import build, losses, models, sanitizers, too_large, training
from tests.gpu_run import parts as parts_module
from tests.gpu_run.machine import Clocks, about, summary
from tests.gpu_run.page import page, reports
from tests.gpu_run.parts import LENT, Part, parts, plan
from tests.gpu_run.program import Task
from tests.gpu_run.report import Report, Rows, read_rows
from tests.gpu_run.stages import FAILED, GRACE, OK, OVERRAN, UNFINISHED, Outcome, Stage, run_all
from tests.gpu_run.timing import CYCLES, SHORTEST, Clock
from tests.gpu_run.training import timed

ROOT = Path(__file__).parent.parent


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def run(given: list[Stage], folder: Path) -> list[Outcome]:
    return list(run_all(given, folder / "log", {}, lambda stage: None, time.monotonic()))


def tool(folder: Path, name: str, script: str) -> None:
    """A program `name` on the PATH that `folder` is put on."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def gpu_run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`python -m tests.gpu_run` on the stand-in."""
    command = [sys.executable, "-m", "tests.gpu_run", "--simulate", "--out", str(folder), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_gpu_goes_through_all_parts_and_reports_a_stage_that_went_wrong(tmp_path, request):
    instead = {"smoke": "raise SystemExit('told to fail')"}
    if request.config.getoption("--cases") != "all":  # the suite has these tests, and another part this program
        instead |= dict.fromkeys(("tests", "plain tests", "plain host"), "print('6 passed, 1 skipped')")
    arguments = " ".join(f"--instead {shlex.quote(f'{stage}={code}')}" for stage, code in instead.items())
    command = ["make", "gpu", "GPU=simulator", f"PYTHON={sys.executable}", f"OUT={tmp_path}", "COMMIT=abc"]
    done = subprocess.run([*command, f"ARGS={arguments}"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0, done.stdout
    every = parts(tmp_path, simulated=False)
    found = {report["part"]: report for report in reports(tmp_path)}
    for part in every:
        report = found.pop(part.name)
        outcomes = {stage["stage"]: stage["outcome"] for stage in report["stages"]}
        stages = [stage for stage in part.stages if part is every[0] or not stage.apart]  # it is built once
        expected = {stage.name: FAILED if stage.name == "smoke" else OK for stage in stages}
        assert outcomes == expected, done.stdout[-5000:]
        assert "no number means anything" in report["about"]["on a stand-in"]
        assert report["about"]["commit"] == "abc"
        assert report["about"]["torch"].startswith(torch.__version__.split("+")[0])
        log = (tmp_path / f"{part.name}.log").read_text()
        assert all(f"=== {stage.name}: " in log for stage in stages)
    assert not found
    rows = [row for report in reports(tmp_path) for row in report["rows"]]
    assert not [row for row in rows if row["what"] == "failed"]
    assert {row["stage"] for row in rows} == {"host", "steps", "training", "losses", "too_large", "sanitizers"}
    assert {row["what"] for row in rows if row["stage"] == "losses" and "gap_to_FP32" in row} == set(losses.WHO)
    assert {row["what"] for row in rows if row.get("trains") == "yes"} == set(too_large.WHO)
    everyone = {*training.LEVELS, *training.AUTOCAST, training.TF32, training.FLOAT32, training.PURE}
    assert everyone <= {row["what"] for row in rows if row["stage"] == "training"}
    assert {20, 14.1, 30, 36} <= {row.get("bytes_a_parameter") for row in rows if row["case"].startswith("AdamW, O")}
    hows = {row["case"].rpartition(", ")[2] for row in rows if row["stage"] == "training" and row["what"] == "O5"}
    assert {"compiled", "as a graph", "DDP", "FSDP2"} < hows
    numbers = {name for row in rows if row["stage"] == "steps" for name in row}
    assert {"ms", "host_ms", "bytes_a_parameter", "of_copy", "kept_full", "ratio", "launches", "syncs"} <= numbers
    tests = {stage["stage"]: stage["note"] for report in reports(tmp_path) for stage in report["stages"]}
    assert int(re.search(r"(\d+) passed", tests["tests"])[1]) > 5 * int(re.search(r"(\d+) skipped", tests["tests"])[1])
    assert "failed" not in tests["plain tests"]
    text = (tmp_path / "gpu.md").read_text()
    assert "told to fail" in text
    assert "smoke failed" in text


@pytest.mark.parametrize("name", [part.name for part in parts(Path(), simulated=True)])
def test_a_part_that_is_killed_leaves_what_it_has_found(tmp_path, name):
    """The stage behind the build finds something, then kills the part in a way that it cannot catch."""
    (part,) = (part for part in parts(tmp_path, simulated=True) if part.name == name)
    first, second, *others = [stage.name for stage in part.stages]
    row = json.dumps({"stage": second, "case": "a case", "what": "ours", "ms": 1.5})
    kills = f"""
import os, signal
open({str(tmp_path / name)!r} + '.jsonl', 'a').write({row!r} + chr(10) + '{{"stage": "half a li')
os.kill(os.getppid(), signal.SIGKILL)"""
    done = gpu_run(tmp_path, "--part", name, "--instead", f"{second}={kills}")
    assert done.returncode == -signal.SIGKILL, done.stderr
    (report,) = reports(tmp_path)
    became = [(stage["stage"], stage["outcome"]) for stage in report["stages"]]
    assert became == [(first, OK), *((stage, UNFINISHED) for stage in (second, *others))]
    text = (tmp_path / "gpu.md").read_text()
    assert f"| {first} | ok |" in text
    assert f"{second} unfinished" in text
    assert "| a case | ours | 1.500 |" in page(tmp_path)
    assert sum(path.name.startswith(name) for path in tmp_path.iterdir()) == 3  # few files come back from some machines


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize(("wanted", "said"), [("gpu", "torch finds no GPU"), ("cuda", "it may be gpu or stand-in")])
def test_tests_that_are_to_run_on_a_gpu_fail_without_one(tmp_path, monkeypatch, wanted, said):
    stages = [stage for part in parts(tmp_path, simulated=False) for stage in part.stages if "tests" in stage.name]
    assert [stage.environment["GPU_TESTS"] for stage in stages] == ["gpu", "gpu"]
    monkeypatch.setenv("GPU_TESTS", wanted)
    with pytest.raises(RuntimeError, match=said):
        runpy.run_path(str(ROOT / "tests/gpu/support.py"))


def test_tests_for_a_gpu_are_found_wherever_they_are(tmp_path, monkeypatch):
    (tmp_path / "casting").mkdir()
    (tmp_path / "casting/test_cache.py").write_text("@pytest.mark.cuda\ndef test(): pass\n")
    (tmp_path / "test_other.py").write_text("def test(): pass\n")
    assert str(ROOT / "tests/gpu/test_steps.py") in parts_module.marked_cuda()
    monkeypatch.setattr(parts_module, "TESTS", tmp_path)
    assert parts_module.marked_cuda() == [str(tmp_path / "casting/test_cache.py")]


def test_the_plan_fits_what_is_lent(tmp_path):
    """A quarter of an hour, of which the machine's start takes a minute and a half, in calls of three minutes."""
    every = parts(tmp_path, simulated=False)
    for part in every:
        build, *stages = part.stages
        assert build.apart
        assert not any(stage.apart for stage in stages)
        ending = 3 * GRACE  # of a stage that does not listen
        assert sum(stage.limit + ending for stage in stages) <= part.limit
        assert all(stage.expected <= stage.limit for stage in part.stages)
        assert part.limit <= 180 or part.name not in LENT
    said = re.search(r"A to E, one build that finds its files: (\d+) s, at most (\d+) s$", plan(every))
    assert said
    assert int(said[2]) == 10 + sum(part.limit for part in every if part.name in LENT)
    assert 90 + int(said[1]) < 90 + int(said[2]) < 900


def test_a_build_takes_nothing_from_the_stages_behind_it_and_gives_them_nothing(tmp_path):
    elastic = python("import os; print(os.environ['GPU_RUN_SECONDS'])")
    outcomes = run(
        [
            Stage("build", python("import time; time.sleep(1)"), 99.0, apart=True),
            Stage("a", elastic, 5.0, takes_the_rest=True),
        ],
        tmp_path,
    )
    assert outcomes[1].limit == pytest.approx(5.0, abs=0.5)


def fitting() -> dict[str, str]:
    """The record of an extension for GPUs of compute capability 9.0."""
    return {"mode": "cuda", "torch": torch.__version__, "sources": build.sources_hash(), "gpu": "9.0"}


@pytest.mark.parametrize(
    ("record", "loads", "what"),
    [
        ({}, "compiled for CPU and CUDA", "nothing was compiled: what lies there fits"),
        ({}, "none: GLIBC_2.99 not found", "compiled, since it does not load: none: GLIBC_2.99 not found"),
        ({"mode": "cpu"}, "compiled for CPU and CUDA", "compiled, since mode cpu instead of cuda"),
        ({"gpu": "8.0"}, "compiled for CPU and CUDA", "compiled, since gpu 8.0 instead of 9.0"),
        ({"torch": "2.1", "sources": "0"}, "compiled for CPU", "compiled, since torch 2.1 instead of {}, sources 0 "),
        (None, "none", f"compiled, since there is no {build.EXTENSION.name}"),
    ],
)
def test_an_extension_that_fits_is_taken_and_any_other_compiled(tmp_path, monkeypatch, record, loads, what):
    given = {} if record is None else fitting() | record
    monkeypatch.setattr(build, "query", lambda name: "9.0")
    monkeypatch.setattr(build, "read_record", lambda: given)
    monkeypatch.setattr(build, "loaded", lambda: loads)
    compiled = []
    monkeypatch.setattr(build, "compile_for", compiled.append)
    build.build(Rows(tmp_path / "rows", "build"))
    (row,) = read_rows(tmp_path / "rows")
    assert row["what"].startswith(what.format(torch.__version__))
    assert compiled == ["9.0"] * what.startswith("compiled")


def test_what_is_carried_is_compiled_for_that_gpu_and_fits_there(tmp_path, monkeypatch, capsys):
    """A setup.py that compiles nothing stands in for the build."""
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc/a.cpp").touch()
    (tmp_path / "setup.py").write_text(
        "import json, os, pathlib, shutil, sys\n"
        "shutil.copy(sys.executable, 'extension')\n"
        "mode = os.environ['AMP_ENGINE_BUILD'] + os.environ['TORCH_CUDA_ARCH_LIST']\n"
        "record = {'mode': mode, 'torch': '2.11.0+cu130', 'sources': os.environ['SOURCES']}\n"
        "pathlib.Path('extension.json').write_text(json.dumps(record))\n"
    )
    (tmp_path / "amp_engine/kernels").mkdir(parents=True)
    shutil.copy(ROOT / "amp_engine/kernels/sources.py", tmp_path / "amp_engine/kernels")
    monkeypatch.setenv("SOURCES", digest(tmp_path / "csrc"))
    loads = iter(["compiled for CPU and CUDA", "none: they were compiled from other sources"])
    monkeypatch.setattr(build, "loaded", lambda: next(loads))
    for name, value in (("ROOT", tmp_path), ("EXTENSION", tmp_path / "extension")):
        monkeypatch.setattr(build, name, value)
    monkeypatch.setattr(build, "RECORD", tmp_path / "extension.json")
    build.carry("9.0")
    assert re.match(r"extension: \d+\.\d\d MB\nextension.json: 0.00 MB\n$", capsys.readouterr().out)
    record = build.read_record()
    assert record["mode"] == "cuda9.0"
    assert build.misfit(record | {"mode": "cuda"}, "2.11.0+cu130", "9.0") == ""
    (tmp_path / "csrc/a.cpp").write_text("int changed;")
    assert "sources" in build.misfit(record | {"mode": "cuda"}, "2.11.0+cu130", "9.0")
    with pytest.raises(SystemExit, match="does not load: none: they were compiled from other sources"):
        build.carry("9.0")


def test_the_page_of_what_ran_on_a_gpu_is_made_of_the_reports():
    assert (ROOT / "docs/gpu.md").read_text() == page(ROOT / "docs/gpu"), "run: python -m tests.gpu_run.page"


def test_the_readme_says_which_gpu_has_run_it():
    gpus = {report["about"]["gpu"].partition(",")[0] for report in reports(ROOT / "docs/gpu")}
    assert gpus
    assert all(gpu in (ROOT / "README.md").read_text() for gpu in gpus)


def test_a_stage_that_overruns_is_ended_with_what_it_started_and_the_rest_goes_on(tmp_path):
    nested = python("import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])")
    start = time.monotonic()
    outcomes = run(
        [
            Stage("long", nested, 2.0),
            Stage("failing", python("print('a'); raise SystemExit('why')"), 30.0),
            Stage("absent", ["/there/is/no/such/program"], 30.0),
            Stage("killed", python("import os; os.kill(os.getpid(), 9)"), 30.0),
            Stage("last", python("print('fine')"), 30.0),
        ],
        tmp_path,
    )
    assert [o.outcome for o in outcomes] == [OVERRAN, FAILED, FAILED, FAILED, OK]
    assert time.monotonic() - start < 55  # the run did not wait for the child's 60 s
    assert "why" in outcomes[1].tail
    assert outcomes[-1].note == "fine"
    log = (tmp_path / "log").read_text()
    assert "=== last: ok" in log


def test_a_stage_that_does_not_listen_is_killed(tmp_path):
    deaf = python("import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)")
    (outcome,) = run([Stage("deaf", deaf, 2.0)], tmp_path)
    assert outcome.outcome == OVERRAN
    assert outcome.seconds < 55


def test_time_that_is_left_goes_to_the_stages_that_take_it(tmp_path):
    outcomes = run(
        [
            Stage("quick", python(""), 100.0),
            Stage("fixed", python(""), 50.0),
            Stage("elastic", python("import os; print(os.environ['GPU_RUN_SECONDS'])"), 50.0, takes_the_rest=True),
        ],
        tmp_path,
    )
    assert [o.limit for o in outcomes[:2]] == [100.0, 50.0]
    assert 50.0 < outcomes[2].limit < 200.0
    assert float(outcomes[2].note) == pytest.approx(outcomes[2].limit, abs=0.1)


def test_a_report_holds_the_rows_of_a_stage_that_was_cut_short(tmp_path):
    about = {"gpu": "a GPU", "date": "today", "commit": "abc", "torch": "2"}
    report = Report(tmp_path, Part("B", "steps", 9, (Stage("steps", [], 8.0),)), about)
    rows = Rows(report.rows_file, "steps")
    rows.add("a | b", "ours", ms=1.23456, of_copy=0.5, missing=None)
    rows.add("b", "ours")
    with report.rows_file.open("a") as file:
        file.write('{"stage": "steps", "ca')
    assert len(read_rows(report.rows_file)) == 2
    report.outcomes.append(Outcome("steps", OVERRAN, 9.0, 8.0, "x", ["y"]))
    report.write([])
    text = page(tmp_path)
    assert "| B | today | abc | a GPU | 2 |  | steps overran |" in text
    assert "* gpu: a GPU" in text
    assert "| a \\| b | ours | 1.235 | 50% |" in text
    assert "```text\ny\n```" in text
    assert reports(tmp_path)[0]["rows"][0]["ms"] == 1.23456


def test_a_case_that_fails_costs_no_other_and_one_without_time_is_named(tmp_path):
    done = []
    task = Task(Rows(tmp_path / "rows", "steps"), torch.device("cpu"), tiny=True, end=time.monotonic() + 100)

    def fails():
        raise ValueError("no such kernel")

    with pytest.raises(SystemExit):
        task.run([("bad", 0, fails), ("long", 1000, fails), ("good", 0, lambda: done.append("good"))])
    assert done == ["good"]
    said = [(row["case"], row["what"], row.get("why")) for row in read_rows(tmp_path / "rows")]
    assert said == [("bad", "failed", "ValueError: no such kernel"), ("no time for", "long", None)]


def test_an_error_that_the_device_does_not_recover_from_costs_one_process(tmp_path):
    program = tmp_path / "stage.py"
    program.write_text(
        "from tests.gpu_run.program import task\n"
        "asked = task('stage', 'A stage.')\n"
        "def lost():\n"
        "    def give_back(): raise RuntimeError('illegal address')\n"
        "    asked.give_back = give_back\n"
        "asked.run([('lost', 0, lost), ('next', 0, lambda: asked.rows.add('next', 'ran'))])\n"
    )
    command = [sys.executable, "-m", "stage", "--device", "cpu", "--rows", str(tmp_path / "rows")]
    paths = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    done = subprocess.run(command, env=paths, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "illegal address" in done.stderr
    assert [row["what"] for row in read_rows(tmp_path / "rows")] == ["ran"]


def cpu_task(folder: Path) -> Task:
    return Task(Rows(folder / "D.jsonl", "losses"), torch.device("cpu"), tiny=True, end=time.monotonic() + 100)


def test_all_are_trained_on_the_same_text_from_the_same_weights(tmp_path, monkeypatch):
    seen = []

    @contextmanager
    def contestant(example, who, device):
        model, inputs, targets = training.build(example, device)
        weights = torch.cat([p.flatten() for p in model.parameters()])

        def step():
            assert torch.equal(inputs[:, 1:], targets[:, :-1])
            batches.append(inputs.clone())
            return inputs.sum().float()

        seen.append((weights, batches := []))
        yield step

    monkeypatch.setattr(losses, "contestant", contestant)
    cpu_task(tmp_path).run(losses.Losses(cpu_task(tmp_path)).list())
    assert len(seen) == len(losses.WHO)
    assert all(torch.equal(weights, seen[0][0]) for weights, _ in seen)
    assert all(torch.equal(torch.stack(batches), torch.stack(seen[0][1])) for _, batches in seen)
    assert len({tuple(batch.flatten().tolist()) for batch in seen[0][1]}) == 6
    rows = [row for row in read_rows(tmp_path / "D.jsonl") if "gap_to_FP32" in row]
    assert [row["gap_to_FP32"] for row in rows] == [0.0] * len(losses.WHO)


def test_a_model_that_does_not_fit_is_a_result(tmp_path, monkeypatch):
    @contextmanager
    def contestant(example, who, device):
        if who == "O5":
            raise torch.OutOfMemoryError("CUDA out of memory: while it is built")

        def step():
            if who in training.LEVELS:
                return torch.ones(())
            raise RuntimeError("CUDA out of memory: while it is trained")

        yield step

    monkeypatch.setattr(too_large, "contestant", contestant)
    cpu_task(tmp_path).run(too_large.TooLarge(cpu_task(tmp_path)).list())
    found = {row["what"]: row["trains"] for row in read_rows(tmp_path / "D.jsonl")}
    assert found == dict.fromkeys(too_large.WHO, "yes") | dict.fromkeys(("O5", "autocast bfloat16"), "out of memory")


@pytest.mark.slow
def test_bert_has_no_mask_in_a_capture(monkeypatch):
    transformers = pytest.importorskip("transformers", reason="the extra `zoo` has it")
    example, masks, attention = models.bert(tiny=True), [], torch.nn.functional.scaled_dot_product_attention
    spy = lambda *args, **options: masks.append(options["attn_mask"]) or attention(*args, **options)  # noqa: E731
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    model, (ids, _) = example.model(), example.batch(torch.device("cpu"))
    model(ids)
    assert masks == [None, None]
    model.model.config._attn_implementation = "sdpa"
    transformers.BertForMaskedLM(model.model.config)(ids, attention_mask=torch.ones_like(ids))
    del torch.nn.Module.smart_apply  # that transformers adds
    assert masks[-1] is not None, "transformers makes none any more: models.bert needs no attention of its own"


@pytest.mark.parametrize(
    ("output", "code", "expected"),
    [
        ("========= ERROR SUMMARY: 0 errors", 0, ("no errors", False)),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", 0, ("no errors", False)),
        ("========= Invalid __global__ read\n========= ERROR SUMMARY: 3 errors", 0, ("3 errors", True)),
        ("========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)", 0, ("1 errors", True)),
        ("========= Error: Device not supported.", 1, ("refused", False)),
        ("adam", None, ("no verdict in time", True)),
        ("========= ERROR SUMMARY: 0 errors", 1, ("the program failed with status 1", True)),
    ],
)
def test_what_a_sanitizer_says(output, code, expected):
    assert sanitizers.verdict(output, code) == expected


def test_sanitizers_run_side_by_side(tmp_path):
    tool(tmp_path, "compute-sanitizer", 'echo "tool $2"; echo "========= ERROR SUMMARY: 0 errors"')
    rows = tmp_path / "rows"
    subprocess.run(
        [sys.executable, "-m", "tests.gpu_run.sanitizers", "--rows", str(rows)],
        cwd=ROOT,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        check=True,
    )
    assert [(row["what"], row["found"]) for row in read_rows(rows)] == [
        (name, "no errors") for name in sanitizers.TOOLS
    ]


def test_what_the_machine_is_is_said_without_torch(tmp_path, monkeypatch):
    tool(tmp_path, "nvidia-smi", 'case "$*" in *driver*) echo 580.1;; *) echo "H100, 81559";; esac')
    tool(tmp_path, "make", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("COMMIT", "abc")
    said = about()
    assert (said["gpu"], said["driver"], said["commit"]) == ("H100, 81559", "580.1", "abc")
    assert said["programs"] == "make, no g++, no nvcc, no compute-sanitizer"
    assert f"pytest {pytest.__version__}" in said["packages"]
    assert torch.__version__.startswith(said["torch"])


def test_clocks_are_asked_for_while_stages_run(tmp_path, monkeypatch):
    looped = 'case "$*" in *"-l 1"*) while :; do echo "1980, 3201, 650.0, 55, 99, 0x0"; sleep 0.1; done;; esac; '
    tool(tmp_path, "nvidia-smi", looped + 'case "$*" in *throttle*) exit 2;; *) echo 0x0000000000000000;; esac')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    clocks = Clocks()
    clocks.stage = "steps"
    try:
        end = time.monotonic() + 60
        while not (rows := clocks.rows()) and time.monotonic() < end:
            time.sleep(0.01)
    finally:
        clocks.close()
    assert (rows[0]["stage"], rows[0]["SM MHz"], rows[0]["W"]) == ("steps", "1980", "650")


def test_clocks_are_those_under_load():
    samples = [
        ["345", "3201", "80.0", "30", "0", "0x0000000000000001"],
        ["1980", "3201", "650.5", "55", "99", "0x0000000000000004"],
        ["1755", "3201", "[N/A]", "57", "100", "0x0000000000000000"],
        ["1980", "3201", "640.0", "56", "100", "0x0000000000000000"],
    ]
    expected = {"stage": "steps", "samples": 3, "SM MHz": "1980", "memory MHz": "3201", "W": "650", "C": "57"}
    assert summary("steps", samples) == {**expected, "reasons": "0x4"}
    assert summary("steps", [["", "x"]])["SM MHz"] == ""


class FakeQueue:
    """The clocks of torch.cuda, for a device that does its work at once, but waits while it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ms, self.queued_by_host, self.waits = 0.0, True, []
        queue = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = queue.ms

            def query(self):
                return not queue.queued_by_host

            def synchronize(self):
                pass

            def elapsed_time(self, end):
                return end.at - self.at

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.waits.append(cycles))

    def work(self) -> torch.Tensor:
        self.ms += 3.0
        return torch.zeros(())


def test_the_time_of_the_device_is_that_between_the_events(monkeypatch):
    queue = FakeQueue(monkeypatch)
    clock = Clock(torch.device("cuda"))
    assert clock.on_device(queue.work, wait=0.01) == (3.0, True)
    queue.queued_by_host = False
    assert clock.on_device(queue.work, wait=1e-9) == (3.0, False)
    assert queue.waits == [int(0.01 * CYCLES), int(SHORTEST * CYCLES)]
    assert clock.host(queue.work) > 0
    assert clock.back_to_back(queue.work) > 0
    times, _ = timed(queue.work, torch.device("cuda"), count=4)
    assert times == [3.0] * 4
