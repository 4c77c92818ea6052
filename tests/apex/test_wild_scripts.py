"""Programs of the shapes that `from apex import amp` was written in, run unmodified.

Each file in `scripts/` is a whole program that knows nothing of amp_engine. What is asserted is what its author would
have looked at: the losses that it prints, what it says about itself, and what it can resume from.
"""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from amp_engine import amp
from amp_engine.apex import finder

SCRIPTS = Path(__file__).parent / "scripts"
LEVELS = ("O0", "O1", "O2", "O3")
LOSS = re.compile(r"\bloss[ =:]*(-?\d+\.\d+|-?inf|nan)\b", re.IGNORECASE)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch):
    """Runs a script in this process as the runner does, and gives what it printed."""

    def run(script: str, *args: object) -> str:
        printed = io.StringIO()
        monkeypatch.setattr(sys, "argv", [script, *map(str, args)])
        finder.install()
        try:
            with contextlib.redirect_stdout(printed):
                runpy.run_path(str(SCRIPTS / script), run_name="__main__")
        finally:
            amp.close()
            finder.uninstall()
            if dist.is_initialized():
                dist.destroy_process_group()
        return printed.getvalue()

    return run


def losses(printed: str) -> list[float]:
    return [float(number) for number in LOSS.findall(printed)]


def assert_trained(printed: str, *, to: float = 0.8) -> None:
    """The mean loss of the last quarter is below `to` times that of the first."""
    history = losses(printed)
    quarter = len(history) // 4
    assert quarter > 0, printed
    assert all(abs(loss) < float("inf") for loss in history), history
    assert sum(history[-quarter:]) < to * sum(history[:quarter]), history


# --- image classification ------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_wrapped_scaler_clips_saves_and_resumes(run, tmp_path: Path, level: str) -> None:
    options = ("--amp-opt-level", level, "--output", tmp_path)
    printed = run("swin_main.py", *options)
    assert_trained(printed)
    assert f"loss_scale {1 if level == 'O0' else 65536}" in printed
    resumed = run("swin_main.py", *options, "--resume", tmp_path / "ckpt_epoch_1.pth")
    assert losses(resumed) == losses(printed)[30:]


# --- language ------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("reduction", [(), ("--allreduce_post_accumulation",)], ids=["amp", "own_allreduce"])
def test_pretraining_goes_on_in_a_second_phase(run, tmp_path: Path, level: str, reduction: tuple[str, ...]) -> None:
    options = ("--output_dir", tmp_path, "--fp16_opt_level", level, *reduction)
    first = run("bert_pretraining.py", *options)
    assert_trained(first)
    second = run("bert_pretraining.py", *options, "--phase2", "--phase1_end_step", 30, "--max_steps", 20)
    assert max(losses(second)[:3]) < min(losses(first)[:3])
    assert sum(losses(second)[-3:]) < sum(losses(first)[-3:])


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_overflow_handling_of_its_own_skips_the_step(run, tmp_path: Path, level: str) -> None:
    options = ("--output_dir", tmp_path, "--fp16_opt_level", level, "--init_loss_scale", 1024)
    printed = run("bert_pretraining.py", *options, "--allreduce_post_accumulation", "--poison_step", 21)
    assert "Gradient overflow.  Skipping step, reducing loss scale to 512.0" in printed
    assert printed.count("Step:10 ") == 2  # the step before, and the one that was not taken
    finite = [loss for loss in losses(printed) if abs(loss) < float("inf")]
    assert len(finite) == len(losses(printed)) - 1
    assert sum(finite[-5:]) < 0.8 * sum(finite[:5])


# --- several models, several losses ----------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("names", [(), ("--keep-return",)], ids=["return_value_dropped", "return_value_kept"])
def test_lists_of_models_and_optimizers_with_three_losses(run, level: str, names: tuple[str, ...]) -> None:
    printed = run("cyclegan.py", "--opt_level", level, *names)
    assert_trained(printed)
    assert "losses tracked: 3" in printed


# --- accumulation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", ["delay", "plain", "hack"])
def test_gradients_are_accumulated(run, level: str, mode: str) -> None:
    assert_trained(run("accumulate.py", "--opt_level", level, "--mode", mode))


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_delayed_and_plain_accumulation_agree(run, level: str) -> None:
    def norms(mode: str) -> list[float]:
        printed = run("accumulate.py", "--opt_level", level, "--mode", mode, "--loss_scale", "128.0")
        return [float(norm) for norm in re.findall(r"grad norm (\S+)", printed)]

    assert norms("delay") == pytest.approx(norms("plain"), rel=2e-2 if level == "O2" else 1e-5)
