"""Shared by many tests: one backward, one step, and a picture of model and optimizer to compare bit by bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_engine import amp, kernels
from tests.models import NORMED_MLP

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
DYNAMIC_LEVELS = ("O1", "O2")
MASTER_LEVELS = ("O2", "O5")
FUNCTION_LEVELS = ("O1", "O4")
CAST_LEVELS = ("O0", "O2", "O3", "O5")
WEIGHT_DTYPE = {
    "O0": torch.float32,
    "O1": torch.float32,
    "O2": torch.float16,
    "O3": torch.float16,
    "O4": torch.float32,
    "O5": torch.bfloat16,
}
HALF = {
    "O1": torch.float16,
    "O2": torch.float16,
    "O3": torch.float16,
    "O4": torch.bfloat16,
    "O5": torch.bfloat16,
}

MODULE_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
OPTIMIZER_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


def momentum_sgd(params: Any) -> Optimizer:
    """Return the optimizer of most tests."""
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def started(
    level: str = "O2",
    make: Callable[[Any], Optimizer] = momentum_sgd,
    task: Any = NORMED_MLP,
    *,
    seed: int = 0,
    engine: Any = amp,
    **keywords: Any,
) -> tuple[nn.Module, Optimizer]:
    """A model of `task` and the optimizer that `make` makes of its parameters, initialized silently."""
    model = task.model(seed)
    optimizer = make(model.parameters())
    engine.initialize(model, optimizer, opt_level=level, **{"verbosity": 0, **keywords})
    return model, optimizer


def backward(loss: Tensor, optimizers: Any, *, overflow: bool = False, engine: Any = amp, **keywords: Any) -> None:
    """Run one backward inside `scale_loss`; with `overflow` every gradient is inf or nan."""
    with engine.scale_loss(loss, optimizers, **keywords) as scaled_loss:
        (scaled_loss * float("inf") if overflow else scaled_loss).backward()


def train(
    task: Any,
    model: nn.Module,
    optimizer: Optimizer,
    outcomes: str,
    *,
    first: int = 0,
    engine: Any = amp,
) -> list[float]:
    """Take one step per letter of `outcomes`: `c` clean, `o` overflowing. Return the losses.

    The batch depends on the number of the step only, which starts at `first`.
    """
    losses = []
    for index, outcome in enumerate(outcomes, start=first):
        optimizer.zero_grad()
        loss = task.loss(model, task.batch(index))
        backward(loss, optimizer, overflow=outcome == "o", engine=engine)
        optimizer.step()
        losses.append(loss.item())
    return losses


def step_beside(task: Any, model: nn.Module, optimizer: Optimizer, bare: Optimizer, index: int) -> None:
    """Take a step of `optimizer` on a batch, and one of `bare`, which amp does not know, with the same gradients."""
    optimizer.zero_grad()
    backward(task.loss(model, task.batch(index)), optimizer)
    for ours, theirs in zip(weights_of(optimizer), weights_of(bare), strict=True):
        theirs.grad = ours.grad.clone()
    optimizer.step()
    bare.step()


def scaler_numbers(index: int = 0) -> tuple[float, int]:
    """(loss_scale, unskipped) of one loss scaler, as a checkpoint holds them."""
    entry = amp.state_dict()[f"loss_scaler{index}"]
    return entry["loss_scale"], entry["unskipped"]


def masters(optimizer: Optimizer) -> list[Tensor]:
    return [master.detach().clone() for master in amp.master_params(optimizer)]


def entries_of(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def weights_of(optimizer: Optimizer) -> list[Tensor]:
    """What the optimizer steps, of any engine: its masters where it has them, with FP32 gradients."""
    stash = vars(optimizer).get("_amp_stash")
    if stash is None:
        return entries_of(optimizer)
    record = stash._record
    if not record.rows.is_shown:
        stash._owner.close_into(record)
        record.follow_writes(rounds=not record.is_in_body)
        if record.rows.makes_masters and not record.is_in_body:
            record.give_gradients()
    return list(record.columns.weights)


def frozen(value: Any) -> Any:
    """A copy of nested containers in which every tensor is a clone and every other leaf its deepcopy."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: frozen(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [frozen(item) for item in value]
    return copy.deepcopy(value)


def assert_same_step(optimizer: Any, actual: Any, expected: Any) -> None:
    """Assert that steps are those of torch.optim: the same bits, up to rounding where the native kernels step Adam."""
    if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and kernels.has_native(torch.device("cpu")):
        torch.testing.assert_close(actual, expected, rtol=2e-6, atol=2e-7)
    else:
        assert_bitwise(actual, expected)


def assert_bitwise(actual: Any, expected: Any, where: str = "") -> None:
    """Equal types, dtypes and values, all the way down; a NaN equals a NaN."""
    if isinstance(expected, Tensor):
        assert isinstance(actual, Tensor), where
        torch.testing.assert_close(
            actual.detach(),
            expected.detach(),
            rtol=0,
            atol=0,
            equal_nan=True,
            msg=lambda m: where + m,
        )
    elif isinstance(expected, dict):
        assert list(actual) == list(expected), where
        for key in expected:
            assert_bitwise(actual[key], expected[key], f"{where}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), where
        for index, (a, e) in enumerate(zip(actual, expected, strict=True)):
            assert_bitwise(a, e, f"{where}[{index}]")
    else:
        assert actual == expected, f"{where}: {actual!r} != {expected!r}"


def optimizer_values(optimizer: Optimizer) -> dict[str, Any]:
    """Parameters, state and every other group entry, as copies."""
    return {
        "params": frozen(weights_of(optimizer)),
        "state": [frozen(optimizer.state.get(param, {})) for param in entries_of(optimizer)],
        "groups": [
            frozen({key: value for key, value in group.items() if key != "params"}) for group in optimizer.param_groups
        ],
    }


def everything(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """All that a run goes on from, as copies."""
    return {
        "model": frozen(dict(model.named_parameters()) | dict(model.named_buffers())),
        "saved": frozen(dict(model.state_dict())),
        "optimizer": optimizer_values(optimizer),
        "amp": dict(amp.state_dict()),
    }


def picture(model: nn.Module, optimizers: Iterable[Optimizer] = ()) -> dict[str, Any]:
    """Everything that a refused call must leave alone: values, dtypes, identities, hooks and attributes."""
    modules = dict(model.named_modules())
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        "tensors": {name: (id(tensor), frozen(tensor)) for name, tensor in _initialised(tensors)},
        "grads": {name: None if p.grad is None else frozen(p.grad) for name, p in _initialised(tensors)},
        "module attributes": {name: sorted(vars(module)) for name, module in modules.items()},
        "module classes": {name: type(module).__name__ for name, module in modules.items()},
        "module hooks": {
            name: [list(getattr(module, hooks) or ()) for hooks in MODULE_HOOKS] for name, module in modules.items()
        },
        "optimizers": [
            {
                "values": optimizer_values(optimizer),
                "identities": [
                    [id(group), *(id(param) for param in group["params"])] for group in optimizer.param_groups
                ],
                "attributes": sorted(vars(optimizer)),
                "hooks": [list(getattr(optimizer, hooks)) for hooks in OPTIMIZER_HOOKS],
            }
            for optimizer in optimizers
        ],
    }


@contextmanager
def left_alone(model: nn.Module, *optimizers: Optimizer) -> Iterator[None]:
    """Asserts that the body changed nothing at all about the model and the optimizers."""
    before = picture(model, optimizers)
    yield
    assert_bitwise(picture(model, optimizers), before)


def _initialised(tensors: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    return [
        (name, tensor)
        for name, tensor in tensors.items()
        if not isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin)
    ]
