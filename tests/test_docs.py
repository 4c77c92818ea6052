"""The documents: every block of code in them runs, what they print is what is printed, links lead somewhere."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from amp_engine import amp, kernels
from amp_engine.apex import finder
from amp_engine.ground import messages
from tests.gpu_run import steps

ROOT = Path(__file__).parent.parent
SITE = ROOT / ".ci/site/pages"  # the front page and the API
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *SITE.glob("**/*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """Code between fences."""

    page: Path
    language: str
    heading: str
    line: int
    code: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"

    def run(self, names: dict[str, Any]) -> None:
        exec(compile("\n" * self.line + self.code, self.page, "exec"), names)


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for match in FENCE.finditer(text):
        before = text[: match.start()]
        headings = re.findall(r"^#+ (.*)$", before, re.MULTILINE)
        yield Block(page, match[1], headings[-1] if headings else "", before.count("\n") + 1, match[2])


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
TORCH_AMP = [block for block in BLOCKS if block.page.name == "from_torch_amp.md"]
PYTHON = [block for block in BLOCKS if block.language == "python" and block not in TORCH_AMP]
SHELL = [block for block in BLOCKS if block.language == "sh"]


class Net(nn.Module):
    """The `model` of the documents."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.body(x)))


class MyFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def names_of(folder: Path) -> dict[str, Any]:
    """Return the names that the code of a document uses and does not make."""
    torch.manual_seed(0)
    model, other = Net(), Net()
    optimizer, other_optimizer = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, other))
    batches = [(torch.randn(4, 8), torch.randn(4, 4)) for _ in range(4)]
    return {
        "__name__": "documents",
        "amp": amp,
        "torch": torch,
        "F": F,
        "dist": dist,
        "contextlib": contextlib,
        "get_ema_multi_avg_fn": get_ema_multi_avg_fn,
        "my_module": SimpleNamespace(__name__="my_module", my_layer=lambda x: x, my_loss=lambda x: x),
        "MyFunction": MyFunction,
        "device": "cpu",
        "model": model,
        "optimizer": optimizer,
        "other": other,
        "other_optimizer": other_optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        "scaler": torch.amp.GradScaler("cpu"),
        "loss_fn": nn.MSELoss(),
        "batches": batches,
        "x": batches[0][0],
        "y": batches[0][1],
        "n": 2,
        "path": folder / "checkpoint.pt",
        "writer": SimpleNamespace(add_scalar=lambda name, value, step: None),
    }


def test_every_document_is_looked_at():
    assert {page.name for page in PAGES} >= {"README.md", "training_loop.md", "from_torch_amp.md", "CHANGELOG.md"}
    assert {block.language for block in BLOCKS} == {"diff", "python", "sh", "text"}, "each block says what it is"


# All but those that are made of reports, whose tables are as wide as they are.
@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name not in ("gpu.md", "zoo.md")], ids=lambda page: page.name
)
def test_no_line_is_longer_than_a_window(page):
    assert [number for number, line in enumerate(page.read_text().splitlines(), 1) if len(line) >= 160] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_has_the_marks_of_a_merge(page):
    assert not re.search("^(<{7}|>{7}) ", page.read_text(), re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]*)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_two_pages_have_the_bytes_of_a_step_that_the_benchmark_counts():
    speed, stepping = (
        " ".join((ROOT / "docs" / page).read_text().split()) for page in ("speed.md", "design/stepping.md")
    )
    ours = f"{steps.CHECK + steps.UPDATE['adam']:.0f} bytes a parameter for Adam, with clipping or without"
    assert ours in speed
    for page in (speed, stepping):
        assert re.search(rf"GradScaler,? \D* 52, with clipping {steps.PEER:.0f}\b", page)


# Pictures

PICTURES = ROOT / "docs/pictures"
DRAWN = [path.stem for path in sorted(PICTURES.glob("*.py")) if path.stem not in ("audit", "svg")]  # the audit is slow


def test_each_picture_is_drawn_by_a_script_and_shown_on_a_page():
    drawn = {path.with_suffix(".py").name for path in PICTURES.glob("*.svg")}
    assert drawn == {path.name for path in PICTURES.glob("*.py")} - {"svg.py"}
    for picture in PICTURES.glob("*.svg"):
        assert any(f"pictures/{picture.name})" in page.read_text() for page in PAGES), picture


def words_of(picture: Path) -> str:
    """The words of an SVG, without numbers that differ from machine to machine, and as if no line was wrapped."""
    return re.sub(
        r"[\d.,]+|-{2,}", "#", " ".join(" ".join(re.findall(r">([^<]+)</text>", picture.read_text())).split())
    )


# Each in a fork of one process that has imported what takes seconds.
DRAW = """
import os, runpy, sys
import torch, amp_engine
for script in sys.argv[1:]:
    if (child := os.fork()) == 0:
        runpy.run_path(script, run_name="__main__")
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, script
"""


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all pictures, drawn now."""
    folder = tmp_path_factory.mktemp("pictures")
    for script in PICTURES.glob("*.py"):
        (folder / script.name).write_text(script.read_text())
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    scripts = [str(folder / f"{name}.py") for name in DRAWN]
    subprocess.run([sys.executable, "-c", DRAW, *scripts], env=environment, check=True, timeout=300)
    return folder


@pytest.mark.skipif(not kernels.has_native(torch.device("cpu")), reason="the pictures are of the compiled kernels")
@pytest.mark.parametrize("name", DRAWN)
def test_a_picture_shows_what_the_code_computes_and_prints(name, drawn):
    now, kept = drawn / f"{name}.svg", PICTURES / f"{name}.svg"
    assert words_of(now) == words_of(kept), "draw it again: make pictures"
    if name in ("bits", "memory", "step"):
        assert now.read_text() == kept.read_text(), "draw it again: make pictures"


# Code


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def an_apex_that_goes() -> Iterator[None]:
    environment = dict(os.environ)
    yield
    finder.uninstall()
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture
def checkpoint(tmp_path) -> None:
    """The checkpoint of an earlier run, which the documents load."""
    names = names_of(tmp_path)
    model, optimizer = amp.initialize(names["model"], names["optimizer"], opt_level="O2", verbosity=0)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}
    torch.save(state, names["path"])
    amp.close()


@pytest.fixture
def logger_as_it_was() -> Iterator[None]:
    logger = logging.getLogger("amp_engine")
    handlers = [handler for handler in logger.handlers if isinstance(handler, messages.StdoutHandler)]
    yield
    logger.handlers[:], logger.propagate = handlers, False
    logger.setLevel(logging.INFO)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.usefixtures("one_rank", "an_apex_that_goes", "checkpoint", "logger_as_it_was")
@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_code_runs_and_prints_what_stands_below_it(block, tmp_path, capsys):
    names = names_of(tmp_path)
    if "initialize(" not in block.code:
        level = "O2" if "master" in block.code else "O1"
        amp.initialize(names["model"], names["optimizer"], opt_level=level, verbosity=0)
        names["ddp"] = nn.parallel.DistributedDataParallel(names["model"])
    following = BLOCKS[BLOCKS.index(block) + 1 :][:1]
    block.run(names)
    names.pop("ddp", None)
    below = following and (following[0].page, following[0].heading) == (block.page, block.heading)
    if below and following[0].language == "text":
        assert following[0].code.strip() in capsys.readouterr().out
    assert all(p.isfinite().all() for p in names["model"].parameters())


@pytest.fixture
def clone(tmp_path) -> Path:
    """A folder that a reader may be in: a clone, with a project of theirs."""
    for name in ("examples", "amp_engine", "Makefile"):
        (tmp_path / name).symlink_to(ROOT / name)
    script = names = None
    (readme,) = (block for block in PYTHON if block.page.name == "README.md")
    names = """import sys, torch
    from torch import nn
    torch.manual_seed(0)
    model, loss_fn = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1)), nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [(torch.randn(4, 8), torch.randn(4, 8))]
    """
    scaled = "with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()"  # which `advise` looks for
    script = re.sub(r"^ +", "", names, flags=re.MULTILINE) + readme.code.replace("loss.backward()", scaled)
    for path in ("train.py", "package/train.py", "path/to/project/train.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(script)
    return tmp_path


RAN = {""}  # several pages have the same commands


@pytest.mark.slow
@pytest.mark.parametrize("block", SHELL, ids=str)
def test_commands_run(block, clone):
    binaries = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": binaries, "PYTHONPATH": str(clone), "OMP_NUM_THREADS": "1"}
    for line in block.code.splitlines():
        command = line.partition("#")[0].strip()
        if command.startswith("make "):  # CI runs them
            assert re.search(rf"^{command.split()[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), command
        elif example := re.fullmatch(r"torchrun --standalone --nproc-per-node 2 (examples/\w+\.py)", command):
            assert example[1] in (ROOT / "tests/test_examples.py").read_text(), "run there, in the same way"
        elif command.startswith("torchrun") and "-m amp_engine.apex train.py" in command:
            tested = '"torch.distributed.run", "--standalone", "--nproc_per_node=2"'
            assert tested in (ROOT / "tests/apex/test_run.py").read_text(), "run there, in the same way"
        # An install needs a network.
        elif "pip install" not in command and (kind := re.sub(r" --(json \S+|args|data \S+)", "", command)) not in RAN:
            RAN.add(kind)
            command = re.sub(r"--levels O1,\S+", "--levels O2", command)  # each level is a process
            done = subprocess.run(
                command,
                shell=True,
                cwd=clone,
                env=environment,
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


# torch.amp beside amp_engine


def pairs() -> list[tuple[Block, Block]]:
    return list(zip(TORCH_AMP[::2], TORCH_AMP[1::2], strict=True))


def test_each_habit_is_a_pair_under_one_heading():
    assert len(TORCH_AMP) >= 20
    assert all(torchs.heading == ours.heading and "scale_loss" not in torchs.code for torchs, ours in pairs())


@pytest.mark.parametrize("pair", pairs(), ids=lambda pair: pair[0].heading)
def test_a_habit_of_torch_amp_and_ours_end_in_the_same(pair, tmp_path):
    torchs, ours = (names_of(tmp_path) for _ in pair)
    pair[0].run(torchs)
    before = {name: p.clone() for name, p in ours["model"].state_dict().items()}
    if "amp.initialize(" not in pair[1].code:
        amp.initialize(ours["model"], ours["optimizer"], opt_level="O1", verbosity=0)
    pair[1].run(ours)
    after = ours["model"].state_dict()

    for name, expected in torchs["model"].state_dict().items():
        torch.testing.assert_close(after[name], expected, rtol=1e-2, atol=2e-3)
    results = [
        name for name, value in torchs.items() if isinstance(value, Tensor) and name in ("outputs", "norm", "scale")
    ]
    for name in results:
        torch.testing.assert_close(ours[name].float(), torchs[name].float(), rtol=1e-2, atol=2e-3)
    assert results or any(not torch.equal(before[name], after[name]) for name in after) or "checkpoint" in ours
