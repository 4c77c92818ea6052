"""Parameters, gradients and settings that the tests of the optimizers share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_engine.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD
from tests.optimizers.formulas import Formula
from tests.support import frozen, weights_of

CLASSES: dict[str, type[Optimizer]] = {
    "FusedSGD": FusedSGD,
    "FusedAdam": FusedAdam,
    "FusedLAMB": FusedLAMB,
    "FusedNovoGrad": FusedNovoGrad,
    "FusedAdagrad": FusedAdagrad,
}
TYPICAL: dict[str, dict[str, Any]] = {
    "FusedSGD": {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3},
    "FusedAdam": {"lr": 0.01, "weight_decay": 1e-2},
    "FusedLAMB": {"lr": 0.02},
    "FusedNovoGrad": {"lr": 0.02, "betas": (0.9, 0.98), "weight_decay": 1e-3},
    "FusedAdagrad": {"lr": 0.05, "weight_decay": 1e-3},
}
STATE: dict[str, tuple[str, ...]] = {
    "FusedSGD": ("momentum_buffer",),
    "FusedAdam": ("exp_avg", "exp_avg_sq"),
    "FusedLAMB": ("exp_avg", "exp_avg_sq"),
    "FusedNovoGrad": ("exp_avg", "exp_avg_sq"),
    "FusedAdagrad": ("sum",),
}
HALVES = (torch.float16, torch.bfloat16)
SHAPES = [(), (1,), (7,), (33, 5), (2, 3, 4, 5), (0,), (4, 0, 2), (129, 65)]
LONG = [(70_001,)]  # more than one chunk of any kernel


def made(name: str, params: Any, **settings: Any) -> Optimizer:
    """The optimizer with typical settings, overridden by `settings`."""
    return CLASSES[name](params, **(TYPICAL[name] | settings))


def all_settings(name: str, **settings: Any) -> dict[str, Any]:
    """`settings` over typical ones over the constructor's defaults, as the formulas take them."""
    defaults = {key: value.default for key, value in inspect.signature(CLASSES[name]).parameters.items()}
    return defaults | TYPICAL[name] | settings


def parameters(
    shapes: Iterable[Sequence[int]] = SHAPES, dtype: torch.dtype = torch.float32, seed: int = 0
) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def mixed_parameters(seed: int = 0) -> list[nn.Parameter]:
    """float32, float16, bfloat16 in turn."""
    dtypes = (torch.float32, *HALVES)
    return [
        nn.Parameter(param.detach().to(dtypes[index % 3]))
        for index, param in enumerate(parameters(SHAPES * 2, seed=seed))
    ]


def gradients(params: Sequence[Tensor], index: int) -> list[Tensor]:
    """Gradients number `index`, the same on every call, from one tensor to the next 3 times as large or small."""
    generator = torch.Generator().manual_seed(5000 + index)
    return [
        (torch.randn(param.shape, generator=generator) * 3.0 ** (number % 5 - 3)).to(param.dtype)
        for number, param in enumerate(params)
    ]


def give(params: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.grad = None if grad is None else grad.clone()


def run(optimizer: Optimizer, steps: Iterable[int], after: Callable[[int], None] = lambda index: None) -> None:
    """Take one step with each of these gradients."""
    params = weights_of(optimizer)
    for index in steps:
        give(params, gradients(params, index))
        optimizer.step()
        after(index)


def formula(name: str, params: Sequence[Tensor], dtype: torch.dtype = torch.float64, **settings: Any) -> Formula:
    """The formula of an optimizer that `made` makes, for one group."""
    return Formula(name, [(params, all_settings(name, **settings))], dtype)


def update_error(values: Sequence[Tensor], truth: Sequence[Tensor], start: Sequence[Tensor]) -> float:
    """|values - truth| / |truth - start|, over all tensors together, in float64."""
    error = sum((a.detach().double() - b).square().sum().item() for a, b in zip(values, truth, strict=True))
    moved = sum((b - c.detach().double()).square().sum().item() for b, c in zip(truth, start, strict=True))
    return (error / moved) ** 0.5


def assert_rounded_once(
    values: Sequence[Tensor], truth: Sequence[Tensor], start: Sequence[Tensor], where: str = ""
) -> None:
    """Assert that values are as near to the truth as their types allow, up to float32's own rounding of the step."""
    for index, (value, exact, old) in enumerate(zip(values, truth, start, strict=True)):
        if not value.numel():
            continue
        information = torch.finfo(value.dtype)
        _, exponent = torch.frexp(exact)
        ulp = torch.ldexp(torch.full_like(exact, information.eps), exponent - 1)
        ulp = ulp.clamp(min=information.smallest_normal * information.eps)
        room = 0.5 * ulp + 2.0**-23 * (exact.abs() + old.abs()) + 4e-6 * (exact - old).abs().max()
        excess = ((value.detach().double() - exact).abs() - room).clamp(min=0)
        assert not excess.any(), f"{where} tensor {index} of {value.dtype}: {excess.max().item():.3g} too far"


def assert_follows(
    optimizer: Optimizer,
    truth: Formula,
    grads: Sequence[Tensor | None],
    where: str = "",
    params: Sequence[Tensor] | None = None,
) -> None:
    """Assert that one step from the optimizer's weights, and `truth`'s state, is the true one rounded once.

    `params` are those of `truth`, if the optimizer has not all of them yet.
    """
    params = params or weights_of(optimizer)
    start = [param.detach().double() for param in params]
    truth.params = list(start)
    truth.step(grads)
    give(params, grads)
    optimizer.step()
    assert_rounded_once(params, truth.params, start, where)


def state_error(values: Sequence[Any], truth: Sequence[Any], key: str) -> float:
    """`update_error` of one entry of many states, from 0; 0 where the truth has no such entry."""
    pairs = [
        (value[key], true_value[key]) for value, true_value in zip(values, truth, strict=True) if key in true_value
    ]
    if not pairs:
        return 0.0
    ours, exact = zip(*pairs, strict=True)
    return update_error(ours, exact, [torch.zeros_like(value) for value in exact])


def assert_at_most_twice(name: str, ours: Any, theirs: Any, truth: Formula, start: Sequence[Tensor]) -> None:
    """The error of weights and state is at most twice theirs. `ours`, `theirs`: (weights, states)."""
    assert update_error(ours[0], truth.params, start) <= 2 * update_error(theirs[0], truth.params, start)
    for key in STATE[name]:
        one_ulp = 2.0**-23 if truth.states[0].get(key, start[-1]).ndim == 0 else 0.0  # a few numbers are no statistics
        assert state_error(ours[1], truth.states, key) <= 2 * state_error(theirs[1], truth.states, key) + one_ulp, key


def assert_twice_as_good(
    name: str,
    *,
    split: int = 0,
    second: dict[str, Any] | None = None,
    steps: int = 10,
    change: Callable[[int, list[Tensor]], list[Tensor | None]] = lambda index, grads: list(grads),
    **settings: Any,
) -> None:
    """Holds `steps` steps against `Formula` in float64 and float32.

    Args:
        name: of the optimizer.
        split: how many tensors are in the first group, if there are two.
        second: what differs in the second group.
        steps: their number.
        change: what becomes of the gradients of a step.
        settings: of all groups.
    """
    params = parameters(SHAPES + LONG)
    start = frozen(params)
    halves = [params[:split], params[split:]] if split else [params]
    differences: list[dict[str, Any]] = [{}, second or {}]
    optimizer = made(
        name, [{"params": half, **own} for half, own in zip(halves, differences, strict=False)], **settings
    )
    truth, plain = (
        Formula(
            name,
            [(half, all_settings(name, **(settings | own))) for half, own in zip(halves, differences, strict=False)],
            dtype,
        )
        for dtype in (torch.float64, torch.float32)
    )
    for index in range(steps):
        grads = change(index, gradients(params, index))
        truth.step(grads)
        plain.step(grads)
        give(params, grads)
        optimizer.step()
    states = [optimizer.state[param] for param in params]
    assert all(state[key].dtype == torch.float32 for state in states for key in STATE[name] if key in state)
    assert_at_most_twice(name, (params, states), (plain.params, plain.states), truth, start)
