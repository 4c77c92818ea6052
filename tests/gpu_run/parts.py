"""The parts of `make gpu`, most valuable first: which stages run in each, for how long.

A to E are what a GPU that is lent for a quarter of an hour is asked, with a minute and a half for its start.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from tests.gpu_run.stages import Stage

# Another machine has other versions: what pytest does not know there is no error, and neither is a warning.
PYTEST = ("-m", "pytest", "-m", "cuda", "-v", "--durations=10", "-p", "no:cacheprovider", "-o", "addopts=", "-ra")
LENT = "ABCDE"
PROCESSES = 6  # of pytest-xdist where it is installed, each with a context of its own on the GPU
LENIENT = ("-W", "default", "--tb=short")
TESTS = Path(__file__).parent.parent
# What is held without compiled kernels: bits are the CPU's with kernels only.
PLAIN = ("test_levels.py", "test_checkpoints.py")


@dataclass(frozen=True)
class Part:
    """Stages that run in one command.

    Attributes:
        name: a letter.
        about: what is found out.
        limit: seconds, of the stages without the build and with what it takes to end those that do not listen.
        stages: what is run.
    """

    name: str
    about: str
    limit: int
    stages: tuple[Stage, ...]


def marked_cuda() -> list[str]:
    """The files with tests that are marked so, wherever they are; without an import of the others."""
    return sorted(str(path) for path in TESTS.rglob("test_*.py") if "pytest.mark.cuda" in path.read_text())


def parts(folder: Path, simulated: bool) -> list[Part]:
    """Return all parts, in order; `simulated`: tiny, on the CPU. Results of part A go to A.jsonl in the folder."""
    tiny = ["--device", "cpu", "--tiny"] if simulated else []
    lenient = [*LENIENT, *["--cases", "one"] * simulated]
    # Without a GPU the tests are to fail, not to try another device.
    on_device = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "GPU_TESTS": "stand-in" if simulated else "gpu"}
    plain = {"AMP_ENGINE_BUILD": "none"}
    blocking = {"CUDA_LAUNCH_BLOCKING": "1"}  # an error names its kernel

    def module(part: str, name: str) -> list[str]:
        return [sys.executable, "-m", f"tests.gpu_run.{name}", "--rows", str(folder / f"{part}.jsonl"), *tiny]

    def part(name: str, about: str, limit: int, *stages: Stage) -> Part:
        code = [sys.executable, "-c", "print('nothing is compiled for a stand-in')"]
        build = Stage("build", code if simulated else module(name, "build"), 170, 10, apart=True)
        return Part(name, about, limit, (build, *stages))

    def measure(part: str, name: str, limit: int, expected: int, environment: dict[str, str] | None = None) -> Stage:
        stage_name = f"plain {name}" if environment else name
        return Stage(stage_name, module(part, name), limit, expected, environment or {}, takes_the_rest=True)

    side_by_side = ["-p", "xdist.plugin", "-n", str(PROCESSES)] if find_spec("xdist") and not simulated else []

    def tests(*which: str) -> list[str]:
        return [sys.executable, *PYTEST, *side_by_side, *lenient, *which]

    return [
        part(
            "A",
            "small cases of every kernel, the tests, the host's time, launches and waits",
            155,
            Stage("smoke", module("A", "small"), 15, 5, blocking),
            Stage("tests", tests(*marked_cuda()), 300 if simulated else 80, 50, on_device),
            measure("A", "host", 30, 30),
        ),
        part(
            "B",
            "steps in 36 to 14 bytes a parameter beside other optimizers' and a copy",
            135,
            measure("B", "steps", 125, 85),
        ),
        part(
            "C",
            "training of BERT, ResNet-50 and GPT beside autocast: eager, compiled, as a graph; speed and memory",
            175,
            measure("C", "training", 165, 150),
        ),
        part(
            "D",
            "losses of a GPT of 124M parameters on text, in FP32, at O5 in less and less memory, in pure bfloat16",
            160,
            measure("D", "losses", 150, 115),
        ),
        part(
            "E",
            "a model whose state in FP32 does not fit, with masters on the CPU",
            120,
            measure("E", "too_large", 110, 60),
        ),
        part(
            "F",
            "the sanitizers, and all without compiled kernels; not within the quarter of an hour",
            340,
            Stage("sanitizers", module("F", "sanitizers"), 120, 45, takes_the_rest=True),
            Stage(
                "plain tests", tests(*(str(TESTS / "gpu" / name) for name in PLAIN)), 110, 40, {**on_device, **plain}
            ),
            measure("F", "host", 70, 15, plain),
        ),
    ]


def plan(every: Sequence[Part]) -> str:
    """The seconds of each part and stage, as expected on an H200 and at most."""
    lines = []
    for part in every:
        stages = ", ".join(f"{stage.name} {stage.expected}" for stage in part.stages)
        lines.append(f"{part.name}  at most {part.limit:3} s  {stages}\n   {part.about}")
    lent = [part for part in every if part.name in LENT]
    build, *_ = lent[0].stages
    expected = build.expected + sum(stage.expected for part in lent for stage in part.stages[1:])
    most = build.expected + sum(part.limit for part in lent)
    lines.append(f"{lent[0].name} to {lent[-1].name}, one build that finds its files: {expected} s, at most {most} s")
    return "\n".join(lines)
