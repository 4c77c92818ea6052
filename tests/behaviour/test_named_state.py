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
    StateDictOptions,
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
    assert amp.optimizer_state_dict(ddp, optimizer)["param_groups"][0]["params"] == list(dict(model.named_parameters()))
    del ddp


def test_a_shared_parameter_has_its_first_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    optimizer = ADAMW(model.parameters())
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert list(dict(amp.named_masters(model))) == ["0.weight", "0.bias", "1.bias"]
    assert amp.optimizer_state_dict(model, optimizer)["param_groups"][0]["params"] == ["0.weight", "0.bias", "1.bias"]


# --- state by names -------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_the_state_is_that_of_torchs_function(level: str) -> None:
    model, optimizer = started(level, ADAMW)
    train(NORMED_MLP, model, optimizer, "cc")
    ours = amp.optimizer_state_dict(model, optimizer)
    assert_bitwise(ours, get_optimizer_state_dict(model, optimizer))
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


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O0", "O2"])
def test_what_is_saved_by_name_goes_on_bitwise(level: str, name: str) -> None:
    make = OPTIMIZERS[name]
    model, optimizer = started(level, make)
    train(NORMED_MLP, model, optimizer, "ccc")
    state = frozen({"m": dict(model.state_dict()), "o": amp.optimizer_state_dict(model, optimizer)})
    scalers = amp.state_dict()
    train(NORMED_MLP, model, optimizer, "cc", first=3)
    truth = everything(model, optimizer)
    amp.close()
    model, optimizer = started(level, make, seed=77)
    train(NORMED_MLP, model, optimizer, "c")
    model.load_state_dict(state["m"])
    amp.load_optimizer_state_dict(model, optimizer, state["o"])
    amp.load_state_dict(scalers)
    train(NORMED_MLP, model, optimizer, "cc", first=3)
    assert_bitwise(everything(model, optimizer), truth)


def in_groups(model: nn.Module, swapped: bool) -> torch.optim.Optimizer:
    decayed = {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1}
    others = {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0}
    if swapped:
        decayed["params"].reverse()
    return torch.optim.AdamW([others, decayed] if swapped else [decayed, others], lr=1e-2, eps=1e-4)


def test_the_order_of_groups_and_parameters_does_not_matter() -> None:
    saved = []
    for swapped in (False, True):
        model = NORMED_MLP.model()
        optimizer = in_groups(model, swapped)
        amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
        if saved:
            amp.load_optimizer_state_dict(model, optimizer, saved[0])
        else:
            train(NORMED_MLP, model, optimizer, "cc")
        saved.append(frozen(amp.optimizer_state_dict(model, optimizer)))
        amp.close()
    first, second = saved
    assert {name: first["state"][name] for name in second["state"]}.keys() == first["state"].keys()
    for name in first["state"]:
        assert_bitwise(second["state"][name], first["state"][name])
    assert [group["weight_decay"] for group in second["param_groups"]] == [0.0, 0.1]


def test_several_optimizers_of_one_model_are_one_dictionary() -> None:
    model = NORMED_MLP.model()
    optimizers = [ADAMW([*model[0].parameters(), *model[1].parameters()]), OPTIMIZERS["sgd"](model[3].parameters())]
    amp.initialize(model, optimizers, opt_level="O2", verbosity=0)
    with amp.scale_loss(NORMED_MLP.loss(model, NORMED_MLP.batch()), optimizers) as scaled_loss:
        scaled_loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    state = frozen(amp.optimizer_state_dict(model, optimizers))
    assert list(state["state"]) == [name for name, _ in model.named_parameters()]
    truth = [optimizer_values(optimizer) for optimizer in optimizers]
    for optimizer in optimizers:
        optimizer.state.clear()
    amp.load_optimizer_state_dict(model, tuple(optimizers), state)
    assert_bitwise([optimizer_values(optimizer) for optimizer in optimizers], truth)


def test_larc_is_looked_into() -> None:
    model = NORMED_MLP.model()
    optimizer = LARC(OPTIMIZERS["sgd"](model.parameters()))
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    train(NORMED_MLP, model, optimizer, "c")
    state = amp.optimizer_state_dict(model, optimizer)
    assert list(state["state"]) == [name for name, _ in model.named_parameters()]
    amp.load_optimizer_state_dict(model, optimizer, state)


def test_another_model_or_other_groups_are_refused_and_nothing_changes() -> None:
    model, optimizer = started("O2", ADAMW)
    train(NORMED_MLP, model, optimizer, "c")
    with pytest.raises(AmpStateError, match=r"steps a tensor of shape \(16, 8\) that is none of the model's 2"):
        amp.optimizer_state_dict(nn.Linear(2, 2), optimizer)
    state = frozen(amp.optimizer_state_dict(model, optimizer))
    before = optimizer_values(optimizer)
    state["param_groups"][0]["params"].remove("3.bias")
    with pytest.raises(AmpStateError, match=r"No group was saved of exactly 0\.weight.*3\.bias, which a group"):
        amp.load_optimizer_state_dict(model, optimizer, state)
    assert_bitwise(optimizer_values(optimizer), before)


class CountsBesideParameters(torch.optim.SGD):
    """Keeps a value in its state under a key that is no parameter."""

    def step(self, closure: Any = None) -> Any:
        self.state["count"] = self.state.get("count", 0) + 1
        return super().step(closure)


def test_state_of_no_parameter_comes_back() -> None:
    model, optimizer = started("O4", lambda params: CountsBesideParameters(params, lr=0.1, momentum=0.9))
    train(NORMED_MLP, model, optimizer, "cc")
    by_name = frozen(amp.optimizer_state_dict(model, optimizer))
    training = frozen(amp.training_state(model, optimizer).state_dict())
    assert by_name["state"]["count"] == 2
    for load in (
        lambda: amp.load_optimizer_state_dict(model, optimizer, by_name),
        lambda: amp.training_state(model, optimizer).load_state_dict(training),
    ):
        optimizer.state.clear()
        load()
        assert optimizer.state["count"] == 2
        state = amp.optimizer_state_dict(model, optimizer)["state"]
        assert_bitwise({key: state.pop(key) for key in by_name["state"]}, by_name["state"])
        assert not state


def test_two_optimizers_of_one_parameter_are_saved_one_by_one() -> None:
    model = NORMED_MLP.model()
    optimizers = [ADAMW(model.parameters()), torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.5, 0.5))]
    amp.initialize(model, optimizers, opt_level="O4", verbosity=0)
    for optimizer in optimizers:
        train(NORMED_MLP, model, optimizer, "c")
    for save in (amp.optimizer_state_dict, lambda *both: amp.training_state(*both).state_dict()):
        with pytest.raises(AmpStateError, match=r"'0\.weight' does not tell of which of 2 optimizers the state is"):
            save(model, optimizers)
    truth = [frozen(optimizer_values(optimizer)) for optimizer in optimizers]
    saved_one_by_one = [frozen(amp.optimizer_state_dict(model, optimizer)) for optimizer in optimizers]
    for optimizer, state in zip(optimizers, saved_one_by_one, strict=True):
        optimizer.state.clear()
        amp.load_optimizer_state_dict(model, optimizer, state)
    assert_bitwise([optimizer_values(optimizer) for optimizer in optimizers], truth)


def test_state_of_no_parameter_of_several_optimizers_is_refused() -> None:
    model = NORMED_MLP.model()
    optimizers = [ADAMW(model[0].parameters()), CountsBesideParameters(model[3].parameters(), lr=0.1)]
    optimizers[1].state["count"] = 1
    with pytest.raises(AmpStateError, match="'count' does not tell of which of 2 optimizers"):
        amp.optimizer_state_dict(model, optimizers)


def test_the_flat_form_of_torchs_function_is_named() -> None:
    model, optimizer = started("O2", ADAMW)
    train(NORMED_MLP, model, optimizer, "c")
    flat = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    before = optimizer_values(optimizer)
    with pytest.raises(AmpStateError, match=r"there is no 'param_groups'.*flatten_optimizer_state_dict=False"):
        amp.load_optimizer_state_dict(model, optimizer, flat)
    assert_bitwise(optimizer_values(optimizer), before)


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
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize(("level", "name"), CASES)
def test_a_run_goes_on_bitwise_through_dcp(tmp_path: Path, level: str, steps: int, name: str) -> None:
    make = OPTIMIZERS[name]
    model, optimizer = started(level, make)
    train(NORMED_MLP, model, optimizer, "c" * steps)
    saved(tmp_path, training=amp.training_state(model, optimizer))
    train(NORMED_MLP, model, optimizer, "cc", first=steps)
    truth = everything(model, optimizer)
    amp.close()

    model, optimizer = started(level, make, seed=77)
    state = amp.training_state(model, optimizer)
    assert isinstance(state, Stateful)
    loaded(tmp_path, training=state)
    if steps == 0:
        assert not optimizer.state
    train(NORMED_MLP, model, optimizer, "cc", first=steps)
    assert_bitwise(everything(model, optimizer), truth)


class Sometimes(nn.Module):
    """A model with one part that was never used yet, and one that is frozen."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.used, self.unused, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.frozen.requires_grad_(False)

    def forward(self, x: Any, with_unused: bool = False) -> Any:
        return self.frozen(self.unused(self.used(x)) if with_unused else self.used(x))


def steps_of_sometimes(model: nn.Module, optimizer: Any, *with_unused: bool) -> None:
    for flag in with_unused:
        with amp.scale_loss(model(torch.ones(2, 4), flag).float().square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("before", [(False, False), (True, False)], ids=["never", "at first"])
@pytest.mark.parametrize("target", ["fresh", "that has begun"])
@pytest.mark.parametrize(("level", "name"), [("O1", "adamw"), ("O3", "adamw"), *(("O2", name) for name in OPTIMIZERS)])
def test_a_parameter_without_state_goes_through_dcp_and_begins_as_it_would_have(
    tmp_path: Path, level: str, name: str, target: str, before: tuple[bool, ...]
) -> None:
    def begin(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Sometimes(seed)
        optimizer = OPTIMIZERS[name](model.parameters())
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        return model, optimizer

    model, optimizer = begin(0)
    steps_of_sometimes(model, optimizer, *before)
    names = dict(amp.named_masters(model))
    has_state = {n for n, weight in names.items() if weight in optimizer.state}
    saved(tmp_path, training=amp.training_state(model, optimizer))
    steps_of_sometimes(model, optimizer, False, True, True)
    truth = everything(model, optimizer)
    amp.close()
    model, optimizer = begin(77)
    if target == "that has begun":
        steps_of_sometimes(model, optimizer, False)
    loaded(tmp_path, training=amp.training_state(model, optimizer))
    assert {n for n, weight in amp.named_masters(model) if weight in optimizer.state} == has_state
    steps_of_sometimes(model, optimizer, False, True, True)
    assert_bitwise(everything(model, optimizer), truth)


def test_a_class_that_steps_with_a_closure_only_has_the_state_that_it_has() -> None:
    model = NORMED_MLP.model()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O0", verbosity=0)
    optimizer.state[next(model.parameters())] = {"n_iter": 1}
    assert list(amp.training_state(model, optimizer).state_dict()["optimizer"]["state"]) == ["0.weight"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_asking_for_the_state_of_an_optimizer_that_has_none_gives_it_none(name: str) -> None:
    model, optimizer = started("O2", OPTIMIZERS[name])
    before = everything(model, optimizer)
    amp.training_state(model, optimizer).state_dict()
    assert not optimizer.state
    assert all(p.grad is None for p in (*model.parameters(), *amp.master_params(optimizer)))
    assert_bitwise(everything(model, optimizer), before)


def test_a_training_state_needs_initialize() -> None:
    model = TRANSFORMER.model()
    with pytest.raises(AmpStateError, match=r"amp\.training_state\(\) was called before"):
        amp.training_state(model, ADAMW(model.parameters()))
