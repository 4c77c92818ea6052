"""Half copies of weights live for one iteration: each forward and backward runs the weights of its moment.

Weights, inputs and gradients are small integers wherever two results are compared: every sum of them is exact in
float16 and bfloat16, in any order, and a stale copy is off by a whole number.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.dlpack
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from amp_engine import Engine, amp
from amp_engine.optimizers import FusedAdam, FusedSGD
from amp_engine.optimizers.fused_step import FusedStep
from tests.support import FUNCTION_LEVELS, HALF, assert_bitwise, backward, frozen

LR = 1.0
LOSS_SCALE = 8.0  # keeps scaled integer gradients in the exact range of both types
X = torch.tensor([[1.0, 2.0, -1.0], [0.0, 1.0, 3.0], [1.0, 0.0, 1.0]])


@pytest.fixture(params=FUNCTION_LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    return request.param


class DataSGD(Optimizer):
    """Writes through `p.data`, as most third-party optimizers do."""

    def __init__(self, params: Any, lr: float = LR) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data.add_(p.grad.data, alpha=-group["lr"])


class FlatSGD(Optimizer):
    """Keeps flat views of its weights from the day it was made, and writes through them."""

    def __init__(self, params: Any, lr: float = LR) -> None:
        super().__init__(params, {"lr": lr})
        self.views = [(p, p.data.view(-1)) for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p, view in self.views:
            if p.grad is not None:
                view.sub_(self.param_groups[0]["lr"] * p.grad.reshape(-1))


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=LR),
    "momentum": lambda params: torch.optim.SGD(params, lr=LR, momentum=0.5),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.5),
    "FusedAdam": lambda params: FusedAdam(params, lr=0.5),
    "AdamW amsgrad": lambda params: torch.optim.AdamW(params, lr=0.5, amsgrad=True),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.5),
    "DataSGD": DataSGD,
    "FlatSGD": FlatSGD,
}


@pytest.fixture(params=OPTIMIZERS)
def make_optimizer(request: pytest.FixtureRequest) -> Callable[[Any], Optimizer]:
    return OPTIMIZERS[request.param]


def integers(*shape: int, seed: int) -> Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


class Net(nn.Module):
    """Two linear layers with integer weights: [N, 3] -> [N, 2]. No two parameters have the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 2, bias=False)
        with torch.no_grad():
            for index, p in enumerate(self.parameters()):
                p.copy_(integers(*p.shape, seed=index))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.first(x)))


def initialized(
    level: str, make: Callable[[Any], Optimizer] = OPTIMIZERS["SGD"], model: nn.Module | None = None
) -> tuple[Any, Optimizer]:
    model = Net() if model is None else model
    optimizer = make(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, loss_scale=LOSS_SCALE, verbosity=0)
    return model, optimizer


def total(output: Tensor) -> Tensor:
    """A loss whose gradients are integers."""
    return output.float().sum()


def iterate(model: nn.Module, optimizer: Optimizer, x: Tensor = X) -> None:
    """Take one step of at most the learning rate, so that weights stay small."""
    optimizer.zero_grad()
    backward(total(model(x)), optimizer)
    clamp_gradients(optimizer)
    optimizer.step()


def clamp_gradients(optimizer: Optimizer) -> None:
    for p in amp.master_params(optimizer):
        if p.grad is not None:
            p.grad.clamp_(-1.0, 1.0)


def fresh(model: Net, x: Tensor = X) -> Tensor:
    """Return `model(x)` with casts made this very moment, by hand."""
    low = HALF[amp.current_engine().policy.opt_level]

    def cast(p: Tensor | None) -> Tensor | None:
        return None if p is None else p.detach().to(low)

    with amp.disable_casts(), torch.no_grad():
        x = x.to(low)
        for layer in (model.first, model.second):
            x = F.linear(x, cast(layer.weight), cast(layer.bias))
            x = F.relu(x) if layer is model.first else x
    return x


def assert_fresh(model: Net) -> None:
    """Assert that copies are fresh in training, in evaluation, and in training after it."""
    expected = fresh(model)
    assert_bitwise(model(X), expected)
    with torch.no_grad():
        assert_bitwise(model(X), expected)
    assert_bitwise(model(X), expected)


# --- after steps ----------------------------------------------------------------------------------


def test_after_each_step_the_model_runs_the_new_weights(level: str, make_optimizer: Any) -> None:
    model, optimizer = initialized(level, make_optimizer)
    for _ in range(4):
        before = fresh(model)
        iterate(model, optimizer)
        assert not torch.equal(fresh(model), before), "the step moved nothing"
        assert_fresh(model)


@pytest.mark.parametrize("loss_scale", ["dynamic", 1.0, 8.0], ids=str)
def test_after_each_step_at_any_kind_of_scale(level: str, loss_scale: Any) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=loss_scale, verbosity=0)
    for _ in range(3):
        optimizer.zero_grad()
        backward(total(model(X)) * 2.0**-12, optimizer)
        optimizer.step()
        assert_fresh(model)


def test_evaluation_between_steps_runs_the_new_weights(level: str, make_optimizer: Any) -> None:
    model, optimizer = initialized(level, make_optimizer)
    for mode in (torch.no_grad, torch.inference_mode, torch.no_grad):
        iterate(model, optimizer)
        model.eval()
        with mode():
            for _ in range(2):
                assert_bitwise(model(X).clone(), fresh(model))
        model.train()
        iterate(model, optimizer)
        assert_fresh(model)


def test_an_optimizer_step_on_gradients_of_an_evaluated_model_reaches_every_weight(level: str) -> None:
    """A copy made without gradients must not cut training off."""
    model, optimizer = initialized(level)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            model(X)
        optimizer.zero_grad()
        backward(total(model(X)), optimizer)
        assert [p.grad is not None and p.grad.dtype for p in model.parameters()] == [torch.float32] * 3
        optimizer.step()


@pytest.mark.parametrize("name", ["SGD", "AdamW", "DataSGD"])
def test_an_overflow_leaves_weights_and_copies_alone(name: str) -> None:
    model = Net()
    optimizer = OPTIMIZERS[name](model.parameters())
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    for outcome in "cococ":
        before, output = frozen(list(model.parameters())), fresh(model)
        optimizer.zero_grad()
        backward(total(model(X)) * 2.0**-12, optimizer, overflow=outcome == "o")
        optimizer.step()
        assert amp.current_engine().step_was_skipped(optimizer) is (outcome == "o")
        if outcome == "o":
            assert_bitwise(list(model.parameters()), before)
            assert_bitwise(model(X), output)
        assert_fresh(model)


def test_two_optimizers_of_one_weight_are_both_seen(level: str) -> None:
    """Ours writes the copy along; the other one, through `.data`, must not leave it behind."""
    model = Net()
    ours, foreign = torch.optim.SGD(model.parameters(), lr=LR), DataSGD(model.parameters())
    amp.initialize(model, [ours, foreign], opt_level=level, loss_scale=LOSS_SCALE, verbosity=0)
    for optimizer in (ours, ours, foreign, ours, foreign, foreign, ours):
        iterate(model, optimizer)
        assert_fresh(model)


def test_an_optimizer_that_amp_does_not_know_is_seen(level: str, make_optimizer: Any) -> None:
    model, optimizer = initialized(level)
    iterate(model, optimizer)
    stranger = make_optimizer(model.parameters())
    for _ in range(2):
        stranger.zero_grad()
        total(model(X)).backward()
        stranger.step()
        assert_fresh(model)


def test_weights_that_another_engine_steps_are_seen(level: str) -> None:
    model, optimizer = initialized(level)
    iterate(model, optimizer)
    with Engine() as other:
        second = torch.optim.SGD(model.parameters(), lr=LR)
        other.initialize(model, second, opt_level="O0", loss_scale=LOSS_SCALE, verbosity=0)
        second.zero_grad()
        backward(total(model(X)), second, engine=other)
        second.step()
    assert_fresh(model)


# --- after foreign writes -------------------------------------------------------------------------


def under_no_grad(p: nn.Parameter) -> None:
    with torch.no_grad():
        p.mul_(2.0).add_(1.0)


def copied(p: nn.Parameter) -> None:
    with torch.no_grad():
        p.copy_(p + 1.0)


def indexed(p: nn.Parameter) -> None:
    with torch.no_grad():
        p[0] = 3.0


def a_view(p: nn.Parameter) -> None:
    with torch.no_grad():
        p.view(-1)[1:].add_(1.0)


def swapped(p: nn.Parameter) -> None:
    p.data, new = p.data + 1.0, p.data + 2.0
    p.data = new


def version_put_back(p: nn.Parameter) -> None:
    """Write as FSDP, functional optimizers and distributed samplers do, lest autograd complain."""
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(p):
        p.fill_(2.0)


# Those that move a version or an address are seen within an iteration, too.
TOLD: dict[str, Callable[[nn.Parameter], Any]] = {
    "in place": under_no_grad,
    "copy_": copied,
    "an index": indexed,
    "a view": a_view,
    "data =": swapped,
    "detach": lambda p: p.detach().add_(1.0),
    "detach, foreach": lambda p: torch._foreach_add_([p.detach()], 1.0),
    "init": lambda p: nn.init.constant_(p, 2.0),
}
WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    **TOLD,
    "data.clamp_": lambda p: p.data.clamp_(-1.0, 0.0),
    "data.copy_": lambda p: p.data.copy_(p.data + 1.0),
    "data of a view": lambda p: p.view(-1).data.add_(1.0),
    "numpy of detach": lambda p: p.detach().numpy().fill(2.0),
    "numpy of a state dictionary": lambda p: nn.ParameterList([p]).state_dict()["0"].numpy().fill(2.0),
    "dlpack": lambda p: torch.from_dlpack(p.detach()).fill_(2.0),
    "the storage": lambda p: p.untyped_storage().copy_(torch.full_like(p, 2.0).untyped_storage()),
    "an address": lambda p: ctypes.memset(p.data_ptr(), 0, p.nbytes),
    "a version put back": version_put_back,
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("name", ["SGD", "AdamW", "DataSGD"])
def test_a_write_after_a_step_is_seen(write: Callable[[nn.Parameter], Any], name: str, level: str) -> None:
    model, optimizer = initialized(level, OPTIMIZERS[name])
    for _ in range(2):
        iterate(model, optimizer)
        write(model.first.weight)
        write(model.second.weight)
        assert_fresh(model)


@pytest.mark.parametrize("write", TOLD.values(), ids=TOLD)
def test_a_write_that_moves_a_version_or_an_address_is_seen_at_once(
    write: Callable[[nn.Parameter], Any], level: str
) -> None:
    model, optimizer = initialized(level)
    for _ in range(2):
        iterate(model, optimizer)
        for weight in (model.first.weight, model.second.weight):
            model(X)
            write(weight)
            assert_fresh(model)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_between_backward_and_step_is_seen(write: Callable[[nn.Parameter], Any], level: str) -> None:
    model, optimizer = initialized(level, OPTIMIZERS["AdamW"])
    iterate(model, optimizer)
    optimizer.zero_grad()
    for weight in (model.first.weight, model.second.weight):
        backward(total(model(X)), optimizer)
        write(weight)
        assert_fresh(model)
    optimizer.step()
    assert_fresh(model)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("point", ["forward", "exit", "step", "load", "write"])
@pytest.mark.parametrize("name", ["SGD", "AdamW", "DataSGD"])
def test_a_forward_without_gradients_anywhere_in_an_iteration(point: str, name: str, mode: Any, level: str) -> None:
    model, optimizer = initialized(level, OPTIMIZERS[name])
    start = copy.deepcopy(model.state_dict())

    def evaluate() -> None:
        expected = fresh(model)
        with mode():
            outputs = [model(X) for _ in range(2)]
            assert [output.dtype for output in outputs] == [HALF[level]] * 2
            assert all(torch.equal(output, expected) for output in outputs)

    for _ in range(3):
        optimizer.zero_grad()
        if point == "load":
            model.load_state_dict(start)
            evaluate()
        loss = total(model(X))
        if point == "forward":
            evaluate()
        backward(loss, optimizer)
        if point == "exit":
            evaluate()
        clamp_gradients(optimizer)
        optimizer.step()
        if point == "write":
            model.first.weight.data.fill_(1.0)
        if point != "load":
            evaluate()
        assert_fresh(model)


def test_a_model_that_is_frozen_after_inference_mode_trains_what_comes_before_it(level: str) -> None:
    """A graph must not save a copy that a forward in inference mode left, since it refuses inference tensors."""
    model, optimizer = initialized(level)
    iterate(model, optimizer)
    with torch.inference_mode():
        model(X)
    model.requires_grad_(False)
    x = X.clone().requires_grad_()
    total(model(x)).backward()
    assert x.grad is not None


LATE_WRITES: dict[str, Callable[[nn.Parameter], Callable[[float], Any]]] = {
    "data": lambda p: p.data.fill_,
    "detach, numpy": lambda p: p.detach().numpy().fill,
    "storage": lambda p: torch.tensor([], dtype=p.dtype).set_(p.untyped_storage()).fill_,
}


@pytest.mark.parametrize("take", LATE_WRITES.values(), ids=LATE_WRITES)
@pytest.mark.parametrize("name", ["SGD", "AdamW", "DataSGD"])
def test_a_write_through_a_view_taken_earlier_is_seen_after_the_next_step(
    take: Callable[[nn.Parameter], Callable[[float], Any]], name: str, level: str
) -> None:
    model, optimizer = initialized(level, OPTIMIZERS[name])
    fills = [take(p) for p in model.parameters()]
    for value in (2.0, -1.0, 1.0):
        iterate(model, optimizer)
        for fill in fills:
            fill(value)
        iterate(model, optimizer)
        assert_fresh(model)


@pytest.mark.parametrize("take", LATE_WRITES.values(), ids=LATE_WRITES)
@pytest.mark.parametrize("name", ["SGD", "AdamW", "DataSGD"])
def test_a_write_through_a_view_taken_earlier_is_seen_after_the_next_scale_loss(
    take: Callable[[nn.Parameter], Callable[[float], Any]], name: str, level: str
) -> None:
    model, optimizer = initialized(level, OPTIMIZERS[name])
    fills = [take(p) for p in model.parameters()]
    for value in (2.0, -1.0, 1.0):
        iterate(model, optimizer)
        for fill in fills:
            fill(value)
        optimizer.zero_grad()
        backward(total(model(X)), optimizer)
        assert_fresh(model)


@pytest.mark.filterwarnings("ignore:.*finds no gradient")  # as the model has other parameters
@pytest.mark.parametrize("assign", [False, True])
def test_a_loaded_state_dict_is_seen(assign: bool, level: str) -> None:
    model, optimizer = initialized(level)
    start = copy.deepcopy(model.state_dict())
    for _ in range(2):
        iterate(model, optimizer)
        model.load_state_dict(start, assign=assign)
        assert_fresh(model)
        with torch.no_grad():
            assert_bitwise(model(X), fresh(model))
        start = {name: value.detach().clone() for name, value in start.items()}


def test_weights_initialized_anew_are_seen(level: str, make_optimizer: Any) -> None:
    model, optimizer = initialized(level, make_optimizer)
    for init in (nn.init.ones_, nn.init.eye_, lambda w: nn.init.uniform_(w, -1, 1)):
        iterate(model, optimizer)
        for layer in (model.first, model.second):
            init(layer.weight)
        assert_fresh(model)
        iterate(model, optimizer)
        model.first.reset_parameters()
        assert_fresh(model)


def test_a_clamped_critic_stays_clamped(level: str, make_optimizer: Any) -> None:
    critic, optimizer = initialized(level, make_optimizer)
    for _ in range(3):
        iterate(critic, optimizer)
        for p in critic.parameters():
            p.data.clamp_(-1.0, 1.0)
        assert_fresh(critic)


def test_a_replaced_parameter_is_seen(level: str) -> None:
    model, optimizer = initialized(level)
    iterate(model, optimizer)
    for value in (1.0, 2.0):
        model.second.weight = nn.Parameter(torch.full((2, 4), value))
        assert_fresh(model)


# --- shared weights -------------------------------------------------------------------------------


def test_tied_modules_run_and_train_one_weight(level: str, make_optimizer: Any) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.outside = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
            self.outside.weight = self.inside.weight
            with torch.no_grad():
                self.inside.weight.copy_(integers(3, 3, seed=3))

        def forward(self, x: Tensor) -> Tensor:
            return self.outside(self.inside(x))

    model, optimizer = initialized(level, make_optimizer, Tied())
    weight, low = model.inside.weight, HALF[level]
    for index in range(3):
        with amp.disable_casts():
            leaf = weight.detach().clone().requires_grad_()
            expected = F.linear(F.linear(X.to(low), leaf.to(low)), leaf.to(low))
            total(expected).backward()
        optimizer.zero_grad()
        output = model(X)
        assert_bitwise(output, expected)
        backward(total(output), optimizer)
        if index == 0:
            assert_bitwise(weight.grad, leaf.grad)
        torch.testing.assert_close(weight.grad, leaf.grad, rtol=2e-2, atol=2e-2)
        clamp_gradients(optimizer)
        optimizer.step()


def test_two_parameters_over_one_storage_both_follow(level: str) -> None:
    """The first is stepped by our kernel, which writes the memory of the second without moving its version."""
    first = nn.Parameter(integers(3, 3, seed=1))
    second = nn.Parameter(first.detach())
    assert first.data_ptr() == second.data_ptr()
    model = nn.ParameterList([first])
    for make in (OPTIMIZERS["SGD"], OPTIMIZERS["AdamW"], DataSGD):
        optimizer = make([first])
        amp.initialize(model, optimizer, opt_level=level, loss_scale=LOSS_SCALE, verbosity=0)
        for _ in range(2):
            F.linear(X, first), F.linear(X, second)
            optimizer.zero_grad()
            backward(total(F.linear(X, first)), optimizer)
            optimizer.step()
            assert_bitwise(F.linear(X, second), F.linear(X, first))
            with amp.disable_casts():
                expected = F.linear(X.to(HALF[level]), first.detach().to(HALF[level]))
            assert_bitwise(F.linear(X, second), expected)
        amp.close()


# --- graphs that are older than the weights -------------------------------------------------------


def by_hand(weight: Tensor, level: str) -> Callable[[Tensor], Tensor]:
    """`F.linear` with casts written out; the weight is cast now."""
    low = HALF[level]
    cast = weight.to(low)
    return lambda x: F.linear(x.to(low), cast)


@pytest.mark.parametrize("uncasted", [True, False], ids=["first forward", "warm"])
def test_a_step_between_the_forward_and_the_backward_of_a_graph_does_not_change_its_gradients(
    uncasted: bool, level: str, make_optimizer: Any
) -> None:
    """GAN order: D is stepped between the two backwards that run through it."""
    generator, critic = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    with torch.no_grad():
        generator.weight.copy_(integers(3, 3, seed=1))
        critic.weight.copy_(integers(3, 3, seed=2))
    of_generator, of_critic = make_optimizer(generator.parameters()), make_optimizer(critic.parameters())
    amp.initialize(
        [generator, critic],
        [of_generator, of_critic],
        opt_level=level,
        loss_scale=LOSS_SCALE,
        num_losses=2,
        verbosity=0,
    )
    if not uncasted:
        for optimizer in (of_generator, of_critic):
            optimizer.zero_grad()
            backward(total(critic(generator(X))), optimizer)
            optimizer.step()
        for layer in (generator, critic):  # back to whole numbers, and the copies are warm
            with torch.no_grad():
                layer.weight.round_()
            layer(X)
        iterate(critic, of_critic)
        with torch.no_grad():
            critic.weight.round_().clamp_(-3, 3)
    with amp.disable_casts():
        leaves = [layer.weight.detach().clone().requires_grad_() for layer in (generator, critic)]
        run_generator, run_critic = (by_hand(leaf, level) for leaf in leaves)
        total(run_critic(run_generator(X))).backward()
    through_both = critic(generator(X))
    of_critic.zero_grad()
    backward(total(critic(X)), of_critic, loss_id=1)
    before = critic.weight.detach().clone()
    of_critic.step()
    assert not torch.equal(critic.weight, before)
    critic.zero_grad()
    of_generator.zero_grad()
    backward(total(through_both), of_generator)
    assert_bitwise(generator.weight.grad, leaves[0].grad)
    assert_bitwise(critic(X), by_hand(critic.weight.detach(), level)(X))
    of_generator.step()
    assert_bitwise(generator(X), by_hand(generator.weight.detach(), level)(X))


@pytest.mark.parametrize("steps", [1, 3])
def test_truncated_backpropagation_steps_between_backwards_through_one_graph(
    steps: int, level: str, make_optimizer: Any
) -> None:
    cell = nn.Linear(3, 3, bias=False)
    with torch.no_grad():
        cell.weight.copy_(torch.tensor([[0.0, 1.0, 0.0], [-1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]))
    optimizer = make_optimizer(cell.parameters())
    amp.initialize(cell, optimizer, opt_level=level, loss_scale=1.0, verbosity=0)
    state, states = X, []
    for _ in range(3):
        state = cell(state)
        states.append(state)
    with amp.disable_casts():
        leaf = cell.weight.detach().clone().requires_grad_()
        run, old, expected = by_hand(leaf, level), X, []
        for _ in range(3):
            old = run(old)
            expected.append(old)
    for index in range(steps):
        optimizer.zero_grad()
        with amp.scale_loss(total(states[index]), optimizer) as scaled_loss:
            scaled_loss.backward(retain_graph=True)
        (gradient,) = torch.autograd.grad(total(expected[index]), leaf, retain_graph=True)
        assert_bitwise(cell.weight.grad, gradient)
        optimizer.step()
        with amp.disable_casts():
            new = by_hand(cell.weight.detach(), level)(X)
        assert_bitwise(cell(X), new)


def test_outputs_of_many_older_graphs_each_have_the_gradient_of_their_weights(level: str, make_optimizer: Any) -> None:
    """The gradient of the input is the weight itself, as it was at the forward."""
    layer = nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, -2.0, 3.0]]))
    optimizer = make_optimizer(layer.parameters())
    amp.initialize(layer, optimizer, opt_level=level, loss_scale=LOSS_SCALE, verbosity=0)
    graphs = []
    for _ in range(4):
        x = torch.ones(1, 3, requires_grad=True)
        graphs.append((x, layer(x), layer.weight.detach().to(HALF[level]).float()))
        iterate(layer, optimizer)
    for x, output, weight in reversed(graphs):
        output.sum().backward()
        assert_bitwise(x.grad, weight)


def test_a_double_backward_after_a_step_is_that_of_the_old_weights(level: str) -> None:
    layer = nn.Linear(3, 3, bias=False)
    with torch.no_grad():
        layer.weight.copy_(integers(3, 3, seed=4))
    model, optimizer = initialized(level, model=layer)
    iterate(model, optimizer)
    old = layer.weight.detach().clone()
    x = X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(total(layer(x)), x, create_graph=True)
    iterate(model, optimizer)
    assert not torch.equal(layer.weight, old)
    layer.zero_grad()
    gradient.float().pow(2).sum().backward()
    leaf = old.clone().requires_grad_()
    (2 * leaf.sum(0, keepdim=True).expand_as(X)).pow(2).div(4).sum().backward()
    assert_bitwise(gradient.detach().float(), old.sum(0, keepdim=True).expand_as(X))
    assert_bitwise(layer.weight.grad, leaf.grad)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_weights_get_their_gradient(use_reentrant: bool, level: str, make_optimizer: Any) -> None:
    model, optimizer = initialized(level, make_optimizer)
    for index in range(3):
        plain = copy.deepcopy(model)
        total(plain(X)).backward()
        x = X.clone().requires_grad_()
        optimizer.zero_grad()
        backward(total(checkpoint(model, x, use_reentrant=use_reentrant)), optimizer)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert p.grad is not None
            torch.testing.assert_close(p.grad, q.grad, rtol=2e-2, atol=2e-2)
            if index == 0:
                assert_bitwise(p.grad, q.grad)
        optimizer.step()
        assert_fresh(model)


# --- accumulation, frozen weights, copies of models -----------------------------------------------


@pytest.mark.parametrize("delay_unscale", [False, True])
def test_gradients_accumulate_over_several_backwards(delay_unscale: bool, level: str, make_optimizer: Any) -> None:
    model, optimizer = initialized(level, make_optimizer)
    iterate(model, optimizer)
    with torch.no_grad():
        for p in model.parameters():
            p.round_().clamp_(-2.0, 2.0)
    twin = copy.deepcopy(model)
    batches = [X, X + 1.0, -X]
    sum(total(twin(batch)) for batch in batches).backward()
    optimizer.zero_grad()
    for index, batch in enumerate(batches):
        backward(total(model(batch)), optimizer, delay_unscale=delay_unscale and index < 2)
        assert_fresh(model)
    assert_bitwise([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
    optimizer.step()
    assert_fresh(model)


def test_a_weight_may_be_frozen_and_unfrozen(level: str, make_optimizer: Any) -> None:
    model, optimizer = initialized(level, make_optimizer)
    iterate(model, optimizer)
    for trainable in (False, True, False, True):
        model.first.weight.requires_grad_(trainable)
        before = model.first.weight.detach().clone()
        optimizer.zero_grad()
        backward(total(model(X + 3.0)), optimizer)
        assert (model.first.weight.grad is not None) is trainable
        optimizer.step()
        assert torch.equal(model.first.weight, before) is not trainable
        assert_fresh(model)


def test_the_cast_of_a_frozen_weight_that_a_function_writes_to_does_not_stay(level: str) -> None:
    class Fill(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            y = x @ weight.t()
            weight.fill_(7.0)  # its argument, which is a copy only where it was cast
            return y

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            return grads[0], None

    model, optimizer = initialized(level)
    model.first.weight.requires_grad_(False)
    iterate(model, optimizer)
    filled = amp.half_function(lambda x, weight: Fill.apply(x, weight))
    before = model.first.weight.detach().clone()
    for _ in range(2):
        filled(X, model.first.weight)
        assert torch.equal(model.first.weight, before), "the weight itself was written to"
        assert_fresh(model)


def test_a_function_that_writes_to_the_cast_of_a_weight_under_no_grad_writes_no_copy(level: str) -> None:
    model, optimizer = initialized(level)
    iterate(model, optimizer)
    zeroed = amp.half_function(lambda weight: weight.zero_())
    with torch.no_grad():
        model(X)
        zeroed(model.first.weight)
        assert model.first.weight.abs().sum() > 0
    assert_fresh(model)


def test_a_deepcopy_between_steps_runs_its_own_weights(level: str, make_optimizer: Any) -> None:
    model, optimizer = initialized(level, make_optimizer)
    for _ in range(2):
        iterate(model, optimizer)
        twin, output = copy.deepcopy(model), fresh(model)
        iterate(model, optimizer)
        assert_bitwise(twin(X), output)
        assert_fresh(model)
        with torch.no_grad():
            twin.first.weight.add_(1.0)
        assert_fresh(twin)
        assert_fresh(model)


def test_a_moving_average_runs_its_own_weights(level: str, make_optimizer: Any) -> None:
    model, optimizer = initialized(level, make_optimizer)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for _ in range(3):
        iterate(model, optimizer)
        average.update_parameters(model)
        with torch.no_grad():
            assert_bitwise(average(X), fresh(average.module))
        assert_fresh(model)


def test_swapping_in_averaged_weights_for_an_evaluation_and_back(level: str, make_optimizer: Any) -> None:
    """The idiom of EMA recipes: `p.data, backup = average, p.data`."""
    model, optimizer = initialized(level, make_optimizer)
    for _ in range(2):
        iterate(model, optimizer)
        backup = [p.data for p in model.parameters()]
        for p in model.parameters():
            p.data = torch.ones_like(p)
        model.eval()
        with torch.no_grad():
            assert_bitwise(model(X), fresh(model))
        for p, data in zip(model.parameters(), backup, strict=True):
            p.data = data
        model.train()
        assert_fresh(model)


def test_the_weights_are_those_of_the_same_training_with_casts_by_hand(level: str) -> None:
    """Exact in both types, since everything is a small integer: no order of sums, no fused step can differ."""
    model, optimizer = initialized(level)
    leaves = [p.detach().clone().requires_grad_() for p in model.parameters()]
    low = HALF[level]
    for x in (X, -X, X + 1.0):
        with amp.disable_casts():
            first, bias, second = (leaf.to(low) for leaf in leaves)
            loss = total(F.linear(F.relu(F.linear(x.to(low), first, bias)), second))
            for leaf, gradient in zip(leaves, torch.autograd.grad(loss, leaves), strict=True):
                leaf.detach().sub_(gradient.clamp(-1.0, 1.0))
        optimizer.zero_grad()
        backward(total(model(x)), optimizer)
        clamp_gradients(optimizer)
        optimizer.step()
        assert_bitwise([p.detach() for p in model.parameters()], [leaf.detach() for leaf in leaves])


# --- cost -----------------------------------------------------------------------------------------


def casts_of(shapes: set[tuple[int, ...]], run: Callable[[], Any]) -> int:
    """Return how many casts of tensors of these shapes torch makes in `run`."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as profiled:
        run()
    return sum(event.name == "aten::_to_copy" and tuple(event.input_shapes[0]) in shapes for event in profiled.events())


@pytest.mark.parametrize("name", ["AdamW", "SGD", "FusedAdam", "DataSGD"])
@pytest.mark.parametrize("loop", ["scale_loss", "plain"])
def test_an_iteration_casts_each_weight_once_for_all_its_uses(loop: str, name: str, level: str) -> None:
    model = Net()
    optimizer = OPTIMIZERS[name](model.parameters())
    amp.initialize(model, optimizer, opt_level=level, loss_scale=1.0, verbosity=0)
    shapes = {tuple(p.shape) for p in model.parameters()}

    def of_loop(loss: Tensor) -> None:
        backward(loss, optimizer)

    for _ in range(3):
        optimizer.zero_grad()
        loss = torch.zeros(())

        def forward() -> None:
            nonlocal loss
            loss = total(model(X)) + total(checkpoint(model, X, use_reentrant=False))

        assert casts_of(shapes, forward) == len(shapes)
        with torch.no_grad():
            assert casts_of(shapes, lambda: model(X)) == len(shapes), "without gradients no copy is read"
        run = of_loop if loop == "scale_loss" else Tensor.backward
        of_gradients = len(shapes)
        assert casts_of(shapes, lambda of=loss, run=run: run(of)) == of_gradients, "the recomputation casts again"
        assert len(amp.current_engine().function_casts.casts.cache) == (0 if loop == "scale_loss" else len(shapes))
        optimizer.step()
        assert len(amp.current_engine().function_casts.casts.cache) == 0


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("last", ["step", "backward"])
def test_weights_die_with_their_model_and_optimizer_after_training(last: str, level: str) -> None:
    made = [initialized(level, OPTIMIZERS["AdamW"])]
    for _ in range(3):
        iterate(*made[0])
    if last == "backward":
        backward(total(made[0][0](X)), made[0][1])
    references = [weakref.ref(p) for p in made[0][0].parameters()]
    made.clear()
    gc.collect()
    assert [r() for r in references if r() is not None] == []


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(o), Tensor) for o in gc.get_objects())


def test_two_thousand_iterations_of_training_and_evaluation_keep_memory_flat() -> None:
    model, optimizer = initialized("O1", OPTIMIZERS["AdamW"])
    engine = amp.current_engine()
    counts = set()
    for index in range(2001):
        iterate(model, optimizer)
        model.eval()
        with torch.no_grad():
            model(X)
        model.train()
        if index and index % 500 == 0:
            engine._scaling.history.hear(wait=False)  # which holds the numbers of the last backwards until it is read
            counts.add((live_tensors(), len(engine.function_casts.casts.cache)))
    assert len(counts) == 1, counts


def test_a_graph_over_a_frozen_weight_has_the_weight_it_ran_with(level: str) -> None:
    convolution = nn.Conv1d(3, 2, 1)  # which saves its weight itself, and no view of it
    nn.init.constant_(convolution.weight, 2.0)
    model, optimizer = initialized(level, OPTIMIZERS["SGD"], convolution)
    x = X[..., None].clone().requires_grad_()
    iterate(model, optimizer, x.detach())
    before = model.weight.detach().clone()
    model.requires_grad_(False)
    loss = total(model(x))
    model.requires_grad_(True)
    iterate(model, optimizer, x.detach())
    assert not torch.equal(model.weight, before)
    loss.backward()
    assert torch.equal(x.grad, before.sum(0).expand_as(x))


def test_collections_of_garbage_while_weights_are_cast_change_nothing(level: str) -> None:
    """Each new object may set off a collection, which drops the copies of models that are gone."""
    initialized(level)
    threshold = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        for i in range(60):
            model = nn.Sequential(*[nn.Linear(3, 3, bias=False) for _ in range(3)])
            for layer in model:
                nn.init.constant_(layer.weight, i % 3)
            cycle = [model]
            cycle.append(cycle)  # type: ignore[arg-type]
            assert model(X[:1])[0, 0] == 2 * (3 * (i % 3)) ** 2 * (i % 3)
    finally:
        gc.set_threshold(*threshold)


# --- threads --------------------------------------------------------------------------------------


# What needs luck is in tests/stress.


def in_another_thread(run: Callable[[], Any]) -> Any:
    """Return the result of `run` in another thread; its error is raised here."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result(60.0)


@pytest.mark.parametrize("gradients", [False, True])
def test_a_model_that_another_thread_runs_around_the_kernels_of_a_step_runs_the_new_weights_after_it(
    gradients: bool, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = initialized(level, lambda params: FusedSGD(params, lr=LR))
    kernels_step, runs = FusedStep.step, []

    def evaluate() -> None:
        with torch.set_grad_enabled(gradients):
            runs.append(model(X))

    def step(self: FusedStep, *args: Any, **keywords: Any) -> None:
        in_another_thread(evaluate)
        kernels_step(self, *args, **keywords)
        in_another_thread(evaluate)

    monkeypatch.setattr(FusedStep, "step", step)
    for _ in range(3):
        iterate(model, optimizer)
        assert_fresh(model)
    assert len(runs) == 6


def test_a_graph_has_the_weights_it_ran_with_though_another_thread_runs_and_steps_the_model(level: str) -> None:
    model, optimizer = initialized(level)
    iterate(model, optimizer)
    x = X.clone().requires_grad_()
    output = total(model(x))
    expected = torch.autograd.grad(total(model(x)), x)[0]

    def work() -> None:
        amp.current_engine().function_casts.casts.cache.clear()  # as at the end of each scale_loss
        iterate(model, optimizer)
        torch.autograd.grad(total(model(x)), x)

    for _ in range(2):
        in_another_thread(work)
    assert_bitwise(torch.autograd.grad(output, x)[0], expected)
    assert_fresh(model)
