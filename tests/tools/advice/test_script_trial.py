"""A script without amp, in this process: when the engine takes it over, and what it does not take."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from amp_engine import amp
from amp_engine.errors import AmpGradientWarning
from amp_engine.tools.advice import script_trial
from amp_engine.tools.advice.records import OWN, Task, Trial
from amp_engine.tools.advice.script_trial import PlainScript
from amp_engine.tools.advice.trial import TrialEngine
from tests.support import HALF, LEVELS


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(x)
        return result


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Begins a trial of four steps, as in the process of a script; gives its engine, and what reads the trial."""
    begun: list[tuple[TrialEngine, PlainScript]] = []

    def start(level: str = "O0") -> tuple[TrialEngine, Callable[[], Trial]]:
        path = tmp_path / str(len(begun))
        engine = TrialEngine(Task(level, 4, math.inf, path=str(path)))
        begun.append((engine, PlainScript(engine)))
        return engine, lambda: pickle.loads(path.read_bytes())

    yield start
    for engine, plain in begun:
        plain.end()
        engine.close()


def parts() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: nn.Module, optimizer: Optimizer, steps: int = 9, clip: Callable[..., Any] | None = None) -> None:
    x = torch.linspace(-1, 1, 64).reshape(16, 4)
    for _ in range(steps):
        optimizer.zero_grad()
        (0.1 * (model(x) - x.sum(1, keepdim=True)).square().mean()).backward()  # fits float16 at 65536
        (clip or nn.utils.clip_grad_norm_)(model.parameters(), 0.03, foreach=True)
        optimizer.step()


@pytest.mark.parametrize("level", LEVELS)
def test_all_steps_but_the_first_are_at_the_level(level: str, begin: Any) -> None:
    model, optimizer = parts()
    train(model, optimizer, 5)
    expected = [p.detach().clone() for p in model.parameters()]
    _, trial = begin(level)
    model, optimizer = parts()
    with pytest.raises(SystemExit):
        train(model, optimizer)
    found = trial()
    assert (found.level, found.asked, found.steps, found.skips, found.obstacle) == (level, None, 4, 0, None)
    assert found.dtype == (str(HALF[level]).removeprefix("torch.") if level in HALF else None)
    assert found.loss_scales == ((65536.0,) if level in ("O1", "O2") else (1.0,))
    assert found.losses[-1][0] < found.losses[0][0]
    for p, one in zip(model.parameters(), expected, strict=True):
        assert torch.equal(p, one) if level == "O0" else torch.allclose(p.float(), one, rtol=0.02, atol=0.01)


@torch.no_grad()
def halved_weights(params: Any, *args: Any, **keywords: Any) -> None:
    for p in params:
        p.mul_(0.5)


def test_weights_that_a_script_writes_and_a_level_rounds_are_an_error(begin: Any) -> None:
    warnings.simplefilter("ignore")
    begin("O2")
    with pytest.raises(AmpGradientWarning, match="amp.on_masters"):
        train(*parts(), clip=halved_weights)


def test_a_script_that_initializes_is_left_alone_also_after_close(begin: Any) -> None:
    engine, _ = begin("O2")
    model, optimizer = engine.initialize(*parts(), opt_level="O1", verbosity=0)
    with engine.scale_loss(model(torch.ones(2, 4)).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    engine.close()
    train(*parts())
    assert engine.policy is None
    assert engine.asked == "O1"


def two_models() -> None:
    models = [Net(), nn.Linear(1, 4)]
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)
    models[1](models[0](torch.ones(2, 4))).sum().backward()
    optimizer.step()


def two_optimizers() -> None:
    first, second = parts(), parts()
    train(*first, steps=2)
    train(first[0], torch.optim.Adam(second[0].parameters()))


def no_model() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.sum().backward()
    torch.optim.SGD([weight], lr=0.1).step()


def autocast() -> None:
    model, optimizer = parts()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.ones(2, 4)).sum()
    loss.backward()
    optimizer.step()


def grad_scaler() -> None:
    model, optimizer = parts()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    scaler.step(optimizer)


def in_a_trainer() -> None:
    loop: dict[str, Any] = {"__name__": "transformers.trainer"}
    exec("def run(step): step()", loop)
    loop["run"](autocast)


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (two_models, f"its optimizer steps parameters of 2 models (Net, Linear).  {script_trial._TYPE_LISTS}"),
        (two_optimizers, f"it steps several optimizers, Adam and SGD.  {script_trial._TYPE_LISTS}"),
        (no_model, f"its optimizer steps parameters of 0 models (none).  {script_trial._TYPE_LISTS}"),
        (autocast, script_trial._TORCH_AMP),
        (grad_scaler, script_trial._TORCH_AMP),
        (in_a_trainer, script_trial._TRAINERS_AMP.format(before="the Trainer is made")),
    ],
)
def test_what_it_cannot_tell_ends_the_script(script: Callable[[], None], why: str, begin: Any) -> None:
    _, trial = begin()
    with pytest.raises(SystemExit) as ended:
        script()
    assert ended.value.code == 0
    assert trial().obstacle == why


@pytest.mark.parametrize("is_passed", [True, False])
@pytest.mark.parametrize("level", LEVELS)
def test_a_script_that_initializes_and_calls_backward_is_tried_at_each_level(
    level: str, is_passed: bool, begin: Any
) -> None:
    expected = parts()
    train(*expected, steps=4)
    engine, trial = begin(level)
    model, optimizer = parts()
    engine.initialize(model, optimizer if is_passed else None, opt_level="O5", verbosity=0)
    with pytest.raises(SystemExit):
        train(model, optimizer)
    found = trial()
    assert (found.level, found.asked, found.steps, found.skips, found.obstacle) == (level, "O5", 4, 0, None)
    assert found.loss_scales == ((65536.0,) if level in ("O1", "O2") else (1.0,))
    for p, one in zip(model.parameters(), expected[0].parameters(), strict=True):
        assert torch.allclose(p.float(), one, rtol=0.02, atol=0.01)


def test_the_own_run_of_half_weights_is_plain_pytorch(begin: Any) -> None:
    def half() -> tuple[nn.Module, Optimizer]:
        model, optimizer = parts()
        model.layers.bfloat16().register_forward_pre_hook(lambda module, args: (args[0].bfloat16(),))
        return model, optimizer

    expected = half()
    train(*expected, steps=5)
    _, trial = begin(OWN)
    model, optimizer = half()
    with pytest.raises(SystemExit):
        train(model, optimizer)
    found = trial()
    assert (found.came, found.dtype, found.steps, len(found.seconds)) == ("bfloat16", "bfloat16", 4, 3)
    assert found.losses[-1][0] < found.losses[0][0]
    assert {one.kind for one in found.memory} == {"parameters", "optimizer state", "gradients"}
    assert found.bytes == 3 * 2 * sum(p.numel() for p in model.parameters())
    for p, one in zip(model.parameters(), expected[0].parameters(), strict=True):
        assert torch.equal(p, one)


def test_begin_puts_it_behind_the_functions_of_amp(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before, plain = amp._amp_state.engine, list[PlainScript]()
    monkeypatch.setattr(script_trial, "PlainScript", lambda engine: plain.append(PlainScript(engine)))
    monkeypatch.setattr(script_trial, "atexit", SimpleNamespace(register=lambda function: None))
    try:
        script_trial.begin({"level": "O5", "steps": 2, "deadline": math.inf, "path": str(tmp_path / "trial")})
        assert isinstance(amp._amp_state.engine, TrialEngine)
        model, optimizer = amp.initialize(*parts(), opt_level="O1", verbosity=0)
        assert next(model.parameters()).dtype is torch.bfloat16
        for _ in range(2):
            with amp.scale_loss(model(torch.ones(3, 4)).sum(), optimizer) as scaled:
                scaled.backward()
            with contextlib.suppress(SystemExit):
                optimizer.step()
        amp.close()
    finally:
        plain[0].end()
        amp.replace_engine(before)
    assert os.listdir(tmp_path) == ["trial"]


def test_torch_is_left_as_it_was() -> None:
    before = torch.autograd.backward, nn.utils.clip_grad_norm_
    PlainScript(TrialEngine(Task("O2", 4, math.inf))).end()
    model, optimizer = parts()
    train(model, optimizer)
    assert (torch.autograd.backward, nn.utils.clip_grad_norm_) == before
    assert next(model.parameters()).dtype is torch.float32
