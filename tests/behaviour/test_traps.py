"""The traps of apex.amp, each as a test named after it: what was broken there is right here."""

from __future__ import annotations

import collections
import functools
import io
import pickle
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_engine import amp
from tests import support
from tests.models import MLP, NORMED_MLP
from tests.support import (
    LEVELS,
    MASTER_LEVELS,
    assert_bitwise,
    backward,
    entries_of,
    masters,
    scaler_numbers,
    train,
)

HALF = torch.float16


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


started = functools.partial(support.started, task=MLP)


# initialize


def test_state_dict_of_a_disabled_amp_is_empty_and_loads() -> None:
    started("O2", enabled=False)
    assert amp.state_dict() == collections.OrderedDict()
    amp.load_state_dict(amp.state_dict())


def test_a_module_given_as_an_argument_is_not_cast() -> None:
    class Distilled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, inputs: Tensor, teacher: nn.Module) -> Tensor:
            return self.layer(inputs) - teacher(inputs.float())

    model, teacher = Distilled(), nn.Linear(8, 4)
    amp.initialize(model, opt_level="O2", verbosity=0)
    model(torch.randn(2, 8), teacher)
    assert teacher.weight.dtype == torch.float32


# scale_loss


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_tuple_of_optimizers_is_prepared_like_a_list(level: str) -> None:
    def run(kind: type) -> list[Tensor]:
        models = [NORMED_MLP.model(0), NORMED_MLP.model(1)]
        optimizers = [sgd(model) for model in models]
        amp.initialize(models, optimizers, opt_level=level, verbosity=0)
        for index in range(4):
            loss = sum(NORMED_MLP.loss(model, NORMED_MLP.batch(index)) for model in models)
            backward(loss, kind(optimizers))
            if index % 2:
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        values = [master for optimizer in optimizers for master in masters(optimizer)]
        amp.close()
        return values

    assert_bitwise(run(tuple), run(list))


def test_the_cast_cache_does_not_outlive_an_exception() -> None:
    model, optimizer = started("O1")
    loss = MLP.loss(model, MLP.batch())
    with pytest.raises(ZeroDivisionError), amp.scale_loss(loss, optimizer):
        raise ZeroDivisionError
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    assert model(MLP.batch()[0]).abs().max() == 0


# masters


TINY = 1e-10  # 0.0 in float16


def with_tiny_state(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for param in model.parameters():
        param.grad = torch.full_like(param, 1e-5)
    optimizer.step()
    optimizer.zero_grad()
    for param in model.parameters():
        optimizer.state[param]["exp_avg_sq"].fill_(TINY)
    return optimizer


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_optimizer_state_from_before_initialize_never_passes_through_half(level: str) -> None:
    model = MLP.model()
    optimizer = with_tiny_state(model)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    for param in entries_of(optimizer):
        moments = optimizer.state[param]["exp_avg_sq"]
        assert_bitwise(moments, torch.full_like(moments, TINY))
        assert moments.dtype == torch.float32


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_an_optimizer_checkpoint_loaded_after_initialize_never_passes_through_half(
    level: str,
) -> None:
    saved = with_tiny_state(MLP.model()).state_dict()
    model = MLP.model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    optimizer.load_state_dict(saved)
    for param in entries_of(optimizer):
        moments = optimizer.state[param]["exp_avg_sq"]
        assert_bitwise(moments, torch.full_like(moments, TINY))
    assert_bitwise(optimizer.state_dict()["state"], saved["state"])


# skipping


def test_step_is_never_replaced() -> None:
    model = MLP.model()
    optimizer = sgd(model)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    backward(MLP.loss(model, MLP.batch()), optimizer, overflow=True)
    for method in ("step", "zero_grad", "add_param_group", "state_dict", "load_state_dict"):
        assert method not in vars(optimizer)
    assert "forward" not in vars(model)


# the scaler


def overflow(times: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    inputs = MLP.batch()
    for _ in range(times):
        optimizer.zero_grad()
        backward(MLP.loss(model, inputs), optimizer, overflow=True)
        optimizer.step()


def test_a_floor_of_zero_is_no_way_to_a_scale_of_zero() -> None:
    model, optimizer = started("O1", min_loss_scale=0.0)
    overflow(60, model, optimizer)
    assert scaler_numbers()[0] > 0


# checkpoints of the scaler


def test_scalers_are_matched_by_name_and_not_by_order() -> None:
    started("O2", num_losses=2)
    amp.load_state_dict(
        collections.OrderedDict(
            loss_scaler1={"loss_scale": 2.0, "unskipped": 2},
            loss_scaler0={"loss_scale": 1024.0, "unskipped": 1},
        )
    )
    assert scaler_numbers(0) == (1024.0, 1)
    assert scaler_numbers(1) == (2.0, 2)


@pytest.mark.parametrize("saved", [1.0, 64.0, 100.0, 65536.0])
def test_a_static_scale_stays_what_initialize_was_told(saved: float) -> None:
    """apex loaded over it: 65536 of a dynamic scaler at O3, whose gradients overflow for ever."""
    started("O2", loss_scale=128.0)
    amp.load_state_dict({"loss_scaler0": {"loss_scale": saved, "unskipped": 7}})
    assert scaler_numbers()[0] == 128.0
    assert not amp._amp_state.loss_scalers[0].dynamic


@pytest.mark.parametrize(("scaler_format", "more"), [("amp", {"dynamic", "opt_level", "version"}), ("apex", set())])
def test_the_checkpoint_has_apex_form_and_fills_a_given_destination(scaler_format: Any, more: set[str]) -> None:
    started("O2", num_losses=2)
    saved = amp.state_dict(format=scaler_format)
    for state in saved.values():
        assert set(state) == {"loss_scale", "unskipped"} | more
        for key in more:
            del state[key]
    assert isinstance(saved, collections.OrderedDict)
    assert saved == {
        "loss_scaler0": {"loss_scale": 65536.0, "unskipped": 0},
        "loss_scaler1": {"loss_scale": 65536.0, "unskipped": 0},
    }
    assert isinstance(saved["loss_scaler0"]["loss_scale"], float)
    assert isinstance(saved["loss_scaler0"]["unskipped"], int)
    destination: dict[str, Any] = {"mine": 1}
    assert amp.state_dict(destination) is destination
    assert list(destination) == ["mine", "loss_scaler0", "loss_scaler1"]


# state_dict, deepcopy, pickle


class WithExtraState(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 4))
        self.epoch = 3

    def get_extra_state(self) -> dict[str, int]:
        return {"epoch": self.epoch}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.epoch = state["epoch"]


@pytest.mark.parametrize("level", LEVELS)
def test_extra_state_passes_through_the_checkpoint(level: str) -> None:
    model = WithExtraState()
    amp.initialize(model, sgd(model), opt_level=level, verbosity=0)
    saved = model.state_dict()
    assert saved["_extra_state"] == {"epoch": 3}
    model.epoch = 0
    model.load_state_dict(saved)
    assert model.epoch == 3


@pytest.mark.parametrize("level", LEVELS)
def test_a_checkpoint_is_float_at_every_level(level: str) -> None:
    model, optimizer = started(level, task=NORMED_MLP)
    train(NORMED_MLP, model, optimizer, "c")
    saved = model.state_dict()
    assert {value.dtype for value in saved.values()} == {torch.float32, torch.int64}


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_a_checkpoint_aliases_nothing(level: str) -> None:
    model, optimizer = started(level)
    best = model.state_dict()
    before = {name: value.clone() for name, value in best.items()}
    train(MLP, model, optimizer, "ccc")
    assert_bitwise(dict(best), before)


@pytest.mark.parametrize("level", LEVELS)
def test_torch_save_of_a_whole_model_works(level: str) -> None:
    model, _ = started(level)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    twin = torch.load(buffer, weights_only=False)
    inputs = MLP.batch()[0]
    assert_bitwise(twin(inputs).detach(), model(inputs).detach())


@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
def test_replicas_of_data_parallel_run_their_own_forward(level: str) -> None:
    """`DataParallel` makes replicas by `_replicate_for_data_parallel`; each must run on its own weights."""
    model, _ = started(level)
    replica = model._replicate_for_data_parallel()
    for name, child in model.named_children():
        twin = child._replicate_for_data_parallel()
        for key, param in child.named_parameters():
            setattr(twin, key, torch.zeros_like(param))
        replica._modules[name] = twin
    inputs = MLP.batch()[0]
    outputs = replica(inputs)
    assert outputs.dtype == torch.float32
    assert outputs.abs().max() == 0
    assert model(inputs).abs().max() > 0


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_a_pickled_optimizer_holds_plain_parameters(level: str) -> None:
    model, optimizer = started(level)
    train(MLP, model, optimizer, "c")
    backward(MLP.loss(model, MLP.batch(1)), optimizer)
    twin = pickle.loads(pickle.dumps(optimizer))
    assert {type(param) for param in entries_of(twin)} == {nn.Parameter}
    assert_bitwise([param.detach() for param in entries_of(twin)], [param.detach() for param in model.parameters()])


# function patching


def test_a_tuple_of_parameters_is_cast_like_any_tuple() -> None:
    started("O1")
    lstm = nn.LSTM(4, 6)
    state = (nn.Parameter(torch.zeros(1, 2, 6)), nn.Parameter(torch.zeros(1, 2, 6)))
    outputs, (hidden, cell) = lstm(torch.randn(3, 2, 4), state)
    assert outputs.dtype == hidden.dtype == cell.dtype == HALF
    outputs.float().sum().backward()
    assert all(part.grad is not None and part.grad.dtype == torch.float32 for part in state)


@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
def test_disable_casts_without_function_casts_does_nothing(level: str) -> None:
    started(level)
    with amp.disable_casts():
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.float32


def test_disable_casts_before_initialize_does_nothing() -> None:
    with amp.disable_casts():
        pass


def test_disable_casts_reaches_the_casts_of_an_earlier_initialize() -> None:
    started("O1", seed=0)
    started("O1", seed=1)
    with amp.disable_casts():
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.float32


def test_batch_norm_takes_half_inputs_beside_float_weights() -> None:
    started("O1")
    norm = nn.BatchNorm1d(4)
    outputs = norm(torch.randn(8, 4).half())
    assert outputs.dtype == HALF
    assert norm.running_mean.dtype == torch.float32


@pytest.fixture
def library() -> types.ModuleType:
    module = types.ModuleType("library")
    module.score = lambda query: query.dtype
    return module


def test_registrations_have_no_effect_without_function_casts(
    library: types.ModuleType,
) -> None:
    amp.register_half_function(library, "score")
    started("O2")
    assert library.score(torch.ones(2)) == torch.float32
