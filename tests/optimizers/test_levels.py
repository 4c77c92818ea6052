"""The five under `amp.initialize` at every level: training, skips, resume, undoing, and masters at O2."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from amp_engine import amp
from tests.models import NORMED_MLP, Task
from tests.optimizers.support import CLASSES
from tests.support import (
    MASTER_LEVELS,
    MODULE_HOOKS,
    OPTIMIZER_HOOKS,
    assert_bitwise,
    backward,
    frozen,
    masters,
    optimizer_values,
    train,
    weights_of,
)

EVERY = pytest.mark.parametrize("name", CLASSES)
KINDS_OF_ROWS = ("O1", "O2", "O3", "O5")  # FP32, masters of float16, half, masters of bfloat16
SETTINGS: dict[str, dict[str, Any]] = {
    "FusedSGD": {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3},
    "FusedAdam": {"lr": 1e-2, "eps": 1e-4, "weight_decay": 1e-2},
    "FusedLAMB": {"lr": 2e-2, "eps": 1e-4},
    "FusedNovoGrad": {"lr": 0.1, "betas": (0.9, 0.98), "weight_decay": 1e-3},
    "FusedAdagrad": {"lr": 3e-2, "eps": 1e-4, "weight_decay": 1e-3},
}


def fused(name: str, model: nn.Module) -> Optimizer:
    """Return an optimizer of two groups: matrices, and vectors without weight decay."""
    params = list(model.parameters())
    groups = [
        {"params": [param for param in params if param.ndim > 1]},
        {"params": [param for param in params if param.ndim <= 1], "weight_decay": 0.0},
    ]
    return CLASSES[name](groups, **SETTINGS[name])


def started(name: str, level: str, task: Task = NORMED_MLP, seed: int = 0, **keywords: Any) -> Any:
    model = task.model(seed)
    optimizer = fused(name, model)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, **keywords)
    return model, optimizer


def saved_by(optimizer: Optimizer) -> dict[str, Any]:
    """A copy of its `state_dict()`; the order of keys means nothing."""
    saved = frozen(optimizer.state_dict())
    saved["state"] = dict(sorted(saved["state"].items()))
    saved["param_groups"] = [dict(sorted(group.items())) for group in saved["param_groups"]]
    return saved


def everything(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    return {
        "model": frozen(dict(model.named_parameters())) | frozen(dict(model.named_buffers())),
        "masters": masters(optimizer),
        "optimizer": saved_by(optimizer),
    }


# --- training -------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", KINDS_OF_ROWS)
@EVERY
def test_state_is_float32_at_every_level(name: str, level: str) -> None:
    model, optimizer = started(name, level)
    train(NORMED_MLP, model, optimizer, "cc")
    tensors = [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]
    assert {value.dtype for value in tensors} == {torch.float32}
    assert len(optimizer.state) == 5


@EVERY
def test_o0_is_the_optimizer_alone_bit_by_bit(name: str) -> None:
    model, optimizer = started(name, "O0")
    losses = train(NORMED_MLP, model, optimizer, "cccc")
    values = optimizer_values(optimizer)
    amp.close()
    plain = NORMED_MLP.model()
    alone = fused(name, plain)
    for index in range(4):
        alone.zero_grad()
        loss = NORMED_MLP.loss(plain, NORMED_MLP.batch(index))
        loss.backward()
        alone.step()
        assert loss.item() == losses[index]
    assert_bitwise(optimizer_values(alone), values)


# --- skips ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", KINDS_OF_ROWS)
@pytest.mark.parametrize("first", ["", "cc"], ids=["first step", "later step"])
@EVERY
def test_an_overflow_leaves_weights_masters_and_state_bit_for_bit(name: str, first: str, level: str) -> None:
    model, optimizer = started(name, level, loss_scale="dynamic")
    train(NORMED_MLP, model, optimizer, first)
    backward(NORMED_MLP.loss(model, NORMED_MLP.batch(8)), optimizer, overflow=True)
    before = everything(model, optimizer)
    groups = optimizer_values(optimizer)["groups"]
    optimizer.step()
    assert_bitwise(everything(model, optimizer), before)
    assert_bitwise(optimizer_values(optimizer)["groups"], groups)


@pytest.mark.parametrize("level", KINDS_OF_ROWS)
@EVERY
def test_steps_around_skips_are_bitwise_those_without_them(name: str, level: str) -> None:
    def end(script: str) -> dict[str, Any]:
        model, optimizer = started(name, level, loss_scale="dynamic")
        model.eval()
        index = 0
        for outcome in script:
            if outcome == "h":
                amp._amp_state.loss_scalers[0]._loss_scale /= 2
            else:
                train(NORMED_MLP, model, optimizer, outcome, first=index)
                index += outcome == "c"
        values = everything(model, optimizer)
        amp.close()
        return values

    assert_bitwise(end("ococc"), end("hchcc"))


# --- resume ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", KINDS_OF_ROWS)
@pytest.mark.parametrize("script", ["", "cco"], ids=lambda script: script or "no step")
@EVERY
def test_a_resumed_run_is_bitwise_the_run_that_was_not_stopped(name: str, script: str, level: str) -> None:
    model, optimizer = started(name, level, loss_scale="dynamic")
    train(NORMED_MLP, model, optimizer, script)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}, file)
    losses = train(NORMED_MLP, model, optimizer, "coc", first=4)
    truth, scalers = everything(model, optimizer), dict(amp.state_dict())
    amp.close()

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    model, optimizer = started(name, level, seed=77, loss_scale="dynamic")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    amp.load_state_dict(saved["amp"])
    assert train(NORMED_MLP, model, optimizer, "coc", first=4) == losses
    assert_bitwise(everything(model, optimizer), truth)
    assert_bitwise(dict(amp.state_dict()), scalers)


@pytest.mark.parametrize("level", MASTER_LEVELS)
@EVERY
def test_a_checkpoint_goes_on_without_amp_and_the_other_way_round(name: str, level: str) -> None:
    model, optimizer = started(name, level)
    train(NORMED_MLP, model, optimizer, "ccc")
    weights, state = frozen(dict(model.state_dict())), saved_by(optimizer)
    amp.close()
    plain = NORMED_MLP.model(9)
    alone = fused(name, plain)
    plain.load_state_dict(weights)
    alone.load_state_dict(state)
    assert_bitwise(saved_by(alone), state)
    NORMED_MLP.loss(plain, NORMED_MLP.batch(3)).backward()
    alone.step()
    weights, state = frozen(dict(plain.state_dict())), saved_by(alone)
    model, optimizer = started(name, level, seed=5)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    assert_bitwise(masters(optimizer), [param.detach() for param in weights_of(alone)])
    assert_bitwise(saved_by(optimizer), state)
    train(NORMED_MLP, model, optimizer, "c")


# --- undoing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", KINDS_OF_ROWS)
@EVERY
def test_close_after_training_gives_back_masters_hooks_and_state_and_training_goes_on(name: str, level: str) -> None:
    model = NORMED_MLP.model()
    optimizer = fused(name, model)
    params, attributes = list(model.parameters()), list(vars(optimizer))
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    train(NORMED_MLP, model, optimizer, "ccc")
    exact, saved = masters(optimizer), saved_by(optimizer)
    amp.close()
    if level != "O3":
        assert_bitwise(weights_of(optimizer), exact)
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    assert {id(param) for param in weights_of(optimizer)} == {id(param) for param in params}
    assert set(optimizer.state) == set(params)
    assert_bitwise(saved_by(optimizer), saved)
    assert not any(getattr(module, hooks) for module in model.modules() for hooks in MODULE_HOOKS)
    assert set(vars(optimizer)) >= set(attributes)

    plain = NORMED_MLP.model()
    plain.load_state_dict(model.state_dict())
    alone = fused(name, plain)
    alone.load_state_dict(saved)
    for index in range(3):
        for each, its in ((model, optimizer), (plain, alone)):
            its.zero_grad()
            NORMED_MLP.loss(each, NORMED_MLP.batch(index)).backward()
            its.step()
    assert_bitwise(weights_of(optimizer), weights_of(alone))
    assert_bitwise(saved_by(optimizer), saved_by(alone))
    for hooks in OPTIMIZER_HOOKS:
        assert list(getattr(optimizer, hooks).values()) == list(getattr(alone, hooks).values())


# --- masters --------------------------------------------------------------------------------------


@pytest.mark.parametrize("looked_at", [False, True], ids=["one pass", "FP32 gradients"])
@pytest.mark.parametrize("level", MASTER_LEVELS)
@EVERY
def test_a_step_of_masters_is_the_step_of_float32_copies(name: str, level: str, looked_at: bool) -> None:
    """The step may read half gradients, or float32 ones that were read before, with equal results."""
    model, optimizer = started(name, level)
    params = [param for group in ("2d", "1d") for param in model.parameters() if (param.ndim > 1) == (group == "2d")]
    copies = [nn.Parameter(master) for master in masters(optimizer)]
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    alone = CLASSES[name](
        [{"params": copies[: sizes[0]]}, {"params": copies[sizes[0] :], "weight_decay": 0.0}], **SETTINGS[name]
    )
    for index in range(4):
        optimizer.zero_grad()
        backward(NORMED_MLP.loss(model, NORMED_MLP.batch(index)), optimizer)
        for param, twin in zip(params, copies, strict=True):
            twin.grad = param.grad.to(torch.float32, copy=True)
        if looked_at:
            assert_bitwise([param.grad for param in amp.master_params(optimizer)], [twin.grad for twin in copies])
        optimizer.step()
        alone.step()
        assert_bitwise(
            [p.detach() for p in params], [m.to(p.dtype) for p, m in zip(params, masters(optimizer), strict=True)]
        )
        if name == "FusedSGD":
            assert_bitwise(masters(optimizer), [twin.detach() for twin in copies])
        else:
            torch.testing.assert_close(masters(optimizer), [twin.detach() for twin in copies], rtol=2e-6, atol=2e-7)
    for param, twin in zip(params, copies, strict=True):
        for key, value in alone.state[twin].items():
            torch.testing.assert_close(optimizer.state[param][key], value, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_sgd_that_materialises_no_master_gradients_steps_the_same(level: str) -> None:
    def end(**settings: Any) -> dict[str, Any]:
        model = NORMED_MLP.model()
        optimizer = CLASSES["FusedSGD"](model.parameters(), lr=0.05, momentum=0.9, **settings)
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        train(NORMED_MLP, model, optimizer, "cccc")
        values = everything(model, optimizer)
        amp.close()
        return {key: values[key] for key in ("model", "masters")}

    assert_bitwise(end(materialize_master_grads=False), end())
