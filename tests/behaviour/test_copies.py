"""Copies of a model (deepcopy, pickle, moving averages) hold, run and save their own values."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from amp_engine import amp
from amp_engine.optimizers import FusedAdam
from tests import support
from tests.models import NORMED_MLP
from tests.support import (
    MASTER_LEVELS,
    assert_bitwise,
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
def test_a_copy_keeps_its_values_and_its_state_dict_while_the_origin_trains(level: str, duplicate: str) -> None:
    model, optimizer = started(level)
    twin = COPIES[duplicate](model)
    before, saved = values(twin), frozen(dict(twin.state_dict()))
    train(NORMED_MLP, model, optimizer, "cccc", first=2)
    assert_bitwise(values(twin), before)
    assert_bitwise(dict(twin.state_dict()), saved)
    assert not torch.equal(saved["0.weight"], model.state_dict()["0.weight"])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": momentum_sgd,
    "FusedAdam": lambda params: FusedAdam(params, lr=0.01),
}
PAIRS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "one by one": lambda pair: tuple(map(copy.deepcopy, pair)),
    "pickle": lambda pair: pickle.loads(pickle.dumps(pair)),
}


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
