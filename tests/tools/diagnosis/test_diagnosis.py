"""Eight skips in a row print one diagnosis: which parameter is not finite, and whether the loss is."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from amp_engine import amp
from tests.models import MLP
from tests.support import LEVELS, backward, train

OVERFLOW = "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to"


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sound = nn.Linear(4, 4)
        self.rotten = nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.sound(inputs) + self.rotten(inputs)


def started(level: str, **keywords: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = TwoHeads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    amp.initialize(model, optimizer, opt_level=level, **keywords)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer, *, ill: bool, loss_ill: bool = False) -> None:
    """A backward whose gradients are infinite in `rotten.weight` only, or everywhere with the loss."""
    optimizer.zero_grad()
    loss = model(torch.ones(2, 4)).float().square().mean() / 8
    if loss_ill:
        loss = loss * float("nan")
    handle = model.rotten.weight.register_hook(lambda grad: grad * float("inf")) if ill else None
    backward(loss, optimizer)
    if handle is not None:
        handle.remove()
    optimizer.step()


def split(text: str) -> tuple[list[str], str]:
    """The overflow lines, and everything else that was printed but for what is known of each overflow."""
    lines = text.splitlines()
    overflows = [line for line in lines if line.startswith(OVERFLOW)]
    return overflows, "\n".join(line for line in lines if not line.startswith((OVERFLOW, "Amp post-mortem:")))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_eight_skips_in_a_row_name_the_parameter(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = started(level)
    capsys.readouterr()
    for _ in range(7):
        step(model, optimizer, ill=True)
    overflows, rest = split(capsys.readouterr().out)
    assert len(overflows) == 7
    assert rest == ""
    step(model, optimizer, ill=True)
    overflows, rest = split(capsys.readouterr().out)
    assert len(overflows) == 1
    assert "rotten.weight" in rest
    assert "sound" not in rest
    assert "rotten.bias" not in rest
    assert "8" in rest
    assert re.search(r"The loss is \d[\d.e-]*, scaled by 512", rest)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_diagnosis_says_when_the_loss_itself_is_not_finite(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = started(level)
    for _ in range(8):
        step(model, optimizer, ill=False, loss_ill=True)
    _, rest = split(capsys.readouterr().out)
    assert "The loss is nan, scaled by 512" in rest
    assert rest.endswith("No scale can help.")
    assert "sound.weight" in rest
    assert "The gradient of" not in rest


class Chain(nn.Module):
    """Registered from the last to the first, as a decoder before its encoder may be."""

    def __init__(self) -> None:
        super().__init__()
        self.dec, self.mid, self.enc = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.bad = 1.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        between = self.mid(self.enc(inputs))
        if between.requires_grad and self.bad != 1.0:
            between.register_hook(lambda grad: grad * self.bad)
        return self.dec(between)


@pytest.mark.parametrize(("bad", "said"), [(float("inf"), "inf"), (float("nan"), "nan")])
@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_the_first_that_the_backward_reached_is_named(
    level: str, bad: float, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic")
    model.bad = bad
    for _ in range(8):
        optimizer.zero_grad()
        backward(model(torch.randn(8, 4)).float().square().mean(), optimizer)
        optimizer.step()
    _, rest = split(capsys.readouterr().out)
    found = re.search(r"The gradient of (\S+) \(Linear\) is the first that is not finite, .*: (\w+) in", rest)
    assert found is not None
    assert found[1] in ("mid.weight", "mid.bias")  # not enc's, though those are the last in the optimizer
    assert found[2] == said or bad == float("inf")  # inf times 0 is nan
    assert "4 of 6" in rest


def test_a_copy_that_float16_cannot_hold_is_named_though_its_master_is_finite(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, optimizer = started("O2")
    for master in amp.master_params(optimizer):
        if master.shape == (4, 4):
            with torch.no_grad():
                master[0, 0] = 7e4
            break
    for _ in range(9):
        step(model, optimizer, ill=False)
    _, rest = split(capsys.readouterr().out)
    assert all(master.isfinite().all() for master in amp.master_params(optimizer))
    assert "Parameters are not finite: sound.weight." in rest
    assert rest.endswith("No scale can help.")
    assert "Their FP32 masters are finite, and beyond float16's 65504: sound.weight (700" in rest
    assert "O5" in rest


def diagnosis_of(capsys: pytest.CaptureFixture[str], spoilt: Any, factor: float = 1.0, grows: bool = False) -> str:
    """The diagnosis of eight steps; `spoilt` gives the parameters whose gradients are spoilt in each, and by which."""
    model, optimizer = started("O1")
    factors = [factor * 4.0**i for i in range(9 if grows else 0)]
    for index, one in enumerate([*factors, *[(factors or [factor])[-1]] * 8]):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).float().square().mean() * one / 8
        spoil = spoilt(index - len(factors)) if index >= len(factors) else {}
        handles = [getattr(model, name).weight.register_hook(lambda g, by=by: g * by) for name, by in spoil.items()]
        backward(loss, optimizer)
        for handle in handles:
            handle.remove()
        optimizer.step()
    return split(capsys.readouterr().out)[1].splitlines()[-1]


INF, NAN = float("inf"), float("nan")


def test_a_scale_that_is_nearly_found_is_nothing_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    said = diagnosis_of(capsys, lambda index: {"sound": INF, "rotten": INF} if index < 7 else {"rotten": INF})
    assert "fewer gradients overflow the lower the scale is: 2 at 65536, 1 at 512." in said
    assert said.endswith("The scale is nearly found: nothing to do.")
    assert "keep" not in said


def test_a_gradient_that_overflows_at_every_scale_wants_another_type(capsys: pytest.CaptureFixture[str]) -> None:
    said = diagnosis_of(capsys, lambda index: {"rotten": INF})
    assert said.endswith("(amp.keep_float), or use bfloat16 (opt_level='O4' or 'O5').")


def test_nan_at_every_scale_is_a_derivative_that_is_not_defined(capsys: pytest.CaptureFixture[str]) -> None:
    said = diagnosis_of(capsys, lambda index: {"rotten": NAN})
    assert "It is NaN at each scale from 65536 to 512." in said
    assert "add an eps inside" in said


def test_losses_that_explode_are_a_learning_rate(capsys: pytest.CaptureFixture[str]) -> None:
    said = diagnosis_of(capsys, lambda index: {"rotten": INF}, 1e-4, grows=True)
    assert "lower the learning rate" in said
    assert "keep" not in said


def test_the_diagnosis_is_printed_once_in_a_long_row(capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = started("O2")
    for _ in range(30):
        step(model, optimizer, ill=True)
    assert capsys.readouterr().out.count("Amp diagnosis:") == 1


def test_a_clean_step_starts_the_count_again(capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = started("O2")
    for _ in range(3):
        for _ in range(7):
            step(model, optimizer, ill=True)
        step(model, optimizer, ill=False)
    assert "Amp diagnosis" not in capsys.readouterr().out


def test_verbosity_0_prints_no_diagnosis(capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = started("O2", verbosity=0)
    for _ in range(9):
        step(model, optimizer, ill=True)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("level", "scale", "is_reported"),
    [(level, scale, scale != 1.0) for level in LEVELS for scale in (1.0, 128.0)],
)
def test_the_first_overflow_of_a_static_scale_is_printed_where_gradients_are_looked_at(
    level: str, scale: float, is_reported: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    model = MLP.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=scale, skip_on_overflow=False)
    capsys.readouterr()
    train(MLP, model, optimizer, "oo")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Gradient overflow")]
    assert len(lines) == int(is_reported)
    assert not any(param.isfinite().all() for param in model.parameters())


@pytest.mark.parametrize("scale", [1.0, 128.0])
@pytest.mark.parametrize("level", LEVELS)
def test_skip_on_overflow_looks_and_skips_at_every_level(
    level: str, scale: float, capsys: pytest.CaptureFixture[str]
) -> None:
    model = MLP.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=scale, skip_on_overflow=True)
    capsys.readouterr()
    train(MLP, model, optimizer, "coo")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Gradient overflow")]
    assert len(lines) == 2
    assert all(param.isfinite().all() for param in model.parameters())
