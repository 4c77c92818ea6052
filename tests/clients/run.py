"""Train through third-party programs: `make clients`, `make clients ARGS="timm lightning"`, or `ARGS="--turn 7"`.

Some know apex, and are unmodified; others train through `amp_engine.integrations`; in those of one_line_*.py one line,
`model, optimizer = amp.initialize(model, optimizer, opt_level="O5")`, gives masters to a model that came in bfloat16;
in their variants that end with later, and in those that have no such variant, it is `amp.initialize(model,
opt_level="O5")`, and the trainer makes the optimizer.

Each has an environment in build/clients, those of today's frameworks one together, with pinned packages and the
amp_engine of this tree, and trains a small model on the CPU at every level that it supports, by `python -m
amp_engine.apex program.py`; variants that begin with `ranks` on two ranks, by torchrun. A row is one such run:

* O0 has to learn;
* O1 and O2 have to follow its losses within 0.01, O4 and O5, in bfloat16, within 0.05; O3 has to stay finite;
* plain bfloat16, in one_line_*.py, has to leave them by more than 0.05, as a control: its small updates are lost;
* training resumed from the client's own checkpoint has to repeat the losses of the run that was not, bit for bit, and
  to find the loss scale and the count of clean steps where the client saves them.

The exit status is 1 if one of these fails; logs and results.json are in build/clients.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BUILD = ROOT / "build" / "clients"
PIP = "pip==24.0"  # later ones refuse the metadata of pytorch-lightning 1.9.5

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
LIMITS = {"O1": 0.01, "O2": 0.01, "O4": 0.05, "O5": 0.05}  # of the difference to O0, at every step
DYNAMIC_LEVELS = ("O1", "O2")  # whose loss scale depends on the count of clean steps
LATER_LEVELS = ("O0", "O4", "O5")  # of the variants that end with later
PLAIN = "bfloat16"  # without amp_engine, where updates are lost
LEARNT = 0.9  # the mean of the last LAST losses is below this times the mean of the first
LAST = 8
TIMEOUT = 600  # seconds

SETTINGS = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    # pytorch-lightning 1.9 and mmengine 0.10 are older than torch.load's weights_only=True.
    "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",
}


class ClientError(Exception):
    """An install or a run failed; the message is for the table."""


@dataclass(frozen=True)
class Client:
    """A third-party program: its environment, and the program of ours that trains through it.

    Attributes:
        name: of its requirements and of its folder below build/clients.
        program: beside this file.
        saves_scaler: whether its checkpoints hold amp's state.
        variants: other ways through it, for the program's `--variant`.
        levels: at which it is resumed and, with O0, at which the variants train; without any these train as it does.
        resumes: the variants that are resumed at these levels, or at O5.
        drawn: variants whose losses depend on tokens that the model draws: at each level they have to learn.
        trained: the levels at which it trains without a variant.
        environment: of its requirements, if they are not of its own name.
    """

    name: str
    program: str
    saves_scaler: bool
    variants: tuple[str, ...] = ()
    levels: tuple[str, ...] = ("O1", "O2")
    drawn: tuple[str, ...] = ()
    trained: tuple[str, ...] = LEVELS
    environment: str = ""
    resumes: tuple[str, ...] = ("",)

    @property
    def folder(self) -> Path:
        return BUILD / self.name

    @property
    def requirements(self) -> str:
        return self.environment or self.name

    @property
    def python(self) -> Path:
        return BUILD / self.requirements / ".venv" / "bin" / "python"


def integrated(name: str, program: str, *variants: str, drawn: tuple[str, ...] = ()) -> Client:
    """A client that trains through `amp_engine.integrations`."""
    return Client(name, program, True, variants, DYNAMIC_LEVELS, drawn, environment="frameworks")


def one_line(name: str, *variants: str, is_resumed: bool = True) -> Client:
    """A client of one_line_*.py, whose variants that end with later are resumed; "" is where it has other variants."""
    program = f"one_line_{name}"
    levels = ("O5",) if variants else ()
    variants = ("later", *variants)
    resumes = tuple(one for one in ("", *variants) if is_resumed and (one.endswith("later") or (levels and not one)))
    return Client(program, f"{program}.py", False, variants, levels, (), ("O0", "O5", PLAIN), "frameworks", resumes)


def later(name: str, *variants: str, drawn: tuple[str, ...] = (), resumes: tuple[str, ...] = ("",)) -> Client:
    """A client of one_line_*.py whose optimizers are all made after the line."""
    program = f"one_line_{name}"
    levels = (*LATER_LEVELS, PLAIN)
    return Client(program, f"{program}.py", False, variants, (), drawn, levels, "frameworks", resumes)


CLIENTS = (
    Client("transformers", "transformers_trainer.py", saves_scaler=False, variants=("adamw_apex_fused",)),
    Client("lightning", "lightning_trainer.py", saves_scaler=True, variants=("manual",)),
    Client("mmengine", "mmengine_runner.py", saves_scaler=True),
    Client("art", "art_classifier.py", saves_scaler=False, variants=("adversarial",)),
    Client("deepillusion", "deepillusion_epochs.py", saves_scaler=True),
    # Its optimizers refuse groups that hold masters instead of the model's parameters, as at O2 and O5.
    Client("classy", "classy_task.py", True, ("larc",), ("O1", "O4"), trained=("O0", "O1", "O3", "O4")),
    # Through timm's ApexScaler, but for the variants that begin with scaler.
    integrated("timm", "timm_scaler.py", "agc", "scaler_norm", "scaler_value", "scaler_agc"),
    integrated("accelerate", "accelerate_loop.py", "value", "ranks"),
    integrated("diffusers", "diffusers_unet.py"),
    integrated("lightning2", "lightning_precision.py", "manual", "fabric", "ranks"),
    integrated("trainer", "amp_trainer.py", "seq2seq", "ranks", "compile", "checkpointing"),
    integrated("trl", "trl_trainers.py", "dpo", "grpo", drawn=("grpo",)),
    one_line("accelerate", "prepared", "ranks", "ranks_prepared", "ranks_later"),
    one_line("trainer", "create_optimizer", "callback", "ranks_later"),
    one_line(
        "lightning", "configure_optimizers", "manual", "manual_later", "fabric", "fabric_prepared", "fabric_later"
    ),
    one_line("ignite"),
    one_line("monai"),
    one_line("skorch"),
    one_line("fastai"),
    # Its trainer reads a checkpoint's weights into a new model, in bfloat16.
    one_line("sentence", is_resumed=False),
    later("trl", "dpo", "grpo", drawn=("grpo",), resumes=("", "dpo")),
    later("timm"),
    later("diffusers"),
)


@dataclass(frozen=True)
class Run:
    """One process: a client at a level, from the start or from the checkpoint of the run that was."""

    client: Client
    variant: str
    level: str
    resumed: bool = False

    @property
    def folder(self) -> Path:
        words = [self.variant, self.level, "resumed" * self.resumed]
        return self.client.folder / "-".join(word for word in words if word)

    @property
    def resumed_from(self) -> Run:
        """The run whose checkpoint a resumed run takes."""
        return replace(self, resumed=False)


@dataclass
class Row:
    """The result of a run. `complaint` is empty where all is well."""

    client: str
    version: str
    level: str
    first: float
    last: float
    difference: float
    seconds: float
    complaint: str = ""

    def __str__(self) -> str:
        numbers = f"{self.first:8.4f} {self.last:8.4f} {self.difference:10.1e} {self.seconds:5.0f}"
        return f"{self.client:31} {self.version:8} {self.level:11} {numbers}  {self.complaint or 'ok'}"


HEADER = f"{'client':31} {'version':8} {'level':11} {'first':>8} {'last':>8} {'to O0':>10} {'s':>5}  ok"


def main(arguments: Sequence[str] | None = None) -> int:
    """Install, run, print the table. Returns the exit status."""
    names = [client.name for client in CLIENTS]
    parser = argparse.ArgumentParser(
        prog="python -m tests.clients.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("clients", nargs="*", metavar="client", help=f"default: {' '.join(names)}")
    parser.add_argument("--torch", default="torch==2.13.0", help="arguments for pip; default: %(default)s")
    parser.add_argument("--turn", type=int, metavar="N", help="of the clients, variants and levels the N-th, after O0")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="at a time; default: %(default)s")
    options = parser.parse_args(arguments)
    if unknown := set(options.clients) - set(names):
        parser.error(f"no client {', '.join(sorted(unknown))}: there are {', '.join(names)}")

    started = time.perf_counter()
    clients = [client for client in CLIENTS if client.name in (options.clients or names)]
    wanted = list(all_runs(clients))
    if options.turn is not None:
        wanted = one_turn(wanted, options.turn)
        clients = [wanted[0].client]
    BUILD.mkdir(parents=True, exist_ok=True)
    rows = []
    with ThreadPoolExecutor(options.jobs) as pool:
        wheel = build_wheel()
        needed = dict.fromkeys(client.requirements for client in clients)
        installs = {name: pool.submit(install, name, wheel, options.torch) for name in needed}
        runs: dict[Run, Future[dict[str, Any]]] = {}
        for run in wanted:
            needs: list[Future[Any]] = [installs[run.client.requirements]]
            if run.resumed:
                needs.append(runs[run.resumed_from])
            runs[run] = pool.submit(train, run, needs)
        print(HEADER, flush=True)
        for run in runs:
            rows.append(judge(run, runs))
            print(rows[-1], flush=True)
    failures = [row for row in rows if row.complaint]
    (BUILD / "results.json").write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    seconds = time.perf_counter() - started
    print(f"\n{len(rows) - len(failures)} of {len(rows)} rows ok; {seconds:.0f} s in all; logs in {BUILD}.")
    return 1 if failures else 0


def all_runs(clients: Sequence[Client]) -> Iterator[Run]:
    """Every run, each after those that it is compared with or resumed from."""
    for client in clients:
        for variant in ("", *client.variants):
            levels = ("O0", *client.levels) if variant and client.levels else client.trained
            for level in LATER_LEVELS if variant.endswith("later") else levels:
                yield Run(client, variant, level)
        for variant in client.resumes:
            for level in client.levels or ("O5",):
                yield Run(client, variant, level, resumed=True)


def one_turn(runs: Sequence[Run], turn: int) -> list[Run]:
    """A run at another level than O0, after the one at O0, and its resume; the next turn has the next."""
    turns = [run for run in runs if run.level != "O0" and not run.resumed]
    chosen = turns[turn % len(turns)]
    resumed = Run(chosen.client, chosen.variant, chosen.level, resumed=True)
    return [Run(chosen.client, chosen.variant, "O0"), chosen, *[run for run in runs if run == resumed]]


def build_wheel() -> Path:
    """amp_engine as a wheel, from a copy: setuptools would pack what an earlier build has left in the tree."""
    source = BUILD / "source"
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(ROOT / "amp_engine", source / "amp_engine", ignore=shutil.ignore_patterns("_C.*", "__pycache__"))
    for name in ("LICENSE", "README.md", "pyproject.toml", "setup.py", "toolchain.py"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(source), str(source)]
    call(command, BUILD / "wheel.log", AMP_ENGINE_BUILD="none")
    return next(source.glob("*.whl"))


def install(name: str, wheel: Path, torch: str) -> None:
    """The environment of these requirements, made once; amp_engine in it, each time anew."""
    requirements = HERE / f"requirements-{name}.txt"
    wanted = f"{sys.version}\n{PIP}\n{torch}\n{requirements.read_text()}"
    folder = BUILD / name
    stamp, python, log = folder / ".venv" / ".installed", folder / ".venv" / "bin" / "python", folder / "install.log"
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    folder.mkdir(exist_ok=True)
    if not stamp.exists() or stamp.read_text() != wanted or not python.exists():
        call([sys.executable, "-m", "venv", "--clear", str(folder / ".venv")], log)
        call([*pip, PIP], log)
        call([*pip, *shlex.split(torch)], log)
        call([*pip, "--requirement", str(requirements)], log)
        stamp.write_text(wanted)
    call([*pip, "--no-deps", "--force-reinstall", str(wheel)], log)
    # The kernels that are compiled for the tree: a minute for each environment, saved.
    package = next(folder.glob(".venv/lib/python*/site-packages/amp_engine"))
    for file in (ROOT / "amp_engine").glob("_C.*"):
        shutil.copy(file, package)


def train(run: Run, needs: Sequence[Future[Any]]) -> dict[str, Any]:
    """The record that the program printed, with the seconds it took, once `needs` are done. Raises ClientError."""
    for needed in needs:
        needed.result()
    shutil.rmtree(run.folder, ignore_errors=True)
    run.folder.mkdir(parents=True)
    command = [str(run.client.python), "-m"]
    if run.variant.startswith("ranks"):
        command += ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    command += ["amp_engine.apex", str(HERE / run.client.program), "--level", run.level, "--out", str(run.folder)]
    if run.variant:
        command += ["--variant", run.variant]
    if run.resumed:
        command += ["--resume", str(run.resumed_from.folder)]
    log = run.folder / "log.txt"
    started = time.perf_counter()
    call(command, log, cwd=run.folder)
    seconds = time.perf_counter() - started
    try:
        return {**json.loads(log.read_text().splitlines()[-1]), "seconds": seconds}
    except (IndexError, ValueError):
        raise ClientError(f"the program printed no record: {log}") from None


def call(command: Sequence[str], log: Path, cwd: Path = BUILD, **variables: str) -> None:
    """Run a command with its output in `log`. Raises ClientError with the last line of it."""
    environment = {**os.environ, **SETTINGS, **variables}
    environment.pop("PYTHONPATH", None)
    with log.open("w") as file:
        try:
            code = subprocess.run(
                command, cwd=cwd, env=environment, stdout=file, stderr=subprocess.STDOUT, timeout=TIMEOUT
            ).returncode
        except subprocess.TimeoutExpired:
            raise ClientError(f"stopped after {TIMEOUT} s: {log}") from None
    if code:
        lines = log.read_text().split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "no output")
        raise ClientError(f"exit status {code}, {last.strip()[:200]}: {log}")


def judge(run: Run, runs: dict[Run, Future[dict[str, Any]]]) -> Row:
    """The row of a run, once it and the runs that it is compared with are done."""
    name = f"{run.client.name}, {run.variant}" if run.variant else run.client.name
    row = Row(name, "", run.level + ", resumed" * run.resumed, math.nan, math.nan, math.nan, math.nan)
    try:
        record = runs[run].result()
        row.version, row.seconds, losses = record["version"], record["seconds"], record["losses"]
        row.first, row.last = losses[0], losses[-1]
        baseline = runs[Run(run.client, run.variant, "O0")].result()["losses"][-len(losses) :]
        differences = [abs(a - b) for a, b in zip(losses, baseline, strict=True)]
        row.difference = max(differences) if all(map(math.isfinite, losses)) else math.nan
        if run.resumed:
            row.complaint = judge_resumed(run, record, runs[Run(run.client, run.variant, run.level)].result())
        else:
            level = "O0" if run.variant in run.client.drawn and run.level != PLAIN else run.level
            row.complaint = judge_losses(level, losses, row.difference)
    except ClientError as error:
        row.complaint = str(error)
    except ValueError:
        row.complaint = f"{len(losses)} losses, {len(baseline)} at O0"
    return row


def judge_losses(level: str, losses: Sequence[float], difference: float) -> str:
    """Complaint about the losses of a run from the start; empty if there is none."""
    bad = [step for step, loss in enumerate(losses) if not math.isfinite(loss)]
    if bad:
        return f"loss {bad[0]} of {len(losses)} is {losses[bad[0]]}"
    first, last = sum(losses[:LAST]) / LAST, sum(losses[-LAST:]) / LAST
    if level == "O0" and last > LEARNT * first:
        return f"it does not learn: the loss goes from {first:.4f} to {last:.4f}"
    if level != "O0" and difference == 0:
        return "the losses are those of O0 to the last bit: nothing ran in low precision"
    if level == PLAIN and difference <= LIMITS["O5"]:
        return f"the losses are within {LIMITS['O5']} of O0 without masters: the updates are not small"
    if difference > LIMITS.get(level, math.inf):
        return f"the losses are up to {difference:.4f} away from O0, allowed are {LIMITS[level]}"
    return ""


def judge_resumed(run: Run, record: dict[str, Any], whole: dict[str, Any]) -> str:
    """Complaint about a run from a checkpoint, compared with the run that wrote it; empty if there is none."""
    losses = record["losses"]
    if not 0 < len(losses) < len(whole["losses"]):
        return f"{len(losses)} losses after the checkpoint, {len(whole['losses'])} in all"
    rest = whole["losses"][-len(losses) :]
    different = [step for step, (a, b) in enumerate(zip(losses, rest, strict=True)) if a != b]
    if different:
        step = different[0]
        return f"loss {step} after the checkpoint is {losses[step]!r}, without a resume {rest[step]!r}"
    if run.client.saves_scaler:
        saved, restored = whole["saved"], record["restored"]
        counts = run.level in DYNAMIC_LEVELS
        if saved is None or saved != restored or (counts and saved["unskipped"] == 0):
            return f"the scaler was saved as {saved} and restored as {restored}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
