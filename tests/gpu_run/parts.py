"""The parts of `make gpu`, each a command of at most ten minutes: which stages run in it, most valuable first."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from tests.gpu_run.stages import Stage

# Another machine has other versions: what pytest does not know there is no error, and neither is a warning.
PYTEST = ("-m", "pytest", "-m", "cuda", "-v", "--durations=10", "-p", "no:cacheprovider", "-o", "addopts=", "-ra")
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
        limit: seconds, of the command as a whole.
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

    def module(part: str, name: str) -> list[str]:
        return [sys.executable, "-m", f"tests.gpu_run.{name}", "--rows", str(folder / f"{part}.jsonl"), *tiny]

    def build(part: str) -> Stage:
        code = ["-c", "print('nothing is compiled for a stand-in')"]
        return Stage("build", [sys.executable, *code] if simulated else module(part, "build"), 170)

    side_by_side = ["-p", "xdist.plugin", "-n", str(PROCESSES)] if find_spec("xdist") and not simulated else []

    def tests(*which: str) -> list[str]:
        return [sys.executable, *PYTEST, *side_by_side, *lenient, *which]

    plain_tests = [str(TESTS / "gpu" / name) for name in PLAIN]
    return [
        Part(
            "A",
            "the machine, small cases of every kernel, the tests, the host's time",
            580,
            (
                build("A"),
                Stage("smoke", module("A", "small"), 40, {"CUDA_LAUNCH_BLOCKING": "1"}),  # an error names its kernel
                Stage("tests", tests(*marked_cuda()), 190, on_device),
                Stage("host", module("A", "host"), 80, takes_the_rest=True),
            ),
        ),
        Part(
            "B",
            "the bandwidth of check and update, steps beside other optimizers' steps",
            520,
            (
                build("B"),
                Stage("steps", module("B", "steps"), 240, takes_the_rest=True),
                Stage("counters", module("B", "counters"), 70, takes_the_rest=True),
            ),
        ),
        Part(
            "C",
            "training at every level beside autocast: speed, memory, losses",
            570,
            (
                build("C"),
                Stage("training", module("C", "training"), 270, takes_the_rest=True),
                Stage("losses", module("C", "losses"), 90, takes_the_rest=True),
            ),
        ),
        Part(
            "D",
            "the sanitizers, and all without compiled kernels",
            520,
            (
                build("D"),
                Stage("sanitizers", module("D", "sanitizers"), 120, takes_the_rest=True),
                Stage("plain tests", tests(*plain_tests), 110, {**on_device, **plain}),
                Stage("plain host", module("D", "host"), 70, plain, takes_the_rest=True),
            ),
        ),
    ]
