"""LARC: its formula, around any optimizer, alone and under amp at every level."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_engine import Engine, amp
from amp_engine.optimizers import LARC, FusedAdam, FusedLAMB, FusedSGD
from tests.models import MLP, NORMED_MLP
from tests.support import (
    DYNAMIC_LEVELS,
    MASTER_LEVELS,
    assert_bitwise,
    backward,
    frozen,
    masters,
    scaler_numbers,
    train,
    weights_of,
)

INNER: dict[str, Any] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-2),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-4, weight_decay=1e-2),
    "FusedSGD": lambda params: FusedSGD(params, lr=0.1, momentum=0.9, weight_decay=1e-2),
    "FusedAdam": lambda params: FusedAdam(params, lr=0.01, weight_decay=1e-2),
    "FusedLAMB": lambda params: FusedLAMB(params, lr=0.01, weight_decay=1e-2),
    "Rprop": lambda params: torch.optim.Rprop(params, lr=0.01),
}


def larc(model: nn.Module, inner: str = "SGD", **settings: Any) -> LARC:
    return LARC(INNER[inner](model.parameters()), **settings)


def started(level: str, inner: str = "SGD", task: Any = MLP, **keywords: Any) -> tuple[nn.Module, LARC]:
    model = task.model()
    optimizer = larc(model, inner)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, **keywords)
    return model, optimizer


def adapted(p: Tensor, g: Tensor, lr: float, weight_decay: float, trust: float, clip: bool, eps: float) -> Tensor:
    """The formula in float64."""
    p, g = p.detach().double(), g.double()
    if not p.norm() or not g.norm():
        return g
    rate = trust * p.norm() / (g.norm() + weight_decay * p.norm() + eps)
    if clip:
        rate = torch.clamp(rate / lr, max=1.0)
    return (g + weight_decay * p) * rate


class Recorder(torch.optim.SGD):
    """Remembers the gradients and the weight decay that its step found."""

    def step(self, closure: Any = None) -> Any:
        self.seen = [None if p.grad is None else p.grad.clone() for p in weights_of(self)]
        self.decays = [group["weight_decay"] for group in self.param_groups]
        return super().step(closure)


# --- the formula ----------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_the_inner_step_finds_gradients_by_the_formula_and_no_weight_decay(dtype: torch.dtype, clip: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(17, 3), (5,), (), (0,), (40,), (40,), (9,)]
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
    for index, p in enumerate(params[:-1]):
        p.grad = (torch.randn(p.shape, generator=generator) * 10.0 ** (index - 3)).to(dtype)
    with torch.no_grad():
        params[4].zero_()
        params[5].grad.zero_()
    groups = [{"params": params[:2], "lr": 0.5}, {"params": params[2:], "weight_decay": 0.3}]
    inner = Recorder(groups, lr=0.1, weight_decay=0.01)
    optimizer = LARC(inner, trust_coefficient=0.1, clip=clip, eps=1e-6)
    expected = [
        None if p.grad is None else adapted(p, p.grad, lr, weight_decay, 0.1, clip, 1e-6)
        for p, lr, weight_decay in zip(params, [0.5] * 2 + [0.1] * 5, [0.01] * 2 + [0.3] * 5, strict=True)
    ]
    optimizer.step()
    tolerance = {torch.float16: 1e-3, torch.bfloat16: 8e-3}.get(dtype, 1e-6)
    for ours, truth in zip(inner.seen, expected, strict=True):
        if truth is None:
            assert ours is None
        else:
            torch.testing.assert_close(ours.double(), truth, rtol=tolerance, atol=1e-9 if tolerance < 1e-5 else 1e-6)
    assert inner.decays == [0.0, 0.0]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.3]


def test_a_float16_weight_whose_norm_is_beyond_float16_is_stepped() -> None:
    p = nn.Parameter(torch.full((1000,), 6e4, dtype=torch.float16))
    p.grad = torch.ones_like(p)
    LARC(torch.optim.SGD([p], lr=1e4)).step()
    assert torch.isfinite(p).all()
    assert (p != 6e4).all()


def test_weight_decay_pulls_a_maximized_weight_to_zero_too() -> None:
    p = nn.Parameter(torch.tensor([1.0, 2.0]))
    p.grad = torch.tensor([1e-12, 0.0])
    LARC(torch.optim.SGD([p], lr=0.1, weight_decay=0.5, maximize=True)).step()
    assert (p.abs() < torch.tensor([1.0, 2.0])).all()


def test_the_weight_decay_is_back_when_the_inner_step_raises() -> None:
    class Raising(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise ArithmeticError("inside of the inner step")

    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    optimizer = LARC(Raising([p], lr=0.1, weight_decay=0.25))
    with pytest.raises(ArithmeticError):
        optimizer.step()
    assert optimizer.param_groups[0]["weight_decay"] == 0.25


def test_groups_without_a_weight_decay_get_none() -> None:
    model = MLP.model()
    optimizer = larc(model, "Rprop")
    model(MLP.batch(0)[0]).sum().backward()
    optimizer.step()
    assert "weight_decay" not in optimizer.param_groups[0]


def test_a_sparse_gradient_is_refused_before_anything_is_changed() -> None:
    table, weight = nn.Embedding(4, 3, sparse=True), nn.Parameter(torch.ones(3))
    optimizer = LARC(torch.optim.SGD([{"params": [weight]}, {"params": table.parameters()}], lr=0.1))
    (table(torch.tensor([1])).sum() + weight.sum()).backward()
    before = weight.grad.clone(), table.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"LARC does not support sparse gradients; a parameter of shape \(4, 3\)"):
        optimizer.step()
    assert_bitwise((weight.grad, table.weight.detach()), before)


# --- what it is -----------------------------------------------------------------------------------


def test_what_is_not_an_optimizer_or_not_positive_is_refused() -> None:
    with pytest.raises(TypeError, match=r"LARC\(\) got a LARC, but wraps a torch.optim.Optimizer"):
        LARC(larc(MLP.model()))  # type: ignore[arg-type]
    for settings in ({"trust_coefficient": 0.0}, {"eps": -1.0}, {"trust_coefficient": float("nan")}):
        with pytest.raises(ValueError, match="trust_coefficient="):
            larc(MLP.model(), **settings)


def test_closures_are_refused_in_words() -> None:
    with pytest.raises(TypeError, match="LARC.step\\(\\) takes no closure"):
        larc(MLP.model()).step(lambda: None)  # type: ignore[arg-type]


def test_groups_state_and_the_rest_are_the_inner_optimizers() -> None:
    model = MLP.model()
    optimizer = larc(model)
    train_plain(model, optimizer, 2)
    assert optimizer.param_groups is optimizer.optim.param_groups
    assert optimizer.state is optimizer.optim.state
    assert optimizer.defaults is optimizer.optim.defaults
    assert_bitwise(optimizer.state_dict(), optimizer.optim.state_dict())
    extra = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [extra]})
    assert optimizer.optim.param_groups[1]["params"][0] is extra
    optimizer.zero_grad()
    assert all(p.grad is None for p in weights_of(optimizer))
    assert "trust_coefficient=0.02" in repr(optimizer)


def train_plain(model: nn.Module, optimizer: LARC, steps: int) -> None:
    for index in range(steps):
        optimizer.zero_grad()
        MLP.loss(model, MLP.batch(index)).backward()
        optimizer.step()


def test_a_learning_rate_scheduler_takes_the_inner_optimizer() -> None:
    model = MLP.model()
    optimizer = larc(model)
    with pytest.raises(TypeError, match="LARC is not an Optimizer"):
        torch.optim.lr_scheduler.StepLR(optimizer, 1)  # type: ignore[arg-type]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optim, 1)
    train_plain(model, optimizer, 1)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_copies_train_on_their_own_also_under_amp(copied: Any) -> None:
    model, optimizer = started("O0")
    train(MLP, model, optimizer, "c")
    model_copy, optimizer_copy = copied((model, optimizer))
    assert not hasattr(optimizer_copy, "_amp_stash")
    before = frozen(list(model.parameters()))
    train_plain(model_copy, optimizer_copy, 1)
    assert_bitwise(frozen(list(model.parameters())), before)
    train_plain(model, optimizer, 1)
    assert_bitwise(list(model.parameters()), list(model_copy.parameters()))


def test_grad_scaler_of_torch_drives_it() -> None:
    model, other = MLP.model(), MLP.model()
    optimizer, plain = larc(model, "FusedSGD"), larc(other, "FusedSGD")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for index in range(3):
        optimizer.zero_grad()
        scaler.scale(MLP.loss(model, MLP.batch(index))).backward()
        scaler.step(optimizer)  # type: ignore[arg-type]
        scaler.update()
    train_plain(other, plain, 3)
    assert_bitwise(list(model.parameters()), list(other.parameters()))


# --- under amp ------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
def test_amp_trains_with_it_at_every_level(level: str, inner: str) -> None:
    model, optimizer = started(level, inner, NORMED_MLP)
    start = masters(optimizer)
    losses = train(NORMED_MLP, model, optimizer, "cccccc")
    assert all(torch.isfinite(torch.tensor(losses)))
    assert all(not torch.equal(a, b) for a, b in zip(masters(optimizer), start, strict=True))


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_fp32_weights_get_what_they_get_without_amp(level: str) -> None:
    model, optimizer = started(level, loss_scale=2.0**8)
    with amp.disable_casts():
        train(MLP, model, optimizer, "cccc")
    amp.close()
    plain = MLP.model()
    train_plain(plain, larc(plain), 4)
    assert_bitwise(list(model.parameters()), list(plain.parameters()))


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_masters_and_their_unscaled_gradients_are_what_it_adapts(level: str) -> None:
    model = MLP.model()
    inner = Recorder(model.parameters(), lr=0.1, weight_decay=0.01)
    optimizer = LARC(inner)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=2.0**7)
    backward(MLP.loss(model, MLP.batch(0)), optimizer)
    expected = [adapted(p, p.grad, 0.1, 0.01, 0.02, True, 1e-8) for p in amp.master_params(optimizer)]
    optimizer.step()
    for ours, truth in zip(inner.seen, expected, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), truth, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("level", DYNAMIC_LEVELS)
@pytest.mark.parametrize("inner", ["SGD", "FusedAdam", "Rprop"])
def test_an_overflow_changes_nothing_but_the_scale(level: str, inner: str) -> None:
    model, optimizer = started(level, inner)
    train(MLP, model, optimizer, "cc")
    optimizer.zero_grad()
    backward(MLP.loss(model, MLP.batch(2)), optimizer, overflow=True)
    before = masters(optimizer), frozen(list(model.parameters())), frozen(optimizer.state_dict())
    optimizer.step()
    assert_bitwise((masters(optimizer), frozen(list(model.parameters())), frozen(optimizer.state_dict())), before)
    assert scaler_numbers() == (2.0**15, 0)
    train(MLP, model, optimizer, "c", first=3)
    assert not torch.equal(masters(optimizer)[0], before[0][0])


def test_the_same_objects_come_back_alone_and_in_lists() -> None:
    model, second = MLP.model(), MLP.model(1)
    one, other = larc(model), INNER["SGD"](second.parameters())
    assert amp.initialize(model, one, verbosity=0)[1] is one
    amp.close()
    listed = [one, other]
    assert amp.initialize([model, second], listed, verbosity=0)[1] is listed
    assert listed[0] is one
    backward(MLP.loss(model, MLP.batch(0)) + MLP.loss(second, MLP.batch(0)), listed)
    assert one._amp_stash.fp32_from_fp32_groups == [list(model.parameters())]  # type: ignore[attr-defined]
    one._lazy_init_maybe_master_weights()  # type: ignore[attr-defined]
    amp.close()
    assert not hasattr(one, "_amp_stash")
    assert not hasattr(one, "_lazy_init_maybe_master_weights")


def test_it_and_what_is_inside_of_it_count_as_one_optimizer() -> None:
    model, optimizer = started("O2")
    for again in (optimizer, optimizer.optim, LARC(optimizer.optim)):
        with pytest.raises(RuntimeError, match=r"^A given optimizer should only be passed through amp.initialize once"):
            amp.initialize(MLP.model(), again, opt_level="O2", verbosity=0)
    amp.close()
    with pytest.raises(RuntimeError, match=r"^A given optimizer should only be passed through amp.initialize once"):
        amp.initialize(model, [optimizer, optimizer.optim], verbosity=0)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    backward(MLP.loss(model, MLP.batch(0)), [optimizer, optimizer.optim])
    optimizer.step()


def test_one_that_was_not_initialized_is_named() -> None:
    started("O1")
    stranger = larc(MLP.model(1))
    with (
        pytest.raises(TypeError, match=r"^This LARC was not passed to amp.initialize"),
        amp.scale_loss(torch.ones((), requires_grad=True), stranger),
    ):
        pass


@pytest.mark.parametrize("level", DYNAMIC_LEVELS)
@pytest.mark.parametrize("afterwards", [False, True])
def test_gradients_that_delay_unscale_left_scaled_are_unscaled_before_it_adapts(level: str, afterwards: bool) -> None:
    delayed, at_once = [], []
    for result, delay in ((delayed, True), (at_once, False)):
        model, optimizer = started(level, loss_scale=2.0**9)
        if afterwards:
            optimizer = LARC(optimizer.optim)
        backward(MLP.loss(model, MLP.batch(0)), optimizer, delay_unscale=delay)
        optimizer.step()
        result += masters(optimizer)
        amp.close()
    assert_bitwise(delayed, at_once)


def test_whether_a_step_was_skipped_can_be_asked_of_it() -> None:
    with Engine() as engine:
        model = MLP.model()
        optimizer = larc(model)
        engine.initialize(model, optimizer, opt_level="O2", verbosity=0)
        train(MLP, model, optimizer, "co", engine=engine)
        assert engine.step_was_skipped(optimizer)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_close_gives_it_back_as_it_was(level: str) -> None:
    model = MLP.model()
    optimizer = larc(model)
    before = frozen(vars(optimizer.optim))
    with Engine() as engine:
        engine.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert not optimizer._contexts
    assert optimizer.param_groups[0]["params"] == list(model.parameters())
    assert set(vars(optimizer.optim)) == set(before)
    train_plain(model, optimizer, 1)
