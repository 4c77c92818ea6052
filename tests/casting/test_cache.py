"""A cast of a weight is made once an iteration and is never stale, however the weight is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_engine.casting import FunctionCasts, patch_torch
from amp_engine.casting.cache import WeightCache
from amp_engine.casting.calls import Call
from amp_engine.ground import devices

X = torch.tensor([[1.0, 2.0]])


def layer(value: float = 1.0) -> nn.Linear:
    made = nn.Linear(2, 2, bias=False)
    nn.init.constant_(made.weight, value)
    return made


def observed_calls(casts: FunctionCasts) -> list[Call]:
    """The calls of listed functions from now on."""
    calls: list[Call] = []
    casts.observers.append(calls.append)
    patch_torch.tell_native()
    return calls


# --- one cast for all uses ------------------------------------------------------------------------


def test_a_weight_used_twice_is_cast_once(casts: FunctionCasts) -> None:
    calls, shared = observed_calls(casts), layer()
    shared(shared(X)).sum().backward()
    assert len([cast for call in calls for cast in call.casts if cast.target == casts.dtype]) == 2  # X and the weight
    assert sum(call.cached for call in calls) == 1
    assert len(casts.cache.kept()) == 1


def test_the_gradient_of_a_shared_weight_is_the_sum_over_its_uses(casts: FunctionCasts) -> None:
    shared = layer(0.5)
    shared(shared(X)).sum().backward()
    with casts.disabled():
        expected = torch.autograd.grad(shared(shared(X)).sum(), shared.weight)[0]
    assert shared.weight.grad.dtype == torch.float32
    torch.testing.assert_close(shared.weight.grad, expected, rtol=1e-2, atol=1e-2)


def test_caching_can_be_switched_off(low: torch.dtype) -> None:
    casts = FunctionCasts(low, enable_caching=False)
    casts.install()
    assert layer()(X).dtype == low
    assert casts.cache.kept() == []
    casts.remove()


def test_only_fp32_parameters_are_kept(casts: FunctionCasts) -> None:
    tensor, double = torch.ones(2, 2, requires_grad=True), nn.Parameter(torch.ones(2, 2).double())
    F.linear(X, tensor)
    F.linear(X.double(), double)
    F.linear(X, nn.Parameter(torch.ones(2, 2, dtype=casts.dtype)))
    F.softmax(nn.Parameter(torch.ones(2)), 0)
    assert casts.cache.kept() == []


def test_a_cast_made_under_no_grad_does_not_starve_training(casts: FunctionCasts) -> None:
    model = layer()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            model(X)
        assert casts.cache.kept() == []
        model(X).sum().backward()
        assert model.weight.grad is not None
        model.weight.grad = None
        casts.cache.clear()


# --- never stale ----------------------------------------------------------------------------------


def write_under_no_grad(p: nn.Parameter) -> None:
    with torch.no_grad():
        p.fill_(3.0)


# They move a version, or an address.
TOLD: dict[str, Callable[[nn.Parameter], Any]] = {
    "no_grad": write_under_no_grad,
    "foreach of detach": lambda p: torch._foreach_add_([p.detach()], 2.0),
    "set data": lambda p: setattr(p, "data", torch.full((2, 2), 3.0)),
}
WRITES: dict[str, Callable[[nn.Parameter], Any]] = {**TOLD, "data": lambda p: p.data.fill_(3.0)}


def assert_is_cast_again_after(write: Callable[[nn.Parameter], Any]) -> None:
    model = layer()
    assert model(X).tolist() == [[3, 3]]
    write(model.weight)
    assert model(X).tolist() == [[9, 9]]


@pytest.mark.parametrize("write", TOLD.values(), ids=TOLD)
def test_a_written_weight_is_cast_again(write: Callable[[nn.Parameter], Any], casts: FunctionCasts) -> None:
    assert_is_cast_again_after(write)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_without_gradients_every_write_is_seen(write: Callable[[nn.Parameter], Any], casts: FunctionCasts) -> None:
    with torch.no_grad():
        assert_is_cast_again_after(write)
    model = layer()
    model(X)  # keeps a cast
    with torch.no_grad():
        write(model.weight)
        assert model(X).tolist() == [[9, 9]]


def test_freezing_and_unfreezing_takes_effect_at_once(casts: FunctionCasts) -> None:
    model = layer()
    for trainable in (True, False, True):
        model.weight.requires_grad_(trainable)
        assert model(X).requires_grad == trainable


def test_a_weight_in_the_place_of_a_dead_one_is_not_taken_for_it() -> None:
    cache, memory, ids = WeightCache(), torch.zeros(2, 2), []
    for value in range(20):
        memory.numpy().fill(value)
        weight = nn.Parameter(memory, requires_grad=False)
        ids.append(id(weight))
        assert cache.cast(weight, torch.bfloat16)[0, 0] == value
        del weight
    assert len(set(ids)) < len(ids), "no object came in the place of another"


def test_another_address_is_another_cast() -> None:
    cache, weight = WeightCache(), layer().weight
    cache.cast(weight, torch.bfloat16)
    weight.data = torch.full((2, 2), 3.0)  # moves no version
    assert cache.cast(weight, torch.bfloat16)[0, 0] == 3


def test_another_type_is_another_cast() -> None:
    cache, weight = WeightCache(), layer().weight
    for dtype in (torch.float16, torch.bfloat16, torch.float16):
        assert cache.cast(weight, dtype).dtype == dtype


def test_a_sparse_weight_is_cast_but_not_kept() -> None:
    cache = WeightCache()
    weight = nn.Parameter(torch.eye(2).to_sparse(), requires_grad=False)
    assert cache.cast(weight, torch.bfloat16).to_dense().tolist() == [[1, 0], [0, 1]]
    assert cache.kept() == []


def test_a_weight_made_in_inference_mode_is_cast_but_not_kept() -> None:
    cache = WeightCache()
    with torch.inference_mode():
        weight = nn.Parameter(torch.ones(2, 2), requires_grad=False)
    assert cache.cast(weight, torch.bfloat16).dtype == torch.bfloat16
    assert cache.kept() == []


# --- where tensors are not what they seem ---------------------------------------------------------


def test_nothing_is_kept_in_functorch(casts: FunctionCasts) -> None:
    model = layer()
    params = dict(model.named_parameters())
    grads = torch.func.grad(lambda p: torch.func.functional_call(model, p, X).sum().float())(params)
    assert grads["weight"].tolist() == [[1, 2], [1, 2]]
    assert torch.func.vmap(model)(X[None]).dtype == casts.dtype
    assert casts.cache.kept() == []


def test_nothing_is_kept_under_a_dispatch_mode(casts: FunctionCasts) -> None:
    from torch._subclasses import FakeTensorMode

    model = layer()
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert model(X).dtype == casts.dtype
    assert casts.cache.kept() == []
    assert type(model(X)) is Tensor


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
def test_a_trace_casts_the_weight_at_each_run(casts: FunctionCasts) -> None:
    model = layer()
    model(X)
    traced = torch.jit.trace(model, X)
    nn.init.constant_(model.weight, 3.0)
    assert traced(X).tolist() == [[9, 9]]


def test_whether_a_graph_is_captured_is_asked_of_the_weights_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, weight = WeightCache(), layer().weight
    with monkeypatch.context() as patch:
        patch.setattr(devices, "is_capturing", lambda device: device == weight.device)
        assert cache.cast(weight, torch.bfloat16).dtype == torch.bfloat16
    assert cache.kept() == []
    cache.cast(weight, torch.bfloat16)
    assert len(cache.kept()) == 1
