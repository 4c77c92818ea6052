"""Messages are records of the logger `amp_engine`, by default lines on stdout; warnings have their own categories."""

from __future__ import annotations

import io
import logging
import pickle
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from amp_engine import AmpGradientWarning, AmpRuntimeWarning, AmpWarning, Engine, amp
from amp_engine.apex.fp16_utils import FP16_Optimizer
from amp_engine.ground import messages
from amp_engine.kernels import _native
from amp_engine.levels.report import Reporter
from tests.models import MLP
from tests.support import FUNCTION_LEVELS, train

ROOT = Path(__file__).parents[2]


class Kept(logging.Handler):
    """An application's handler."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def levels(self) -> dict[str, str]:
        """The first words of each message, with its level."""
        return {" ".join(r.getMessage().split()[:2]): r.levelname for r in self.records}


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("amp_engine")
    before = ours(logger), logger.level, logger.propagate, logger.disabled
    yield logger
    logger.handlers[:], level, logger.propagate, logger.disabled = before
    logger.setLevel(level)


def ours(logger: logging.Logger) -> list[logging.Handler]:
    """The handlers without those of pytest."""
    return [handler for handler in logger.handlers if isinstance(handler, messages.StdoutHandler)]


@pytest.fixture
def kept(logger: logging.Logger) -> Kept:
    kept = Kept()
    logger.addHandler(kept)
    return kept


def pair(**keywords: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = MLP.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, **keywords)
    return model, optimizer


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_message_is_wrapped_where_it_goes_to_a_terminal_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"Gradient overflow.  Skipping step\n  {'the first of them is ' * 12}end"
    written = []
    for stream in (io.StringIO(), Terminal()):
        monkeypatch.setattr("sys.stdout", stream)
        messages.say(text)
        written.append(stream.getvalue().splitlines())
    assert written[0] == text.splitlines()
    first, *lines = written[1]
    assert first == "Gradient overflow.  Skipping step"
    assert max(map(len, lines)) <= messages.COLUMNS
    assert len(lines) == 3
    assert lines[0].startswith("  the")
    assert all(line.startswith("      ") for line in lines[1:])
    assert " ".join(" ".join(lines).split()) == text.splitlines()[1].strip()


NAMES = {"O1": "float16", "O2": "float16", "O3": "float16", "O4": "bfloat16", "O5": "bfloat16"}


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what the CPU can do, for an engine that has noted nothing yet."""
    amp.replace_engine(Engine())
    monkeypatch.setattr("amp_engine.initialization.arguments.missing", lambda device: None)  # which is a note, too
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    return lambda *flags: monkeypatch.setattr("amp_engine.ground.dtypes.cpu_flags", lambda: dict.fromkeys(flags, True))


# --- notes of initialize --------------------------------------------------------------------------


def test_a_lazy_module_is_initialized_where_the_cpu_emulates_the_type(cpu: Any) -> None:
    cpu("avx2")
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    amp.initialize(model, opt_level="O1", verbosity=0)
    assert model(torch.ones(2, 3)).shape == (2, 2)


@pytest.mark.parametrize("level", NAMES)
@pytest.mark.parametrize("model", [nn.Linear(4, 4), nn.Conv1d(2, 2, 3), nn.GRU(2, 2), nn.MultiheadAttention(4, 2)])
def test_a_level_that_the_cpu_emulates_is_noted_once_after_the_banner(
    cpu: Any, level: str, model: nn.Module, capsys: pytest.CaptureFixture[str]
) -> None:
    cpu("avx2")
    amp.initialize(model, opt_level=level)
    banner, *notes = capsys.readouterr().out.splitlines()
    assert banner.startswith(f"Selected optimization level {level}:  ")
    (note,) = (note for note in notes if not note.startswith("Note:  an optimizer that is made later"))
    assert note.startswith(f"Note:  {level} computes in {NAMES[level]}, which is slow on this CPU: ")
    assert "'python -m amp_engine info'" in note
    assert len(note) <= messages.COLUMNS
    amp.initialize(nn.Linear(2, 2), opt_level=level)
    assert "Note:" not in capsys.readouterr().out


@pytest.mark.parametrize("level", NAMES)
def test_a_cpu_that_computes_in_one_half_type_is_slow_in_the_other_alone(
    cpu: Any, level: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cpu("avx512_bf16")
    amp.initialize(nn.Linear(2, 2), opt_level=level)
    assert ("slow on this CPU" in capsys.readouterr().out) == (NAMES[level] == "float16")


@pytest.mark.parametrize(
    ("model", "keywords"),
    [
        (nn.Linear(2, 2), {"opt_level": "O0"}),
        (nn.Linear(2, 2), {"opt_level": "O2", "verbosity": 0}),
        (nn.Linear(2, 2), {"opt_level": "O2", "cast_model_type": torch.float32}),
        (nn.Linear(2, 2), {"opt_level": "O1", "patch_torch_functions": False}),
        (nn.Linear(2, 2), {"opt_level": "O1", "enabled": False}),
        (nn.BatchNorm1d(2), {"opt_level": "O2"}),
        (nn.Linear(2, 2, device="meta"), {"opt_level": "O4"}),
    ],
)
def test_nothing_is_noted_of_what_does_not_compute_in_half_on_the_cpu(
    cpu: Any, model: nn.Module, keywords: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    cpu()
    amp.initialize(model, **keywords)
    assert "slow on this CPU" not in capsys.readouterr().out


# --- by default -----------------------------------------------------------------------------------


def test_importing_it_leaves_one_handler_and_info(logger: logging.Logger) -> None:
    assert len(ours(logger)) == 1
    assert (logger.level, logger.propagate) == (logging.INFO, False)


def test_a_message_is_a_plain_line_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    Reporter().say("100% of {it}\nand more")
    assert capsys.readouterr() == ("100% of {it}\nand more\n", "")


@pytest.mark.parametrize("stdout", [None, "closed"])
def test_a_stdout_that_is_gone_does_not_end_the_training(
    stdout: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = io.StringIO()
    gone.close()
    monkeypatch.setattr(sys, "stdout", gone if stdout else None)
    train(MLP, *pair(opt_level="O2"), "oc")
    assert ("I/O operation on closed file" in capsys.readouterr().err) is (stdout == "closed")


# --- as records -----------------------------------------------------------------------------------


def test_a_step_that_was_taken_on_an_overflow_is_a_warning(kept: Kept) -> None:
    train(MLP, *pair(opt_level="O2", loss_scale=128.0), "o")
    levels = kept.levels()
    assert levels["Gradient overflow."] == levels["Amp post-mortem:"] == "WARNING"


def test_what_apex_marked_as_a_warning_is_one(kept: Kept) -> None:
    model, optimizer = pair(opt_level="O2")
    amp.load_state_dict(amp.state_dict(format="apex") | {"loss_scaler1": {"loss_scale": 64.0, "unskipped": 5}})
    FP16_Optimizer(torch.optim.SGD(MLP.model().parameters(), lr=0.1))
    amp._amp_state.hard_override = True
    with Engine() as engine:
        engine.hard_override = True
        engine.initialize(MLP.model(), opt_level="O1", master_weights=False, verbosity=0)
    warned = [record.getMessage() for record in kept.records if record.levelno == logging.WARNING]
    assert [text.split()[1] for text in warned] == ["state_dict", "FP16_Optimizer", "It"]
    assert all(text.startswith("Warning:") for text in warned)


def test_records_of_overflows_have_plain_numbers_and_can_be_sent(kept: Kept) -> None:
    train(MLP, *pair(opt_level="O2"), "o")
    skipped, post_mortem = (vars(pickle.loads(pickle.dumps(record))) for record in kept.records[-2:])
    assert (skipped["amp_loss_id"], skipped["amp_loss_scale"]) == (0, 32768.0)
    assert (post_mortem["amp_loss_id"], post_mortem["amp_loss_scale"]) == (0, 65536.0)
    assert post_mortem["amp_cause"] == "backward"
    assert skipped["filename"] == "overflow_messages.py"


# --- as the application says ----------------------------------------------------------------------


def run(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True)


CONFIGURED_BEFORE = """
import logging, sys
logger = logging.getLogger("amp_engine")
handler = logging.StreamHandler(sys.stderr)
handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
logger.addHandler(handler)
logger.setLevel(logging.WARNING)
from amp_engine.levels.report import Reporter
assert logger.handlers == [handler] and logger.level == logging.WARNING and logger.propagate
Reporter().say("said")
Reporter().say("Warning:  said")
"""


def test_a_logger_that_was_configured_before_the_import_is_left_alone() -> None:
    done = run(CONFIGURED_BEFORE)
    assert (done.stdout, done.stderr) == ("", "WARNING Warning:  said\n")


@pytest.mark.parametrize("level", [logging.NOTSET, logging.ERROR])
@pytest.mark.parametrize("has_handler", [False, True])
@pytest.mark.parametrize("propagate", [False, True])
def test_only_what_nobody_set_is_set(level: int, has_handler: bool, propagate: bool) -> None:
    logger = logging.Logger("amp_engine", level)
    logger.propagate = propagate
    if has_handler:
        logger.addHandler(Kept())
    messages._set_defaults(logger)
    messages._set_defaults(logger)
    assert logger.level == (level or logging.INFO)
    assert [type(handler) for handler in logger.handlers] == [Kept if has_handler else messages.StdoutHandler]
    assert logger.propagate is (propagate and has_handler)


# basicConfig before the import and after it; a fork; a configuration that names other loggers alone.
IN_A_PROGRAM = """
import logging, logging.config, os, sys
logging.basicConfig(level=logging.DEBUG, format="root %(message)s", stream=sys.stdout)
from amp_engine.levels.report import Reporter
logging.basicConfig(level=logging.DEBUG, format="root %(message)s", stream=sys.stdout, force=True)
say = Reporter().say
print("1"); say("2"); print("3"); sys.stdout.flush()
if (child := os.fork()) == 0:
    say("4")
    sys.stdout.flush()
    os._exit(0)
os.waitpid(child, 0)
logging.config.dictConfig({"version": 1})
assert logging.getLogger("amp_engine").disabled
say("5")
logging.getLogger("amp_engine").disabled = True
say("not said")
logging.config.dictConfig({"version": 1, "loggers": {"amp_engine": {"level": "ERROR"}}})
say("nor this")
sys.exit(print("6"))
"""


def test_lines_come_once_in_order_and_whatever_is_configured_for_others() -> None:
    done = run(IN_A_PROGRAM)
    assert (done.stdout.split(), done.stderr) == (list("123456"), "")


# --- warnings -------------------------------------------------------------------------------------


def missing_gradients() -> None:
    model, optimizer = pair(opt_level="O2", verbosity=0)
    with amp.scale_loss(MLP.loss(model, MLP.batch()), optimizer):
        pass
    optimizer.step()


def other_torch() -> None:
    _native.refuse_other_torch("1.2.3")


WARNED = {
    missing_gradients: (AmpGradientWarning, UserWarning),
    other_torch: (AmpRuntimeWarning, RuntimeWarning),
}


@pytest.mark.parametrize("cause", WARNED, ids=lambda cause: cause.__name__)
def test_a_warning_is_filtered_by_its_own_category_and_by_the_old_one(cause: Any) -> None:
    own, old = WARNED[cause]
    with pytest.warns(own):
        cause()
    for category in (own, AmpWarning, old):
        amp.close()
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            warnings.simplefilter("ignore", category)
            cause()
        assert heard == []


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_a_cast_model_that_is_called_inside_of_autocast_warns(level: str) -> None:
    model, _ = pair(opt_level=level, verbosity=0)
    x, _ = MLP.batch()
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.warns(AmpRuntimeWarning, match="Take `with torch.autocast"),
    ):
        model(x)
    with torch.autocast("cpu", enabled=False):
        model(x)  # without a warning
    model(x)


def test_autocast_around_a_cast_model_is_told_once_whatever_python_remembers() -> None:
    model, _ = pair(opt_level="O5", verbosity=0)
    x, _ = MLP.batch()
    with warnings.catch_warnings(record=True) as heard, torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(3):
            warnings.simplefilter("always")
            model(x)
    assert len(heard) == 1


def test_a_part_that_is_called_from_outside_inside_of_autocast_warns() -> None:
    """As the layers of a LightningModule, whose trainer calls its training_step."""
    model, _ = pair(opt_level="O5", verbosity=0)
    part = next(module for module in model.children() if isinstance(module, nn.Linear))
    x = torch.ones(2, part.in_features)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.warns(AmpRuntimeWarning, match="or a trainer's option for it: bf16"),
    ):
        part(x)
    part(x)  # without a warning


@pytest.mark.parametrize("casts", ["everywhere", "model"])
@pytest.mark.parametrize("level", FUNCTION_LEVELS)
def test_the_first_function_in_low_precision_inside_of_autocast_warns(level: str, casts: Any) -> None:
    model, _ = pair(opt_level=level, casts=casts, verbosity=0)
    torch.ones(2).exp() + torch.arange(2)  # as data is prepared
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.warns(AmpRuntimeWarning) as heard:
        MLP.loss(model, MLP.batch())
    (warning,) = heard
    assert "torch.autocast" in str(warning.message)
    assert "Take `with torch.autocast(...)` out, or a trainer's option" in str(warning.message)
    assert (f"opt_level='{level}'" in str(warning.message)) is (casts == "everywhere")
    MLP.loss(model, MLP.batch())  # without a warning


@pytest.mark.parametrize("level", FUNCTION_LEVELS)
def test_autocast_that_is_off_or_comes_without_casts_does_not_warn(level: str) -> None:
    model, _ = pair(opt_level=level, verbosity=0)
    with torch.autocast("cpu", enabled=False):
        MLP.loss(model, MLP.batch())
    amp.close()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        MLP.loss(model, MLP.batch())
