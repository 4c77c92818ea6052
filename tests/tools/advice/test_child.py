"""A trial in the process of a script, before the script runs: modules that stand in for torch, numpy and amp_engine."""

from __future__ import annotations

import shutil
import time
from textwrap import dedent

import pytest

from amp_engine.tools.advice import running
from amp_engine.tools.advice.records import Task, Trial

# Each writes down what it is told.
MODULES = {
    "torch.py": "seeds = []\nmanual_seed = seeds.append",
    "numpy/__init__.py": "",
    "numpy/random.py": "seeds = []\nseed = seeds.append",
    "amp_engine/__init__.py": "",
    "amp_engine/tools/advice/__init__.py": "",
    "amp_engine/tools/advice/script_trial.py": "tasks = []\nbegin = tasks.append",
}
TOLD = """
import sys, importlib, importlib.util

def check(after=""):
    import torch, numpy.random, amp_engine.tools.advice.script_trial
    assert torch.seeds == [7], (after, torch.seeds)
    assert numpy.random.seeds == [7], (after, numpy.random.seeds)
    assert [task["level"] for task in amp_engine.tools.advice.script_trial.tasks] == ["O2"], after
    for name in ("torch", "numpy", "amp_engine"):
        module = sys.modules[name]
        assert module.__loader__ is module.__spec__.loader
        assert type(module.__loader__).__name__ == "SourceFileLoader"
"""


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """Runs a script beside the modules; fails with what it printed."""
    for name, text in MODULES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    child = tmp_path / "amp_engine" / "advice" / "child"  # from where it finds the stand-ins
    shutil.copytree(running._CHILD, child)
    monkeypatch.setattr(running, "_CHILD", str(child))
    monkeypatch.setattr(running.finder, "add_children", lambda environment, replace: None)  # finds the real amp_engine

    def run(text: str) -> None:
        (tmp_path / "script.py").write_text(TOLD + dedent(text))
        trial = running.run_in_process(["script.py"], Task("O2", 3, time.monotonic() + 300, seed=7))
        assert trial == Trial("O2"), trial.error

    return run


def test_each_is_told_once_after_its_import(ran):
    ran("""
        check()
        importlib.reload(sys.modules["torch"])
        assert sys.modules["torch"].seeds == []
    """)


def test_a_script_that_imports_torch_alone_has_a_trial(ran):
    ran("""
        import torch
        assert sys.modules["amp_engine.tools.advice.script_trial"].tasks[0]["level"] == "O2"
        check()
    """)


def test_looking_for_a_module_before_its_import_loses_nothing(ran):
    ran("""
        for name in ("torch", "numpy", "amp_engine") * 2:
            assert importlib.util.find_spec(name).origin.endswith(".py")
            assert name not in sys.modules
        check()
    """)


def test_a_finder_that_asks_all_finders_is_answered(ran):
    ran("""
        class Asks:
            asked = []
            def find_spec(self, name, path=None, target=None):
                self.asked.append(name)
                specs = (other.find_spec(name, path, target) for other in sys.meta_path if other is not self)
                return next(filter(None, specs), None)
        sys.meta_path.insert(1, Asks())
        check()
        assert "torch" in Asks.asked
    """)


def test_an_import_that_raises_tells_nothing_and_the_next_one_does(ran):
    ran("""
        source = open("torch.py").read()
        text = "import builtins\\nbuiltins.told = []\\nmanual_seed = builtins.told.append\\n"
        open("torch.py", "w").write(text + "raise ImportError('no such library')")
        try:
            import torch
        except ImportError as e:
            assert str(e) == "no such library"
        else:
            raise AssertionError("imported")
        assert told == []  # of builtins
        open("torch.py", "w").write(source)
        importlib.invalidate_caches()
        check()
    """)


def test_a_lazy_module_is_told_once_it_is_loaded(ran):
    ran("""
        spec = importlib.util.find_spec("torch")
        spec.loader = importlib.util.LazyLoader(spec.loader)
        module = sys.modules["torch"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        assert module.seeds == [7]
    """)
