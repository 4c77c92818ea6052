"""A master's `.grad` is made when it is read; code that reads, edits or copies it sees what apex showed."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parameters_to_vector
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile

from amp_engine import AmpStateError, amp, kernels
from amp_engine.optimizers import FusedAdam, FusedLAMB, FusedSGD
from amp_engine.stepping import master_parameter
from tests import support
from tests.models import MLP, NORMED_MLP
from tests.support import MASTER_LEVELS, assert_bitwise, backward, frozen, masters, optimizer_values

Edit = Callable[[Optimizer], None]

native_only = pytest.mark.skipif(
    not kernels.has_native(torch.device("cpu")), reason="without kernels, torch's optimizers step FP32 gradients"
)

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "Adam": lambda params: torch.optim.Adam(params, lr=1e-2),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "FusedAdam": lambda params: FusedAdam(params, lr=1e-2),
    "FusedSGD": lambda params: FusedSGD(params, lr=0.1, momentum=0.9),
    "FusedLAMB": lambda params: FusedLAMB(params, lr=1e-2),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-2),
}


started = functools.partial(support.started, task=MLP)


def pending(
    level: str = "O2", make: Callable[[Any], Optimizer] = OPTIMIZERS["SGD"], task: Any = MLP
) -> tuple[nn.Module, Optimizer]:
    """Between the exit of the second backward and the second step."""
    model, optimizer = started(level, make, task=task)
    backward(task.loss(model, task.batch()), optimizer)
    optimizer.step()
    optimizer.zero_grad()
    backward(task.loss(model, task.batch(1)), optimizer)
    return model, optimizer


def held(param: Tensor) -> Tensor | None:
    """The gradient that exists in memory, without asking for one."""
    return torch.Tensor.grad.__get__(param)


def own_masters(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    own = {id(param) for param in model.parameters()}
    return [param for param in amp.master_params(optimizer) if id(param) not in own]


def gradients(optimizer: Optimizer) -> list[Tensor]:
    return [master.grad.clone() for master in amp.master_params(optimizer)]


def look(optimizer: Optimizer) -> None:
    assert all(master.grad is not None for master in amp.master_params(optimizer))


def seen_backward(model: nn.Module, optimizers: Any, loss: Tensor, **keywords: Any) -> dict[str, Tensor]:
    """Run one backward; return its half gradients, as they were in the body, still scaled."""
    with amp.scale_loss(loss, optimizers, **keywords) as scaled_loss:
        scaled_loss.backward()
        return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


# --- where gradients exist ------------------------------------------------------------------------


@pytest.mark.parametrize("level", MASTER_LEVELS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_master_gradient_exists_after_the_exit_or_after_the_step(name: str, level: str) -> None:
    model, optimizer = started(level, OPTIMIZERS[name], task=NORMED_MLP)
    for index in range(3):
        optimizer.zero_grad(set_to_none=True)
        backward(NORMED_MLP.loss(model, NORMED_MLP.batch(index)), optimizer)
        assert [held(master) for master in own_masters(model, optimizer)] == [None] * 3
        optimizer.step()
        shown = [master for master in own_masters(model, optimizer) if master.grad is not None]
        assert [master.numel() for master in shown] == [min(m.numel() for m in own_masters(model, optimizer))]
        assert all(bool((held(master) < 1e-4).all()) for master in shown)  # for zero_grad to find


@native_only
def test_the_exit_and_the_step_allocate_nothing_of_the_size_of_a_parameter() -> None:
    model = nn.Linear(512, 256, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    inputs = torch.ones(2, 512)

    def largest(call: Callable[[], Any]) -> int:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as record:
            call()
        return max((event.self_cpu_memory_usage for event in record.events()), default=0)

    assert largest(lambda: torch.empty(64, 512, dtype=torch.half)) >= 65536  # the probe sees
    for index in range(3):
        optimizer.zero_grad()
        context = amp.scale_loss(model(inputs).square().mean(), optimizer)
        context.__enter__().backward()
        assert largest(lambda context=context: context.__exit__(None, None, None)) < 65536
        if index:
            assert largest(optimizer.step) < 65536
        else:
            optimizer.step()  # makes the state


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_a_read_gradient_is_the_half_one_over_the_scale_in_the_layout_of_the_parameter(level: str) -> None:
    class Layouts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain = nn.Parameter(torch.randn(4, 6))
            self.transposed = nn.Parameter(torch.randn(6, 4).t())
            self.image = nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
            self.scalar = nn.Parameter(torch.randn(()))
            self.empty = nn.Parameter(torch.randn(0, 3))

    torch.manual_seed(3)
    model = Layouts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=2.0**10, verbosity=0)
    loss = sum((param.float() ** 3).sum() for param in model.parameters())
    halves = seen_backward(model, optimizer, loss)
    for half, param, master in zip(halves.values(), model.parameters(), amp.master_params(optimizer), strict=True):
        assert_bitwise(master.grad, half.float() / 2.0**10)
        assert master.grad.shape == param.shape
        assert master.grad.stride() == master.stride() == param.stride()
        assert master.grad is master.grad
    before = masters(optimizer)
    kept = gradients(optimizer)
    optimizer.step()
    assert_bitwise(masters(optimizer), [torch.add(b, g, alpha=-0.1) for b, g in zip(before, kept, strict=True)])


@pytest.mark.parametrize("scale", [2.0**10, 1000.0])
@pytest.mark.parametrize("level", MASTER_LEVELS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_looking_at_gradients_changes_no_bit_of_the_step(name: str, level: str, scale: float) -> None:
    def run(*, looking: bool) -> dict[str, Any]:
        model, optimizer = started(level, OPTIMIZERS[name], task=NORMED_MLP, loss_scale=scale)
        for index in range(4):
            optimizer.zero_grad()
            backward(NORMED_MLP.loss(model, NORMED_MLP.batch(index)), optimizer)
            if looking and index != 2:
                look(optimizer)
            optimizer.step()
        values = optimizer_values(optimizer) | {"model": frozen(dict(model.named_parameters()))}
        amp.close()
        return values

    seen, unseen = run(looking=True), run(looking=False)
    if name == "FusedLAMB" and scale == 1000.0:  # its norm is one of rounded gradients, or of scaled ones
        torch.testing.assert_close(seen["params"], unseen["params"], rtol=1e-5, atol=1e-7)
    else:
        assert_bitwise(seen, unseen)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_looking_at_one_gradient_of_several_changes_no_bit_of_the_step(name: str) -> None:
    def run(*, looking: bool) -> list[Tensor]:
        _, optimizer = pending("O2", OPTIMIZERS[name])
        if looking:
            assert list(amp.master_params(optimizer))[2].grad is not None
        optimizer.step()
        values = masters(optimizer)
        amp.close()
        return values

    assert_bitwise(run(looking=True), run(looking=False))


def test_masters_without_a_gradient_show_none() -> None:
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    optimizer = torch.optim.AdamW(model.parameters())
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert [master.grad for master in amp.master_params(optimizer)] == [None] * 4
    backward(model[1](torch.ones(2, 4).half()).float().square().mean() / 8, optimizer)
    assert [master.grad is None for master in amp.master_params(optimizer)] == [True, True, False, False]
    before = masters(optimizer)
    optimizer.step()
    assert_bitwise(masters(optimizer)[:2], before[:2])
    assert not torch.equal(masters(optimizer)[2], before[2])
    assert [len(optimizer.state.get(master, {})) for master in amp.master_params(optimizer)] == [0, 0, 3, 3]


def test_the_gradients_of_an_overflow_can_be_looked_at() -> None:
    model, optimizer = started()
    backward(MLP.loss(model, MLP.batch()), optimizer, overflow=True)
    assert not any(gradient.isfinite().all() for gradient in gradients(optimizer))
    before = optimizer_values(optimizer)
    optimizer.step()
    assert_bitwise(optimizer_values(optimizer), before)


def test_gradients_of_the_model_stay_scaled_after_exit_read_and_clip() -> None:
    model, optimizer = started()
    halves = seen_backward(model, optimizer, MLP.loss(model, MLP.batch()))
    assert_bitwise({name: param.grad for name, param in model.named_parameters()}, halves)
    look(optimizer)
    amp.clip_grad_norm_(optimizer, 1e-3)
    assert_bitwise({name: param.grad for name, param in model.named_parameters()}, halves)


# --- masters are parameters -----------------------------------------------------------------------


def test_a_master_is_a_leaf_parameter_whose_results_are_plain_tensors() -> None:
    _, optimizer = pending()
    for master in amp.master_params(optimizer):
        assert isinstance(master, nn.Parameter)
        assert master.is_leaf
        assert master.requires_grad
        assert type(master + 0) is type(master.detach()) is type(master.clone()) is Tensor
        assert "Parameter" in repr(master)
        assert not vars(master)


def test_the_gradient_of_a_master_is_checked_as_torch_checks_it() -> None:
    _, optimizer = pending()
    master = next(iter(amp.master_params(optimizer)))
    with pytest.raises(RuntimeError, match="size"):
        master.grad = torch.ones(3)
    with pytest.raises((TypeError, RuntimeError)):
        master.grad = "gradient"
    assert master.grad.shape == master.shape


def test_the_gradient_of_a_master_can_be_deleted() -> None:
    _, optimizer = pending()
    first, *_ = before = masters(optimizer)
    del next(iter(amp.master_params(optimizer))).grad
    assert next(iter(amp.master_params(optimizer))).grad is None
    optimizer.step()
    assert_bitwise(masters(optimizer)[0], first)
    assert not torch.equal(masters(optimizer)[1], before[1])


# --- what users do with gradients -----------------------------------------------------------------


def scale_in_place(optimizer: Optimizer) -> None:
    for master in amp.master_params(optimizer):
        master.grad.mul_(0.5)


def scale_data(optimizer: Optimizer) -> None:
    for master in amp.master_params(optimizer):
        master.grad.data.mul_(0.5)


def assign_data(optimizer: Optimizer) -> None:
    for master in amp.master_params(optimizer):
        master.grad.data = master.grad.data * 0.5


def assign(optimizer: Optimizer) -> None:
    for master in amp.master_params(optimizer):
        master.grad = master.grad * 0.5


def assign_unread(optimizer: Optimizer) -> None:
    for master in amp.master_params(optimizer):
        master.grad = torch.full_like(master, 0.25)


def drop_one(optimizer: Optimizer) -> None:
    list(amp.master_params(optimizer))[2].grad = None


def foreach(optimizer: Optimizer) -> None:
    torch._foreach_mul_([master.grad for master in amp.master_params(optimizer)], 0.5)


def clip_norm(optimizer: Optimizer) -> None:
    clip_grad_norm_(amp.master_params(optimizer), 1e-2)


def clip_norm_foreach(optimizer: Optimizer) -> None:
    clip_grad_norm_(amp.master_params(optimizer), 1e-2, foreach=True)


def clip_value(optimizer: Optimizer) -> None:
    clip_grad_value_(amp.master_params(optimizer), 1e-3)


def zero_out(optimizer: Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


def drop_all(optimizer: Optimizer) -> None:
    optimizer.zero_grad(set_to_none=True)


def add_noise(optimizer: Optimizer) -> None:
    generator = torch.Generator().manual_seed(5)
    for master in amp.master_params(optimizer):
        if master.grad is not None:
            master.grad += torch.randn(master.shape, generator=generator)


EDITS = [
    scale_in_place,
    scale_data,
    assign_data,
    assign,
    assign_unread,
    drop_one,
    foreach,
    clip_norm,
    clip_norm_foreach,
    clip_value,
    zero_out,
    drop_all,
    add_noise,
]


@pytest.mark.filterwarnings("ignore:.*finds no gradient")
@pytest.mark.parametrize("level", MASTER_LEVELS)
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_of_gradients_counts_as_in_torch(edit: Edit, level: str) -> None:
    """SGD, which rounds like torch's, against torch's own on FP32 parameters with the same gradients and edits."""
    model, optimizer = started(level)
    bare = OPTIMIZERS["SGD"]([nn.Parameter(master) for master in masters(optimizer)])
    for index in range(3):
        optimizer.zero_grad()
        bare.zero_grad()
        halves = seen_backward(model, optimizer, MLP.loss(model, MLP.batch(index)))
        scale = amp._amp_state.loss_scalers[0].loss_scale()
        for param, half in zip(amp.master_params(bare), halves.values(), strict=True):
            param.grad = half.float() / scale
        if index == 1:
            edit(optimizer)
            edit(bare)
        optimizer.step()
        bare.step()
    assert_bitwise(masters(optimizer), masters(bare))


@pytest.mark.filterwarnings("ignore:.*finds no gradient")
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("edit", [drop_all, lambda optimizer: drop_one(optimizer)], ids=["all", "one"])
def test_a_gradient_that_was_dropped_leaves_weight_and_state_alone(edit: Edit, name: str) -> None:
    model, optimizer = pending("O2", OPTIMIZERS[name])
    before = optimizer_values(optimizer)
    halves = frozen(list(model.parameters()))
    edit(optimizer)
    alone = [i for i, master in enumerate(amp.master_params(optimizer)) if master.grad is None]
    optimizer.step()
    after = optimizer_values(optimizer)
    for index in alone:
        assert_bitwise(after["params"][index], before["params"][index])
        assert_bitwise(after["state"][index], before["state"][index])
        assert_bitwise(frozen(list(model.parameters()))[index], halves[index])


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("whose", ["model", "optimizer"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_zero_grad_before_the_next_backward_leaves_nothing_behind(name: str, whose: str, set_to_none: bool) -> None:
    model, optimizer = pending("O2", OPTIMIZERS[name])
    optimizer.zero_grad(set_to_none=set_to_none)
    if whose == "model":
        model.zero_grad(set_to_none=set_to_none)
    halves = seen_backward(model, optimizer, MLP.loss(model, MLP.batch(2)))
    assert_bitwise(gradients(optimizer), [half.float() / 65536 for half in halves.values()])


@pytest.mark.filterwarnings("ignore:Gradients of the model were")
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_of_the_model_between_exit_and_step_changes_nothing(set_to_none: bool) -> None:
    def run(*, zeroing: bool) -> list[Tensor]:
        model, optimizer = pending()
        if zeroing:
            model.zero_grad(set_to_none=set_to_none)
        optimizer.step()
        values = masters(optimizer)
        amp.close()
        return values

    assert_bitwise(run(zeroing=True), run(zeroing=False))


def test_a_gradient_of_the_model_assigned_after_the_exit_changes_nothing() -> None:
    model, optimizer = pending()
    expected = gradients(optimizer)
    amp.close()
    model, optimizer = pending()
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    assert_bitwise(gradients(optimizer), expected)


@pytest.mark.parametrize("looked", [False, True])
def test_a_second_scaler_of_torch_works_on_top(looked: bool) -> None:
    def run(*, on_top: bool) -> list[Tensor]:
        model, optimizer = started()
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for index in range(3):
            optimizer.zero_grad()
            loss = MLP.loss(model, MLP.batch(index)) / 16
            backward(scaler.scale(loss) if on_top else loss, optimizer)
            if looked:
                look(optimizer)
            if on_top:
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
        values = masters(optimizer)
        amp.close()
        return values

    torch.testing.assert_close(run(on_top=True), run(on_top=False), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("what", ["looked at", "stepped", "clipped"])
def test_autograd_into_the_masters_adds_to_what_is_pending(what: str) -> None:
    """A penalty on the exact weights, as people write it for weight decay."""
    _, optimizer = pending()
    expected = [g + 2 * m for g, m in zip(gradients(optimizer), masters(optimizer), strict=True)]
    amp.close()
    _, optimizer = pending()
    sum(master.square().sum() for master in amp.master_params(optimizer)).backward()
    if what == "looked at":
        torch.testing.assert_close(gradients(optimizer), expected)
    if what == "clipped":
        torch.testing.assert_close(amp.clip_grad_norm_(optimizer, 1e6), torch.nn.utils.get_total_norm(expected))
    before, kept = masters(optimizer), frozen([optimizer.state[m] for m in amp.master_params(optimizer)])
    optimizer.step()
    for new, old, gradient, state in zip(masters(optimizer), before, expected, kept, strict=True):
        torch.testing.assert_close(new, old - 0.1 * (0.9 * state["momentum_buffer"] + gradient))


def test_a_gradient_that_autograd_left_in_a_master_is_added_to() -> None:
    _, optimizer = pending()
    expected = [g + 2 * m for g, m in zip(gradients(optimizer), masters(optimizer), strict=True)]
    amp.close()
    model, optimizer = started()
    backward(MLP.loss(model, MLP.batch()), optimizer)
    optimizer.step()
    sum(master.square().sum() for master in amp.master_params(optimizer)).backward()
    backward(MLP.loss(model, MLP.batch(1)), optimizer)
    torch.testing.assert_close(gradients(optimizer), expected)


@pytest.mark.parametrize("backwards", [1, 2])
def test_gradients_first_looked_at_in_inference_mode_can_be_edited_outside(backwards: int) -> None:
    """A logger of gradient norms reads them so, before the script clips or goes on adding up."""
    model, optimizer = pending()
    with torch.inference_mode():
        look(optimizer)
    if backwards == 2:
        backward(MLP.loss(model, MLP.batch(2)), optimizer)
    norm = clip_grad_norm_(amp.master_params(optimizer), 1e-2)
    assert norm > 1e-2
    optimizer.step()


@pytest.mark.filterwarnings("ignore:Gradients of the model were written")
def test_a_backward_outside_of_scale_loss_changes_nothing_of_what_is_pending() -> None:
    def run(*, outside: bool) -> list[Tensor]:
        model, optimizer = pending()
        if outside:
            MLP.loss(model, MLP.batch(7)).backward()
        optimizer.step()
        values = masters(optimizer)
        amp.close()
        return values

    assert_bitwise(run(outside=True), run(outside=False))


@pytest.mark.parametrize("backwards", [1, 2])
def test_an_exception_in_a_later_body_keeps_what_was_pending(backwards: int) -> None:
    def fails(model: nn.Module, optimizer: Optimizer) -> None:
        with amp.scale_loss(MLP.loss(model, MLP.batch(5)), optimizer) as scaled_loss:
            scaled_loss.backward()
            raise ZeroDivisionError

    def run(*, failing: bool) -> dict[str, Any]:
        model, optimizer = pending()
        for index in range(1, backwards):
            backward(MLP.loss(model, MLP.batch(1 + index)), optimizer)
        if failing:
            with pytest.raises(ZeroDivisionError):
                fails(model, optimizer)
        optimizer.step()
        values = optimizer_values(optimizer)
        amp.close()
        return values

    assert_bitwise(run(failing=True), run(failing=False))


# --- copies of the optimizer while gradients are pending ------------------------------------------


def through_torch_save(optimizer: Optimizer) -> Optimizer:
    buffer = io.BytesIO()
    torch.save(optimizer, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES: dict[str, Callable[[Optimizer], Optimizer]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
    "torch.save": through_torch_save,
}


@pytest.mark.parametrize("duplicate", COPIES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_copy_of_the_optimizer_has_plain_parameters_and_leaves_the_origin_alone(name: str, duplicate: str) -> None:
    _, optimizer = pending("O2", OPTIMIZERS[name])
    optimizer.step()
    expected = optimizer_values(optimizer)
    amp.close()
    model, optimizer = pending("O2", OPTIMIZERS[name])
    twin = COPIES[duplicate](optimizer)
    assert {type(param) for param in amp.master_params(twin)} == {nn.Parameter}
    assert_bitwise(optimizer_values(twin), optimizer_values(optimizer))
    assert {param.grad for param in amp.master_params(twin)} == {None}
    halves = frozen(list(model.parameters()))
    for param in amp.master_params(twin):
        param.grad = torch.ones_like(param)
    twin.step()
    assert_bitwise(frozen(list(model.parameters())), halves)
    optimizer.step()
    assert_bitwise(optimizer_values(optimizer), expected)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_a_copy_of_a_master_is_a_plain_parameter(duplicate: Any) -> None:
    _, optimizer = pending()
    for master in amp.master_params(optimizer):
        twin = duplicate(master)
        assert type(twin) is nn.Parameter
        assert twin.grad is None
        assert_bitwise(twin.detach(), master.detach())
        twin.grad = torch.ones_like(twin)
        assert master.grad is not None
        assert not torch.equal(master.grad, twin.grad)


@pytest.mark.usefixtures("dynamo")
def test_compiled_functions_see_gradients() -> None:
    _, optimizer = pending()
    expected = sum(gradient.double().square().sum() for gradient in gradients(optimizer))
    amp.close()
    _, optimizer = pending()

    @torch.compile(backend="eager")
    def squares(params: list[Tensor]) -> Tensor:
        return sum(param.grad.double().square().sum() for param in params)

    torch.testing.assert_close(squares(list(amp.master_params(optimizer))), expected)


def test_owners_may_end_while_dynamo_walks_them() -> None:
    _, optimizer = pending()
    for index, _ in enumerate(master_parameter._OWNERS):
        if index == 0:
            amp.close()
            del _, optimizer
            gc.collect()


@pytest.mark.usefixtures("dynamo")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it traces its optimizers
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_compiled_step_is_the_step(name: str) -> None:
    def run(*, compiled: bool) -> list[Tensor]:
        model, optimizer = started("O2", OPTIMIZERS[name])
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        for index, outcome in enumerate("coc"):
            optimizer.zero_grad()
            backward(MLP.loss(model, MLP.batch(index)), optimizer, overflow=outcome == "o")
            step()
        values = masters(optimizer)
        amp.close()
        return values

    torch.testing.assert_close(run(compiled=True), run(compiled=False), rtol=1e-5, atol=1e-6)


# --- a second backward before the step ------------------------------------------------------------


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


def accumulated(
    plan: list[tuple[str, dict[str, Any]]], level: str, edit: Edit | None = None
) -> tuple[Heads, Optimizer, dict[str, Tensor]]:
    """The backwards of `plan`, `edit` after each, and the sums of the unscaled gradients in float64."""
    torch.manual_seed(1)
    model = Heads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    amp.initialize(model, optimizer, opt_level=level, num_losses=2, loss_scale="dynamic", verbosity=0)
    amp._amp_state.loss_scalers[1]._loss_scale = 2.0**9
    truth: dict[str, Tensor] = {}
    for index, (which, keywords) in enumerate(plan):
        scale = amp._amp_state.loss_scalers[keywords.get("loss_id", 0)].loss_scale()
        for name, half in seen_backward(model, optimizer, model.loss(which, index), **keywords).items():
            truth[name] = truth.get(name, 0) + half.double() / scale
        if edit is not None:
            edit(optimizer)
    return model, optimizer, truth


@pytest.mark.parametrize("level", MASTER_LEVELS)
@pytest.mark.parametrize("plan", PLANS)
def test_backwards_before_a_step_add_up_in_fp32(plan: str, level: str) -> None:
    model, optimizer, truth = accumulated(PLANS[plan], level)
    for (name, _), master in zip(model.named_parameters(), amp.master_params(optimizer), strict=True):
        if name in truth:
            assert master.grad.dtype == torch.float32
            error = (master.grad.double() - truth[name]).abs()
            assert (error <= 3 * 2.0**-23 * truth[name].abs() + 1e-9).all(), name
        else:
            assert master.grad is None


def peek(optimizer: Optimizer) -> None:
    for master in amp.master_params(optimizer):
        assert master.grad is None or master.grad.isfinite().all()


@pytest.mark.parametrize("level", MASTER_LEVELS)
@pytest.mark.parametrize("plan", PLANS)
def test_adding_up_unseen_gradients_gives_the_bits_of_adding_up_seen_ones(plan: str, level: str) -> None:
    def run(edit: Edit | None) -> dict[str, Any]:
        model, optimizer, _ = accumulated(PLANS[plan], level, edit)
        optimizer.step()
        optimizer.zero_grad()
        backward(model.loss("first+second", 9), optimizer)
        optimizer.step()
        values = optimizer_values(optimizer)
        amp.close()
        return values

    assert_bitwise(run(None), run(peek))


def double(optimizer: Optimizer) -> None:
    for master in amp.master_params(optimizer):
        if master.grad is not None:
            master.grad.mul_(2)


def test_an_edit_between_two_backwards_counts() -> None:
    plain, optimizer, _ = accumulated(PLANS["one loss twice"][:1], "O2")
    first = gradients(optimizer)
    amp.close()
    _, optimizer, truth = accumulated(PLANS["one loss twice"], "O2")
    both = gradients(optimizer)
    amp.close()
    _, optimizer, _ = accumulated(PLANS["one loss twice"], "O2", double)
    names = [name for name, _ in plain.named_parameters()]
    for name, edited, f, b in zip(names, gradients(optimizer), first, both, strict=True):
        if "norm" not in name:
            torch.testing.assert_close(edited, 2 * (b + f), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("looking", [False, True])
@pytest.mark.parametrize("outcomes", ["co", "oc", "oo"])
def test_an_overflow_among_several_backwards_skips_and_leaves_every_bit(outcomes: str, looking: bool) -> None:
    model, optimizer = pending("O2", OPTIMIZERS["AdamW"], NORMED_MLP)
    optimizer.step()
    optimizer.zero_grad()
    before, halves = optimizer_values(optimizer), frozen(list(model.parameters()))
    for index, outcome in enumerate(outcomes):
        backward(NORMED_MLP.loss(model, NORMED_MLP.batch(index)), optimizer, overflow=outcome == "o")
        if looking:
            look(optimizer)
    optimizer.step()
    assert_bitwise(optimizer_values(optimizer), before)
    assert_bitwise(frozen(list(model.parameters())), halves)
    optimizer.zero_grad()
    backward(NORMED_MLP.loss(model, NORMED_MLP.batch(5)), optimizer)
    optimizer.step()
    assert {optimizer.state[master]["step"].item() for master in amp.master_params(optimizer)} == {3.0}


@pytest.mark.parametrize("level", MASTER_LEVELS)
@pytest.mark.parametrize("looking", [False, True])
def test_a_delayed_window_steps_on_its_sum(level: str, looking: bool) -> None:
    def run() -> tuple[list[Tensor], list[Tensor]]:
        model, optimizer = started(level)
        before = masters(optimizer)
        backward(MLP.loss(model, MLP.batch(0)) / 2, optimizer, delay_unscale=True)
        halves = seen_backward(model, optimizer, MLP.loss(model, MLP.batch(1)) / 2)
        if looking:
            look(optimizer)
        optimizer.step()
        scale = 1.0 if level == "O5" else 65536.0
        expected = [
            torch.add(b, half.float() / scale, alpha=-0.1) for b, half in zip(before, halves.values(), strict=True)
        ]
        return masters(optimizer), expected

    assert_bitwise(*run())


def test_the_scale_of_the_backward_counts_not_the_one_it_is_updated_to() -> None:
    """A growth between exit and step, and one between two backwards."""
    model, optimizer = started()
    amp._amp_state.loss_scalers[0]._unskipped = 1999
    halves = seen_backward(model, optimizer, MLP.loss(model, MLP.batch()))
    assert amp._amp_state.loss_scalers[0].loss_scale() == 2.0**17
    before = masters(optimizer)
    optimizer.step()
    expected = [torch.add(b, half.float() / 65536, alpha=-0.1) for b, half in zip(before, halves.values(), strict=True)]
    assert_bitwise(masters(optimizer), expected)


def test_a_scale_set_by_the_user_after_the_exit_does_not_touch_pending_gradients() -> None:
    model, optimizer = started()
    halves = seen_backward(model, optimizer, MLP.loss(model, MLP.batch()))
    amp._amp_state.loss_scalers[0]._loss_scale = 4.0
    assert_bitwise(gradients(optimizer), [half.float() / 65536 for half in halves.values()])


# --- gradients that are not torch's usual ones ----------------------------------------------------


@pytest.mark.filterwarnings("ignore:Gradients of the model were written")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradients_that_are_views_of_a_bucket_keep_the_values_of_the_exit(name: str) -> None:
    """DistributedDataParallel(gradient_as_bucket_view=True) leaves such views; the bucket is written again later."""

    def run(*, buckets: bool) -> list[Tensor]:
        model, optimizer = started("O2", OPTIMIZERS[name])
        bucket = torch.zeros(sum(param.numel() for param in model.parameters()), dtype=torch.float16)
        for index in range(3):
            optimizer.zero_grad()
            with amp.scale_loss(MLP.loss(model, MLP.batch(index)), optimizer) as scaled_loss:
                scaled_loss.backward()
                if buckets:
                    for param, view in zip(
                        model.parameters(), bucket.split([p.numel() for p in model.parameters()]), strict=True
                    ):
                        view.copy_(param.grad.flatten())
                        param.grad = view.view_as(param)
            bucket.fill_(float("nan"))
            optimizer.step()
        values = masters(optimizer)
        amp.close()
        return values

    assert_bitwise(run(buckets=True), run(buckets=False))


def test_the_buffer_of_a_gradient_written_after_the_exit_changes_nothing() -> None:
    """A script that holds on to the tensor and reuses it."""
    model, optimizer = started()
    with amp.scale_loss(MLP.loss(model, MLP.batch()), optimizer) as scaled_loss:
        scaled_loss.backward()
        buffers = [param.grad for param in model.parameters()]
        expected = [buffer.float() / 65536 for buffer in buffers]
    for buffer in buffers:
        buffer.zero_()
    assert_bitwise(gradients(optimizer), expected)


@pytest.mark.parametrize("looking", [False, True])
@pytest.mark.parametrize("level", MASTER_LEVELS)
@pytest.mark.parametrize("name", ["AdamW", "SGD", "FusedLAMB", "RMSprop"])
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
        optimizer = OPTIMIZERS[name](model.parameters())
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        for _ in range(2):
            optimizer.zero_grad()
            with amp.scale_loss(sum((p.float() / 1000).square().sum() for p in model), optimizer) as scaled_loss:
                scaled_loss.backward()
                for param, layout in zip(model, layouts, strict=True):
                    gradient = layout(param.grad)
                    param.grad = gradient if odd else gradient.contiguous()
            if looking:
                look(optimizer)
            optimizer.step()
        values = masters(optimizer)
        amp.close()
        return values

    assert_bitwise(run(odd=True), run(odd=False))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch 2.11
@pytest.mark.parametrize("looking", [False, True])
def test_a_sparse_gradient_beside_dense_ones(looking: bool) -> None:
    model = nn.ModuleList([nn.Embedding(8, 4, sparse=True), nn.Linear(4, 2)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    for _ in range(2):
        optimizer.zero_grad()
        before = masters(optimizer)
        loss = model[1](model[0](torch.tensor([1, 2, 1]))).float().square().mean() / 8
        halves = seen_backward(model, optimizer, loss)
        if looking:
            look(optimizer)
        optimizer.step()
        for new, old, half in zip(masters(optimizer), before, halves.values(), strict=True):
            gradient = (half.to_dense() if half.is_sparse else half).float() / 65536
            torch.testing.assert_close(new, old - 0.1 * gradient, rtol=1e-3, atol=1e-5)
        for param, master in zip(model.parameters(), masters(optimizer), strict=True):
            assert_bitwise(param.detach(), master.half())


@pytest.mark.parametrize("name", ["AdamW", "SGD", "RMSprop"])
@pytest.mark.parametrize("looking", [False, True])
def test_parameters_of_other_types_are_stepped_beside(name: str, looking: bool) -> None:
    """float32 and float64 parameters that belong to no model, as a learned temperature does."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    extra = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, dtype=torch.float64))]
    optimizer = OPTIMIZERS[name]([*model.parameters(), *extra])
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    bare = OPTIMIZERS[name]([nn.Parameter(value) for value in masters(optimizer)])
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
            look(optimizer)
        optimizer.step()
        bare.step()
    assert [master.dtype for master in masters(optimizer)] == [torch.float32] * 3 + [torch.float64]
    torch.testing.assert_close(masters(optimizer), masters(bare), rtol=2e-6, atol=2e-7)


# --- two optimizers, the end of an engine ---------------------------------------------------------


@pytest.mark.parametrize("task", [MLP, NORMED_MLP])
@pytest.mark.parametrize("name", ["SGD", "FusedAdam", "RMSprop"])
def test_gradients_stay_with_their_parameters_when_the_groups_change_before_the_step(name: str, task: Any) -> None:
    def run(change: Callable[[list[Tensor]], None]) -> dict[str, Tensor]:
        model, optimizer = pending("O2", OPTIMIZERS[name], task)
        change(optimizer.param_groups[0]["params"])
        optimizer.step()
        state = {key: value.clone() for key, value in model.state_dict().items()}
        amp.close()
        return state

    expected = run(lambda params: None)
    reversed_, without_last = run(list.reverse), run(list.pop)
    assert_bitwise(list(reversed_.values()), list(expected.values()))
    changed = [key for key in expected if not torch.equal(without_last[key], expected[key])]
    assert changed == [list(dict(task.model().named_parameters()))[-1]]


def reversed_(optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["params"].reverse()


def swapped_groups(optimizer: Optimizer) -> None:
    params = optimizer.param_groups[0]["params"]
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    moved = optimizer.param_groups[1]["params"]
    moved.append(params.pop(0))


def with_a_new_group(optimizer: Optimizer) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, dtype=torch.half))]})


def without_the_last(optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["params"].pop()


@pytest.mark.parametrize("regroup", [reversed_, swapped_groups, with_a_new_group, without_the_last])
@pytest.mark.parametrize("level", MASTER_LEVELS)
@pytest.mark.parametrize("name", ["SGD", "AdamW", "FusedAdam", "FusedLAMB", "RMSprop"])
@pytest.mark.parametrize("row", [0, 1])
def test_a_dropped_gradient_stays_dropped_when_the_groups_change_before_the_step(
    row: int, name: str, level: str, regroup: Edit
) -> None:
    model, optimizer = pending(level, OPTIMIZERS[name])
    both = list(amp.master_params(optimizer))[:2]
    dropped, other = both[row], both[1 - row]
    before = [dropped.detach().clone(), other.detach().clone()]
    dropped.grad = None
    regroup(optimizer)
    optimizer.step()
    assert_bitwise(dropped.detach(), before[0])
    assert not torch.equal(other.detach(), before[1])


def test_a_gradient_given_to_a_master_that_had_none_is_clipped_with_the_others() -> None:
    model = nn.ModuleList([nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0, loss_scale=8.0)
    backward(model[0](torch.ones(2, 4, dtype=torch.float16)).float().sum(), optimizer)
    seen, unseen = amp.master_params(optimizer)
    unseen.grad = torch.full_like(unseen, 100.0)
    norm = amp.clip_grad_norm_(optimizer, 1.0)
    assert norm.item() == pytest.approx(math.sqrt(16 * 100.0**2 + 16 * 2.0**2), rel=1e-3)
    assert parameters_to_vector([seen.grad, unseen.grad]).norm().item() == pytest.approx(1.0, rel=1e-3)


def test_a_parameter_of_two_optimizers_has_its_gradient_in_both() -> None:
    model = NORMED_MLP.model()
    optimizers = [torch.optim.SGD(model.parameters(), lr=lr) for lr in (0.1, 0.2)]
    amp.initialize(model, optimizers, opt_level="O2", verbosity=0)
    halves = seen_backward(model, optimizers, NORMED_MLP.loss(model, NORMED_MLP.batch()))
    expected = [half.float() / 65536 for half in halves.values()]
    optimizers[0].step()
    assert_bitwise(gradients(optimizers[1]), expected)
    before = masters(optimizers[1])
    optimizers[1].step()
    for new, old, gradient in zip(masters(optimizers[1]), before, expected, strict=True):
        assert not torch.equal(new, old) or not gradient.any()
    for param, master in zip(model.parameters(), masters(optimizers[1]), strict=True):
        assert_bitwise(param.detach(), master.to(param.dtype))


def test_an_optimizer_keeps_its_pending_gradients_while_another_steps() -> None:
    model = MLP.model()
    optimizers = [torch.optim.AdamW(layer.parameters()) for layer in (model[0], model[2])]
    amp.initialize(model, optimizers, opt_level="O2", verbosity=0)
    halves = seen_backward(model, optimizers, MLP.loss(model, MLP.batch()))
    optimizers[0].step()
    optimizers[0].zero_grad()
    assert_bitwise(gradients(optimizers[1]), [half.float() / 65536 for half in list(halves.values())[2:]])


@pytest.mark.parametrize("level", MASTER_LEVELS)
@pytest.mark.parametrize("looking", [False, True])
@pytest.mark.parametrize("twice", [False, True])
def test_close_leaves_pending_gradients_unscaled_on_the_parameters(level: str, looking: bool, twice: bool) -> None:
    model, optimizer = started(level, task=NORMED_MLP)
    backward(NORMED_MLP.loss(model, NORMED_MLP.batch()), optimizer)
    if twice:
        backward(NORMED_MLP.loss(model, NORMED_MLP.batch(1)), optimizer)
    expected = gradients(optimizer)
    amp.close()
    model, optimizer = started(level, task=NORMED_MLP)
    backward(NORMED_MLP.loss(model, NORMED_MLP.batch()), optimizer)
    if twice:
        backward(NORMED_MLP.loss(model, NORMED_MLP.batch(1)), optimizer)
    if looking:
        look(optimizer)
    amp.close()
    assert {type(param) for param in amp.master_params(optimizer)} == {nn.Parameter}
    assert_bitwise([param.grad for param in model.parameters()], expected)
    before = masters(optimizer)
    optimizer.step()
    assert not torch.equal(masters(optimizer)[0], before[0])


def test_the_gradients_of_a_clip_are_what_close_leaves() -> None:
    model, optimizer = pending()
    norm = amp.clip_grad_norm_(optimizer, 1e-2)
    assert norm > 1e-2
    amp.close()
    norm = torch.nn.utils.get_total_norm([param.grad for param in model.parameters()])
    assert norm.item() == pytest.approx(1e-2, rel=1e-3)


def test_a_master_outlives_its_engine_and_its_optimizer() -> None:
    _, optimizer = pending()
    expected = gradients(optimizer)
    kept = list(amp.master_params(optimizer))
    amp.close()
    del optimizer
    for master, gradient in zip(kept, expected, strict=True):
        assert master.grad is None or torch.equal(master.grad, gradient)
        master.grad = torch.ones_like(master)
        assert_bitwise(master.grad, torch.ones_like(master))
    assert parameters_to_vector(kept).isfinite().all()


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
@pytest.mark.parametrize("make", [OPTIMIZERS["AdamW"], OPTIMIZERS["FusedSGD"]], ids=["AdamW", "FusedSGD"])
def test_a_graph_from_before_a_step_of_its_parameter_cannot_be_run_backward(
    make: Callable[[Any], Optimizer], level: str
) -> None:
    model, optimizer = started(level, make)
    for step in range(3):
        backward(MLP.loss(model, MLP.batch(step)), optimizer)
        powers = [(p**3).sum() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.backward(powers)


@pytest.mark.filterwarnings("ignore:Gradients of the model were set to None")
@native_only
@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_a_lost_gradient_is_an_error_once_and_training_goes_on(level: str) -> None:
    model, optimizer = pending(level)
    param = next(model.parameters())
    assert param.grad is not None
    param.grad.untyped_storage().resize_(0)
    param.grad = None
    before = [p.clone() for p in masters(optimizer)]
    lost = None
    try:
        optimizer.step()
    except AmpStateError as error:
        lost = error
    if lost is not None:  # before torch 2.13 the clone has the memory
        assert "resize_()" in str(lost)
        assert_bitwise(masters(optimizer), before)
        with pytest.raises(AmpStateError, match="is lost"):
            optimizer.zero_grad()
    optimizer.zero_grad()
    backward(MLP.loss(model, MLP.batch(2)), optimizer)
    optimizer.step()
    amp.close()


@pytest.mark.filterwarnings("ignore:Gradients of the model were set to None")
@native_only
def test_a_lost_gradient_does_not_keep_a_scale_loss_or_close_from_working() -> None:
    for call in ("scale_loss", "close"):
        model, optimizer = pending()
        param = next(model.parameters())
        assert param.grad is not None
        param.grad.untyped_storage().resize_(0)
        param.grad = None
        if call == "scale_loss":
            with contextlib.suppress(AmpStateError):
                backward(MLP.loss(model, MLP.batch(2)), optimizer)
            backward(MLP.loss(model, MLP.batch(2)), optimizer)
            optimizer.step()
        amp.close()


def test_each_of_two_optimizers_has_the_gradient_as_it_was_at_its_exit() -> None:
    model = nn.Linear(4, 4, bias=False)
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    amp.initialize(model, [first, second], opt_level="O2", verbosity=0, loss_scale=1.0)
    with amp.scale_loss(model(torch.ones(3, 4)).float().sum(), first) as scaled_loss:
        scaled_loss.backward()
    assert model.weight.grad is not None
    before = model.weight.grad.float()
    with amp.scale_loss(model(torch.ones(3, 4)).float().sum(), second):
        model.weight.grad.mul_(2)
    model.weight.grad.zero_()
    assert [torch.equal(p.grad, before) for p in amp.master_params(first)] == [True]
    assert [torch.equal(p.grad, 2 * before) for p in amp.master_params(second)] == [True]
