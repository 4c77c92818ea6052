"""`python -m amp_engine audit`: an unmodified script, what it prints, and what is said of its steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from amp_engine import __main__ as amp_engine_main
from amp_engine.tools.advice import audit_command, script_audit
from amp_engine.tools.advice.script_audit import ScriptAudit

TRAINS = """
    import sys
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(16)
            self.linear = nn.Linear(16, 16)

        def forward(self, x):
            return self.linear(self.norm(x))

    def main():
        model = Block().bfloat16()
        optimizer = torch.optim.AdamW(model.parameters(), lr=float(sys.argv[1]))
        for i in range(1000):
            optimizer.zero_grad()
            model(torch.randn(4, 16).bfloat16()).float().square().mean().backward()
            optimizer.step()
            if i == 3:
                print("weights", sum(p.double().sum().item() for p in model.parameters()), torch.rand(1).item())
            if i == int(sys.argv[2]):
                raise ValueError("enough of it")
    torch.manual_seed(0)
    main()
    print("the end of the script")
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a script; by Python itself, or by the command and its options. Gives status, output and errors."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    def run(text: str, *arguments: str, options: str | None = None) -> tuple[int, str, str]:
        script = tmp_path / "script.py"
        script.write_text(dedent(text))
        audited = [] if options is None else ["-m", "amp_engine", "audit", *options.split()]
        command = [sys.executable, *audited, str(script), *arguments]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        return ended.returncode, ended.stdout, ended.stderr

    return run


@pytest.mark.slow
def test_a_script_is_ended_after_its_steps_and_nothing_in_it_changes(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "audit.json"
    status, out, err = run(TRAINS, "1e-4", "999", options=f"--steps 6 --every 2 --json {path}")
    assert (status, err) == (0, "The script is stopped after 6 steps; --steps audits more.\n")
    lines = out.splitlines()
    assert lines[0] == run(TRAINS, "1e-4", "3")[1].splitlines()[0]
    assert lines[1] == "Audit of updates"
    assert "the end of the script" not in out
    found = json.loads(path.read_text())
    assert found["optimizers"][0]["steps"] == 6
    assert found["optimizers"][0]["audited"] == 3
    assert {one["name"] for one in found["tensors"]} == {"norm.weight", "norm.bias", "linear.weight", "linear.bias"}
    worst = found["tensors"][0]
    assert (worst["name"], worst["erased"], worst["advice"][-4:]) == ("norm.weight", 1.0, ": O5")
    assert "\nBlock, AdamW, lr 0.0001: " in out
    assert "norm.weight loses most" in " ".join(out.split())


@pytest.mark.slow
def test_of_a_script_that_raises_the_steps_before_are_told(run: Any) -> None:
    status, out, err = run(TRAINS, "1e-4", "4", options="")
    assert status == 1
    assert "ValueError: enough of it" in err
    assert "AdamW: 5 of 5 steps audited" in out


def test_a_script_without_a_step_is_said_to_have_none(run: Any) -> None:
    status, out, err = run("print('hello')", options="")
    assert (status, out) == (1, "hello\n")
    assert "without a step of a torch.optim.Optimizer" in err


def test_a_script_that_fails_before_its_first_step_is_said_to_have_failed(run: Any) -> None:
    status, _, err = run("raise SystemExit(7)", options="")
    assert status == 7
    assert err.endswith("failed before the first step of a torch.optim.Optimizer, with exit status 7.\n")


def test_a_script_that_imports_apex_is_audited(run: Any) -> None:
    script = """
    import torch
    from apex import amp
    model = torch.nn.Linear(4, 2)
    model, optimizer = amp.initialize(model, torch.optim.AdamW(model.parameters()), opt_level="O5", verbosity=0)
    for step in range(2):
        with amp.scale_loss(model(torch.ones(3, 4)).float().sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    """
    status, out, err = run(script, options="")
    assert (status, err) == (0, "")
    assert "AdamW: 2 of 2 steps audited" in out


@pytest.mark.parametrize("package", ["apex", "amp_engine"])
def test_amp_may_be_imported_before_torch_and_a_refusal_is_a_sentence_at_the_scripts_line(
    run: Any, tmp_path: Path, package: str
) -> None:
    script = f"""
    from {package} import amp
    import torch
    model = torch.nn.Linear(4, 2).half()
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O4", verbosity=0)
    """
    status, _, err = run(script, options="")
    assert status == 1
    assert err.startswith(f"{tmp_path / 'script.py'}, line 5: Found param weight with type torch.HalfTensor")
    assert "Traceback" not in err


def test_the_first_step_of_a_script_with_amp_is_audited_before_amp_takes_it(run: Any, tmp_path: Path) -> None:
    script = """
    import torch
    from amp_engine import amp
    torch.manual_seed(0)
    for level, loss_scale in {"O0": 128.0, "O1": 128.0, "O4": None, "O5": None}.items():
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: print(
            "gradients", sum(p.grad.norm().item() > 0 for p in amp.master_params(optimizer))))
        amp.initialize(model, optimizer, opt_level=level, loss_scale=loss_scale, verbosity=0)
        with amp.scale_loss(model(torch.randn(16, 8)).float().square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        amp.close()
    """
    path = tmp_path / "audit.json"
    status, out, err = run(script, options=f"--json {path}")
    assert (status, err) == (0, "")
    assert out.splitlines()[:4] == ["gradients 4"] * 4
    found = json.loads(path.read_text())
    assert [one["audited"] for one in found["optimizers"]] == [1] * 4
    assert len(found["tensors"]) == 4 * 4
    assert all(0 < one["erased"] < 1e-3 and one["never_moved"] == 0 for one in found["tensors"])
    assert "All is well" in out


@pytest.mark.slow
def test_the_package_is_found_where_the_command_found_it(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(dedent(TRAINS))
    told = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-m", "amp_engine", "audit", "--steps", "2", str(tmp_path / "script.py"), "1e-4", "9"]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, cwd=Path(__file__).parents[3], env=told
    )
    assert ended.returncode == 0, ended.stderr
    assert "AdamW: 2 of 2 steps audited" in ended.stdout


@pytest.mark.slow
def test_a_module_and_its_exit_status(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(
        dedent("""
        import torch
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([("w", weight)], lr=0.5)
        weight.sum().backward()
        optimizer.step()
        raise SystemExit(3)
        """)
    )
    command = [sys.executable, "-m", "amp_engine", "audit", "-m", "package.train"]
    root = str(Path(__file__).parents[3])
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert (ended.returncode, ended.stderr) == (3, "")
    assert "All is well" in ended.stdout
    assert "\nw  " in ended.stdout


# In this process.


@pytest.fixture
def audit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Begins an audit, whose hooks and its writing at the end are taken away afterwards."""
    monkeypatch.setattr(script_audit, "atexit", SimpleNamespace(register=lambda function: None))
    begun = []

    def begin(steps: int) -> ScriptAudit:
        begun.append(ScriptAudit(steps, 1, tmp_path))
        return begun[-1]

    yield begin
    for one in begun:
        one._hooks.end()
        one._audit.__exit__()


class Twice(torch.optim.SGD):
    """Steps by an optimizer of its own, and by its base."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params, lr=0.1)
        self.inner = torch.optim.SGD(params, lr=0.1)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        super().step()


def test_all_optimizers_are_followed_and_those_inside_belong_to_them(audit: Any, tmp_path: Path) -> None:
    audited = audit(3)
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizers = [Twice(first.parameters()), torch.optim.Adam(second.parameters())]

    def train() -> None:
        for _ in range(9):
            for one in (first, second):
                one(torch.ones(1, 2)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()

    with pytest.raises(SystemExit) as ended:
        train()
    assert ended.value.code == 0
    audited.write()
    found = json.loads((tmp_path / "audit.json").read_text())
    steps = [(one["class_name"], one["steps"], one["audited"], one["refused"]) for one in found["optimizers"]]
    assert steps == [("Twice", 3, 3, ""), ("Adam", 2, 2, "")]
    assert len(found["tensors"]) == 4
    assert all(one["name"].split(".")[1] in ("weight", "bias") for one in found["tensors"])
    assert all(one["erased"] < 1e-3 for one in found["tensors"])


def test_our_options_stand_before_the_script(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    told: list[Any] = []

    def started(command: list[str], env: dict[str, str]) -> Any:
        told.append((command, json.loads(env["AMP_ENGINE_AUDIT"])))
        return SimpleNamespace(wait=lambda: -9)

    monkeypatch.setattr(audit_command, "subprocess", SimpleNamespace(Popen=started))
    assert amp_engine_main.main(f"audit --steps 3 --every=2 {__file__} --steps 7 --json x".split()) == 128 + 9
    ((command, task),) = told
    assert command[-5:] == [__file__, "--steps", "7", "--json", "x"]
    assert (task["steps"], task["every"]) == (3, 2)
    assert "with exit status 137" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "There is no script to run"),
        ("missing.py", "There is no file 'missing.py'"),
        (f"--steps 0 {__file__}", "--steps 0: expected 1 or more"),
        (f"--every -1 {__file__}", "--every -1: expected 1 or more"),
        (f"--json /missing/x.json {__file__}", "there is no directory /missing"),
        (
            f"--json {Path(__file__).parent} {__file__}",
            "is a directory: type the path of a file, for example audit.json in it",
        ),
    ],
)
def test_a_wrong_command_line_is_told(line: str, said: str, capsys: Any) -> None:
    try:
        status = audit_command.main(line.split())
    except SystemExit as e:
        status = e.code  # type: ignore[assignment]
    assert status == 2
    assert said in capsys.readouterr().err


def test_the_help_shows_the_command_as_it_is_typed_and_its_options(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        amp_engine_main.main(["audit", "--help"])
    out = capsys.readouterr().out
    assert out.startswith("usage: python -m amp_engine audit [options] script.py")
    assert all(option in out for option in ("--steps", "--every", "--json"))
