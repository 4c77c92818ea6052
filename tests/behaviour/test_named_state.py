"""Masters and optimizers' state by names, and torch.distributed.checkpoint over both."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful

import amp_engine
from amp_engine import AmpStateError, Engine, amp
from amp_engine.optimizers import LARC, FusedAdam, FusedNovoGrad
from tests.models import NORMED_MLP, TRANSFORMER
from tests.support import (
    LEVELS,
    MASTER_LEVELS,
    WEIGHT_DTYPE,
    assert_bitwise,
    everything,
    frozen,
    optimizer_values,
    scaler_numbers,
    started,
    train,
)

# Gradients are put there by hand.
pytestmark = pytest.mark.filterwarnings("ignore:.*nothing scaled the loss:amp_engine.errors.AmpGradientWarning")

OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-4),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, dampening=0.1),
    "plain sgd": lambda params: torch.optim.SGD(params, lr=0.05),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
    "fused adam": lambda params: FusedAdam(params, lr=1e-2, eps=1e-4),
    "fused novograd": lambda params: FusedNovoGrad(params, lr=1e-2, eps=1e-4),
}
ADAMW = OPTIMIZERS["adamw"]


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_masters_have_the_names_of_their_parameters(level: str) -> None:
    model, optimizer = started(level, ADAMW)
    train(NORMED_MLP, model, optimizer, "cc")
    named = dict(amp.named_masters(model))
    assert list(named) == [name for name, _ in model.named_parameters()]
    assert {id(weight) for weight in named.values()} == {id(weight) for weight in amp.master_params(optimizer)}
    for name, weight in named.items():
        has_master = level in MASTER_LEVELS and not name.startswith("1.")
        assert (weight is not model.get_parameter(name)) == has_master
        assert_bitwise(weight.detach().to(model.get_parameter(name).dtype), model.get_parameter(name).detach())
        assert weight.dtype == (WEIGHT_DTYPE[level] if not has_master and level == "O3" else torch.float32)


def test_wrappers_are_not_in_the_names() -> None:
    model = NORMED_MLP.model()
    names = [name for name, _ in model.named_parameters()]
    assert [name for name, _ in amp.named_masters(torch.compile(model, backend="eager"))] == names


@pytest.mark.usefixtures("one_process_group")
def test_nor_is_distributed_data_parallel() -> None:
    model, optimizer = started("O2", ADAMW)
    ddp = nn.parallel.DistributedDataParallel(model)
    assert list(dict(amp.named_masters(ddp))) == list(dict(model.named_parameters()))
    assert get_optimizer_state_dict(ddp, optimizer)["param_groups"][0]["params"] == list(dict(model.named_parameters()))
    del ddp


def test_a_shared_parameter_has_its_first_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    optimizer = ADAMW(model.parameters())
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert list(dict(amp.named_masters(model))) == ["0.weight", "0.bias", "1.bias"]
    assert get_optimizer_state_dict(model, optimizer)["param_groups"][0]["params"] == ["0.weight", "0.bias", "1.bias"]


# --- state by names -------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_torchs_function_finds_the_state_by_names(level: str) -> None:
    model, optimizer = started(level, ADAMW)
    train(NORMED_MLP, model, optimizer, "cc")
    ours = get_optimizer_state_dict(model, optimizer)
    params = dict(model.named_parameters())
    assert list(ours["state"]) == list(params)
    for name, state in ours["state"].items():
        assert_bitwise(state["exp_avg"], optimizer.state[params[name]]["exp_avg"])


@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor", "fused adam"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_torchs_own_functions_resume_bitwise(level: str, name: str) -> None:
    make = OPTIMIZERS[name]
    model, optimizer = started(level, make)
    train(NORMED_MLP, model, optimizer, "ccc")
    weights, state = get_state_dict(model, optimizer)
    weights, state, scalers = frozen(dict(weights)), frozen(state), amp.state_dict()
    train(NORMED_MLP, model, optimizer, "cc", first=3)
    truth = everything(model, optimizer)
    amp.close()
    model, optimizer = started(level, make, seed=77)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    amp.load_state_dict(scalers)
    train(NORMED_MLP, model, optimizer, "cc", first=3)
    assert_bitwise(everything(model, optimizer), truth)


# --- torch.distributed.checkpoint -----------------------------------------------------------------


@pytest.fixture
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is (disabled|unavailable|not available).*")
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
        yield


def saved(folder: Path, **objects: Any) -> None:
    dcp.save(objects, checkpoint_id=folder, no_dist=True)


def loaded(folder: Path, **objects: Any) -> None:
    dcp.load(objects, checkpoint_id=folder, no_dist=True)


@pytest.mark.parametrize("one", [amp, amp_engine, Engine()], ids=["amp", "amp_engine", "Engine"])
def test_what_has_the_loss_scales_is_stateful(one: Any) -> None:
    assert isinstance(one, Stateful)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_the_loss_scales_go_through_dcp_and_keep_their_kind(tmp_path: Path, level: str) -> None:
    started("O2", ADAMW)
    amp._amp_state.loss_scalers[0]._loss_scale = 2.0**10
    saved(tmp_path, amp=amp)
    amp.close()
    started(level, ADAMW)
    loaded(tmp_path, amp=amp)
    assert scaler_numbers()[0] == (2.0**10 if level == "O2" else 1.0)


CASES = [*((level, "adamw") for level in LEVELS), *(("O2", name) for name in OPTIMIZERS if name != "adamw")]


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(("level", "name"), CASES)
def test_a_run_goes_on_bitwise_through_dcp(tmp_path: Path, level: str, name: str) -> None:
    make = OPTIMIZERS[name]
    model, optimizer = started(level, make)
    train(NORMED_MLP, model, optimizer, "ccc")
    saved(tmp_path, training=amp.training_state(model, optimizer))
    train(NORMED_MLP, model, optimizer, "cc", first=3)
    truth = everything(model, optimizer)
    amp.close()

    model, optimizer = started(level, make, seed=77)
    state = amp.training_state(model, optimizer)
    assert isinstance(state, Stateful)
    loaded(tmp_path, training=state)
    train(NORMED_MLP, model, optimizer, "cc", first=3)
    assert_bitwise(everything(model, optimizer), truth)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("as_given", [list, tuple])
def test_several_optimizers_and_larc_go_on_bitwise_through_dcp(tmp_path: Path, as_given: Any) -> None:
    def begun(seed: int) -> tuple[nn.Module, list[Any]]:
        model = NORMED_MLP.model(seed)
        of_first = ADAMW([*model[0].parameters(), *model[1].parameters()])
        optimizers = [of_first, LARC(OPTIMIZERS["sgd"](model[3].parameters()))]
        amp.initialize(model, optimizers, opt_level="O2", verbosity=0)
        return model, optimizers

    def trained(model: nn.Module, optimizers: list[Any], *batches: int) -> None:
        for index in batches:
            with amp.scale_loss(NORMED_MLP.loss(model, NORMED_MLP.batch(index)), optimizers) as scaled_loss:
                scaled_loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    model, optimizers = begun(0)
    trained(model, optimizers, 0, 1)
    saved(tmp_path, training=amp.training_state(model, as_given(optimizers)))
    trained(model, optimizers, 2)
    truth = frozen(dict(model.state_dict()))
    amp.close()
    model, optimizers = begun(77)
    loaded(tmp_path, training=amp.training_state(model, as_given(optimizers)))
    trained(model, optimizers, 2)
    assert_bitwise(dict(model.state_dict()), truth)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_parameter_without_a_gradient_so_far_has_no_state_to_load(level: str) -> None:
    def begun() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.ModuleDict({"used": nn.Linear(4, 4), "unused": nn.Linear(4, 4)})
        optimizer = ADAMW(model.parameters())
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        return model, optimizer

    model, optimizer = begun()
    with amp.scale_loss(model["used"](torch.ones(2, 4)).float().square().mean(), optimizer) as scaled_loss:  # type: ignore[index]
        scaled_loss.backward()
    optimizer.step()
    state = amp.training_state(model, optimizer).state_dict()
    assert list(state["optimizer"]["state"]) == ["used.weight", "used.bias"]
    truth = frozen(optimizer.state[model["used"].weight])  # type: ignore[index]
    amp.close()
    model, optimizer = begun()
    amp.training_state(model, optimizer).load_state_dict(state)
    assert_bitwise(optimizer.state[model["used"].weight], truth)  # type: ignore[index]


def test_two_optimizers_of_one_parameter_are_saved_one_by_one() -> None:
    model = NORMED_MLP.model()
    optimizers = [ADAMW(model.parameters()), torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.5, 0.5))]
    amp.initialize(model, optimizers, opt_level="O4", verbosity=0)
    for optimizer in optimizers:
        train(NORMED_MLP, model, optimizer, "c")
    with pytest.raises(AmpStateError, match=r"Call amp\.training_state\(model, optimizer\) for each of them"):
        amp.training_state(model, optimizers).state_dict()
    for optimizer in optimizers:
        state = frozen(amp.training_state(model, optimizer).state_dict())
        truth = frozen(optimizer_values(optimizer))
        optimizer.state.clear()
        amp.training_state(model, optimizer).load_state_dict(state)
        assert_bitwise(optimizer_values(optimizer), truth)


def test_state_of_no_parameter_is_refused_by_name() -> None:
    model = NORMED_MLP.model()
    optimizer = ADAMW(model.parameters())
    amp.initialize(model, optimizer, opt_level="O4", verbosity=0)
    train(NORMED_MLP, model, optimizer, "c")
    optimizer.state["count"] = 1
    with pytest.raises(AmpStateError, match=r"AdamW\.state has an entry under 'count'.*Save optimizer\.state_dict\(\)"):
        amp.training_state(model, optimizer).state_dict()


def test_a_training_state_needs_initialize() -> None:
    model = TRANSFORMER.model()
    with pytest.raises(AmpStateError, match=r"amp\.training_state\(\) was called before"):
        amp.training_state(model, ADAMW(model.parameters()))
