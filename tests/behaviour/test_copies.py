"""Copies of a model (deepcopy, pickle, moving averages) hold, run and save their own values."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from amp_engine import amp
from amp_engine.optimizers import FusedAdam
from tests import support
from tests.models import MLP, NORMED_MLP
from tests.support import (
    MASTER_LEVELS,
    assert_bitwise,
    entries_of,
    frozen,
    masters,
    momentum_sgd,
    train,
)

COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


def started(level: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = support.started(level)
    train(NORMED_MLP, model, optimizer, "cc")
    return model, optimizer


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return frozen(dict(model.named_parameters()) | dict(model.named_buffers()))


@pytest.mark.parametrize("duplicate", COPIES)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_copy_has_the_types_values_and_outputs_of_its_origin(level: str, duplicate: str) -> None:
    model, _ = started(level)
    twin = COPIES[duplicate](model)
    assert_bitwise(values(twin), values(model))
    inputs = NORMED_MLP.batch()[0]
    outputs, expected = twin.eval()(inputs), model.eval()(inputs)
    assert_bitwise(outputs.detach(), expected.detach())


@pytest.mark.parametrize("duplicate", COPIES)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_copy_keeps_its_values_and_its_state_dict_while_the_origin_trains(level: str, duplicate: str) -> None:
    model, optimizer = started(level)
    twin = COPIES[duplicate](model)
    before, saved = values(twin), frozen(dict(twin.state_dict()))
    train(NORMED_MLP, model, optimizer, "cccc", first=2)
    assert_bitwise(values(twin), before)
    assert_bitwise(dict(twin.state_dict()), saved)
    assert not torch.equal(saved["0.weight"], model.state_dict()["0.weight"])


@pytest.mark.parametrize("duplicate", COPIES)
@pytest.mark.parametrize("level", ["O2"])
def test_the_state_dict_of_a_copy_is_its_own_half_values_widened(level: str, duplicate: str) -> None:
    model, _ = started(level)
    twin = COPIES[duplicate](model)
    for name, value in twin.state_dict().items():
        own = values(twin)[name]
        assert_bitwise(value, own.float() if own.is_floating_point() else own)


@pytest.mark.parametrize("duplicate", COPIES)
@pytest.mark.parametrize("level", ["O2"])
def test_loading_into_a_copy_leaves_the_origin_and_its_masters_alone(level: str, duplicate: str) -> None:
    model, optimizer = started(level)
    twin = COPIES[duplicate](model)
    before, exact = values(model), masters(optimizer)
    twin.load_state_dict(NORMED_MLP.model(8).state_dict())
    assert_bitwise(values(model), before)
    assert_bitwise(masters(optimizer), exact)
    assert_bitwise(twin[0].weight.detach(), NORMED_MLP.model(8)[0].weight.detach().to(twin[0].weight.dtype))


@pytest.mark.parametrize("duplicate", COPIES)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_copy_outlives_close(level: str, duplicate: str) -> None:
    model, _ = started(level)
    twin = COPIES[duplicate](model)
    amp.close()
    assert twin(NORMED_MLP.batch()[0]).isfinite().all()
    assert twin.state_dict()["0.weight"].dtype == torch.float32


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_averaged_model_averages_and_saves_its_own_values(level: str) -> None:
    model, optimizer = started(level)
    with pytest.warns(UserWarning, match="moving average") if level == "O2" else nullcontext():
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    first = model[0].weight.detach().clone()
    ema.update_parameters(model)
    train(NORMED_MLP, model, optimizer, "cccc", first=2)
    ema.update_parameters(model)
    second = model[0].weight.detach()
    average = ema.module[0].weight.detach()
    torch.testing.assert_close(average, 0.5 * first + 0.5 * second, rtol=1e-2, atol=1e-3)
    assert not torch.equal(average, second)
    saved = ema.state_dict()["module.0.weight"]
    assert saved.dtype == torch.float32
    assert_bitwise(saved, average.float())
    assert ema(NORMED_MLP.batch()[0]).isfinite().all()


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_a_deepcopy_of_model_and_optimizer_together_does_not_step_the_origin(level: str) -> None:
    model, optimizer = started(level)
    before = values(model)
    _, twin_optimizer = copy.deepcopy((model, optimizer))
    for param in entries_of(twin_optimizer):
        param.grad = torch.ones_like(param)
    twin_optimizer.step()
    assert_bitwise(values(model), before)
    train(MLP, model, optimizer, "c", first=3)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": momentum_sgd,
    "FusedAdam": lambda params: FusedAdam(params, lr=0.01),
}
PAIRS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "one by one": lambda pair: tuple(map(copy.deepcopy, pair)),
    "pickle": lambda pair: pickle.loads(pickle.dumps(pair)),
}


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    NORMED_MLP.loss(model, NORMED_MLP.batch()).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("duplicate", ["deepcopy", "pickle"])
@pytest.mark.parametrize("name", ["SGD", "FusedAdam"])
@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_a_copied_optimizer_goes_on_with_the_half_parameters_of_the_copied_model(
    level: str, name: str, duplicate: str
) -> None:
    model, optimizer = support.started(level, OPTIMIZERS[name])
    train(NORMED_MLP, model, optimizer, "cc")
    origin = values(model)
    twin, stepped = PAIRS[duplicate]((model, optimizer))
    before = values(twin)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        amp.initialize(twin, stepped, opt_level=level, verbosity=0)
        train(NORMED_MLP, twin, stepped, "c", first=2)
    assert all(p.isfinite().all() and not torch.equal(p, before[name]) for name, p in twin.named_parameters())
    assert_bitwise(values(model), origin)
    train(NORMED_MLP, model, optimizer, "c", first=2)


@pytest.mark.parametrize("duplicate", PAIRS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_pair_that_was_copied_after_close_trains(level: str, duplicate: str) -> None:
    pair = started(level)
    amp.close()
    twin, stepped = PAIRS[duplicate](pair)
    if duplicate == "one by one":  # torch's own optimizers do not find a model either
        stepped = momentum_sgd(twin.parameters())
    before = values(twin)
    plain_step(twin, stepped)
    assert not torch.equal(twin[0].weight, before["0.weight"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("duplicate", COPIES)
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_copy_that_is_converted_computes_in_its_own_type(level: str, duplicate: str, dtype: torch.dtype) -> None:
    model, _ = started(level)
    twin = COPIES[duplicate](model).to(dtype).eval()
    inputs = NORMED_MLP.batch()[0]
    expected = model.eval()(inputs)
    assert expected.dtype is torch.float32

    outputs = twin(inputs.to(dtype))
    assert outputs.dtype is dtype
    assert torch.equal(outputs, twin.forward(inputs.to(dtype)))
    torch.testing.assert_close(outputs.float(), expected, rtol=0.05, atol=0.05)
    first = next(part for part in twin.modules() if isinstance(part, nn.Linear))
    assert first(inputs.to(dtype)).isfinite().all()
