"""Half copies of weights are never stale, however the weight is written, and cost nothing in a steady iteration.

Weights, inputs and gradients are small integers wherever two results are compared: every sum of them is exact in
float16 and bfloat16, in any order, and a stale copy is off by a whole number.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import io
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
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
from amp_engine.casting import FunctionCasts
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
INTEGER = ("SGD", "DataSGD", "FlatSGD")  # whose steps keep integers integers


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
        other.initialize(model, second, opt_level=level, loss_scale=LOSS_SCALE, verbosity=0)
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


WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    "in place": under_no_grad,
    "copy_": copied,
    "an index": indexed,
    "a view": a_view,
    "data.clamp_": lambda p: p.data.clamp_(-1.0, 0.0),
    "data.add_": lambda p: p.data.add_(1.0),
    "data.copy_": lambda p: p.data.copy_(p.data + 1.0),
    "data =": swapped,
    "data of a view": lambda p: p.view(-1).data.add_(1.0),
    "detach": lambda p: p.detach().add_(1.0),
    "detach, foreach": lambda p: torch._foreach_add_([p.detach()], 1.0),
    "numpy of data": lambda p: p.data.numpy().fill(2.0),
    "init": lambda p: nn.init.constant_(p, 2.0),
    "set_": lambda p: p.data.set_(p.data + 1.0),
    "resized through data": lambda p: p.data.resize_(p.shape).fill_(1.0),
    "numpy of detach": lambda p: p.detach().numpy().fill(2.0),
    "numpy of a detached view": lambda p: p.detach().view(-1)[1:].numpy().fill(2.0),
    "numpy of a state dictionary": lambda p: nn.ParameterList([p]).state_dict()["0"].numpy().fill(2.0),
    "np.asarray": lambda p: np.asarray(p.detach()).fill(2.0),
    "dlpack": lambda p: torch.from_dlpack(p.detach()).fill_(2.0),
    "dlpack capsule": lambda p: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(p.detach())).fill_(2.0),
    "numpy's dlpack": lambda p: torch.from_numpy(np.from_dlpack(p.detach())).fill_(2.0),
    "bytes of the storage": lambda p: p.untyped_storage().fill_(0),
    "the storage": lambda p: p.untyped_storage().copy_(torch.full_like(p, 2.0).untyped_storage()),
    "an address": lambda p: ctypes.memset(p.data_ptr(), 0, p.nbytes),
    "a version put back": version_put_back,
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("name", ["SGD", "AdamW", "DataSGD"])
def test_a_write_after_a_step_is_seen_at_once(write: Callable[[nn.Parameter], Any], name: str, level: str) -> None:
    model, optimizer = initialized(level, OPTIMIZERS[name])
    for _ in range(2):
        iterate(model, optimizer)
        write(model.first.weight)
        assert_fresh(model)
        write(model.second.weight)
        assert_fresh(model)
        iterate(model, optimizer)
        assert_fresh(model)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_between_forward_and_step_is_seen(write: Callable[[nn.Parameter], Any], level: str) -> None:
    model, optimizer = initialized(level, OPTIMIZERS["AdamW"])
    iterate(model, optimizer)
    optimizer.zero_grad()
    backward(total(model(X)), optimizer)
    write(model.first.weight)
    assert_fresh(model)
    optimizer.step()
    assert_fresh(model)


class WritableArray(np.ndarray):
    """numpy makes what it has from DLPack read-only; who knows better writes."""

    def fill(self, value: float) -> None:
        assert self.base is not None
        ctypes.memmove(self.ctypes.data, np.full_like(self, value).ctypes.data, self.nbytes)


LATE_WRITES: dict[str, Callable[[nn.Parameter], Callable[[float], Any]]] = {
    "data of detach": lambda p: p.detach().data.fill_,
    "data": lambda p: p.data.fill_,
    "detach, numpy": lambda p: p.detach().numpy().fill,
    "data, flat": lambda p: p.data.view(-1).fill_,
    "storage": lambda p: torch.tensor([], dtype=p.dtype).set_(p.untyped_storage()).fill_,
    "dlpack": lambda p: torch.from_dlpack(p.detach()).fill_,
    "numpy's dlpack": lambda p: np.from_dlpack(p.detach()).view(WritableArray).fill,
    "numpy of data, flat": lambda p: p.data.view(-1).numpy()[:].fill,
}


@pytest.mark.parametrize("take", LATE_WRITES.values(), ids=LATE_WRITES)
@pytest.mark.parametrize("name", ["SGD", "AdamW", "DataSGD"])
def test_a_write_through_a_view_taken_earlier_is_seen_at_once(
    take: Callable[[nn.Parameter], Callable[[float], Any]], name: str, level: str
) -> None:
    model, optimizer = initialized(level, OPTIMIZERS[name])
    iterate(model, optimizer)
    fills = [take(p) for p in model.parameters()]
    for value in (2.0, -1.0, 1.0):
        iterate(model, optimizer)
        for write in fills:
            assert_fresh(model)
            write(value)
            assert_fresh(model)
        optimizer.zero_grad()
        loss = total(model(X))
        fills[0](3.0)
        assert_fresh(model)
        backward(loss, optimizer)
        fills[0](4.0)
        assert_fresh(model)
        optimizer.step()
        assert_fresh(model)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("take", LATE_WRITES.values(), ids=LATE_WRITES)
@pytest.mark.parametrize("name", ["SGD", "AdamW", "DataSGD"])
def test_evaluations_see_each_write_through_a_view(
    take: Callable[[nn.Parameter], Callable[[float], Any]], name: str, mode: Any, level: str
) -> None:
    model, optimizer = initialized(level, OPTIMIZERS[name])
    iterate(model, optimizer)
    fills = [take(p) for p in model.parameters()]
    iterate(model, optimizer)
    model(X)  # which leaves copies
    model.eval()
    for value in (2.0, -1.0, 1.0):
        for write in fills:
            with mode():
                model(X)
                write(value)
                output = model(X).clone()
            assert_bitwise(output, fresh(model))


@pytest.mark.parametrize("when", ["after the forward", "after the backward"])
@pytest.mark.parametrize("kept", [True, False], ids=["kept", "let go"])
@pytest.mark.parametrize("take", LATE_WRITES.values(), ids=LATE_WRITES)
@pytest.mark.parametrize("name", ["SGD", "AdamW", "FusedAdam", "DataSGD"])
def test_a_write_to_a_weight_that_the_step_leaves_alone_is_seen(
    take: Callable[[nn.Parameter], Callable[[float], Any]], name: str, kept: bool, when: str, level: str
) -> None:
    """The step has a copy of it to write, and no gradient."""
    model, optimizer = initialized(level, OPTIMIZERS[name])
    iterate(model, optimizer)
    iterate(model, optimizer)
    fill = take(model.second.weight)
    for value in (2.0, 3.0):
        optimizer.zero_grad()
        model(X)  # uses and casts both
        loss = total(model.first(X))
        if when == "after the forward":
            fill(value)
        backward(loss, optimizer)
        if when == "after the backward":
            fill(value)
        if not kept:
            del fill
        optimizer.step()
        assert_fresh(model)
        fill = take(model.second.weight)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_between_the_forwards_of_an_accumulation_is_seen(
    write: Callable[[nn.Parameter], Any], level: str
) -> None:
    model, optimizer = initialized(level, OPTIMIZERS["AdamW"])
    for _ in range(2):
        iterate(model, optimizer)
        optimizer.zero_grad()
        for p in (model.first.weight, model.second.weight):
            backward(total(model(X)), optimizer)
            assert_fresh(model)
            write(p)
            assert_fresh(model)
        optimizer.step()
        assert_fresh(model)


@pytest.mark.parametrize("memory", ["numpy", "shared", "file"])
@pytest.mark.parametrize("name", ["SGD", "AdamW", "DataSGD"])
def test_weights_in_memory_that_others_may_write_are_cast_at_each_use(
    memory: str, name: str, level: str, tmp_path: Path
) -> None:
    """An array, another process, a file: torch is not asked before they write."""
    model, array = Net(), np.zeros((4, 3), np.float32)
    if memory == "numpy":
        model.first.weight = nn.Parameter(torch.from_numpy(array))
    elif memory == "shared":
        model.share_memory()
    else:
        weight = torch.from_file(str(tmp_path / "weight"), shared=True, size=12, dtype=torch.float32)
        model.first.weight = nn.Parameter(weight.view(4, 3))
    where = model.first.weight.data_ptr()
    optimizer = OPTIMIZERS[name](model.parameters())
    amp.initialize(model, optimizer, opt_level=level, loss_scale=LOSS_SCALE, verbosity=0)
    for _ in range(3):
        iterate(model, optimizer)
        assert_fresh(model)
        ctypes.memset(where, 0, array.nbytes)
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


@pytest.mark.parametrize("name", ["SGD", "AdamW", "DataSGD"])
def test_a_write_after_a_step_through_data_taken_before_it_is_seen(name: str, level: str) -> None:
    model, optimizer = initialized(level, OPTIMIZERS[name])
    iterate(model, optimizer)
    iterate(model, optimizer)
    backward(total(model(X)), optimizer)
    data = model.first.weight.data
    optimizer.step()
    data.fill_(2.0)
    del data
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


@pytest.mark.parametrize("take", LATE_WRITES.values(), ids=LATE_WRITES)
@pytest.mark.parametrize("name", ["SGD", "AdamW", "DataSGD"])
def test_a_write_through_a_view_between_forward_and_backward_is_seen_after_the_next_scale_loss(
    take: Callable[[nn.Parameter], Callable[[float], Any]], name: str, level: str
) -> None:
    model, optimizer = initialized(level, OPTIMIZERS[name])
    fills = [take(p) for p in model.parameters()]
    for value in (2.0, -1.0, 1.0):
        iterate(model, optimizer)
        optimizer.zero_grad()
        loss = total(model(X))
        for fill in fills:
            fill(value)
        backward(loss, optimizer)
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


def test_a_weight_that_a_cuda_graph_steps_is_cast_at_each_use_and_its_steps_keep_their_table(
    level: str, native: bool
) -> None:
    """Replays are not seen. A rebuilt table would have step counts of its own, and cannot be made in a capture."""
    if not native:
        pytest.skip("only the compiled kernels can be captured")
    model, optimizer = initialized(level, OPTIMIZERS["AdamW"])
    for _ in range(3):
        iterate(model, optimizer)
    cache: Any = amp.current_engine().function_casts.casts.cache
    weights = list(model.parameters())
    addresses = [(p.data_ptr(), torch.full_like(p, 2.0)) for p in weights]
    iterate(model, optimizer)
    handed = cache.copies(weights)
    cache.written(weights)
    cache.native.leave(weights)  # as where the stream is captured
    for _ in range(3):
        assert [a is b for a, b in zip(cache.copies(weights), handed, strict=True)] == [True] * len(weights)
        cache.written(weights)
        assert_fresh(model)
        for address, value in addresses:
            ctypes.memmove(address, value.data_ptr(), value.nbytes)
        assert_fresh(model)
        assert len(cache) == 0
        iterate(model, optimizer)
        assert_fresh(model)
    references = [weakref.ref(p) for p in weights]
    del model, optimizer, weights
    gc.collect()
    assert [r() for r in references if r() is not None] == []


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


@pytest.mark.parametrize("name", ["AdamW", "SGD", "momentum", "FusedAdam"])
def test_a_steady_iteration_casts_no_weight(name: str, level: str, native: bool) -> None:
    model, optimizer = initialized(level, OPTIMIZERS[name])
    shapes = {tuple(p.shape) for p in model.parameters()}
    assert casts_of(shapes, lambda: F.linear(X, model.first.weight.detach())) == 1, "the count sees casts"
    for _ in range(4):
        iterate(model, optimizer)
    allowed = 0 if native else len(shapes)
    for _ in range(2):
        optimizer.zero_grad()
        outputs: list[Tensor] = []
        assert casts_of(shapes, lambda into=outputs: into.append(model(X))) <= allowed
        assert casts_of(shapes, lambda: model(X)) == 0, "a second forward casts again"
        backward(total(outputs[0]), optimizer)
        assert casts_of(shapes, optimizer.step) == 0
    assert_fresh(model)


def saved(model: nn.Module) -> None:
    torch.save(model.state_dict(), io.BytesIO())


LOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "torch.save": saved,
    "storage": lambda model: [p.untyped_storage().nbytes() for p in model.parameters()],
    "norm": lambda model: [p.norm() for p in model.parameters()],
    "cat": lambda model: torch.cat([p.flatten() for p in model.parameters()]),
    "is finite": lambda model: [p.isfinite().all() for p in model.parameters()],
    "print": lambda model: [str(p) for p in model.parameters()],
    "deepcopy": copy.deepcopy,
    "state_dict": lambda model: model.state_dict(),
    "numpy": lambda model: [p.detach().numpy().mean() for p in model.parameters()],
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_after_a_look_at_the_weights_a_steady_iteration_casts_none_again(look: Any, level: str, native: bool) -> None:
    if native and torch.__version__ < "2.13" and look in (saved, LOOKS["storage"], copy.deepcopy):
        pytest.skip("a Python object of a storage is another user of it there")
    model, optimizer = initialized(level, OPTIMIZERS["AdamW"])
    shapes = {tuple(p.shape) for p in model.parameters()}
    for _ in range(3):
        iterate(model, optimizer)
    look(model)
    for _ in range(3):
        assert_fresh(model)
        iterate(model, optimizer)
    assert casts_of(shapes, lambda: model(X)) == (0 if native else len(shapes))


@pytest.mark.parametrize("name", ["AdamW", "DataSGD"])
def test_a_weight_used_twice_is_cast_once_an_iteration(name: str, level: str) -> None:
    model, optimizer = initialized(level, OPTIMIZERS[name])
    shapes = {tuple(p.shape) for p in model.parameters()}
    for _ in range(3):
        optimizer.zero_grad()
        assert casts_of(shapes, lambda: [model(X) for _ in range(3)]) <= len(shapes)
        iterate(model, optimizer)


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("work", ["forward", "forward without gradients", "backward"])
def test_weights_of_a_model_that_amp_does_not_hold_die_with_it(work: str, level: str) -> None:
    amp.initialize(nn.Linear(1, 1), opt_level=level, verbosity=0)
    model = Net()
    with torch.set_grad_enabled(work != "forward without gradients"):
        loss = total(model(X))
    if work == "backward":
        loss.backward()
    weights = {name: weakref.ref(p) for name, p in model.named_parameters()}
    del model, loss
    gc.collect()
    assert [name for name, weight in weights.items() if weight() is not None] == []


@pytest.mark.parametrize("last", ["step", "backward", "forward"])
def test_weights_die_with_their_model_and_optimizer_after_training(last: str, level: str) -> None:
    made = [initialized(level, OPTIMIZERS["AdamW"])]
    for _ in range(3):
        iterate(*made[0])
    if last != "step":
        loss = total(made[0][0](X))
        if last == "backward":
            loss.backward()
        del loss
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


def test_models_that_come_and_go_keep_memory_flat() -> None:
    amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
    counts = set()
    for index in range(301):
        total(Net()(X)).backward()
        with torch.no_grad():
            Net()(X)
        if index and index % 100 == 0:
            counts.add((live_tensors(), len(amp.current_engine().function_casts.casts.cache)))
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


def test_a_copy_that_a_forward_makes_during_a_step_is_not_taken_for_what_the_step_wrote(level: str) -> None:
    model, optimizer = initialized(level)
    iterate(model, optimizer)
    iterate(model, optimizer)
    casts = amp.current_engine().function_casts.casts
    assert casts is not None
    weights = list(model.parameters())
    handed = casts.cache.copies(weights)
    outputs = []  # of another thread, which hold what they were made with
    for _ in range(2):
        casts.cache.after_backward()
        outputs.append(model(X))
    for weight, copy_of_it in zip(weights, handed, strict=True):
        with torch.no_grad():
            weight.add_(1.0)
            if copy_of_it is not None:
                copy_of_it.copy_(weight)
    casts.cache.written(weights)
    assert_fresh(model)


@pytest.mark.parametrize("hear", ["discard", "after_backward"])
def test_a_write_of_another_thread_during_a_step_is_seen(hear: str, level: str) -> None:
    model, optimizer = initialized(level)
    iterate(model, optimizer)
    iterate(model, optimizer)
    casts = amp.current_engine().function_casts.casts
    assert casts is not None
    weights = [model.first.weight]
    data = model.first.weight.data
    casts.cache.cast(model.first.weight, HALF[level])
    handed = casts.cache.copies(weights)
    if handed[0] is not None:
        with torch.no_grad():
            handed[0].copy_(weights[0])
    if hear == "discard":
        weights[0].data.fill_(2.0)
        del data
    else:
        data.fill_(2.0)
        del data
        casts.cache.after_backward()
    casts.cache.written(weights)
    assert_fresh(model)


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
        amp.current_engine().function_casts.casts.cache.after_backward()  # as at the end of each scale_loss
        iterate(model, optimizer)
        torch.autograd.grad(total(model(x)), x)

    for _ in range(2):
        in_another_thread(work)
    assert_bitwise(torch.autograd.grad(output, x)[0], expected)
    assert_fresh(model)


def test_a_write_in_the_midst_of_a_call_that_casts_the_weight_is_seen(casts: FunctionCasts) -> None:
    """Freeing a tensor while a weight is cast may write the weight, as other threads may."""
    weight = nn.Parameter(torch.zeros(3, 3))
    written = []

    def write(alias: Any) -> None:
        written.append(alias)
        weight.data.fill_(2.0)

    alias = weakref.ref(casts.cache.cast(weight, casts.dtype), write)
    assert alias() is not None  # kept by the cache, until the weight is seen to be another
    with torch.no_grad():
        weight.fill_(1.0)
    F.linear(X, weight)
    assert written == [alias]
    assert torch.equal(F.linear(X, weight).float(), X @ torch.full((3, 3), 2.0))


def test_a_step_of_another_thread_is_not_taken_for_one_that_told_what_it_wrote(level: str) -> None:
    model, optimizer = initialized(level)
    iterate(model, optimizer)
    weight = nn.Parameter(torch.zeros(3, 3))
    other = DataSGD([weight])
    data = weight.data
    written, stepped = threading.Event(), threading.Event()

    def write(self: Any, *args: Any) -> None:
        data.add_(1.0)  # through what was taken earlier

    def between(*args: Any) -> None:
        written.set()
        assert stepped.wait(60.0)

    optimizer.register_step_post_hook(between)  # after our kernels have stepped, before the end of the step is heard of
    other.register_step_pre_hook(write)
    backward(total(model(X)), optimizer)
    thread = threading.Thread(target=optimizer.step, daemon=True)
    F.linear(X, weight)
    thread.start()
    assert written.wait(60.0)
    F.linear(X, weight)
    other.step()
    output = F.linear(X, weight)
    stepped.set()
    thread.join(60.0)
    assert torch.equal(output.float(), X @ torch.ones(3, 3))


def test_two_optimizers_that_step_one_weight_at_once_leave_no_copy_behind(level: str) -> None:
    """Each may write only its own copy, which does not count as current if the other has written since."""
    model, optimizer = initialized(level)
    for _ in range(2):
        iterate(model, optimizer)
    casts = amp.current_engine().function_casts.casts
    assert casts is not None
    weights = list(model.parameters())

    class Step:
        """Half of it in a thread of its own, which a test can let go on."""

        def __init__(self, value: float) -> None:
            self.go_on = threading.Event()
            self.is_at_work = threading.Event()
            self.thread = threading.Thread(target=self.run, args=(value,), daemon=True)
            self.thread.start()
            assert self.is_at_work.wait(60.0)

        def run(self, value: float) -> None:
            self.copies = casts.cache.copies(weights)
            self.write(value)
            self.is_at_work.set()
            assert self.go_on.wait(60.0)
            self.write(value)
            casts.cache.written(weights)
            casts.cache.after_step()

        def write(self, value: float) -> None:
            for tensor in (*weights, *self.copies):
                if tensor is not None:  # as a kernel does: of nothing that torch could note
                    filled = torch.full_like(tensor, value)
                    ctypes.memmove(address(tensor), filled.data_ptr(), filled.nbytes)

        def end(self) -> None:
            self.go_on.set()
            self.thread.join(60.0)

    addresses = {id(w): w.data_ptr() for w in weights}

    def address(tensor: Tensor) -> int:
        return addresses[id(tensor)] if id(tensor) in addresses else tensor.data_ptr()

    model(X)
    for order in ((0, 1), (1, 0)):
        first = Step(1.0)
        second = Step(2.0)
        shared = [
            a is not None and b is not None and a.data_ptr() == b.data_ptr()
            for a, b in zip(first.copies, second.copies, strict=True)
        ]
        assert not any(shared), "two steps write one copy"
        for index in order:
            (first, second)[index].end()
            model(X)
        assert_fresh(model)
        third = Step(3.0)
        third.end()
        assert_fresh(model)
        first, between = Step(1.0), Step(2.0)
        between.end()
        model(X)
        last = Step(3.0)
        first.end()
        last.end()
        assert_fresh(model)


def test_a_step_that_raised_does_not_keep_its_copies_for_good(level: str, native: bool) -> None:
    model, optimizer = initialized(level, OPTIMIZERS["AdamW"])
    for _ in range(3):
        iterate(model, optimizer)
    casts = amp.current_engine().function_casts.casts
    assert casts is not None
    casts.cache.copies(list(model.parameters()))  # of a step that never says what it wrote
    for _ in range(4):
        iterate(model, optimizer)
        assert_fresh(model)
    iterate(model, optimizer)
    shapes = {tuple(p.shape) for p in model.parameters()}
    assert casts_of(shapes, lambda: model(X)) == (0 if native else len(shapes))
