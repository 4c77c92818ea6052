"""Gradients between the exit of `scale_loss` and the step: what may be read, edited, added up and thrown away."""

from __future__ import annotations

import gc
import warnings
import weakref
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map_only

from amp_engine import Engine, amp, kernels
from amp_engine.errors import AmpGradientWarning, AmpStateError
from amp_engine.ground.distributed import local_gradient
from amp_engine.optimizers import FusedAdam, FusedLAMB, FusedSGD
from tests.models import MLP, NORMED_MLP
from tests.support import (
    LEVELS,
    MASTER_LEVELS,
    WEIGHT_DTYPE,
    assert_bitwise,
    backward,
    frozen,
    group_params,
    masters,
    scaler_numbers,
    started,
    train,
)


def gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [master.grad.clone() for master in amp.master_params(optimizer)]


def fp32_gradients(*indices: int) -> list[Tensor]:
    model = NORMED_MLP.model()
    for index in indices:
        NORMED_MLP.loss(model, NORMED_MLP.batch(index)).backward()
    return [param.grad for param in model.parameters()]


def assert_close(actual: list[Tensor], truth: list[Tensor], tolerance: float = 0.02) -> None:
    for a, t in zip(actual, truth, strict=True):
        assert (a.double() - t.double()).norm() <= tolerance * t.double().norm() + 1e-5


def assert_left_nothing(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Assert that a step left a tiny gradient in one master and in one parameter that has one, and no other."""
    own = {id(param) for param in model.parameters()}
    masters = [param for param in group_params(optimizer) if id(param) not in own]
    for params in (masters, [param for param in model.parameters() if param.dtype != torch.float32]):
        (left,) = (param.grad for param in params if param.grad is not None)
        assert bool((left < 1e-4).all())
        assert left.numel() == min(param.numel() for param in params)


# --- what stands where after the exit -------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_master_gradients_are_unscaled_at_the_exit(level: str) -> None:
    model, optimizer = started(level)
    backward(NORMED_MLP.loss(model, NORMED_MLP.batch()), optimizer)
    tolerance = {"O4": 0.1, "O5": 0.1}.get(level, 0.02)
    assert_close(gradients(optimizer), fp32_gradients(0), tolerance)
    if level != "O3":
        assert {gradient.dtype for gradient in gradients(optimizer)} == {torch.float32}


def test_half_model_gradients_stay_scaled_at_o2() -> None:
    model, optimizer = started("O2")
    backward(NORMED_MLP.loss(model, NORMED_MLP.batch()), optimizer)
    half, master = model[0].weight.grad, gradients(optimizer)[0]
    assert half.dtype == torch.float16
    assert_bitwise(half.float() / 65536.0, master)


def test_float_gradients_of_batch_norm_are_unscaled_in_place_at_o2() -> None:
    model, optimizer = started("O2")
    backward(NORMED_MLP.loss(model, NORMED_MLP.batch()), optimizer)
    assert_close([model[1].weight.grad], [fp32_gradients(0)[1]])


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_master_gradients_are_gone_after_the_step_and_float_ones_persist(level: str) -> None:
    model, optimizer = started(level)
    backward(NORMED_MLP.loss(model, NORMED_MLP.batch()), optimizer)
    kept = model[1].weight.grad.clone()
    optimizer.step()
    assert_left_nothing(model, optimizer)
    for param in model.parameters():
        assert param.dtype != torch.float32 or param.grad is not None
    assert_bitwise(model[1].weight.grad, kept)


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_master_gradients_are_gone_after_a_skipped_step(level: str) -> None:
    model, optimizer = started(level, loss_scale="dynamic")
    backward(NORMED_MLP.loss(model, NORMED_MLP.batch()), optimizer, overflow=True)
    optimizer.step()
    assert_left_nothing(model, optimizer)


# --- edits of the model's gradients change nothing ------------------------------------------------


def clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_([p for p in model.parameters() if p.dtype != torch.float32], 1e-3)


def zero_in_place(model: nn.Module) -> None:
    for param in model.parameters():
        if param.dtype != torch.float32:
            param.grad.zero_()


def zero_through_data(model: nn.Module) -> None:
    for param in model.parameters():
        if param.dtype != torch.float32:
            param.grad.data.zero_()


def drop(model: nn.Module) -> None:
    for param in model.parameters():
        if param.dtype != torch.float32:
            param.grad = None


def read(model: nn.Module) -> None:
    assert all(param.grad.isfinite().all() for param in model.parameters())


def multiply(model: nn.Module) -> None:
    for param in model.parameters():
        if param.dtype != torch.float32:
            param.grad.mul_(2)


@pytest.mark.filterwarnings("ignore:Gradients of the model were")
@pytest.mark.parametrize("level", MASTER_LEVELS)
@pytest.mark.parametrize("edit", [clip, zero_in_place, zero_through_data, drop, read, multiply])
def test_editing_half_model_gradients_after_the_exit_changes_nothing(edit: Any, level: str) -> None:
    def run(edit: Any) -> list[Tensor]:
        model, optimizer = started(level)
        for index in range(3):
            optimizer.zero_grad()
            backward(NORMED_MLP.loss(model, NORMED_MLP.batch(index)), optimizer)
            edit(model)
            optimizer.step()
        values = masters(optimizer)
        amp.close()
        return values

    assert_bitwise(run(edit), run(lambda model: None))


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_zeroing_half_model_gradients_between_two_backwards_loses_none(level: str) -> None:
    model, optimizer = started(level, task=MLP)
    backward(MLP.loss(model, MLP.batch(0)), optimizer)
    model.zero_grad()
    with pytest.warns(AmpGradientWarning, match="set to None.*or the sum of them and the next"):
        backward(MLP.loss(model, MLP.batch(1)), optimizer)
    both = gradients(optimizer)
    amp.close()
    model, optimizer = started(level, task=MLP)
    for index in range(2):
        backward(MLP.loss(model, MLP.batch(index)), optimizer)
    assert_bitwise(both, gradients(optimizer))


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_a_gradient_of_the_model_that_is_set_to_none_is_warned_of_once(level: str) -> None:
    model, optimizer = started(level, task=MLP)
    for index in range(3):
        backward(MLP.loss(model, MLP.batch(index)), optimizer)
        model[2].weight.grad = None
        with pytest.warns(AmpGradientWarning, match="set to None") if index == 0 else nullcontext():
            optimizer.step()


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_clipping_the_master_gradients_clips_the_step(level: str) -> None:
    model, optimizer = started(level, task=MLP)
    before = masters(optimizer)
    backward(MLP.loss(model, MLP.batch()), optimizer)
    norm = nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1e-2)
    assert norm > 1e-2
    optimizer.step()
    step = sum((a - b).double().square().sum() for a, b in zip(masters(optimizer), before, strict=True))
    assert step.sqrt().item() == pytest.approx(0.1 * 1e-2, rel=0.05)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_clipping_by_value_clips_the_step(level: str) -> None:
    model, optimizer = started(level, task=MLP)
    backward(MLP.loss(model, MLP.batch()), optimizer)
    nn.utils.clip_grad_value_(amp.master_params(optimizer), 1e-3)
    before = masters(optimizer)
    optimizer.step()
    largest = max((a - b).abs().max().item() for a, b in zip(masters(optimizer), before, strict=True))
    assert largest == pytest.approx(1e-4, rel=1e-2)


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_a_master_gradient_set_by_the_user_is_the_one_that_is_stepped(level: str) -> None:
    model, optimizer = started(level, task=MLP)
    before = masters(optimizer)
    backward(MLP.loss(model, MLP.batch()), optimizer)
    for master in amp.master_params(optimizer):
        master.grad = torch.ones_like(master)
    optimizer.step()
    for new, old in zip(masters(optimizer), before, strict=True):
        assert_bitwise(new, torch.add(old, torch.ones_like(old), alpha=-0.1))


# --- accumulation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_add_up_over_backwards_until_they_are_zeroed(level: str) -> None:
    model, optimizer = started(level)
    tolerance = {"O4": 0.1, "O5": 0.1}.get(level, 0.02)
    for index in range(3):
        backward(NORMED_MLP.loss(model, NORMED_MLP.batch(index)), optimizer)
        assert_close(gradients(optimizer), fp32_gradients(*range(index + 1)), tolerance)
    optimizer.zero_grad()
    backward(NORMED_MLP.loss(model, NORMED_MLP.batch(0)), optimizer)
    assert_close(gradients(optimizer), fp32_gradients(0), tolerance)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_gradients_add_up_over_scales_that_differ(level: str) -> None:
    model, optimizer = started(level, num_losses=2, loss_scale="dynamic")
    amp._amp_state.loss_scalers[0]._loss_scale = 2.0**12
    amp._amp_state.loss_scalers[1]._loss_scale = 2.0**5
    for index in range(2):
        backward(NORMED_MLP.loss(model, NORMED_MLP.batch(index)), optimizer, loss_id=index)
    assert_close(gradients(optimizer), fp32_gradients(0, 1), 0.05 if level == "O3" else 0.02)


def test_accumulation_at_o2_happens_in_float() -> None:
    """1 + 2**-12 is 1 in half; the masters' gradients see the difference."""
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level="O2", loss_scale=4.0, verbosity=0)
    for value in (1.0, 2.0**-12):
        backward((model(torch.ones(1, 1)) * value).sum(), optimizer)
    assert gradients(optimizer)[0].item() == 1 + 2.0**-12


def test_an_overflow_in_an_accumulated_backward_skips_the_whole_step() -> None:
    model, optimizer = started("O2")
    before = masters(optimizer)
    for index, outcome in enumerate("coc"):
        loss = NORMED_MLP.loss(model, NORMED_MLP.batch(index))
        backward(loss, optimizer, overflow=outcome == "o")
    optimizer.step()
    assert_bitwise(masters(optimizer), before)
    assert scaler_numbers() == (32768.0, 1)


CHECKED = {
    **{level: {"loss_scale": "dynamic"} for level in LEVELS},
    "O0, static": {"loss_scale": 64.0, "skip_on_overflow": True},
    "O4, scale of 1": {"skip_on_overflow": True},
    "O5, split": {"loss_scale": "dynamic", "master_weights": "split"},
}
OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-4),
    "FusedAdam": lambda params: FusedAdam(params, lr=0.01),
    "Rprop": lambda params: torch.optim.Rprop(params, lr=0.01),
}


def is_finite(model: nn.Module) -> bool:
    return all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("delay", [False, True], ids=["", "delay_unscale"])
@pytest.mark.parametrize("outcomes", ["ooc", "coc", "oc", "cooccz", "oocczc"])
@pytest.mark.parametrize("level", CHECKED)
def test_no_step_is_taken_on_gradients_that_a_skipped_step_left(level: str, outcomes: str, delay: bool) -> None:
    """Without zero_grad() the model's own gradients add up, so one that is not finite skips until they are gone."""
    options = CHECKED[level] | {"loss_scale": 64.0, "skip_on_overflow": True}
    model, optimizer = started(level[:2], OPTIMIZERS["SGD"], **options)
    has_bad = False
    for index, outcome in enumerate(outcomes):
        if outcome == "z":
            optimizer.zero_grad()
            has_bad = False
        else:
            backward(
                NORMED_MLP.loss(model, NORMED_MLP.batch(index)), optimizer, overflow=outcome == "o", delay_unscale=delay
            )
            has_bad |= outcome == "o"
            optimizer.step()
            assert amp.current_engine().step_was_skipped(optimizer) == has_bad
        assert is_finite(model)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("level", CHECKED)
def test_zero_grad_after_skipped_steps_ends_the_skips(level: str, kind: str, set_to_none: bool) -> None:
    if level == "O5, split" and kind == "Rprop":
        pytest.skip("has no step of ours")
    model, optimizer = started(level[:2], OPTIMIZERS[kind], **CHECKED[level])
    for index, outcome in enumerate("coocc"):
        backward(NORMED_MLP.loss(model, NORMED_MLP.batch(index)) / 2**12, optimizer, overflow=outcome == "o")
        optimizer.step()
        assert is_finite(model)
    optimizer.zero_grad(set_to_none)
    backward(NORMED_MLP.loss(model, NORMED_MLP.batch()) / 2**12, optimizer)
    optimizer.step()
    assert not amp.current_engine().step_was_skipped(optimizer)
    assert is_finite(model)


@pytest.mark.parametrize("level", CHECKED)
def test_a_step_without_a_backward_looks_at_what_a_skipped_step_left(level: str) -> None:
    model, optimizer = started(level[:2], **CHECKED[level])
    backward(NORMED_MLP.loss(model, NORMED_MLP.batch()), optimizer, overflow=True)
    optimizer.step()
    optimizer.step()
    assert is_finite(model)
    with pytest.raises(ZeroDivisionError), amp.scale_loss(NORMED_MLP.loss(model, NORMED_MLP.batch()), optimizer):
        print(1 / 0)
    optimizer.step()
    assert is_finite(model)
    amp.close()
    optimizer.step()
    assert is_finite(model)


@pytest.mark.parametrize("level", CHECKED)
def test_looking_at_what_a_skipped_step_left_moves_nothing(level: str) -> None:
    model, optimizer = started(level[:2], **CHECKED[level])
    backward(NORMED_MLP.loss(model, NORMED_MLP.batch()), optimizer, overflow=True)
    optimizer.step()
    before = scaler_numbers()
    assert [p.grad for p in amp.master_params(optimizer)]
    amp.clip_grad_norm_(optimizer, 1.0)
    assert scaler_numbers() == before
    optimizer.zero_grad()
    backward(NORMED_MLP.loss(model, NORMED_MLP.batch()) / 2**12, optimizer)
    optimizer.step()
    assert not amp.current_engine().step_was_skipped(optimizer)


@pytest.mark.parametrize("level", CHECKED)
def test_a_backward_outside_that_overflowed_skips_the_step_of_the_next_one(level: str) -> None:
    model, optimizer = started(level[:2], **CHECKED[level])
    (NORMED_MLP.loss(model, NORMED_MLP.batch()) * float("inf")).backward()
    backward(NORMED_MLP.loss(model, NORMED_MLP.batch()) / 2**12, optimizer)
    optimizer.step()
    assert is_finite(model)


@pytest.mark.parametrize("level", CHECKED)
def test_what_a_skipped_step_left_skips_two_optimizers_of_one_loss(level: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
    amp.initialize(model, optimizers, opt_level=level[:2], verbosity=0, num_losses=2, **CHECKED[level])
    for loss_id, outcome in enumerate("oococ"):
        loss = model(torch.ones(2, 4)).float().sum() / 2**12
        listed = optimizers if loss_id % 2 == 0 else optimizers[:1]
        backward(loss, listed, overflow=outcome == "o", loss_id=loss_id % 2)
        for optimizer in listed:
            optimizer.step()
        assert is_finite(model)


# --- delay_unscale --------------------------------------------------------------------------------


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("level", LEVELS)
def test_zero_grad_in_an_open_window_reaches_gradients_that_the_window_has_not_touched(
    level: str, set_to_none: bool
) -> None:
    model = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    x = torch.ones(1, 2, dtype=WEIGHT_DTYPE[level])
    backward(sum(layer(x).float().sum() for layer in model), optimizer)
    backward(model[0](x).float().sum(), optimizer, delay_unscale=True)
    optimizer.zero_grad(set_to_none)
    backward(model[0](x).float().sum(), optimizer)
    touched, other = (p.grad for p in amp.master_params(optimizer))
    assert touched.eq(1.0).all()
    assert other is None if set_to_none else other.eq(0.0).all()


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_that_an_open_window_has_not_touched_are_there_after_it(level: str) -> None:
    model = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    x = torch.ones(1, 2, dtype=WEIGHT_DTYPE[level])
    backward(sum(layer(x).float().sum() for layer in model), optimizer)
    for delay_unscale in (True, True, False):
        backward(model[0](x).float().sum(), optimizer, delay_unscale=delay_unscale)
    touched, other = (p.grad for p in amp.master_params(optimizer))
    assert touched.eq(4.0).all()
    assert other.eq(1.0).all()


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_a_backward_adds_to_a_gradient_that_was_laid_out_otherwise(level: str) -> None:
    model = nn.Linear(4, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    weight = next(amp.master_params(optimizer))
    for count in (1, 2):
        backward(model(torch.ones(2, 4)).sum(), optimizer)
        assert weight.grad.to_dense().eq(2.0 * count).all()
        weight.grad = weight.grad.t().contiguous().t()


@pytest.mark.parametrize("level", LEVELS)
def test_delayed_backwards_are_one_big_batch(level: str) -> None:
    model, optimizer = started(level, task=MLP)
    for index in range(3):
        loss = MLP.loss(model, MLP.batch(index)) / 4
        backward(loss, optimizer, delay_unscale=True)
        assert scaler_numbers()[1] == 0
    backward(MLP.loss(model, MLP.batch(3)) / 4, optimizer)
    plain = MLP.model()
    inputs, targets = (torch.cat(parts) for parts in zip(*MLP.batches(4), strict=True))
    F.mse_loss(plain(inputs), targets).backward()
    tolerance = {"O4": 0.1, "O5": 0.1}.get(level, 0.02)
    assert_close(gradients(optimizer), [param.grad for param in plain.parameters()], tolerance)
    if level in ("O1", "O2"):
        assert scaler_numbers() == (65536.0, 1)
    before = masters(optimizer)
    optimizer.step()
    assert not torch.equal(masters(optimizer)[0], before[0])


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_delayed_window_can_be_opened_again_and_again(level: str) -> None:
    model, optimizer = started(level, task=MLP)
    for window in range(3):
        optimizer.zero_grad()
        backward(MLP.loss(model, MLP.batch(2 * window)), optimizer, delay_unscale=True)
        backward(MLP.loss(model, MLP.batch(2 * window + 1)), optimizer)
        both = gradients(optimizer)
        optimizer.zero_grad()
        for index in (2 * window, 2 * window + 1):
            backward(MLP.loss(model, MLP.batch(index)), optimizer)
        assert_close(both, gradients(optimizer), 1e-2)
        optimizer.step()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_in_a_delayed_backward_skips_the_step_of_its_window(level: str) -> None:
    model, optimizer = started(level, task=MLP)
    before = masters(optimizer)
    backward(MLP.loss(model, MLP.batch(0)), optimizer, delay_unscale=True, overflow=True)
    backward(MLP.loss(model, MLP.batch(1)), optimizer)
    assert scaler_numbers() == (32768.0, 0)
    optimizer.step()
    assert_bitwise(masters(optimizer), before)
    train(MLP, model, optimizer, "c", first=2)
    assert not torch.equal(masters(optimizer)[0], before[0])


def overflow_elsewhere() -> None:
    backward(F.mse_loss(OTHER[0](MLP.batch(9)[0]), MLP.batch(9)[1]), OTHER[1], overflow=True)


def grow_elsewhere() -> None:
    amp._amp_state.loss_scalers[0]._unskipped = 1999
    backward(F.mse_loss(OTHER[0](MLP.batch(9)[0]), MLP.batch(9)[1]), OTHER[1])


def load_a_scale() -> None:
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 8.0, "unskipped": 3}})


def write_a_scale() -> None:
    amp._amp_state.loss_scalers[0]._loss_scale = 4.0


def initialize_again() -> None:
    model = MLP.model()
    options = amp._amp_state.opt_properties
    scale = 16.0 if options.loss_scale == "dynamic" else 2.0
    amp.initialize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        opt_level=options.opt_level,
        verbosity=0,
        loss_scale=scale,
    )


OTHER: list[Any] = []
MOVES = [overflow_elsewhere, grow_elsewhere, load_a_scale, write_a_scale, initialize_again]


def started_beside_another(level: str, **keywords: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    models = [MLP.model(), MLP.model()]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
    amp.initialize(models, optimizers, opt_level=level, verbosity=0, **keywords)
    OTHER[:] = models[1], optimizers[1]
    return models[0], optimizers[0]


def sum_of_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, *indices: int) -> list[Tensor]:
    optimizer.zero_grad()
    for index in indices:
        backward(MLP.loss(model, MLP.batch(index)), optimizer)
    return gradients(optimizer)


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("end", ["exit", "step"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_window_is_unscaled_by_its_own_scale_when_the_scale_moves_while_it_is_open(
    level: str, end: str, move: Any
) -> None:
    model, optimizer = started_beside_another(level)
    expected = sum_of_gradients(model, optimizer, *((0, 1) if end == "exit" else (0,)))
    optimizer.zero_grad()
    backward(MLP.loss(model, MLP.batch(0)), optimizer, delay_unscale=True)
    move()
    before = masters(optimizer)
    if end == "exit":
        backward(MLP.loss(model, MLP.batch(1)), optimizer)
        assert_close(gradients(optimizer), expected, 1e-2)
    optimizer.step()
    assert_close([b - a for a, b in zip(masters(optimizer), before, strict=True)], [0.1 * g for g in expected], 1e-2)


@pytest.mark.parametrize("move", [move for move in MOVES if move is not initialize_again])
@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_loss_is_unscaled_by_its_own_scale_when_the_scale_moves_inside_of_the_body(
    level: str, delayed: bool, move: Any
) -> None:
    model, optimizer = started_beside_another(level)
    expected = sum_of_gradients(model, optimizer, 0, 1)
    optimizer.zero_grad()
    for index, delay in enumerate((delayed, False)):
        with amp.scale_loss(MLP.loss(model, MLP.batch(index)), optimizer, delay_unscale=delay) as scaled_loss:
            move()
            scaled_loss.backward()
    assert_close(gradients(optimizer), expected, 1e-2)


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_an_overflow_is_told_to_the_scaler_that_came_while_the_window_was_open(level: str) -> None:
    model, optimizer = started_beside_another(level, loss_scale="dynamic")
    before = masters(optimizer)
    backward(MLP.loss(model, MLP.batch(0)), optimizer, delay_unscale=True)
    other = MLP.model()
    optimizer_of_other = torch.optim.SGD(other.parameters(), lr=0.1)
    amp.initialize(other, optimizer_of_other, opt_level=level, verbosity=0, loss_scale="dynamic")
    backward(MLP.loss(model, MLP.batch(1)), optimizer, overflow=True)
    optimizer.step()
    assert_bitwise(masters(optimizer), before)
    assert scaler_numbers() == (32768.0, 0)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("end", ["exit", "step"])
@pytest.mark.parametrize("move", [load_a_scale, write_a_scale])
@pytest.mark.parametrize("level", LEVELS)
def test_two_open_windows_of_different_scales_get_one_loss(
    level: str, move: Any, end: str, order: tuple[int, int]
) -> None:
    model, optimizer = started_beside_another(level, loss_scale=65536.0 if level in ("O1", "O2") else 32.0)
    pairs = [(model, optimizer), (OTHER[0], OTHER[1])]
    expected = [sum_of_gradients(m, o, 0, 1) for m, o in pairs]
    for _, o in pairs:
        o.zero_grad()
    backward(MLP.loss(model, MLP.batch(0)), optimizer, delay_unscale=True)
    move()
    backward(MLP.loss(OTHER[0], MLP.batch(0)), OTHER[1], delay_unscale=True)
    both = [pairs[i][1] for i in order]
    backward(sum(MLP.loss(m, MLP.batch(1)) for m, _ in pairs), both, delay_unscale=end == "step")
    before = [masters(o) for _, o in pairs]
    tolerance = 0.1 if level in ("O4", "O5") else 1e-2
    for (_, o), was, wanted in zip(pairs, before, expected, strict=True):
        if end == "exit":
            assert_close(gradients(o), wanted, tolerance)
        o.step()
        moved = [b.float() - a.float() for a, b in zip(masters(o), was, strict=True)]
        assert_close(moved, [0.1 * g.float() for g in wanted], 0.1 if level == "O3" else tolerance)


def test_an_overflow_in_a_window_that_is_unscaled_for_another_skips_its_own_step() -> None:
    model, optimizer = started_beside_another("O2")
    before = [masters(optimizer), masters(OTHER[1])]
    backward(MLP.loss(OTHER[0], MLP.batch(0)), OTHER[1], delay_unscale=True)
    write_a_scale()
    backward(MLP.loss(model, MLP.batch(0)), optimizer, delay_unscale=True, overflow=True)
    backward(MLP.loss(OTHER[0], MLP.batch(1)), [OTHER[1], optimizer])
    optimizer.step()
    OTHER[1].step()
    assert_bitwise(masters(optimizer), before[0])
    assert not torch.equal(masters(OTHER[1])[0], before[1][0])


def test_a_loss_id_that_is_refused_leaves_windows_of_different_scales_open() -> None:
    model, optimizer = started_beside_another("O2", num_losses=2)
    backward(MLP.loss(model, MLP.batch(0)), optimizer, delay_unscale=True)
    write_a_scale()
    backward(MLP.loss(OTHER[0], MLP.batch(0)), OTHER[1], delay_unscale=True)
    scaled = [[p.grad.clone() for p in m.parameters()] for m in (model, OTHER[0])]
    with pytest.raises(AmpStateError, match="loss_id=1"):
        backward(MLP.loss(model, MLP.batch(1)), [optimizer, OTHER[1]], loss_id=1)
    assert_bitwise([[p.grad.clone() for p in m.parameters()] for m in (model, OTHER[0])], scaled)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("before", [False, True], ids=["nothing before", "a backward before"])
def test_zero_grad_in_an_open_window_throws_away_it_and_what_came_before(
    level: str, before: bool, set_to_none: bool
) -> None:
    model, optimizer = started(level, task=MLP)
    if before:
        backward(MLP.loss(model, MLP.batch(4)), optimizer)
    backward(MLP.loss(model, MLP.batch(5)), optimizer, delay_unscale=True)
    optimizer.zero_grad(set_to_none=set_to_none)
    backward(MLP.loss(model, MLP.batch(0)), optimizer)
    after = gradients(optimizer)
    amp.close()
    model, optimizer = started(level, task=MLP)
    backward(MLP.loss(model, MLP.batch(0)), optimizer)
    assert_bitwise(after, gradients(optimizer))


@pytest.mark.parametrize("level", LEVELS)
def test_an_exception_before_the_backward_keeps_the_open_window(level: str) -> None:
    def fails(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        with amp.scale_loss(MLP.loss(model, MLP.batch(5)), optimizer):
            raise ZeroDivisionError

    def run(*, interrupted: bool) -> list[Tensor]:
        model, optimizer = started(level, task=MLP)
        backward(MLP.loss(model, MLP.batch(0)), optimizer, delay_unscale=True)
        if interrupted:
            with pytest.raises(ZeroDivisionError):
                fails(model, optimizer)
        backward(MLP.loss(model, MLP.batch(1)), optimizer)
        values = gradients(optimizer)
        amp.close()
        return values

    assert_bitwise(run(interrupted=True), run(interrupted=False))


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_an_undelayed_backward_before_a_delayed_one_is_kept(level: str) -> None:
    model, optimizer = started(level, task=MLP)
    backward(MLP.loss(model, MLP.batch(0)), optimizer)
    backward(MLP.loss(model, MLP.batch(1)), optimizer, delay_unscale=True)
    backward(MLP.loss(model, MLP.batch(2)), optimizer)
    three = gradients(optimizer)
    amp.close()
    model, optimizer = started(level, task=MLP)
    for index in range(3):
        backward(MLP.loss(model, MLP.batch(index)), optimizer)
    assert_close(three, gradients(optimizer), 0.05 if level == "O5" else 1e-2)


# --- several losses, graphs and optimizers --------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_two_losses_of_one_graph_with_retain_graph(level: str) -> None:
    model, optimizer = started(level, task=MLP, num_losses=2)
    outputs = model(MLP.batch()[0]).float()
    first, second = outputs.square().mean(), (outputs - 1).abs().mean()
    with amp.scale_loss(first, optimizer, loss_id=0) as scaled_loss:
        scaled_loss.backward(retain_graph=True)
    with amp.scale_loss(second, optimizer, loss_id=1) as scaled_loss:
        scaled_loss.backward()
    ours = gradients(optimizer)
    plain = MLP.model()
    outputs = plain(MLP.batch()[0])
    (outputs.square().mean() + (outputs - 1).abs().mean()).backward()
    tolerance = {"O4": 0.1, "O5": 0.1}.get(level, 0.02)
    assert_close(ours, [param.grad for param in plain.parameters()], tolerance)
    optimizer.step()


@pytest.mark.parametrize("level", LEVELS)
def test_a_gan_with_two_optimizers_and_three_losses_trains_as_in_fp32(level: str) -> None:
    def run(level: str | None) -> list[Tensor]:
        torch.manual_seed(0)
        generator, critic = (
            nn.Linear(4, 8),
            nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)),
        )
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (generator, critic)]
        if level is not None:
            amp.initialize([generator, critic], optimizers, opt_level=level, num_losses=3, verbosity=0)
        bce = F.binary_cross_entropy_with_logits

        def descend(loss: Tensor, optimizer: torch.optim.Optimizer, loss_id: int) -> None:
            if level is None:
                loss.backward()
            else:
                backward(loss, optimizer, loss_id=loss_id)

        for _ in range(4):
            real, noise = torch.randn(16, 8) + 1, torch.randn(16, 4)
            optimizers[1].zero_grad()
            logits = critic(real)
            descend(bce(logits, torch.ones_like(logits)), optimizers[1], 0)
            logits = critic(generator(noise).detach())
            descend(bce(logits, torch.zeros_like(logits)), optimizers[1], 1)
            optimizers[1].step()
            optimizers[0].zero_grad()
            logits = critic(generator(noise))
            descend(bce(logits, torch.ones_like(logits)), optimizers[0], 2)
            optimizers[0].step()
        values = [param.detach().clone() for opt in optimizers for param in group_params(opt)]
        amp.close()
        return values

    for ours, truth in zip(run(level), run(None), strict=True):
        torch.testing.assert_close(ours.float(), truth, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("level", LEVELS)
def test_one_loss_into_several_optimizers(level: str) -> None:
    model = NORMED_MLP.model()
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model[0], model[1], model[3])]
    amp.initialize(model, optimizers, opt_level=level, verbosity=0)
    backward(NORMED_MLP.loss(model, NORMED_MLP.batch()), optimizers)
    ours = [gradient for optimizer in optimizers for gradient in gradients(optimizer)]
    tolerance = {"O4": 0.1, "O5": 0.1}.get(level, 0.02)
    assert_close(ours, fp32_gradients(0), tolerance)


def test_gradients_of_an_optimizer_that_is_not_listed_are_left_alone() -> None:
    model, other = MLP.model(0), MLP.model(1)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other)]
    amp.initialize([model, other], optimizers, opt_level="O2", verbosity=0)
    backward(MLP.loss(other, MLP.batch(1)), optimizers[1])
    kept = gradients(optimizers[1])
    backward(MLP.loss(model, MLP.batch(0)), optimizers[0], overflow=True)
    assert_bitwise(gradients(optimizers[1]), kept)
    before = masters(optimizers[1])
    optimizers[1].step()
    assert not torch.equal(masters(optimizers[1])[0], before[0])


@pytest.mark.parametrize("level", LEVELS)
def test_parameters_without_a_gradient_stay_where_they_are(level: str) -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.used(inputs)

    model = Half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    before = masters(optimizer)
    backward(model(MLP.batch()[0]).float().square().mean(), optimizer)
    optimizer.step()
    after = masters(optimizer)
    assert not torch.equal(after[0], before[0])
    assert_bitwise(after[2:], before[2:])


# --- sparse gradients -----------------------------------------------------------------------------


def embedding(level: str, make: Any) -> tuple[nn.Embedding, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Embedding(12, 4, sparse=True)
    optimizer = make(list(model.parameters()))
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    return model, optimizer


SPARSE = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "SparseAdam": lambda params: torch.optim.SparseAdam(params, lr=0.1),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch, about its own Adagrad
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
@pytest.mark.parametrize("name", SPARSE)
def test_sparse_gradients_train(name: str, level: str) -> None:
    def run(level: str | None) -> Tensor:
        torch.manual_seed(0)
        model = nn.Embedding(12, 4, sparse=True)
        optimizer = SPARSE[name](list(model.parameters()))
        if level is not None:
            amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        for rows in ([1, 2, 1], [3, 2, 7], [1, 1, 1]):
            optimizer.zero_grad()
            loss = model(torch.tensor(rows)).float().square().mean() / 4
            if level is None:
                loss.backward()
            else:
                backward(loss, optimizer)
            optimizer.step()
        value = group_params(optimizer)[0].detach().clone()
        amp.close()
        return value

    torch.manual_seed(0)
    start = nn.Embedding(12, 4).weight.detach()
    value = run(level)
    untouched = [row for row in range(12) if row not in (1, 2, 3, 7)]
    assert_bitwise(value[untouched], start[untouched])
    torch.testing.assert_close(value, run(None), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_in_a_sparse_gradient_is_seen(level: str) -> None:
    model, optimizer = embedding(level, SPARSE["SGD"])
    before = masters(optimizer)
    backward(model(torch.tensor([1, 2])).float().sum(), optimizer, overflow=True)
    optimizer.step()
    assert scaler_numbers() == (32768.0, 0)
    assert_bitwise(masters(optimizer), before)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_two_entries_of_a_row_that_overflow_only_when_added_are_seen(level: str) -> None:
    """Uncoalesced values are finite, their sum is not representable."""
    model, optimizer = embedding(level, SPARSE["SGD"])
    amp._amp_state.loss_scalers[0]._loss_scale = 1.0
    large = 60000.0 if level == "O2" else 3e38
    with amp.scale_loss(model(torch.tensor([1, 1])).float().sum(), optimizer) as scaled_loss:
        (scaled_loss * large).backward()
    before = masters(optimizer)
    optimizer.step()
    now = masters(optimizer)
    assert all(value.isfinite().all() for value in now)
    if level == "O1":
        assert_bitwise(now, before)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_sparse_gradients_add_up(level: str) -> None:
    model, optimizer = embedding(level, SPARSE["SGD"])
    for rows in ([1, 2], [2, 3]):
        backward(model(torch.tensor(rows)).float().sum() / 4, optimizer)
    (gradient,) = gradients(optimizer)
    dense = gradient.to_dense()
    assert [row.sum().item() for row in dense[:5]] == [0, 1, 2, 1, 0]


# --- groups that change ---------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("when", ["before the first backward", "between steps", "between backwards"])
def test_a_group_added_later_is_trained_like_the_others(level: str, when: str) -> None:
    model = NORMED_MLP.model()
    optimizer = torch.optim.SGD(model[3].parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    if when == "between steps":
        train(NORMED_MLP, model, optimizer, "c")
    if when == "between backwards":
        backward(NORMED_MLP.loss(model, NORMED_MLP.batch()), optimizer)
    model[0].zero_grad()
    model[1].zero_grad()  # scaled: no optimizer owned these until now
    optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.05})
    optimizer.add_param_group({"params": model[1].weight})
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 1, 1]
    before = [master.float() for master in masters(optimizer)]
    if level != "O3":
        backward(NORMED_MLP.loss(model, NORMED_MLP.batch(1)), optimizer)
        assert {master.dtype for master in amp.master_params(optimizer)} == {torch.float32}
        optimizer.step()
    else:
        train(NORMED_MLP, model, optimizer, "c", first=1)
    for new, old in zip(masters(optimizer), before, strict=True):
        assert not torch.equal(new.float(), old)
        assert (new - old).abs().max() < 1
    if level in MASTER_LEVELS:
        half = model[0].weight
        assert_bitwise(half.detach(), masters(optimizer)[2].to(half.dtype))


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_a_group_added_later_starts_from_the_exact_values(level: str) -> None:
    model = MLP.model()
    exact = [param.detach().clone() for param in model[0].parameters()]
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    optimizer.add_param_group({"params": list(model[0].parameters())})
    rounded = [value.to(model[0].weight.dtype).float() for value in exact]
    backward(MLP.loss(model, MLP.batch()), optimizer)
    added = masters(optimizer)[2:]
    assert [a.dtype for a in added] == [torch.float32] * 2
    for ours, e, r in zip(added, exact, rounded, strict=True):
        assert torch.equal(ours, e) or torch.equal(ours, r)


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_a_parameter_that_has_a_master_is_not_added_a_second_time(level: str) -> None:
    model, optimizer = started(level, task=MLP)

    def add_and_use() -> None:
        optimizer.add_param_group({"params": [model[0].weight]})
        backward(MLP.loss(model, MLP.batch()), optimizer)

    with pytest.raises((ValueError, RuntimeError)):
        add_and_use()


@pytest.mark.parametrize("level", LEVELS)
def test_freezing_stops_and_unfreezing_resumes_the_training_of_a_layer(level: str) -> None:
    model, optimizer = started(level, task=MLP)
    train(MLP, model, optimizer, "c")
    model[0].requires_grad_(False)
    optimizer.zero_grad()
    before = [param.detach().clone() for param in model.parameters()]
    train(MLP, model, optimizer, "c", first=1)
    after = [param.detach().clone() for param in model.parameters()]
    assert_bitwise(after[:2], before[:2])
    assert not torch.equal(after[2], before[2])
    model[0].requires_grad_(True)
    train(MLP, model, optimizer, "c", first=2)
    assert not torch.equal(model[0].weight.detach(), after[0])
    assert (model[0].weight.detach() - after[0]).abs().max() < 1


# --- gradients of gradients -----------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_gradient_penalty_trains(level: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    inputs = MLP.batch()[0].requires_grad_()
    outputs = model(inputs).float()
    (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    backward(0.1 * outputs.mean() + 0.1 * (slope.norm(dim=1) - 1).square().mean(), optimizer)
    assert all(gradient.isfinite().all() for gradient in gradients(optimizer))
    optimizer.step()


# --- gradients that are not what lies in their memory ---------------------------------------------


LAZY = {
    "negative view": lambda g: torch._neg_view(-g),
    "zeros without memory": lambda g: torch._efficientzerotensor(g.shape, dtype=g.dtype),
}
STEPPED = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": torch.optim.AdamW,
    "RMSprop": torch.optim.RMSprop,
    "FusedAdam": FusedAdam,
    "FusedLAMB": FusedLAMB,
}


@pytest.mark.parametrize("name", STEPPED)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("kind", "when"),
    [
        *((kind, when) for kind in LAZY for when in ("in the body", "between backwards", "before the step")),
        ("negative view", "in an open window"),  # torch accumulates nothing into zeros without memory
    ],
)
def test_a_gradient_that_is_not_what_lies_in_its_memory_counts_as_what_it_is(
    kind: str, when: str, level: str, name: str
) -> None:
    def run(*, lazy: bool) -> tuple[list[Tensor], list[Tensor]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
        optimizer = STEPPED[name](model.parameters())
        keywords = {} if level == "O5" else {"loss_scale": 64.0}
        amp.initialize(model, optimizer, opt_level=level, verbosity=0, **keywords)

        def replace(params: Any) -> None:
            for param in list(params)[::2]:
                gradient = LAZY[kind](param.grad)
                param.grad = gradient if lazy else gradient.clone()

        for delay in (True, False):
            loss = model(torch.ones(2, 4)).square().sum()
            with amp.scale_loss(loss, optimizer, delay_unscale=delay and when == "in an open window") as scaled_loss:
                scaled_loss.backward()
                if when == "in the body":
                    replace(model.parameters())
            if when == "in an open window" and delay:
                replace(model.parameters())
            if when == "before the step" or (when == "between backwards" and delay):
                replace(amp.master_params(optimizer))
        seen = gradients(optimizer)
        optimizer.step()
        values = masters(optimizer)
        amp.close()
        return seen, values

    assert_bitwise(run(lazy=True), run(lazy=False))


@pytest.mark.parametrize("name", ["SGD", "AdamW", "RMSprop"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_weight_that_is_a_negative_view_is_trained_as_what_it_is(level: str, name: str) -> None:
    def run(*, lazy: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        weight = torch._neg_view(-model.weight.detach())
        model.weight = nn.Parameter(weight if lazy else weight.clone())
        optimizer = STEPPED[name](model.parameters())
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        for _ in range(2):
            optimizer.zero_grad()
            backward(model(torch.ones(2, 4)).float().square().mean(), optimizer)
            optimizer.step()
        values = [master.clone() for master in masters(optimizer)]
        amp.close()
        return values

    torch.testing.assert_close(run(lazy=True), run(lazy=False), rtol=2e-6, atol=2e-7)


# --- what an optimizer without masters is seen to hold --------------------------------------------


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.RMSprop])
def test_an_optimizer_over_the_masters_of_another_steps_them(kind: type) -> None:
    model = nn.Linear(4, 4)
    owner = torch.optim.SGD(model.parameters(), lr=0.0)
    amp.initialize(model, owner, opt_level="O2", verbosity=0, loss_scale=64.0)
    other = kind(list(amp.master_params(owner)), lr=0.1)
    amp.initialize(nn.Linear(2, 2), other, opt_level="O2", verbosity=0, loss_scale=64.0)
    before = masters(owner)
    backward(model(torch.ones(2, 4)).float().square().sum(), owner)
    other.step()
    assert all(not torch.equal(now, was) for now, was in zip(masters(owner), before, strict=True))


class Asked(nn.Parameter):
    """A parameter whose gradient is kept elsewhere."""

    @property
    def grad(self) -> Tensor:
        return torch.ones_like(self)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        del value


@pytest.mark.parametrize("level", ["O0", "O1", None])
def test_parameters_that_keep_their_gradients_elsewhere_are_asked(level: str | None) -> None:
    param = Asked(torch.zeros(4))
    optimizer = FusedSGD([param], lr=0.5)
    if level is not None:
        amp.initialize(nn.Linear(2, 2), optimizer, opt_level=level, verbosity=0, loss_scale=64.0)
    optimizer.step()
    assert param.tolist() == [-0.5] * 4


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_parameters_can_be_swapped_after_an_iteration(level: str) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=64.0)
    backward(model(torch.ones(2, 4)).float().sum(), optimizer)
    optimizer.step()
    backward(torch.zeros((), requires_grad=True), optimizer)
    torch.utils.swap_tensors(model.weight, nn.Parameter(torch.zeros(4, 4)))
    assert not model.weight.any()
    assert optimizer.param_groups[0]["params"][0] is model.weight


def test_an_optimizer_that_a_parameter_refers_to_is_freed() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0, loss_scale=64.0)
    backward(model(torch.ones(2, 4)).float().sum(), optimizer)
    optimizer.step()
    model.weight.owner = optimizer
    alive = weakref.ref(optimizer)
    amp.close()
    del model, optimizer
    gc.collect()
    assert alive() is None


@pytest.mark.filterwarnings("ignore:Gradients of the model were written")
@pytest.mark.parametrize("level", LEVELS)
def test_gradients_in_memory_of_others_are_stepped_and_may_be_written_after_the_exit(level: str) -> None:
    outcomes = []
    for of_others in (False, True):
        model, optimizer = started(level, task=MLP)
        with amp.scale_loss(MLP.loss(model, MLP.batch(0)), optimizer) as scaled_loss:
            scaled_loss.backward()
            for p in model.parameters() if of_others else ():
                assert p.grad is not None
                if p.dim() == 1:  # a view is copied in any case
                    memory = bytearray(p.grad.numel() * p.grad.element_size())  # as numpy and DLPack give it
                    p.grad = torch.frombuffer(memory, dtype=p.dtype).copy_(p.grad)
        if level in MASTER_LEVELS:
            for p in model.parameters():
                assert p.grad is not None
                p.grad.fill_(7.0)
        optimizer.step()
        outcomes.append([p.detach().clone() for p in group_params(optimizer)])
        amp.close()
    assert_bitwise(outcomes[0], outcomes[1])


CAST: dict[str, Any] = {level: {} for level in LEVELS} | {"O5, split": {"master_weights": "split"}}

# --- what happens in the body ----------------------------------------------------------------------

ZEROED = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer, in place": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, optimizer: model.zero_grad(),
    "model, in place": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "one parameter": lambda model, optimizer: setattr(model[0].weight, "grad", None),
    "half of it": lambda model, optimizer: [p.grad.mul_(0) for p in (model[0].weight, model[3].weight)],
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("how", ZEROED)
@pytest.mark.parametrize("delay", [False, True], ids=["", "delay_unscale"])
def test_zero_grad_in_the_body_is_heeded(level: str, how: str, delay: bool) -> None:
    def run(level: str | None) -> list[Tensor]:
        model = NORMED_MLP.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        if level is not None:
            amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=64.0)
        for index in range(3):
            loss = NORMED_MLP.loss(model, NORMED_MLP.batch(index)).float()
            if level is None:
                ZEROED[how](model, optimizer) if index else None
                loss.backward()
                continue
            with amp.scale_loss(loss, optimizer, delay_unscale=delay and index == 1) as scaled_loss:
                ZEROED[how](model, optimizer) if index else None
                scaled_loss.backward()
        found = gradients(optimizer)
        amp.close()
        return found

    assert_close(run(level), run(None), {"O4": 0.1, "O5": 0.1}.get(level, 0.03))


LATE = {how: ZEROED[how] for how in ("optimizer", "optimizer, in place", "model", "model, in place")}


@pytest.mark.parametrize("level", [*LEVELS, "O5, split"])
@pytest.mark.parametrize("how", LATE)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, FusedAdam])
def test_zero_grad_after_a_backward_in_the_body_is_heeded(level: str, how: str, kind: Any) -> None:
    """z: it; b: a backward; of a body, after some bodies with one."""

    def run(level: str | None, count: int, body: str) -> list[Tensor | None]:
        model = NORMED_MLP.model()
        optimizer = kind(model.parameters(), lr=0.0)
        if level is not None:
            amp.initialize(model, optimizer, opt_level=level[:2], verbosity=0, loss_scale=64.0, **CAST[level])
        for index in range(count + 1):
            loss = NORMED_MLP.loss(model, NORMED_MLP.batch(index)).float()
            with nullcontext(loss) if level is None else amp.scale_loss(loss, optimizer) as scaled_loss:
                for action in body if index == count else "b":
                    if action == "b":
                        scaled_loss.backward(retain_graph=True)
                    else:
                        LATE[how](model, optimizer)
        params = model.parameters() if level is None else amp.master_params(optimizer)
        found = [None if p.grad is None else p.grad.clone() for p in params]
        amp.close()
        return found

    for count in (0, 1, 2):
        for body in ("bzb", "bz", "bzbb", "bbzb"):
            ours, plain = run(level, count, body), run(None, count, body)
            assert [g is None for g in ours] == [g is None for g in plain]
            tolerance = {"O4": 0.1, "O5": 0.1}.get(level[:2], 0.03)
            assert_close([g for g in ours if g is not None], [g for g in plain if g is not None], tolerance)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("how", LATE)
@pytest.mark.parametrize("second", ["", "delay_unscale", "a second optimizer", "of parameters that it does not reach"])
def test_zero_grad_after_a_backward_reaches_what_torch_has_it_reach(level: str, how: str, second: str) -> None:
    def run(level: str | None) -> list[Tensor | None]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        parts = [list(model[0].parameters()), list(model[1:].parameters())]
        groups = parts if second == "a second optimizer" else [[*parts[0], *parts[1]]]
        optimizers = [torch.optim.SGD(group, lr=0.0) for group in groups]
        if level is not None:
            amp.initialize(model, optimizers, opt_level=level, verbosity=0, loss_scale=64.0)
        for index in range(3):
            hidden = model[0](torch.full((2, 4), 1.0 + index, dtype=model[0].weight.dtype))
            short = second == "of parameters that it does not reach" and index == 2
            loss = (hidden if short else model[2](model[1](hidden))).float().square().sum()
            delay = second == "delay_unscale" and index == 1
            scaled = amp.scale_loss(loss, optimizers, delay_unscale=delay) if level else nullcontext(loss)
            with scaled as scaled_loss:
                scaled_loss.backward(retain_graph=True)
                if index == 2:
                    LATE[how](model, optimizers[-1])
                    scaled_loss.backward()
        params = [p for o in optimizers for p in (amp.master_params(o) if level else o.param_groups[0]["params"])]
        found = [None if p.grad is None else p.grad.clone() for p in params]
        amp.close()
        return found

    ours, plain = run(level), run(None)
    assert_close(
        [torch.zeros(()) if g is None else g.norm() for g in ours],
        [torch.zeros(()) if g is None else g.norm() for g in plain],
        {"O4": 0.1, "O5": 0.1}.get(level, 0.03),
    )


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("how", LATE)
def test_zero_grad_in_the_body_of_another_optimizers_loss_is_heeded(level: str, how: str) -> None:
    """A generator's loop zeroes so what its loss left in the discriminator."""
    if level in MASTER_LEVELS:
        pytest.skip("masters take gradients of losses that list their optimizer")
    torch.manual_seed(0)
    models = [nn.Linear(4, 4), nn.Linear(4, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.0) for model in models]
    amp.initialize(models, optimizers, opt_level=level, verbosity=0, loss_scale=64.0)
    x = torch.ones(2, 4)
    for index in range(3):
        loss = models[1](models[0](x)).float().sum()
        with amp.scale_loss(loss, optimizers[0]) as scaled_loss:
            scaled_loss.backward()
            if index == 2:
                LATE[how](models[1], optimizers[1])
    assert not any(p.grad is not None and p.grad.any() for p in models[1].parameters())
    assert all(p.grad is not None and p.grad.any() for p in models[0].parameters())


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_that_are_only_computed_in_the_body_leave_earlier_ones(level: str) -> None:
    model, optimizer = started(level, loss_scale=64.0)
    backward(NORMED_MLP.loss(model, NORMED_MLP.batch()), optimizer)
    before = gradients(optimizer)
    with amp.scale_loss(NORMED_MLP.loss(model, NORMED_MLP.batch(1)), optimizer) as scaled_loss:
        torch.autograd.grad(scaled_loss, list(model.parameters()), retain_graph=True)
        torch.autograd.grad(scaled_loss, list(model.parameters()))
    assert_bitwise(gradients(optimizer), before)


@pytest.mark.parametrize("level", LEVELS)
def test_earlier_gradients_are_put_back_if_the_body_raises_before_and_in_a_backward(level: str) -> None:
    model, optimizer = started(level, loss_scale=64.0)
    backward(NORMED_MLP.loss(model, NORMED_MLP.batch()), optimizer)
    before = gradients(optimizer)
    for run in (lambda loss: None, lambda loss: loss.backward()):
        loss = NORMED_MLP.loss(model, NORMED_MLP.batch(1))
        with pytest.raises(ZeroDivisionError), amp.scale_loss(loss, optimizer) as scaled_loss:
            print(run(scaled_loss), 1 / 0)
        assert_bitwise(gradients(optimizer), before)


EDITS = ZEROED | {
    "halved": lambda model, optimizer: [p.grad.mul_(0.5) for p in amp.master_params(optimizer)],
    "clipped": lambda model, optimizer: nn.utils.clip_grad_norm_(list(amp.master_params(optimizer)), 0.01),
    "one replaced": lambda model, optimizer: setattr(next(amp.master_params(optimizer)), "grad", None),
}


@pytest.mark.parametrize("level", CHECKED)
@pytest.mark.parametrize("how", EDITS)
def test_edits_in_a_body_that_raises_before_its_backward_stay(level: str, how: str) -> None:
    def run(*, in_body: bool) -> list[Tensor | None]:
        options = CHECKED[level] | {"loss_scale": 64.0, "skip_on_overflow": True}
        model, optimizer = started(level[:2], **options)
        backward(NORMED_MLP.loss(model, NORMED_MLP.batch()), optimizer)
        loss = NORMED_MLP.loss(model, NORMED_MLP.batch(1))
        if in_body:
            with pytest.raises(ZeroDivisionError), amp.scale_loss(loss, optimizer):
                print(EDITS[how](model, optimizer), 1 / 0)
        elif how.startswith(("model", "one parameter", "half")):
            # Outside of a body this does not reach the masters.
            with amp.scale_loss(loss, optimizer):
                EDITS[how](model, optimizer)
        else:
            EDITS[how](model, optimizer)
        found = [None if p.grad is None else p.grad.clone() for p in amp.master_params(optimizer)]
        amp.close()
        return found

    ours, plain = run(in_body=True), run(in_body=False)
    assert [g is None for g in ours] == [g is None for g in plain]
    assert_bitwise([g for g in ours if g is not None], [g for g in plain if g is not None])


@pytest.mark.parametrize("delay", [False, True], ids=["", "delay_unscale"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("wrong", [lambda loss: loss, lambda loss: loss / 2 + 1], ids=["itself", "a part of it"])
def test_a_backward_of_the_loss_that_was_passed_in_is_refused(wrong: Any, level: str, delay: bool) -> None:
    model, optimizer = started(level, loss_scale=64.0)
    backward(NORMED_MLP.loss(model, NORMED_MLP.batch()), optimizer)
    before = gradients(optimizer)
    loss = NORMED_MLP.loss(model, NORMED_MLP.batch(1))
    with pytest.raises(AmpStateError, match="on the loss that was passed"):  # noqa: SIM117 - which raises is the point
        with amp.scale_loss(loss, optimizer, delay_unscale=delay):
            wrong(loss).backward()
    assert_bitwise(gradients(optimizer), before)
    backward(NORMED_MLP.loss(model, NORMED_MLP.batch(1)), optimizer)
    optimizer.step()


MIXED = {
    "before": lambda loss, scaled: [loss.backward(retain_graph=True), scaled.backward()],
    "after": lambda loss, scaled: [scaled.backward(retain_graph=True), loss.backward()],
    "between": lambda loss, scaled: [
        scaled.backward(retain_graph=True),
        (loss * 2).backward(retain_graph=True),
        scaled.backward(),
    ],
}


@pytest.mark.parametrize("delay", [False, True], ids=["", "delay_unscale"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("order", MIXED)
def test_a_backward_of_the_loss_itself_beside_the_scaled_one_is_refused(order: str, level: str, delay: bool) -> None:
    model, optimizer = started(level, loss_scale=64.0)
    backward(NORMED_MLP.loss(model, NORMED_MLP.batch()), optimizer)
    before = gradients(optimizer)
    loss = NORMED_MLP.loss(model, NORMED_MLP.batch(1))
    with pytest.raises(AmpStateError, match="on the loss that was passed"):  # noqa: SIM117 - which raises is the point
        with amp.scale_loss(loss, optimizer, delay_unscale=delay) as scaled_loss:
            MIXED[order](loss, scaled_loss)
    assert_bitwise(gradients(optimizer), before)


PARTS = {
    "parts": lambda first, second: [first.backward(), second.backward()],
    "one part": lambda first, second: second.backward(),
    "another loss": lambda first, second: (first * 3).backward(),
    "accumulated": lambda first, second: torch.autograd.backward([first, second]),
}


@pytest.mark.parametrize("delay", [False, True], ids=["", "delay_unscale"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("index", [0, 1], ids=["first", "accumulating"])
@pytest.mark.parametrize("how", PARTS)
def test_backwards_of_parts_of_the_loss_are_said_by_name(how: str, index: int, level: str, delay: bool) -> None:
    model, optimizer = started(level, loss_scale=64.0)
    for earlier in range(index):
        backward(NORMED_MLP.loss(model, NORMED_MLP.batch(earlier)), optimizer)
    first, second = (NORMED_MLP.loss(model, NORMED_MLP.batch(i)) for i in (2, 3))
    with pytest.warns(AmpGradientWarning, match=r"no backward of scaled_loss ran there.*l1\.backward"):  # noqa: SIM117
        with amp.scale_loss(first + second, optimizer, delay_unscale=delay):
            PARTS[how](first, second)
    with warnings.catch_warnings():  # it is said once
        warnings.simplefilter("error")
        first, second = (NORMED_MLP.loss(model, NORMED_MLP.batch(i)) for i in (2, 3))
        with amp.scale_loss(first + second, optimizer):
            PARTS[how](first, second)


def test_backwards_of_parts_at_a_scale_of_1_are_right_and_nothing_is_said() -> None:
    model, optimizer = started("O5")
    loss = NORMED_MLP.loss(model, NORMED_MLP.batch())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with amp.scale_loss(loss + 0, optimizer):
            (loss * 2).backward()


ALLOWED = {
    "accumulation": lambda loss, scaled, model: (scaled / 4).backward(),
    "a constant": lambda loss, scaled, model: (scaled + loss.detach()).backward(),
    "twice": lambda loss, scaled, model: [scaled.backward(retain_graph=True), scaled.backward()],
    "gradients by themselves": lambda loss, scaled, model: torch.autograd.grad(loss, list(model.parameters())),
    "gradients of the loss first": lambda loss, scaled, model: [
        torch.autograd.grad(loss, model[0].weight, retain_graph=True),
        scaled.backward(),
    ],
    "gradients of the loss after it": lambda loss, scaled, model: [
        scaled.backward(retain_graph=True),
        torch.autograd.grad(loss, model[0].weight),
    ],
    "no backward": lambda loss, scaled, model: None,
    "inputs": lambda loss, scaled, model: scaled.backward(inputs=[model[0].weight]),
    "in another way": lambda loss, scaled, model: torch.autograd.backward([scaled.sum()]),
    "divided in place": lambda loss, scaled, model: scaled.div_(2).backward(),
    "put there by hand": lambda loss, scaled, model: [
        setattr(p, "grad", grad)
        for p, grad in zip(model.parameters(), torch.autograd.grad(scaled, list(model.parameters())), strict=True)
    ],
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("how", ALLOWED)
def test_other_backwards_in_the_body_are_no_error(how: str, level: str) -> None:
    model, optimizer = started(level, loss_scale=64.0)
    for index in range(2):
        loss = NORMED_MLP.loss(model, NORMED_MLP.batch(index))
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            ALLOWED[how](loss, scaled_loss, model)
    leaves_none = how in ("gradients by themselves", "no backward")
    with pytest.warns(AmpGradientWarning, match="finds no gradient") if leaves_none else nullcontext():
        optimizer.step()


def test_at_a_scale_of_one_the_loss_itself_may_be_run() -> None:
    model, optimizer = started("O5")
    loss = NORMED_MLP.loss(model, NORMED_MLP.batch())
    with amp.scale_loss(loss, optimizer):
        loss.backward()
    assert all(gradient is not None for gradient in gradients(optimizer))


# --- gradients of parameters that no listed optimizer steps -----------------------------------------


def gathered(level: str | None, when: str, kind: type[torch.optim.Optimizer], overflow: bool = False) -> Tensor:
    """Return how far the weight of a head moves by gradients that three backwards at three scales left in it before."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = kind(model[0].parameters(), lr=0.1)
    other = kind(model[1].parameters(), lr=0.1) if when == "of another optimizer" else None
    if level is not None:
        optimizers = optimizer if other is None else [optimizer, other]
        options = {"opt_level": level[:2], "verbosity": 0, "loss_scale": "dynamic", **CAST[level]}
        amp.initialize(model, optimizers, **options)
    head = model[1]
    if when == "made later":
        torch.manual_seed(1)
        head = nn.Linear(4, 2)
    head.requires_grad_(when != "frozen")
    before = head.weight.detach().clone()
    for index in range(3):
        if index == 1:
            head.requires_grad_(True)
        hidden = model[0](torch.arange(12.0).view(3, 4).div(12).to(model[0].weight.dtype))
        loss = head(hidden.to(head.weight.dtype) if hidden.dtype != head.weight.dtype else hidden).float()
        loss = loss.square().mean()
        if level is None:
            loss.backward()
        else:
            amp._amp_state.loss_scalers[0]._loss_scale = 64.0 * 2**index
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                (scaled_loss * (1e39 if overflow and index == 1 else 1.0)).backward()
        optimizer.step()
        if index < 2:
            optimizer.zero_grad()
    if other is None:
        optimizer.add_param_group({"params": list(head.parameters())})
        optimizer.zero_grad() if when == "zeroed" else None
        optimizer.step()
    else:
        other.step()
    amp.close()
    return head.weight.detach().float() - before.float()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("level", CAST)
@pytest.mark.parametrize("when", ["unowned", "made later", "frozen", "zeroed", "of another optimizer"])
def test_what_a_parameter_gathers_before_it_is_stepped_is_the_unscaled_sum(level: str, when: str, kind: Any) -> None:
    if when == "of another optimizer" and level in MASTER_LEVELS:
        pytest.skip("masters take gradients of losses that list their optimizer, and the step warns of others")
    moved, truth = gathered(level, when, kind), gathered(None, when, kind)
    torch.testing.assert_close(moved, truth, rtol=0.05, atol=0.05 * float(truth.abs().max()) + 1e-7)


@pytest.mark.parametrize("level", CAST)
@pytest.mark.parametrize("then", ["step", "scale_loss", "clip"])
def test_a_gradient_that_no_exit_saw_is_refused_where_its_parameter_joins(level: str, then: str) -> None:
    torch.manual_seed(0)
    base, head = nn.Linear(4, 4), nn.Linear(4, 2)
    optimizer = torch.optim.SGD(base.parameters(), lr=1.0)
    amp.initialize(base, optimizer, opt_level=level[:2], verbosity=0, loss_scale=64.0, **CAST[level])
    with amp.scale_loss(head(base(torch.ones(3, 4)).float()).float().square().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    before = [p.detach().clone() for p in (*base.parameters(), *head.parameters())]
    optimizer.add_param_group({"params": list(head.parameters())})
    actions = {
        "step": optimizer.step,
        "clip": lambda: amp.clip_grad_norm_(optimizer, 1.0),
        "scale_loss": amp.scale_loss(head(base(torch.ones(3, 4)).float()).sum(), optimizer).__enter__,
    }
    with pytest.raises(AmpStateError, match=r"in no module that was passed to amp\.initialize.*`\.grad` to None"):
        actions[then]()
    assert_bitwise([p.detach() for p in (*base.parameters(), *head.parameters())], before)
    optimizer.zero_grad()
    for p in head.parameters():
        p.grad = torch.zeros_like(p)  # which is the same at every scale
    with amp.scale_loss(head(base(torch.ones(3, 4)).float()).float().square().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert not torch.equal(head.weight, before[2])


@pytest.mark.parametrize("level", CAST)
def test_a_group_that_is_taken_out_and_put_back_steps_the_unscaled_sum(level: str) -> None:
    def moved(level: str | None) -> Tensor:
        torch.manual_seed(0)
        base, head = nn.Linear(4, 4), nn.Linear(4, 2)
        optimizer = torch.optim.SGD([{"params": base.parameters()}, {"params": head.parameters()}], lr=0.1)
        if level is not None:
            amp.initialize(base, optimizer, opt_level=level[:2], verbosity=0, loss_scale=64.0, **CAST[level])
        before = head.weight.detach().clone()
        group = {}
        for index in range(4):
            loss = head(base(torch.ones(3, 4)).float()).float().square().mean()
            if level is None:
                loss.backward()
            else:
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
            if index == 2:
                optimizer.add_param_group({"params": group["params"]})
            optimizer.step()
            if index == 0:
                group = optimizer.param_groups.pop()
            base.zero_grad()
            optimizer.zero_grad()
        return head.weight.detach() - before

    truth = moved(None)
    torch.testing.assert_close(moved(level), truth, rtol=0.05, atol=0.05 * float(truth.abs().max()))


def joined(level: str | None, then: str) -> list[Tensor]:
    """Return how far a step moves a model whose head joins the optimizer after a first backward."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=1.0)
    if level is not None:
        options = {"opt_level": level[:2], "verbosity": 0, "loss_scale": 64.0, **CAST[level]}
        amp.initialize(model, optimizer, **options)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def run(delay: bool) -> None:
        loss = (model(torch.arange(12.0).view(3, 4) / 12).float() - 1).square().mean()
        if level is None:
            loss.backward()
            return
        with amp.scale_loss(loss, optimizer, delay_unscale=delay) as scaled_loss:
            scaled_loss.backward()

    delays = then.startswith("delayed")
    run(delays)
    optimizer.add_param_group({"params": list(model[1].parameters())})
    if then == "clipped":
        params = model.parameters() if level is None else amp.master_params(optimizer)
        nn.utils.clip_grad_norm_(params, 0.2)
    if then == "delayed twice":
        run(True)
    if then in ("delayed twice", "delayed, a backward"):
        run(False)
    optimizer.step()
    moved = [value - before[name] for name, value in model.state_dict().items()]
    amp.close()
    return moved


@pytest.mark.parametrize("level", CAST)
@pytest.mark.parametrize("then", ["clipped", "delayed", "delayed, a backward", "delayed twice"])
def test_what_a_parameter_gathered_counts_in_an_open_window_and_for_master_params(then: str, level: str) -> None:
    for moved, truth in zip(joined(level, then), joined(None, then), strict=True):
        torch.testing.assert_close(moved, truth, rtol=0.05, atol=0.1 * float(truth.abs().max()))


@pytest.mark.parametrize("level", CAST)
@pytest.mark.parametrize("when", ["unowned", "made later", "of another optimizer"])
@pytest.mark.filterwarnings("ignore:SGD.step")
def test_an_overflow_in_what_a_parameter_gathers_skips_the_step(level: str, when: str) -> None:
    assert gathered(level, when, torch.optim.SGD, overflow=True).abs().max() < 1e-3  # close() undoes the rounding


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_that_no_optimizer_steps_are_put_back_if_the_backward_raises(level: str) -> None:
    model = MLP.model()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=64.0)
    backward(MLP.loss(model, MLP.batch()), optimizer)
    before = model[2].weight.grad.clone()

    def put_hook(module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(lambda grad: 1 / 0)

    model[0].register_forward_hook(put_hook)
    with pytest.raises(ZeroDivisionError), amp.scale_loss(MLP.loss(model, MLP.batch(1)), optimizer) as scaled_loss:
        print(scaled_loss.backward() if level not in MASTER_LEVELS else None, 1 / 0)
    assert_bitwise(model[2].weight.grad, before)


@pytest.mark.parametrize("is_listed", [True, False], ids=["initialized", "made later"])
@pytest.mark.parametrize("order", ["before", "after", "without"])
def test_another_loss_in_the_body_leaves_unscaled_gradients_alone(order: str, is_listed: bool) -> None:
    def gradients(scale: float | None) -> list[Tensor]:
        torch.manual_seed(0)
        model, probe = nn.Linear(4, 4), nn.Linear(4, 1)
        optimizer, probes = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, probe))
        if is_listed:
            amp.initialize([model, probe], [optimizer, probes], opt_level="O1", verbosity=0, loss_scale=scale)
        else:
            amp.initialize(model, optimizer, opt_level="O1", verbosity=0, loss_scale=scale)
            probe.bias = nn.Parameter(probe.bias.detach())
        x = torch.ones(2, 4)
        for _ in range(2):  # the second adds to gradients
            loss = model(x).square().mean() + (0.0 if order == "without" else probe(x).sum())
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                for which in {"before": (1, 0), "after": (0, 1), "without": (0, 1, 0)}[order]:
                    one = scaled_loss if which == 0 else probe(x.square() / 2).exp().sum()
                    one.backward(retain_graph=True)
        found = [p.grad.clone() for p in probe.parameters()]
        amp.close()
        return found

    assert_bitwise(gradients(64.0), gradients(1.0))


def test_two_bodies_inside_of_each_other_unscale_each_gradient_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
    amp.initialize(model, optimizers, opt_level="O1", verbosity=0, loss_scale=64.0)
    losses = [part(torch.ones(1, 4)).sum() for part in model]
    for _ in range(2):
        with amp.scale_loss(losses[0], optimizers[0]) as first, amp.scale_loss(losses[1], optimizers[1]) as second:
            first.backward(retain_graph=True)
            second.backward(retain_graph=True)
    assert [float(part.bias.grad[0]) for part in model] == [2.0, 2.0]


def test_a_body_inside_of_another_after_its_backward_goes_on_with_what_was_there() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.0) for part in model]
    amp.initialize(model, optimizers, opt_level="O1", verbosity=0, loss_scale=64.0)
    for delay in (False, True):
        losses = [part(torch.ones(1, 4)).sum() for part in model]
        with amp.scale_loss(losses[0], optimizers[0]) as first:
            first.backward()
            with amp.scale_loss(losses[1], optimizers[1], delay_unscale=delay) as second:
                second.backward()
    optimizers[1].step()
    assert [float(part.bias.grad[0]) for part in model] == [2.0, 2.0]


# --- what is refused, or said -----------------------------------------------------------------------


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_an_optimizer_that_scale_loss_did_not_list_is_told_to_be_listed(level: str) -> None:
    body, head = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (body, head)]
    amp.initialize([body, head], optimizers, opt_level=level, verbosity=0)
    backward(head(body(torch.ones(2, 4))).sum(), optimizers[0])
    optimizers[0].step()
    with pytest.warns(AmpGradientWarning, match=r"amp\.scale_loss\(loss, \[optimizer, other\]\)"):
        optimizers[1].step()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("inside", ["the body", "the backward"])
def test_a_step_inside_of_the_body_is_refused_before_anything_is_stepped(inside: str, level: str) -> None:
    model, optimizer = started(level, task=MLP, loss_scale=64.0)
    before = masters(optimizer)
    loss = MLP.loss(model, MLP.batch())
    hook = model[0].weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    if inside == "the body":
        hook.remove()
    with pytest.raises(AmpStateError, match=r"Nothing was\s+stepped"), amp.scale_loss(loss, optimizer) as scaled_loss:
        print(scaled_loss.backward(), optimizer.step())
    hook.remove()
    assert_bitwise(masters(optimizer), before)
    backward(MLP.loss(model, MLP.batch()), optimizer)
    optimizer.step()
    assert not torch.equal(masters(optimizer)[0], before[0])


@pytest.mark.parametrize("level", ["O0", "O3", "O4"])
def test_no_optimizer_is_needed_at_a_scale_of_one(level: str) -> None:
    started(level, task=MLP)
    with amp.scale_loss(torch.ones((), requires_grad=True) * 2, None) as scaled_loss:
        assert scaled_loss == 2


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_no_optimizer_at_another_scale_is_refused_with_what_to_type(level: str) -> None:
    started(level, task=MLP)
    with pytest.raises(TypeError, match=r"amp.scale_loss\(loss, optimizer\)"):
        amp.scale_loss(torch.ones((), requires_grad=True), None)


EDITED = {
    "in place": lambda p: p.grad.clamp_(-1, 1),
    "through data": lambda p: p.grad.data.clamp_(-1, 1),
    "replaced": lambda p: setattr(p, "grad", p.grad.clamp(-1, 1)),
}


@pytest.mark.parametrize("level", MASTER_LEVELS)
@pytest.mark.parametrize("how", EDITED)
def test_edits_of_half_gradients_are_warned_of_however_they_are_made(how: str, level: str) -> None:
    if how == "through data" and not kernels.has_native(torch.device("cpu")):
        pytest.skip("seen by the address of memory that is copied on write, which plain PyTorch does not tell")
    model, optimizer = started(level, task=MLP)
    backward(MLP.loss(model, MLP.batch()), optimizer)
    EDITED[how](model[0].weight)
    with pytest.warns(AmpGradientWarning, match="were written"):
        optimizer.step()


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_gradients_that_nobody_edits_are_not_warned_of(level: str) -> None:
    model, optimizer = started(level, task=MLP)
    for index in range(4):
        backward(MLP.loss(model, MLP.batch(index)), optimizer)
        assert len([p.grad.float().norm() for p in model.parameters()]) == len(gradients(optimizer))
        optimizer.step()


# --- requires_grad, written through the groups ----------------------------------------------------


@pytest.mark.parametrize("how", ["attribute", "method"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_what_is_frozen_through_the_groups_gets_no_gradient_and_is_not_stepped(level: str, how: str) -> None:
    model, optimizer = started(level, task=MLP)

    def set_all(value: bool) -> None:
        for param in group_params(optimizer)[:2]:
            if how == "method":
                param.requires_grad_(value)
            else:
                param.requires_grad = value

    train(MLP, model, optimizer, "c")
    set_all(False)
    before = frozen(group_params(optimizer))
    assert [p.requires_grad for p in model.parameters()] == [False, False, True, True]
    assert [p.requires_grad for p in group_params(optimizer)] == [False, False, True, True]
    train(MLP, model, optimizer, "c", first=1)
    assert [torch.equal(a, b) for a, b in zip(group_params(optimizer), before, strict=True)] == [True] * 2 + [False] * 2
    set_all(True)
    assert all(p.requires_grad for p in [*model.parameters(), *group_params(optimizer)])
    train(MLP, model, optimizer, "c", first=2)
    assert not any(torch.equal(a, b) for a, b in zip(group_params(optimizer), before, strict=True))


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_each_of_two_optimizers_of_a_parameter_reads_what_it_was_told(level: str) -> None:
    """LightningModule.toggle_optimizer and untoggle_optimizer write it so."""
    model = MLP.model()
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    amp.initialize(model, [first, second], opt_level=level, verbosity=0)
    state = {}
    for param in [*group_params(first), *group_params(second)]:
        state[param] = param.requires_grad
        param.requires_grad = False
    assert all(state.values())
    for param in group_params(second):
        param.requires_grad = state[param]
    assert all(p.requires_grad for p in model.parameters())
    for param in group_params(first):
        param.requires_grad = state[param]
    model.requires_grad_(False)
    assert not any(p.requires_grad for p in [*group_params(first), *group_params(second)])


@pytest.mark.parametrize("level", LEVELS)
def test_a_body_without_a_backward_is_said_once_by_the_step(level: str) -> None:
    model, optimizer = started(level)
    loss = NORMED_MLP.loss(model, NORMED_MLP.batch())
    with amp.scale_loss(loss, optimizer):
        pass
    with pytest.warns(AmpGradientWarning, match=r"step\(\) finds no gradient.*call scaled_loss.backward\(\) in it"):
        optimizer.step()
    with amp.scale_loss(NORMED_MLP.loss(model, NORMED_MLP.batch()), optimizer):
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_that_are_zeroed_between_the_exit_and_the_step_are_said_once(level: str) -> None:
    model, optimizer = started(level)
    backward(NORMED_MLP.loss(model, NORMED_MLP.batch()), optimizer)
    optimizer.zero_grad()
    with pytest.warns(AmpGradientWarning, match=r"step\(\) finds no gradient.*zero_grad\(\) came between"):
        optimizer.step()


@pytest.mark.parametrize("level", LEVELS)
def test_steps_with_gradients_frozen_weights_and_no_loss_are_not_said_to_miss_any(level: str) -> None:
    model, optimizer = started(level)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        backward(NORMED_MLP.loss(model, NORMED_MLP.batch()), optimizer, overflow=True)
        optimizer.step()
        optimizer.zero_grad()
        for param in model.parameters():
            param.requires_grad_(False)
        inputs, targets = NORMED_MLP.batch()
        with amp.scale_loss((model(inputs.requires_grad_()).float() - targets).square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O5"])
def test_a_backward_of_the_scaled_loss_after_the_exit_is_refused_before_it_adds_anything(level: str) -> None:
    model, optimizer = started(level, loss_scale=128.0)
    with amp.scale_loss(NORMED_MLP.loss(model, NORMED_MLP.batch()), optimizer) as scaled_loss:
        pass
    with pytest.raises(AmpStateError, match=r"after its `with amp.scale_loss\(...\)` was left.*inside of the `with`"):
        scaled_loss.backward()
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("level", LEVELS)
def test_a_backward_after_an_exit_that_left_gradients_scaled_is_unscaled_with_them(level: str) -> None:
    model, optimizer = started(level, loss_scale=128.0)
    with amp.scale_loss(NORMED_MLP.loss(model, NORMED_MLP.batch()), optimizer, delay_unscale=True) as scaled_loss:
        pass
    scaled_loss.backward()
    optimizer.step()
    assert all(param.isfinite().all() and param.abs().max() < 3 for param in model.parameters())


def two_tensors(model: nn.Module) -> nn.Module:
    """Make the weight a wrapper subclass that is no DTensor."""
    weight = model.weight
    model.weight = nn.Parameter(TwoTensor(weight.detach().clone(), weight.detach().clone()))
    return model


def test_a_gradient_that_wraps_tensors_cannot_be_checked_and_says_so() -> None:
    model = two_tensors(nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    with (
        pytest.raises(AmpStateError, match=r"A gradient of shape \(4, 8\) is a TwoTensor, .* Choose opt_level='O4'"),
        amp.scale_loss(model(torch.randn(3, 8)).sum(), optimizer) as scaled_loss,
    ):
        scaled_loss.backward()
    assert all(p.grad is None for p in model.parameters())
    model.weight.grad = torch.zeros(4, 8)
    assert local_gradient(model.weight) is model.weight.grad, "a plain one can be"
    optimizer.zero_grad()
    amp.close()
    amp.initialize(model, optimizer, opt_level="O4", verbosity=0)
    before = model.weight.a.clone()
    with amp.scale_loss(model(torch.randn(3, 8)).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert not torch.equal(model.weight.a, before)


class Wrapped(Tensor):
    """A wrapper subclass of one tensor, whose gradients are plain."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        self = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        self.inner = inner
        return self

    def __tensor_flatten__(self) -> Any:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> Wrapped:
        return Wrapped(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        unwrapped, named = tree_map_only(Wrapped, lambda one: one.inner, (args, kwargs or {}))
        result = func(*unwrapped, **named)
        if func._schema.is_mutable:
            return args[0]
        return Wrapped(result) if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default) else result


@pytest.mark.parametrize("level", ["O1", "O4"])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_a_weight_that_wraps_a_tensor_is_stepped_by_its_plain_gradient(make: Any, level: str) -> None:
    weights = []
    for is_wrapped in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(8, 4)
        if is_wrapped:
            model.weight = nn.Parameter(Wrapped(model.weight.detach()))
        optimizer = make(model.parameters(), lr=0.01)
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        for _ in range(2):
            with amp.scale_loss(model(torch.ones(2, 8)).float().square().mean(), optimizer) as scaled_loss:
                scaled_loss.backward()
            assert type(model.weight.grad) is Tensor
            optimizer.step()
            optimizer.zero_grad()
        weight = model.weight.detach()
        weights.append((weight.inner if isinstance(weight, Wrapped) else weight).clone())
        amp.close()
    torch.testing.assert_close(*weights)


def test_a_frozen_half_weight_that_wraps_a_tensor_is_left_alone_or_refused() -> None:
    model = nn.Linear(8, 4)
    model.register_parameter("quantized", nn.Parameter(Wrapped(torch.ones(4).bfloat16()), requires_grad=False))
    with pytest.raises(AmpStateError, match=r"a frozen Wrapped of shape \(4,\) in torch.bfloat16, which gets no"):
        amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O5", verbosity=0)
    optimizer = torch.optim.SGD([model.weight, model.bias], lr=0.1)
    amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    assert [p.dtype for p in amp.master_params(optimizer)] == [torch.float32, torch.float32]
    assert type(model.quantized.data) is Wrapped


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("ends", ["body", "observer", "step"])
def test_a_backward_after_delayed_gradients_were_discarded_or_stepped_is_refused(ends: str, level: str) -> None:
    with Engine() as engine:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        engine.initialize(model, optimizer, opt_level=level, verbosity=0)

        def fails(*_: Any) -> None:
            raise ZeroDivisionError

        unsubscribe = engine.backwards.events.leaving.subscribe(fails if ends == "observer" else lambda _: None)
        loss = model(torch.ones(2, 4)).square().mean()
        with suppress(ZeroDivisionError), engine.scale_loss(loss, optimizer, delay_unscale=True) as scaled_loss:
            scaled_loss.backward(retain_graph=True)
            if ends == "body":
                fails()
        unsubscribe()
        if ends == "step":
            optimizer.step()
        with pytest.raises(AmpStateError, match="after its `with amp.scale_loss"):
            scaled_loss.backward()
