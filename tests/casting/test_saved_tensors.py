"""Hooks on saved tensors cast nothing: a graph gets back what it saved, in the type that it saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from amp_engine import Engine
from amp_engine.casting import FunctionCasts
from tests.support import FUNCTION_LEVELS, assert_bitwise, backward

X = torch.tensor([[1.0, 2.0, -1.0], [0.0, 1.0, 3.0]])


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.LayerNorm(4), nn.Linear(4, 3), nn.Softmax(1), nn.Linear(3, 2))


def through_a_list(tensor: Tensor) -> Any:
    """Listed methods and functions, as an offloader may call them."""
    with torch.no_grad():
        largest = F.softmax(tensor.flatten(), 0).sum() if tensor.is_floating_point() else tensor.sum()
        return tensor.cpu(), torch.cat([tensor, tensor]), largest.dtype, tensor.dtype


def back(packed: Any) -> Tensor:
    tensor, twice, largest, dtype = packed
    assert twice.dtype == tensor.dtype == largest == dtype, packed
    return tensor.cpu()


HOOKS: dict[str, Callable[[], Any]] = {
    "save_on_cpu": save_on_cpu,
    "cpu": lambda: saved_tensors_hooks(Tensor.cpu, lambda packed: packed),
    "cpu in both": lambda: saved_tensors_hooks(lambda t: t.cpu(), lambda t: t.cpu()),
    "listed functions": lambda: saved_tensors_hooks(through_a_list, back),
}


@pytest.mark.parametrize("hooks", HOOKS.values(), ids=HOOKS)
@pytest.mark.parametrize("level", FUNCTION_LEVELS)
def test_gradients_through_hooks_are_those_without(level: str, hooks: Callable[[], Any]) -> None:
    gradients = []
    for within in (False, True):
        with Engine() as engine:
            model = net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            engine.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
            for _ in range(2):
                optimizer.zero_grad()
                if within:
                    with hooks():
                        loss = model(X).float().pow(2).sum()
                else:
                    loss = model(X).float().pow(2).sum()
                backward(loss, optimizer, engine=engine)
                gradients.append([p.grad.clone() for p in model.parameters()])
                optimizer.step()
    assert_bitwise(gradients[2], gradients[0])
    assert_bitwise(gradients[3], gradients[1])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("level", FUNCTION_LEVELS)
def test_checkpoints_within_hooks_recompute_with_casts(level: str, reentrant: bool) -> None:
    def grad(run: Callable[[nn.Module, Tensor], Tensor]) -> list[Tensor]:
        model = net()
        with save_on_cpu():
            loss = run(model, X.clone().requires_grad_()).float().pow(2).sum()
        return list(torch.autograd.grad(loss, list(model.parameters()))) if not reentrant else backward_of(loss, model)

    def backward_of(loss: Tensor, model: nn.Module) -> list[Tensor]:
        loss.backward()
        return [p.grad for p in model.parameters()]

    with Engine() as engine:
        engine.initialize(nn.Linear(1, 1), opt_level=level, verbosity=0)
        plain = grad(lambda model, x: model(x))
        assert_bitwise(grad(lambda model, x: checkpoint(model, x, use_reentrant=reentrant)), plain)


def test_hooks_that_outlive_the_casts_are_plain_and_casts_are_on_again_after_a_hook(low: torch.dtype) -> None:
    seen, x = [], torch.ones(2, dtype=low, requires_grad=True)
    casts = FunctionCasts(low)
    casts.install()
    with saved_tensors_hooks(lambda t: seen.append(t.cpu().dtype) or t, lambda t: t):
        x * x
        assert x.cpu().dtype == torch.float32
        casts.remove()
        x * x
    assert seen == [low] * len(seen)
    assert len(seen) >= 2
    assert x.cpu().dtype == low


def test_a_hook_that_raises_leaves_the_casts_on(casts: FunctionCasts) -> None:
    def refuse(tensor: Tensor) -> Tensor:
        raise ValueError("not this one")

    x = torch.ones(2, dtype=casts.dtype, requires_grad=True)
    with saved_tensors_hooks(refuse, lambda t: t), pytest.raises(ValueError, match="not this one"):
        x * x
    assert x.cpu().dtype == torch.float32
