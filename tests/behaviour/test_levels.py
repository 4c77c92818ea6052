"""Every level trains every kind of model, follows FP32, and errs no more than mixed precision written by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from amp_engine import amp
from amp_engine.errors import AmpStateError, AmpTypeError
from tests.models import CNN, MLP, NORMED_MLP, TASKS, Task
from tests.oracle import AdamW, Float64Training, Sgd, relative_error
from tests.plain import AutocastTraining, Fp32Training, HalfTraining, MasterTraining
from tests.support import HALF, LEVELS, left_alone, masters, train

LEARNING_RATE = {"mlp": 0.1, "normed_mlp": 0.1, "cnn": 0.05, "lstm": 0.2, "transformer": 0.05}

FINAL_LOSS_TOLERANCE = {"O0": 1e-4, "O1": 0.01, "O2": 0.01, "O3": 0.02, "O4": 0.02, "O5": 0.02}
"""How far the mean of the last losses may be from FP32's, relative to the first loss."""

STEPS = 24


def sgd(params: Any, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr, momentum=0.9)


def losses_of(task: Task, level: str | None) -> list[float]:
    """The losses at `level`, or those of plain FP32 training if it is None."""
    model = task.model()
    optimizer = sgd(model.parameters(), LEARNING_RATE[task.name])
    if level is None:
        losses = []
        for index in range(STEPS):
            optimizer.zero_grad()
            loss = task.loss(model, task.batch(index))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    losses = train(task, model, optimizer, "c" * STEPS)
    amp.close()
    return losses


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.fixture(scope="module", params=list(TASKS))
def task_and_truth(request: pytest.FixtureRequest) -> tuple[Task, list[float]]:
    task = TASKS[request.param]
    return task, losses_of(task, None)


@pytest.mark.parametrize("level", LEVELS)
def test_the_loss_falls_and_follows_fp32(task_and_truth: tuple[Task, list[float]], level: str) -> None:
    task, truth = task_and_truth
    losses = losses_of(task, level)
    assert mean(losses[-4:]) < 0.7 * mean(losses[:2])
    assert abs(mean(losses[-4:]) - mean(truth[-4:])) < FINAL_LOSS_TOLERANCE[level] * truth[0]


def test_o0_is_fp32_bit_by_bit() -> None:
    assert losses_of(NORMED_MLP, "O0") == losses_of(NORMED_MLP, None)


# --- rounding error against the float64 truth -----------------------------------------------------

ERROR_STEPS = 6
EPS = 1e-4  # 1e-8, the default, is 0 in float16: pure half training with it is NaN
RULES = {
    "sgd": (Sgd(lr=0.05, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)),
    "adamw": (AdamW(lr=1e-2, eps=EPS), lambda p: torch.optim.AdamW(p, lr=1e-2, eps=EPS, weight_decay=1e-2)),
}


def by_hand(level: str, model: nn.Module, make: Any, loss: Any) -> Any:
    scale = 1.0 if level in ("O4", "O5") else 2.0**16
    if level == "O0":
        return Fp32Training(model, make, loss)
    if level in ("O1", "O4"):
        return AutocastTraining(model, make, loss, HALF[level], scale)
    if level == "O3":
        return HalfTraining(model, make, loss, HALF[level])
    return MasterTraining(model, make, loss, HALF[level], scale)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("task", [MLP, NORMED_MLP, CNN], ids=lambda task: task.name)
def test_the_error_is_at_most_twice_that_of_plain_pytorch(task: Task, level: str, rule: str) -> None:
    formula, make = RULES[rule]
    start = task.model()
    truth = Float64Training(start, formula, task.loss)
    plain = by_hand(level, start, make, task.loss)
    optimizer = make(start.parameters())
    model = start
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    for index in range(ERROR_STEPS):
        batch = task.batch(index)
        truth.step(batch)
        plain.step(batch)
        train(task, model, optimizer, "c", first=index)
    expected = list(truth.parameters().values())
    ours = relative_error(masters(optimizer), expected)
    theirs = relative_error(plain.parameters(), expected)
    assert theirs > 0
    assert ours <= 2 * theirs + 1e-9


MEANT = {"bf16": "O5", "torch.bfloat16": "O5", torch.bfloat16: "O5", "BF16": "O5", "bf16-mixed": "O4", "fp16": "O2"}
MEANT |= {"half": "O2", torch.float16: "O2", 16: "O2", "mixed": "O1", "16-mixed": "O1", "amp": "O1"}
MEANT |= {"fp32": "O0", "float32": "O0", 32: "O0", 2: "O2", "02": "O2", "o5": "O5", "04": "O4", 1: "O1", "best": "O2"}


@pytest.mark.parametrize(("written", "level"), MEANT.items())
def test_what_is_no_level_is_answered_with_the_one_that_is_meant(written: Any, level: str) -> None:
    with pytest.raises(AmpStateError, match=f'Use opt_level="{level}"'):
        amp.initialize(MLP.model(), opt_level=written)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("level", "opt_level"),
        ("optlevel", "opt_level"),
        ("dtype", "opt_level"),
        ("optimizer", "optimizers"),
        ("lossscale", "loss_scale"),
    ],
)
def test_a_keyword_that_initialize_has_not_is_answered_with_the_one_that_is_meant(written: str, meant: str) -> None:
    model = MLP.model()
    optimizer = sgd(model.parameters())
    with left_alone(model, optimizer), pytest.raises(AmpTypeError, match=f"argument '{written}'.  Write {meant}=") as e:
        amp.initialize(model, optimizer, **{written: "O2"})
    assert isinstance(e.value, TypeError)


def test_a_keyword_like_none_of_initialize_is_answered_with_all_of_them() -> None:
    with pytest.raises(AmpTypeError, match=r"argument 'xyz'.  It has models, optimizers, enabled, opt_level, "):
        amp.initialize(MLP.model(), xyz=1)


@pytest.mark.parametrize("keywords", [{"opt_level": "O2"}, {"opt_level": "O5"}, {"enabled": False}])
def test_who_takes_scale_loss_for_the_loss_is_told_of_with(keywords: dict[str, Any]) -> None:
    model = MLP.model()
    optimizer = sgd(model.parameters())
    amp.initialize(model, optimizer, verbosity=0, **keywords)
    loss = MLP.loss(model, MLP.batch(0))
    context = amp.scale_loss(loss, optimizer)
    for use in (lambda: context.backward(), lambda: context.item(), lambda: context.detach()):  # type: ignore[attr-defined]
        with pytest.raises(
            AttributeError, match=r"with amp.scale_loss\(loss, optimizer\) as scaled_loss: scaled_loss\.b"
        ):
            use()
    assert not hasattr(context, "__len__")
    with context as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
