"""Half copies of weights live for one iteration: each forward and backward runs the weights of its moment.

Weights, inputs and gradients are small integers wherever two results are compared: every sum of them is exact in
float16 and bfloat16, in any order, and a stale copy is off by a whole number.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from amp_engine import Engine, amp
from amp_engine.optimizers import FusedAdam, FusedSGD
from amp_engine.optimizers.fused_step import FusedStep
from tests.support import FUNCTION_LEVELS, HALF, assert_bitwise, backward

LR = 1.0
LOSS_SCALE = 8.0  # keeps scaled integer gradients in the exact range of both types
X = torch.tensor([[1.0, 2.0, -1.0], [0.0, 1.0, 3.0], [1.0, 0.0, 1.0]])


@pytest.fixture(params=FUNCTION_LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    return request.param


class DataSGD(Optimizer):
    """Writes through `p.data`, as most third-party optimizers do: no version moves."""

    def __init__(self, params: Any, lr: float = LR) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data.add_(p.grad.data, alpha=-group["lr"])


# The kernels step it for torch's class; for our class; its own step.
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.5),
    "FusedAdam": lambda params: FusedAdam(params, lr=0.5),
    "DataSGD": DataSGD,
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


def initialized(level: str, make: Callable[[Any], Optimizer] = DataSGD) -> tuple[Any, Optimizer]:
    model = Net()
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
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert_bitwise(model(X).clone(), expected)
    assert_bitwise(model(X), expected)


# --- after steps and other writes -----------------------------------------------------------------


def test_after_each_step_the_model_runs_the_new_weights(level: str, make_optimizer: Any) -> None:
    model, optimizer = initialized(level, make_optimizer)
    for _ in range(3):
        before = fresh(model)
        iterate(model, optimizer)
        assert not torch.equal(fresh(model), before), "the step moved nothing"
        assert_fresh(model)


def test_a_step_of_an_optimizer_that_amp_does_not_know_is_seen(level: str) -> None:
    model, _ = initialized(level)
    stranger = DataSGD(model.parameters())
    for _ in range(2):
        stranger.zero_grad()
        total(model(X)).backward()
        stranger.step()
        assert_fresh(model)


def test_weights_that_another_engine_steps_are_seen(level: str) -> None:
    model, optimizer = initialized(level)
    iterate(model, optimizer)
    with Engine() as other:
        second = DataSGD(model.parameters())
        other.initialize(model, second, opt_level="O0", loss_scale=LOSS_SCALE, verbosity=0)
        second.zero_grad()
        backward(total(model(X)), second, engine=other)
        second.step()
    assert_fresh(model)


@pytest.mark.parametrize("after", ["backward", "step"])
def test_a_write_through_data_after_a_backward_or_a_step_is_seen(after: str, level: str, make_optimizer: Any) -> None:
    model, optimizer = initialized(level, make_optimizer)
    iterate(model, optimizer)
    for value in (2.0, -1.0):
        optimizer.zero_grad()
        backward(total(model(X)), optimizer)
        if after == "step":
            optimizer.step()
        for p in model.parameters():
            p.data.fill_(value)
        assert_fresh(model)


def test_a_write_through_data_is_seen_after_a_backward_without_scale_loss_and_step(level: str) -> None:
    model, _ = initialized(level)
    for value in (2.0, -1.0, 3.0):
        total(checkpoint(model, X, use_reentrant=False)).backward()
        for p in model.parameters():
            p.data.fill_(value)
        assert_fresh(model)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_backward_by_compiled_autograd_discards_copies_too(level: str, dynamo: None) -> None:
    model, _ = initialized(level)
    for value in (2.0, -1.0):
        loss = total(model(X))
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            loss.backward()
        for p in model.parameters():
            p.data.fill_(value)
        assert_fresh(model)


def test_graphs_that_are_older_than_steps_have_the_gradients_of_their_weights(level: str, make_optimizer: Any) -> None:
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


# --- cost and memory ------------------------------------------------------------------------------


def casts_of(shapes: set[tuple[int, ...]], run: Callable[[], Any]) -> int:
    """Return how many casts of tensors of these shapes torch makes in `run`."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as profiled:
        run()
    return sum(event.name == "aten::_to_copy" and tuple(event.input_shapes[0]) in shapes for event in profiled.events())


@pytest.mark.parametrize("loop", ["scale_loss", "plain"])
def test_an_iteration_casts_each_weight_once_for_all_its_uses(loop: str, level: str, make_optimizer: Any) -> None:
    model = Net()
    optimizer = make_optimizer(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, loss_scale=1.0, verbosity=0)
    shapes = {tuple(p.shape) for p in model.parameters()}
    kept = amp.current_engine().function_casts.casts.cache.kept

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
        assert len(kept()) == (0 if loop == "scale_loss" else len(shapes))
        optimizer.step()
        assert len(kept()) == 0


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


def test_iterations_of_training_and_evaluation_keep_memory_flat(level: str) -> None:
    model, optimizer = initialized(level, OPTIMIZERS["AdamW"])
    engine = amp.current_engine()
    counts = set()
    for index in range(1, 301):
        iterate(model, optimizer)
        with torch.no_grad():
            model(X)
        if index % 100 == 0:
            engine._scaling.history.hear(wait=False)  # which holds the numbers of the last backwards until it is read
            counts.add((live_tensors(), len(engine.function_casts.casts.cache.kept())))
    assert len(counts) == 1, counts


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


# What needs luck with threads is in tests/stress.


def test_a_model_that_another_thread_runs_around_the_kernels_of_a_step_runs_the_new_weights_after_it(
    level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = initialized(level, lambda params: FusedSGD(params, lr=LR))
    kernels_step, runs = FusedStep.step, []

    def evaluate() -> None:
        with ThreadPoolExecutor(1) as pool:
            runs.append(pool.submit(model, X).result(60.0))

    def step(self: FusedStep, *args: Any, **keywords: Any) -> None:
        evaluate()
        kernels_step(self, *args, **keywords)
        evaluate()

    monkeypatch.setattr(FusedStep, "step", step)
    for _ in range(3):
        iterate(model, optimizer)
        assert_fresh(model)
    assert len(runs) == 6
