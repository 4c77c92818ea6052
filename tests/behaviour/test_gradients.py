"""Gradients between the exit of `scale_loss` and the step: what may be read, edited, added up and thrown away."""

from __future__ import annotations

import warnings
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from amp_engine import Engine, amp
from amp_engine.errors import AmpGradientWarning, AmpStateError
from amp_engine.ground.distributed import local_gradient
from amp_engine.optimizers import FusedLAMB
from tests.models import MLP, NORMED_MLP
from tests.support import (
    MASTER_LEVELS,
    WEIGHT_DTYPE,
    assert_bitwise,
    backward,
    entries_of,
    frozen,
    masters,
    momentum_sgd,
    scaler_numbers,
    started,
    weights_of,
)


def gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [master.grad.clone() for master in amp.master_params(optimizer)]


def assert_close(actual: list[Tensor], truth: list[Tensor], tolerance: float = 0.02) -> None:
    for a, t in zip(actual, truth, strict=True):
        assert (a.double() - t.double()).norm() <= tolerance * t.double().norm() + 1e-5


# --- what stands where after the exit -------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 1000.0])
@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_the_models_gradients_are_those_of_the_backward_over_the_scale(level: str, scale: float) -> None:
    class Layouts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain = nn.Parameter(torch.randn(4, 6))
            self.transposed = nn.Parameter(torch.randn(6, 4).t())
            self.image = nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
            self.scalar = nn.Parameter(torch.randn(()))
            self.empty = nn.Parameter(torch.randn(0, 3))
            self.norm = nn.BatchNorm1d(3)

    torch.manual_seed(3)
    model = Layouts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=scale, verbosity=0)
    with amp.scale_loss(sum((p.float() ** 3).sum() for p in model.parameters()), optimizer) as scaled_loss:
        scaled_loss.backward()
        scaled = [param.grad.clone() for param in model.parameters()]
    for was, param in zip(scaled, model.parameters(), strict=True):
        assert was.dtype == param.dtype
        assert param.grad.dtype == (torch.float32 if scale != 1.0 else param.dtype)
        torch.testing.assert_close(param.grad.float(), was.float() / scale, rtol=2.0**-23, atol=0)
        assert param.grad.stride() == param.stride()
    for param, master in zip(model.parameters(), amp.master_params(optimizer), strict=True):
        assert master.grad is param.grad
        assert master.grad.dtype == torch.float32
        assert master.stride() == param.stride()


# --- edits of gradients ---------------------------------------------------------------------------


def scale_data(params: list[Tensor]) -> None:
    for param in params:
        param.grad.data.mul_(0.5)


def assign_data(params: list[Tensor]) -> None:
    for param in params:
        param.grad.data = param.grad.data * 0.5


def drop_one(params: list[Tensor]) -> None:
    params[2].grad = None


def foreach(params: list[Tensor]) -> None:
    torch._foreach_mul_([param.grad for param in params], 0.5)


def clip_norm(params: list[Tensor]) -> None:
    nn.utils.clip_grad_norm_(params, 1e-2)


def clip_value(params: list[Tensor]) -> None:
    nn.utils.clip_grad_value_(params, 1e-3)


@pytest.mark.filterwarnings("ignore:.*finds no gradient")
@pytest.mark.parametrize("whose", ["the masters'", "the model's"])
@pytest.mark.parametrize("level", MASTER_LEVELS)
@pytest.mark.parametrize("edit", [scale_data, assign_data, drop_one, foreach, clip_norm, clip_value])
def test_an_edit_of_gradients_counts_as_in_torch(edit: Any, level: str, whose: str) -> None:
    """SGD, which rounds like torch's, against torch's own on FP32 parameters with the same gradients and edits."""
    model, optimizer = started(level, task=MLP)
    bare = momentum_sgd([nn.Parameter(master) for master in masters(optimizer)])
    for index in range(3):
        optimizer.zero_grad()
        backward(MLP.loss(model, MLP.batch(index)), optimizer)
        params = list(model.parameters()) if whose == "the model's" else list(amp.master_params(optimizer))
        for param, own in zip(entries_of(bare), params, strict=True):
            param.grad = own.grad.float().clone()
        if index == 1:
            edit(params)
            edit(entries_of(bare))
        optimizer.step()
        bare.step()
    if level == "O5" and whose == "the model's":  # its gradients are rounded after the edit
        assert_close(masters(optimizer), masters(bare), 1e-2)
    else:
        assert_bitwise(masters(optimizer), masters(bare))


# --- accumulation ---------------------------------------------------------------------------------


class Heads(nn.Module):
    """Two heads on one trunk, so that a loss may leave out a head."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.first, self.second = nn.Linear(16, 4), nn.Linear(16, 4)

    def loss(self, which: str, index: int = 0) -> Tensor:
        inputs, targets = MLP.batch(index)
        features = self.norm(self.trunk(inputs.to(self.trunk.weight.dtype)))
        features = features.to(self.first.weight.dtype).tanh()
        heads = [getattr(self, name) for name in which.split("+")]
        return sum((head(features).float() - targets).square().mean() for head in heads)


PLANS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "one loss twice": [("first+second", {}), ("first+second", {})],
    "three times": [("first+second", {})] * 3,
    "two scalers": [("first+second", {"loss_id": 0}), ("first+second", {"loss_id": 1})],
    "a head in the second only": [("first", {}), ("first+second", {})],
    "a head in the first only": [("first+second", {}), ("first", {})],
    "a head each, two scalers": [("first", {"loss_id": 0}), ("second", {"loss_id": 1})],
    "a head each, then both": [("first", {}), ("second", {"loss_id": 1}), ("first+second", {})],
}


@pytest.mark.parametrize("level", ["O1", *MASTER_LEVELS])
@pytest.mark.parametrize("plan", PLANS)
def test_backwards_before_a_step_add_up_in_fp32(plan: str, level: str) -> None:
    torch.manual_seed(1)
    model = Heads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    amp.initialize(model, optimizer, opt_level=level, num_losses=2, loss_scale="dynamic", verbosity=0)
    amp._amp_state.loss_scalers[1]._loss_scale = 2.0**9
    truth: dict[str, Tensor] = {}
    for index, (which, keywords) in enumerate(PLANS[plan]):
        scale = amp._amp_state.loss_scalers[keywords.get("loss_id", 0)].loss_scale()
        with amp.scale_loss(model.loss(which, index), optimizer, **keywords) as scaled_loss:
            scaled_loss.backward()
            for name, p in model.named_parameters():
                if p.grad is not None:  # in half, and still scaled
                    truth[name] = truth.get(name, 0) + p.grad.double() / scale
    for (name, _), master in zip(model.named_parameters(), amp.master_params(optimizer), strict=True):
        if name in truth:
            assert master.grad.dtype == torch.float32
            error = (master.grad.double() - truth[name]).abs()
            assert (error <= 3 * 2.0**-23 * truth[name].abs() + 1e-9).all(), name
        else:
            assert master.grad is None


def peek(optimizer: torch.optim.Optimizer) -> None:
    for master in amp.master_params(optimizer):
        assert master.grad is None or master.grad.isfinite().all()


CHECKED = {
    **{level: {"loss_scale": "dynamic"} for level in ("O1", "O2", "O3")},
    "O0, static": {"loss_scale": 64.0, "skip_on_overflow": True},
    "O4, scale of 1": {"skip_on_overflow": True},
    "O5, split": {"loss_scale": "dynamic", "master_weights": "split"},
}


def is_finite(model: nn.Module) -> bool:
    return all(bool(p.isfinite().all()) for p in model.parameters())


# --- delay_unscale --------------------------------------------------------------------------------


@pytest.mark.parametrize("level", CHECKED)
def test_a_backward_outside_that_overflowed_skips_the_step_of_the_next_one(level: str) -> None:
    model, optimizer = started(level[:2], **CHECKED[level])
    (NORMED_MLP.loss(model, NORMED_MLP.batch()) * float("inf")).backward()
    backward(NORMED_MLP.loss(model, NORMED_MLP.batch()) / 2**12, optimizer)
    optimizer.step()
    assert is_finite(model)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
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


def overflow_elsewhere() -> None:
    backward(F.mse_loss(OTHER[0](MLP.batch(9)[0]), MLP.batch(9)[1]), OTHER[1], overflow=True)


def grow_elsewhere() -> None:
    amp._amp_state.loss_scalers[0]._unskipped = 1999
    backward(F.mse_loss(OTHER[0](MLP.batch(9)[0]), MLP.batch(9)[1]), OTHER[1])


def load_a_scale() -> None:
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 8.0, "unskipped": 3}})


def write_a_scale() -> None:
    amp._amp_state.loss_scalers[0]._loss_scale = 4.0


OTHER: list[Any] = []


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


@pytest.mark.parametrize("move", [overflow_elsewhere, grow_elsewhere, load_a_scale, write_a_scale])
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


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("end", ["exit", "step"])
@pytest.mark.parametrize("move", [load_a_scale, write_a_scale])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
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
    for (_, o), was, wanted in zip(pairs, before, expected, strict=True):
        if end == "exit":
            assert_close(gradients(o), wanted, 1e-2)
        o.step()
        moved = [b.float() - a.float() for a, b in zip(masters(o), was, strict=True)]
        assert_close(moved, [0.1 * g.float() for g in wanted], 0.1 if level == "O3" else 1e-2)


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


# --- sparse gradients -----------------------------------------------------------------------------


SPARSE = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "SparseAdam": lambda params: torch.optim.SparseAdam(params, lr=0.1),
}


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
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
        value = weights_of(optimizer)[0].detach().clone()
        amp.close()
        return value

    torch.manual_seed(0)
    start = nn.Embedding(12, 4).weight.detach()
    value = run(level)
    untouched = [row for row in range(12) if row not in (1, 2, 3, 7)]
    assert_bitwise(value[untouched], start[untouched])
    torch.testing.assert_close(value, run(None), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_two_entries_of_a_row_that_overflow_only_when_added_are_seen(level: str) -> None:
    """Uncoalesced values are finite, their sum is not representable."""
    torch.manual_seed(0)
    model = nn.Embedding(12, 4, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
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


# --- gradients that are not what lies in their memory ---------------------------------------------


STEPPED = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": torch.optim.AdamW,
    "RMSprop": torch.optim.RMSprop,
    "FusedLAMB": FusedLAMB,
}


@pytest.mark.parametrize("looking", [False, True])
@pytest.mark.parametrize("level", MASTER_LEVELS)
@pytest.mark.parametrize("name", ["AdamW", "FusedLAMB", "RMSprop"])
def test_gradients_of_any_layout_are_stepped(name: str, level: str, looking: bool) -> None:
    layouts = [
        lambda g: g,
        lambda g: g.t().contiguous().t(),
        lambda g: g[:1].expand_as(g),
        lambda g: torch.stack([g, g], -1)[..., 0],
        lambda g: torch.cat([g, g])[: len(g)],
        lambda g: g.new_tensor(0.5).expand_as(g),
    ]

    def run(*, odd: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.ParameterList([nn.Parameter(torch.randn(6, 4)) for _ in layouts])
        optimizer = STEPPED[name](model.parameters())
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        for _ in range(2):
            optimizer.zero_grad()
            with amp.scale_loss(sum((p.float() / 1000).square().sum() for p in model), optimizer) as scaled_loss:
                scaled_loss.backward()
                for param, layout in zip(model, layouts, strict=True):
                    gradient = layout(param.grad)
                    param.grad = gradient if odd else gradient.contiguous()
            if looking:
                peek(optimizer)
            optimizer.step()
        values = masters(optimizer)
        amp.close()
        return values

    assert_bitwise(run(odd=True), run(odd=False))


@pytest.mark.parametrize("name", ["AdamW", "RMSprop"])
@pytest.mark.parametrize("looking", [False, True])
def test_parameters_of_other_types_are_stepped_beside(name: str, looking: bool) -> None:
    """float32 and float64 parameters that belong to no model, as a learned temperature does."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    extra = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, dtype=torch.float64))]
    optimizer = STEPPED[name]([*model.parameters(), *extra])
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    bare = STEPPED[name]([nn.Parameter(value) for value in masters(optimizer)])
    for _ in range(3):
        optimizer.zero_grad()
        with amp.scale_loss(
            model(torch.ones(2, 4)).square().mean() + sum(p.float().pow(2).sum() for p in extra), optimizer
        ) as scaled_loss:
            scaled_loss.backward()
            halves = [p.grad.clone() for p in (*model.parameters(), *extra)]
        for param, half in zip(amp.master_params(bare), halves, strict=True):
            param.grad = half.to(param.dtype) / 65536
        if looking:
            peek(optimizer)
        optimizer.step()
        bare.step()
    assert [master.dtype for master in masters(optimizer)] == [torch.float32] * 3 + [torch.float64]
    torch.testing.assert_close(masters(optimizer), masters(bare), rtol=2e-6, atol=2e-7)


# --- what an optimizer without masters is seen to hold --------------------------------------------


CAST: dict[str, Any] = {level: {} for level in ("O1", "O2", "O3")} | {"O5, split": {"master_weights": "split"}}


@pytest.mark.usefixtures("dynamo")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it traces its optimizers
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_compiled_step_is_the_step(name: str) -> None:
    def run(*, compiled: bool) -> list[Tensor]:
        model, optimizer = started("O2", STEPPED[name], MLP)
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        for index, outcome in enumerate("coc"):
            optimizer.zero_grad()
            backward(MLP.loss(model, MLP.batch(index)), optimizer, overflow=outcome == "o")
            step()
        values = masters(optimizer)
        amp.close()
        return values

    torch.testing.assert_close(run(compiled=True), run(compiled=False), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("level", MASTER_LEVELS)
@pytest.mark.parametrize("looking", [False, True])
@pytest.mark.parametrize("twice", [False, True])
def test_close_leaves_gradients_unscaled_on_the_parameters(level: str, looking: bool, twice: bool) -> None:
    model, optimizer = started(level, task=NORMED_MLP)
    for index in range(1 + twice):
        backward(NORMED_MLP.loss(model, NORMED_MLP.batch(index)), optimizer)
    expected = gradients(optimizer)
    amp.close()
    model, optimizer = started(level, task=NORMED_MLP)
    for index in range(1 + twice):
        backward(NORMED_MLP.loss(model, NORMED_MLP.batch(index)), optimizer)
    if looking:
        peek(optimizer)
    amp.close()
    assert_bitwise([param.grad for param in model.parameters()], expected)
    before = masters(optimizer)
    optimizer.step()
    assert not torch.equal(masters(optimizer)[0], before[0])


# --- what happens in the body ----------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("bodies", ["b zb", "bzb", "bz", "bbzb"])
def test_zero_grad_in_a_body_is_that_of_torch_until_a_backward_sets_gradients_aside(
    level: str, set_to_none: bool, bodies: str
) -> None:
    """z: it; b: a backward. A later body sets aside what was there when its backward began."""

    def run(level: str | None) -> list[Tensor | None]:
        model = MLP.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if level is not None:
            amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=64.0)
        for actions in bodies.split():
            loss = MLP.loss(model, MLP.batch()).float()
            with nullcontext(loss) if level is None else amp.scale_loss(loss, optimizer) as scaled_loss:
                for action in actions:
                    if action == "b":
                        scaled_loss.backward(retain_graph=True)
                    else:
                        optimizer.zero_grad(set_to_none)
        params = model.parameters() if level is None else amp.master_params(optimizer)
        found = [None if p.grad is None else p.grad.float() for p in params]
        amp.close()
        return found

    ours, plain = run(level), run(None)
    assert [g is None for g in ours] == [g is None for g in plain]
    assert_close([g for g in ours if g is not None], [g for g in plain if g is not None], 0.03)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gradients_that_are_only_computed_in_the_body_leave_earlier_ones(level: str) -> None:
    model, optimizer = started(level, loss_scale=64.0)
    backward(NORMED_MLP.loss(model, NORMED_MLP.batch()), optimizer)
    before = gradients(optimizer)
    with amp.scale_loss(NORMED_MLP.loss(model, NORMED_MLP.batch(1)), optimizer) as scaled_loss:
        torch.autograd.grad(scaled_loss, list(model.parameters()), retain_graph=True)
        torch.autograd.grad(scaled_loss, list(model.parameters()))
    assert_bitwise(gradients(optimizer), before)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gradients_of_the_loss_itself_in_a_body_are_refused(level: str) -> None:
    model, optimizer = started(level, loss_scale=64.0)
    loss = NORMED_MLP.loss(model, NORMED_MLP.batch())
    with pytest.raises(AmpStateError, match=r"run torch.autograd.grad\(loss, ...\) before the `with`"):  # noqa: SIM117
        with amp.scale_loss(loss, optimizer):
            torch.autograd.grad(loss, list(model.parameters()))


MIXED = {
    "alone": lambda loss, scaled: loss.backward(),
    "a part of it": lambda loss, scaled: (loss / 2 + 1).backward(),
    "before": lambda loss, scaled: [loss.backward(retain_graph=True), scaled.backward()],
    "after": lambda loss, scaled: [scaled.backward(retain_graph=True), loss.backward()],
    "between": lambda loss, scaled: [
        scaled.backward(retain_graph=True),
        (loss * 2).backward(retain_graph=True),
        scaled.backward(),
    ],
}


@pytest.mark.parametrize("delay", [False, True], ids=["", "delay_unscale"])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("order", MIXED)
def test_a_backward_of_the_loss_that_was_passed_in_is_refused(order: str, level: str, delay: bool) -> None:
    model, optimizer = started(level, loss_scale=64.0)
    backward(NORMED_MLP.loss(model, NORMED_MLP.batch()), optimizer)
    before = gradients(optimizer)
    loss = NORMED_MLP.loss(model, NORMED_MLP.batch(1))
    with pytest.raises(AmpStateError, match="on the loss that was passed"):  # noqa: SIM117 - which raises is the point
        with amp.scale_loss(loss, optimizer, delay_unscale=delay) as scaled_loss:
            MIXED[order](loss, scaled_loss)
    assert_bitwise(gradients(optimizer), before)
    backward(NORMED_MLP.loss(model, NORMED_MLP.batch(1)), optimizer)
    optimizer.step()


PARTS = {
    "parts": lambda first, second: [first.backward(), second.backward()],
    "one part": lambda first, second: second.backward(),
    "another loss": lambda first, second: (first * 3).backward(),
    "accumulated": lambda first, second: torch.autograd.backward([first, second]),
}


@pytest.mark.parametrize("delay", [False, True], ids=["", "delay_unscale"])
@pytest.mark.parametrize("level", ["O1", "O2"])
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


def plain_steps(level: str, **options: Any) -> list[warnings.WarningMessage]:
    """The warnings of two steps on backwards outside of `scale_loss`."""
    model, optimizer = started(level, **options)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for i in range(2):
            NORMED_MLP.loss(model, NORMED_MLP.batch(i)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return heard


@pytest.mark.parametrize("call", ["clip_grad_norm_", "clip_grad_value_"])
def test_a_clipping_at_o2_of_a_loss_that_nothing_scaled_is_refused(call: str) -> None:
    model, optimizer = started("O2")
    before = frozen(list(model.parameters()))
    NORMED_MLP.loss(model, NORMED_MLP.batch(0)).backward()
    for run in (lambda: getattr(amp, call)(optimizer, 1.0), optimizer.step):
        with pytest.raises(AmpStateError, match=r"gradients of a backward\(\) outside of amp\.scale_loss.*'O5'"):
            run()
    assert_bitwise(list(model.parameters()), before)


def test_a_step_at_o1_of_a_loss_that_nothing_scaled_is_said_once() -> None:
    for options in ({}, {"loss_scale": 64.0}):
        (one,) = plain_steps("O1", **options)
        assert one.category is AmpGradientWarning
        assert "nothing scaled the loss, unless you did" in str(one.message)
        assert one.filename == __file__
        amp.close()


@pytest.mark.parametrize("level", ["O0", "O1", "O4", "O5"])
def test_it_is_not_said_where_the_scale_is_1(level: str) -> None:
    assert plain_steps(level, loss_scale=1.0) == []


@pytest.mark.parametrize("optimizer", ["SGD", "fused"])
def test_torchs_own_scaler_at_o1_is_not_said_to_lack_a_scale(optimizer: str) -> None:
    model = NORMED_MLP.model()
    stepping = torch.optim.AdamW(model.parameters(), fused=optimizer == "fused")
    amp.initialize(model, stepping, opt_level="O1", verbosity=0)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(2):
            scaler.scale(NORMED_MLP.loss(model, NORMED_MLP.batch(i))).backward()
            scaler.unscale_(stepping)
            scaler.step(stepping)
            scaler.update()
            stepping.zero_grad()


def test_gradients_of_a_scale_by_hand_and_those_written_after_an_exit_are_not_said_to_lack_it() -> None:
    model, optimizer = started("O1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        params = list(model.parameters())
        found = torch.autograd.grad(amp.scale(NORMED_MLP.loss(model, NORMED_MLP.batch())), params)
        for p, grad in zip(params, amp.unscale(found), strict=True):
            p.grad = grad
        optimizer.step()
        optimizer.zero_grad()
        amp.close()
        model, optimizer = started("O1")
        backward(NORMED_MLP.loss(model, NORMED_MLP.batch()), optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        NORMED_MLP.loss(model, NORMED_MLP.batch()).backward()  # accumulates: what came before was scaled
        optimizer.step()


ALLOWED = {
    "accumulation": lambda loss, scaled, model: (scaled / 4).backward(),
    "a constant": lambda loss, scaled, model: (scaled + loss.detach()).backward(),
    "twice": lambda loss, scaled, model: [scaled.backward(retain_graph=True), scaled.backward()],
    "no backward": lambda loss, scaled, model: None,
    "inputs": lambda loss, scaled, model: scaled.backward(inputs=[model[0].weight]),
    "in another way": lambda loss, scaled, model: torch.autograd.backward([scaled.sum()]),
    "divided in place": lambda loss, scaled, model: scaled.div_(2).backward(),
    "put there by hand": lambda loss, scaled, model: [
        setattr(p, "grad", grad)
        for p, grad in zip(model.parameters(), torch.autograd.grad(scaled, list(model.parameters())), strict=True)
    ],
}


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("how", ALLOWED)
def test_other_backwards_in_the_body_are_no_error(how: str, level: str) -> None:
    model, optimizer = started(level, loss_scale=64.0)
    for index in range(2):
        loss = NORMED_MLP.loss(model, NORMED_MLP.batch(index))
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            ALLOWED[how](loss, scaled_loss, model)
    with pytest.warns(AmpGradientWarning, match="finds no gradient") if how == "no backward" else nullcontext():
        optimizer.step()


def test_gradients_that_autograd_left_in_one_memory_are_added_up_in_float32() -> None:
    """The gradients of concatenated weights are parts of one tensor. bfloat16 sums of ones end at 256."""
    layer = nn.ParameterList([torch.ones(3, 4), torch.ones(2, 4)])
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    amp.initialize(layer, optimizer, opt_level="O5", verbosity=0)
    for _ in range(300):
        output = nn.functional.linear(torch.ones(1, 4, dtype=torch.bfloat16), torch.cat([*layer]))
        with amp.scale_loss(output.float().sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
    for param in layer.parameters():
        assert param.grad is not None
        assert bool((param.grad == 300.0).all())


@pytest.mark.parametrize("how", ["expanded", "in a graph"])
def test_an_earlier_gradient_that_is_a_view_which_cannot_be_written_is_added(how: str) -> None:
    layer = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    amp.initialize(layer, optimizer, opt_level="O1", verbosity=0, loss_scale=64.0)
    ones = torch.ones(1, 1) if how == "expanded" else torch.ones(16, requires_grad=True)
    layer.weight.grad = ones.expand(4, 4) if how == "expanded" else ones.view(4, 4)
    with amp.scale_loss(layer(torch.ones(1, 4)).float().sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    assert layer.weight.grad.tolist() == [[2.0] * 4] * 4
    optimizer.step()


# --- gradients of parameters that no listed optimizer steps -----------------------------------------


@pytest.mark.parametrize("level", ["O1", "O2", "O5, split"])
@pytest.mark.parametrize("then", ["step", "scale_loss"])
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
        "scale_loss": amp.scale_loss(head(base(torch.ones(3, 4)).float()).sum(), optimizer).__enter__,
    }
    with pytest.raises(AmpStateError, match=r"joined SGD with a gradient.*`\.grad` to None"):
        actions[then]()
    assert_bitwise([p.detach() for p in (*base.parameters(), *head.parameters())], before)
    optimizer.zero_grad()
    with amp.scale_loss(head(base(torch.ones(3, 4)).float()).float().square().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert not torch.equal(head.weight, before[2])


@pytest.mark.parametrize("how", ["amp.scale", "apex's copied scale_loss"])
def test_a_gradient_of_a_loss_that_was_scaled_by_hand_is_refused_where_its_parameter_joins(how: str) -> None:
    base, head = nn.Linear(4, 4), nn.Linear(4, 2)
    optimizer = torch.optim.SGD(base.parameters(), lr=1.0)
    amp.initialize(base, optimizer, opt_level="O1", verbosity=0, loss_scale=64.0)
    loss = head(base(torch.ones(3, 4))).float().square().mean()
    if how == "amp.scale":
        amp.scale(loss).backward()
        other = nn.Linear(2, 2)
        amp.initialize(other, torch.optim.SGD(other.parameters(), 0.1), opt_level="O1", verbosity=0, loss_scale=64.0)
    else:
        optimizer._prepare_amp_backward()
        (loss * 64.0).backward()
        optimizer._post_amp_backward(amp._amp_state.loss_scalers[0])
    optimizer.add_param_group({"params": list(head.parameters())})
    with pytest.raises(AmpStateError, match="joined SGD with a gradient"):
        optimizer.step()


@pytest.mark.filterwarnings("ignore:SGD.step.. takes gradients of a backward.. outside of amp.scale_loss")
def test_a_parameter_joins_with_its_gradient_where_no_loss_was_scaled() -> None:
    base, head = nn.Linear(4, 4), nn.Linear(4, 2)
    optimizer = torch.optim.SGD(base.parameters(), lr=1.0)
    amp.initialize(base, optimizer, opt_level="O1", verbosity=0)
    for step in range(3):
        if step == 1:
            optimizer.add_param_group({"params": list(head.parameters())})
        before = head.weight.detach().clone()
        optimizer.zero_grad()
        head(base(torch.ones(3, 4))).float().square().mean().backward()
        optimizer.step()
        assert torch.equal(head.weight, before) == (step == 0)


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


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_an_optimizer_that_scale_loss_did_not_list_is_told_to_be_listed(level: str) -> None:
    body, head = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (body, head)]
    amp.initialize([body, head], optimizers, opt_level=level, verbosity=0)
    before = masters(optimizers[1])
    backward(head(body(torch.ones(2, 4))).sum() / 1024, optimizers[0])
    optimizers[0].step()
    is_scaled = scaler_numbers()[0] != 1.0
    match = r"scaled gradients of a loss that did not list it.*amp\.scale_loss\(loss, \[optimizer, other\]\)"
    with pytest.raises(AmpStateError, match=match) if is_scaled else nullcontext():
        optimizers[1].step()
    assert torch.equal(masters(optimizers[1])[0], before[0]) == is_scaled
    for optimizer in optimizers:
        optimizer.zero_grad()
    backward(head(body(torch.ones(2, 4))).sum() / 1024, optimizers)
    optimizers[1].step()
    assert not torch.equal(masters(optimizers[1])[0], before[0])


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


# --- requires_grad, written through the groups ----------------------------------------------------


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_body_without_a_backward_is_said_once_by_the_step(level: str) -> None:
    model, optimizer = started(level)
    loss = NORMED_MLP.loss(model, NORMED_MLP.batch())
    with amp.scale_loss(loss, optimizer):
        pass
    assert scaler_numbers()[1] == (0 if level == "O5" else 1), "it counts as clean"
    with pytest.warns(AmpGradientWarning, match=r"step\(\) finds no gradient.*call scaled_loss.backward\(\) in it"):
        optimizer.step()
    with amp.scale_loss(NORMED_MLP.loss(model, NORMED_MLP.batch()), optimizer):
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_gradients_that_are_zeroed_between_the_exit_and_the_step_are_said_once(level: str) -> None:
    model, optimizer = started(level)
    backward(NORMED_MLP.loss(model, NORMED_MLP.batch()), optimizer)
    optimizer.zero_grad()
    with pytest.warns(AmpGradientWarning, match=r"step\(\) finds no gradient.*zero_grad\(\) came between"):
        optimizer.step()


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
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


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_backward_of_the_scaled_loss_after_the_exit_is_refused_before_it_adds_anything(level: str) -> None:
    model, optimizer = started(level, loss_scale=128.0)
    with amp.scale_loss(NORMED_MLP.loss(model, NORMED_MLP.batch()), optimizer) as scaled_loss:
        pass
    with pytest.raises(AmpStateError, match=r"after its `with amp.scale_loss\(...\)` was left.*inside of the `with`"):
        scaled_loss.backward()
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_backward_after_an_exit_that_left_gradients_scaled_is_unscaled_with_them(level: str) -> None:
    model, optimizer = started(level, loss_scale=128.0)
    with amp.scale_loss(NORMED_MLP.loss(model, NORMED_MLP.batch()), optimizer, delay_unscale=True) as scaled_loss:
        pass
    scaled_loss.backward()
    optimizer.step()
    assert all(param.isfinite().all() and param.abs().max() < 3 for param in model.parameters())


def test_a_gradient_that_wraps_tensors_cannot_be_checked_and_says_so() -> None:
    model = nn.Linear(8, 4)
    model.weight = nn.Parameter(TwoTensor(torch.randn(4, 8), torch.randn(4, 8)))
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


def test_a_frozen_half_weight_that_wraps_a_tensor_is_left_alone_or_refused() -> None:
    model = nn.Linear(8, 4)
    model.register_parameter(
        "quantized", nn.Parameter(TwoTensor(*[torch.ones(4).bfloat16() for _ in range(2)]), requires_grad=False)
    )
    with pytest.raises(AmpStateError, match=r"a frozen TwoTensor of shape \(4,\) in torch.bfloat16, which gets no"):
        amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O5", verbosity=0)
    optimizer = torch.optim.SGD([model.weight, model.bias], lr=0.1)
    amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    assert [p.dtype for p in amp.master_params(optimizer)] == [torch.float32, torch.float32]
    assert type(model.quantized.data) is TwoTensor


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("ends", ["body", "observer", "step"])
def test_a_backward_after_delayed_gradients_were_discarded_or_stepped_is_refused(ends: str, level: str) -> None:
    with Engine() as engine:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        engine.initialize(model, optimizer, opt_level=level, verbosity=0)

        def fails(*_: Any) -> None:
            raise ZeroDivisionError

        unsubscribe = engine.records.events.leaving.subscribe(fails if ends == "observer" else lambda _: None)
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
