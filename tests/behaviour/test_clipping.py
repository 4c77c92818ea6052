"""`amp.clip_grad_norm_(optimizer, ...)` does what torch's clip_grad_norm_ does on `amp.master_params(optimizer)`."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_engine import AmpStateError, AmpTypeError, Engine, amp
from amp_engine.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD
from tests.models import MLP, NORMED_MLP
from tests.support import (
    assert_bitwise,
    backward,
    frozen,
    masters,
    optimizer_values,
    scaler_numbers,
    started,
    train,
)

INF = float("inf")

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "FusedAdam": lambda params: FusedAdam(params, lr=1e-2),
    "FusedSGD": lambda params: FusedSGD(params, lr=0.1, momentum=0.9),
    "FusedLAMB": lambda params: FusedLAMB(params, lr=1e-2),
    "FusedNovoGrad": lambda params: FusedNovoGrad(params, lr=1e-2),
    "FusedAdagrad": lambda params: FusedAdagrad(params, lr=1e-2),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-2),
}

Clip = Callable[..., Tensor]


def by_torch(optimizer: Optimizer, max_norm: float, *args: Any, **keywords: Any) -> Tensor:
    return nn.utils.clip_grad_norm_(list(amp.master_params(optimizer)), max_norm, *args, **keywords)


def gradients(optimizer: Optimizer) -> list[Tensor | None]:
    return [None if master.grad is None else master.grad.clone() for master in amp.master_params(optimizer)]


def true_norm(values: list[Tensor | None], norm_type: float = 2.0) -> float:
    flat = torch.cat([value.double().flatten() for value in values if value is not None])
    return torch.linalg.vector_norm(flat, norm_type).item()


def assert_same_clip(prepare: Callable[[], Optimizer], use: Callable[[Optimizer, Clip], Any]) -> None:
    """`use(optimizer, clip)` returns the same norms with both clips, and the next step moves the same way."""
    outcomes = []
    for clip in (amp.clip_grad_norm_, by_torch):
        optimizer = prepare()
        norms = use(optimizer, clip)
        optimizer.step()
        outcomes.append((norms, masters(optimizer), [frozen(s) for s in optimizer.state.values()]))
        amp.close()
    torch.testing.assert_close(outcomes[0], outcomes[1], rtol=1e-5, atol=1e-7)


def one_backward(level: str, make: Callable[[Any], Optimizer] = OPTIMIZERS["SGD"]) -> Callable[[], Optimizer]:
    def prepare() -> Optimizer:
        model, optimizer = started(level, make)
        train(NORMED_MLP, model, optimizer, "c")
        optimizer.zero_grad()
        backward(NORMED_MLP.loss(model, NORMED_MLP.batch(1)), optimizer)
        return optimizer

    return prepare


# --- the same as torch's --------------------------------------------------------------------------


@pytest.mark.parametrize("max_norm", [1e-2, 0.0, 1e6, INF])
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_clip_is_the_one_of_torch(level: str, max_norm: float) -> None:
    assert_same_clip(one_backward(level), lambda optimizer, clip: clip(optimizer, max_norm))


@pytest.mark.parametrize("name", ["AdamW", "FusedLAMB", "FusedNovoGrad", "RMSprop"])
def test_every_optimizer_is_clipped(name: str) -> None:
    assert_same_clip(one_backward("O2", OPTIMIZERS[name]), lambda optimizer, clip: clip(optimizer, max_norm=1e-2))


@pytest.mark.parametrize("norm_type", [2, 1.0, INF, 3.0, 0.5, "inf", -INF])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_every_order_of_norm_is_the_one_of_torch(level: str, norm_type: Any) -> None:
    assert_same_clip(one_backward(level), lambda optimizer, clip: clip(optimizer, 1e-2, norm_type=norm_type))


def by_level(level: str) -> torch.optim.Optimizer:
    return started(level, task=MLP)[1]


def by_split_masters() -> torch.optim.Optimizer:
    return started("O5", torch.optim.AdamW, task=MLP, master_weights="split")[1]


def by_nobody() -> torch.optim.Optimizer:
    return torch.optim.SGD(MLP.model().bfloat16().parameters(), lr=0.1)


@pytest.mark.parametrize("norm_type", [2, 1.0, INF, 3.0])
@pytest.mark.parametrize("make", [partial(by_level, "O3"), by_split_masters, by_nobody], ids=["O3", "split", "unknown"])
def test_the_norm_of_half_gradients_has_the_digits_of_float32(make: Any, norm_type: float) -> None:
    optimizer = make()
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for p in params:
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())).to(p)
    wide = [p.grad.double() for p in params]
    expected = torch.nn.utils.get_total_norm(wide, norm_type)
    assert amp.clip_grad_norm_(optimizer, 0.5, norm_type).item() == pytest.approx(expected.item(), rel=1e-6)
    for p, g in zip(params, wide, strict=True):
        torch.testing.assert_close(p.grad, (g * (0.5 / expected)).to(p.dtype), rtol=1e-2, atol=0.0)


@pytest.mark.parametrize("engine", ["none", "another", "closed"])
def test_an_optimizer_that_no_engine_knows_is_clipped(engine: str) -> None:
    if engine == "another":
        started("O2")
    elif engine == "closed":
        started("O2")
        amp.close()
    model = MLP.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    MLP.loss(model, MLP.batch()).backward()
    expected = true_norm([param.grad for param in model.parameters()])
    norm = amp.clip_grad_norm_(optimizer, 1e-2)
    assert norm.item() == pytest.approx(expected, rel=1e-5)
    assert true_norm([param.grad for param in model.parameters()]) == pytest.approx(1e-2, rel=1e-3)


def test_amp_that_is_not_enabled_clips() -> None:
    model = MLP.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, enabled=False)
    backward(MLP.loss(model, MLP.batch()), optimizer)
    amp.clip_grad_norm_(optimizer, 1e-2)
    assert true_norm(gradients(optimizer)) == pytest.approx(1e-2, rel=1e-3)


# --- several clips, several backwards -------------------------------------------------------------


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("max_norms", [(1e-3, 1e-2), (1e6, 1e-2), (1e-2, INF), (1e-2, 1e-3, 1e-4)], ids=str)
@pytest.mark.parametrize("norm_types", [(2.0, 2.0, 2.0), (2.0, INF, 1.0)], ids=str)
def test_clips_in_a_row_are_those_of_torch(level: str, max_norms: Any, norm_types: Any) -> None:
    assert_same_clip(
        one_backward(level),
        lambda optimizer, clip: [clip(optimizer, m, t) for m, t in zip(max_norms, norm_types, strict=False)],
    )


# --- overflow -------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_type", [2.0, 1.0])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_error_if_nonfinite_raises_and_clips_nothing(level: str, norm_type: float) -> None:
    model, optimizer = started(level, loss_scale="dynamic")
    backward(NORMED_MLP.loss(model, NORMED_MLP.batch(1)), optimizer, overflow=True)
    with pytest.raises(RuntimeError, match="norm"):
        amp.clip_grad_norm_(optimizer, 1.0, norm_type, error_if_nonfinite=True)
    before = optimizer_values(optimizer)
    optimizer.step()
    assert_bitwise(optimizer_values(optimizer), before)
    optimizer.zero_grad()
    train(NORMED_MLP, model, optimizer, "c")
    assert not torch.equal(masters(optimizer)[0], before["params"][0])


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_parameter_that_left_its_group_since_the_backward_does_not_count(level: str) -> None:
    model = nn.Linear(1, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=16.0, verbosity=0)
    backward(model(torch.full((1, 1), 64.0)).float().sum(), optimizer)
    optimizer.param_groups[0]["params"].pop(0)
    assert amp.clip_grad_norm_(optimizer, 1.0).item() == pytest.approx(2.0, rel=1e-3)
    (bias,) = amp.master_params(optimizer)
    before = bias.detach().clone().float()
    optimizer.step()
    torch.testing.assert_close(bias.detach().float(), before - 0.1 / 2, rtol=1e-2, atol=1e-3)


# --- parameters in place of the optimizer ---------------------------------------------------------


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_clip_of_parameters_is_that_of_their_optimizer(level: str) -> None:
    outcomes = []
    for of_parameters in (True, False):
        model, optimizer = started(level, OPTIMIZERS["SGD"], NORMED_MLP)
        model.register_parameter("frozen", nn.Parameter(torch.ones(3), requires_grad=False))
        backward(NORMED_MLP.loss(model, NORMED_MLP.batch(1)), optimizer)
        norm = amp.clip_grad_norm_(model.parameters() if of_parameters else optimizer, 1e-2)
        optimizer.step()
        outcomes.append((norm, masters(optimizer)))
        amp.close()
    assert_bitwise(outcomes[0], outcomes[1])


def test_masters_that_a_script_listed_before_the_backward_are_clipped() -> None:
    outcomes = []
    for of_masters in (True, False):
        model, optimizer = started("O2", OPTIMIZERS["SGD"], NORMED_MLP)
        listed = list(amp.master_params(optimizer))
        backward(NORMED_MLP.loss(model, NORMED_MLP.batch(1)), optimizer)
        norm = amp.clip_grad_norm_(listed if of_masters else optimizer, 1e-2)
        optimizer.step()
        outcomes.append((norm, masters(optimizer)))
        amp.close()
    assert_bitwise(outcomes[0], outcomes[1])


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("clip", ["norm", "value"])
def test_a_clip_of_some_parameters_leaves_the_others_alone(level: str, clip: str) -> None:
    model, optimizer = started(level, OPTIMIZERS["SGD"], MLP)
    backward(MLP.loss(model, MLP.batch(1)), optimizer)
    before = gradients(optimizer)
    part = [next(model.parameters())]
    if clip == "norm":
        assert amp.clip_grad_norm_(part, 1e-3).item() == pytest.approx(true_norm(before[:1]), rel=1e-5)
        wanted = before[0] * (1e-3 / (true_norm(before[:1]) + 1e-6))
    else:
        amp.clip_grad_value_(part[0], 1e-3)
        wanted = before[0].clamp(-1e-3, 1e-3)
    after = gradients(optimizer)
    torch.testing.assert_close(after[0], wanted)
    assert_bitwise(after[1:], before[1:])


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_clip_of_the_parameters_of_two_optimizers_is_by_their_common_norm(level: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
    amp.initialize(model, optimizers, opt_level=level, verbosity=0, loss_scale=128.0)
    backward(model(torch.randn(3, 4)).float().square().sum(), optimizers)
    before = [*gradients(optimizers[0]), *gradients(optimizers[1])]
    assert amp.clip_grad_norm_(model.parameters(), 1e-3).item() == pytest.approx(true_norm(before), rel=1e-5)
    assert true_norm([*gradients(optimizers[0]), *gradients(optimizers[1])]) == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_clipping_by_value_is_that_of_torch_on_master_params(level: str) -> None:
    outcomes = []
    for by_amp in (True, False):
        optimizer = one_backward(level)()
        if by_amp:
            amp.clip_grad_value_(optimizer, 1e-3)
        else:
            nn.utils.clip_grad_value_(amp.master_params(optimizer), 1e-3)
        optimizer.step()
        outcomes.append(masters(optimizer))
        amp.close()
    # At O5 half gradients are clamped, to a number that is rounded.
    torch.testing.assert_close(*outcomes, rtol=1e-4 if level == "O5" else 0, atol=1e-6 if level == "O5" else 0)


def test_parameters_without_an_engine_are_clipped_as_by_torch() -> None:
    p = nn.Parameter(torch.tensor([3.0, 4.0]))
    p.grad = torch.tensor([3.0, 4.0])
    assert amp.clip_grad_norm_(p, 1.0).item() == 5.0
    amp.clip_grad_value_([p], 0.7)
    torch.testing.assert_close(p.grad, torch.tensor([0.6, 0.7]))


# --- what is not a clip of what is stepped --------------------------------------------------------


def test_a_clip_of_a_model_says_what_to_write() -> None:
    model, optimizer = started()
    for wrong in (model, [model], 1.0):
        with pytest.raises(AmpTypeError, match=r"Call amp.clip_grad_norm_\(optimizer, max_norm\)"):
            amp.clip_grad_norm_(wrong, 1.0)  # type: ignore[arg-type]
    with pytest.raises(AmpTypeError, match=r"Call amp.clip_grad_value_\(optimizer, clip_value\)"):
        amp.clip_grad_value_(model, 1.0)  # type: ignore[arg-type]


def test_master_params_of_a_model_says_what_it_takes() -> None:
    with pytest.raises(AmpTypeError, match=r"takes the optimizer, not a [A-Z]\w+.*amp\.master_params\(optimizer\)"):
        amp.master_params(MLP.model())  # type: ignore[arg-type]


WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    "in place": lambda p: p.grad.mul_(10.0),
    "other memory": lambda p: setattr(p.grad, "data", p.grad.data * 10.0),
    "replaced": lambda p: setattr(p, "grad", p.grad * 10.0),
}


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("norm_type", [2.0, INF])
@pytest.mark.parametrize("how", WRITES)
def test_gradients_written_after_the_exit_are_clipped_by_the_norm_that_they_have(
    how: str, norm_type: float, level: str
) -> None:
    model, optimizer = started(level, loss_scale=64.0)
    backward(NORMED_MLP.loss(model, NORMED_MLP.batch()), optimizer)
    truth = true_norm([p.grad * 10.0 for p in model.parameters()], norm_type)
    for p in model.parameters():
        WRITES[how](p)
    assert amp.clip_grad_norm_(optimizer, 1e9, norm_type).item() == pytest.approx(truth, rel=1e-6)


def test_a_clip_is_forgotten_with_its_gradients() -> None:
    """A script that drops a batch zeroes after the clip, and the next batch has gradients of its own."""

    def train_so(model: nn.Module, optimizer: Optimizer, clip: Callable[[float], Tensor]) -> list[float]:
        norms = []
        for index in range(4):
            NORMED_MLP.loss(model, NORMED_MLP.batch(index)).backward()
            norms.append(float(clip(0.1)))
            if index % 2:
                optimizer.step()
            optimizer.zero_grad()
        return norms

    outcomes = []
    for by in ("amp", "torch"):
        model, optimizer = started("O5", OPTIMIZERS["SGD"])
        given = list(model.parameters())
        clip = partial(amp.clip_grad_norm_, optimizer) if by == "amp" else partial(nn.utils.clip_grad_norm_, given)
        outcomes.append((train_so(model, optimizer, clip), masters(optimizer)))
        amp.close()
    torch.testing.assert_close(*outcomes, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("clip", [amp.clip_grad_norm_, amp.clip_grad_value_])
def test_a_second_clip_of_gradients_that_another_backward_added_to_is_refused(clip: Callable[..., Any]) -> None:
    model, optimizer = started("O5", OPTIMIZERS["SGD"])
    loss = NORMED_MLP.loss(model, NORMED_MLP.batch())
    loss.backward(retain_graph=True)
    amp.clip_grad_norm_(optimizer, 0.01)
    loss.backward()
    with pytest.raises(AmpStateError, match="were written after amp.clip_grad_norm_"):
        clip(optimizer, 0.01)


def test_a_clip_counts_for_one_step_only() -> None:
    def use(optimizer: Optimizer, clip: Clip) -> Tensor:
        norm = clip(optimizer, 1e-6)
        optimizer.step()
        optimizer.zero_grad()
        for master in amp.master_params(optimizer):
            master.grad = torch.ones_like(master)
        return norm

    assert_same_clip(one_backward("O2"), use)


@pytest.mark.parametrize("norm_type", [2.0, 1.0])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", ["AdamW", "FusedLAMB", "RMSprop"])
def test_a_clip_of_an_overflow_skips_and_leaves_every_bit(name: str, level: str, norm_type: float) -> None:
    model, optimizer = started(level, OPTIMIZERS[name])
    train(NORMED_MLP, model, optimizer, "c")
    before, halves = optimizer_values(optimizer), frozen(list(model.parameters()))
    optimizer.zero_grad()
    backward(NORMED_MLP.loss(model, NORMED_MLP.batch(1)), optimizer, overflow=True)
    norm = amp.clip_grad_norm_(optimizer, 1.0, norm_type)
    assert not math.isfinite(norm.item())
    optimizer.step()
    assert_bitwise(optimizer_values(optimizer), before)
    assert_bitwise(frozen(list(model.parameters())), halves)
    assert scaler_numbers() == (32768.0, 0)
    train(NORMED_MLP, model, optimizer, "c", first=2)
    assert all(master.isfinite().all() for master in masters(optimizer))
    assert not torch.equal(masters(optimizer)[0], before["params"][0])


def by_torch_on_the_model(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def repair(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad.nan_to_num_(0.0, 0.0, 0.0)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_is_told_with_its_scale_and_loss_though_torch_clips_its_gradients(
    level: str, capsys: pytest.CaptureFixture[str]
) -> None:
    amp.replace_engine(Engine())
    model, optimizer = started(level, OPTIMIZERS["AdamW"], MLP, verbosity=1)
    capsys.readouterr()
    backward(MLP.loss(model, MLP.batch(0)) * INF, optimizer)
    by_torch_on_the_model(model)
    by_torch_on_the_model(model)
    optimizer.step()
    said = capsys.readouterr().out
    assert "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0" in said
    assert "The loss is inf, scaled by 65536" in said
    assert (amp.last_step(optimizer).skipped, amp.last_step(optimizer).loss_scale) == (True, 65536.0)
    assert amp.last_step(optimizer).loss == INF


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gradients_that_were_repaired_after_an_overflow_are_stepped_without_a_message(
    level: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = started(level, OPTIMIZERS["AdamW"], MLP, verbosity=1)
    capsys.readouterr()
    backward(MLP.loss(model, MLP.batch(0)) * INF, optimizer)
    repair(model)
    optimizer.step()
    assert "Skipping" not in capsys.readouterr().out
    assert (amp.last_step(optimizer).skipped, amp.last_step(optimizer).loss_scale) == (False, 65536.0)


def test_each_backward_without_scale_loss_that_is_clipped_is_a_loss_of_its_own() -> None:
    amp.replace_engine(Engine())
    model, optimizer = started("O5", OPTIMIZERS["AdamW"], MLP)
    losses = []
    for index in range(2):
        loss = MLP.loss(model, MLP.batch(index))
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        amp.clip_grad_norm_(optimizer, 1.0)
        losses.append(loss.item())
    optimizer.step()
    assert amp.last_step(optimizer).loss == losses[-1] != losses[0]
