"""`--fix` adds a line to files that import apex, `--undo` takes it out; all other bytes stay."""

import subprocess
import sys

import pytest

from amp_engine.apex import __main__
from amp_engine.tools.apex_check.fix import LINE

ADDED = LINE.decode() + "\n"
FIXED = {
    "import": ("import torch\n", "from apex import amp\nprint(amp)\n"),
    "one that may ask for apex": ("import os\n", "import transformers\nimport torch\nfrom apex import amp\n"),
    "one that is not run now": (
        "import os\nif TYPE_CHECKING:\n    import timm\ndef plot():\n    import matplotlib\nos.environ['A'] = ''\n",
        "from apex import amp\n",
    ),
    "one within try": ("import os\n", "try:\n    import timm\nexcept ImportError:\n    timm = None\nimport apex\n"),
    "one of the project": ("import numpy as np\n", "from .helpers import f\nfrom apex import amp\n"),
    "no import before it": ("", "import apex\n"),
    "docstring and future": ('"""Trains."""\nfrom __future__ import annotations\n', "import apex.amp as amp\n"),
    "within try": ("import os\n", "try:\n    from apex import amp\nexcept ImportError:\n    amp = None\n"),
    "within a function": ("import os\n", "@print\ndef f():\n    from apex.parallel import LARC\n    return LARC\n"),
    "several lines": ("", "from apex.optimizers import (\n    FusedAdam,\n    FusedLAMB,\n)\n"),
    "two on a line": ("x = 1\n", "import os; from apex import amp\n"),
    "behind a string": ("", 'x = """\n"""; import apex\n'),
    "a test before it": ("import importlib.util\n", "has = importlib.util.find_spec('apex')\nimport apex\n"),
    "by name": ("import importlib\n", "amp_C = importlib.import_module('amp_C')\n"),
    "no last newline": ("x = 1\n", "import apex"),
}
LEFT = {
    "no apex": "import torch\nprint('apex')\n",
    "one of its own": "from .apex import amp\nfrom amp_engine import amp\nfrom myapex import apex\n",
    "the line is there": "import amp_engine.apex.install\nfrom apex import amp\n",
    "installed by a call": "from amp_engine.apex.finder import install\ninstall(children=True)\nimport apex\n",
}


def run(*arguments):
    return __main__.main([str(argument) for argument in arguments])


@pytest.mark.parametrize(("before", "behind"), FIXED.values(), ids=FIXED)
def test_the_line_stands_before_the_first_use_and_undo_gives_the_bytes_back(before, behind, tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text(before + behind)
    for _ in range(2):  # the second time there is nothing to do
        assert run("--fix", tmp_path) == 0
        assert path.read_text() == before + ADDED + behind
    assert f"+{ADDED}" in capsys.readouterr().out
    assert run("--undo", tmp_path) == 0
    assert path.read_text() == before + behind
    assert f"-{ADDED}" in capsys.readouterr().out


@pytest.mark.parametrize("source", LEFT.values(), ids=LEFT)
def test_files_that_import_no_apex_or_have_a_line_are_left(source, tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text(source)
    assert run("--fix", path) == run("--undo", path) == 0
    assert path.read_text() == source
    assert capsys.readouterr().out == "0 files changed.\n" * 2


def test_other_bytes_stay_as_they_are(tmp_path):
    source = "# coding: latin-1\r\nname = 'Jos\xe9'\r\nfrom apex import amp\r\n\x0cx = 1\r\n".encode("latin-1")
    path = tmp_path / "train.py"
    path.write_bytes(source)
    path.chmod(0o755)
    assert run("--fix", path) == 0
    assert path.read_bytes() == source.replace(b"from apex", LINE + b"\r\nfrom apex")
    assert path.stat().st_mode & 0o777 == 0o755
    assert run("--undo", path) == 0
    assert path.read_bytes() == source


@pytest.mark.parametrize(
    ("name", "source", "why"),
    [
        ("train.ipynb", '{"cells": [], "x": "apex"}', "a notebook is left as it is: put"),
        ("train.py", "print 'apex'\n", "cannot be read: "),
        ("train.py", "from __future__ import annotations; import apex\n", "is left as it is: put"),
    ],
)
def test_a_file_that_cannot_have_the_line_is_left_and_named(name, source, why, tmp_path, capsys):
    (tmp_path / name).write_text(source)
    other = tmp_path / "other.py"
    other.write_text("import apex\n")
    assert run("--fix", tmp_path) == 1
    assert f"{tmp_path / name}: {why}" in capsys.readouterr().err
    assert (tmp_path / name).read_text() == source
    assert other.read_text() == ADDED + "import apex\n"


def test_a_missing_path_changes_nothing(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text("import apex\n")
    assert run("--fix", path, tmp_path / "other") == 2
    assert path.read_text() == "import apex\n"
    assert "python -m amp_engine.apex --fix PATH" in capsys.readouterr().err
    assert run("--undo") == 2
    assert "--undo needs files" in capsys.readouterr().err


def test_a_program_runs_with_the_line(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("from apex import amp\nprint(amp.__name__)\n")
    assert run("--fix", path) == 0
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=True)
    assert done.stdout == "amp_engine.apex.amp\n"
