"""A master is its parameter with more bits: who writes the one writes the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_engine import AmpStateError, amp
from tests.support import HALF, backward, momentum_sgd

SMALL = 2.0**-14  # lost where it is added to 1 in half, and kept in FP32


def adagrad(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(params, lr=0.1)


# The kernels step SGD; Adagrad steps itself, on masters that stand in for the parameters.
OPTIMIZERS = {"kernels": momentum_sgd, "own step": adagrad}


class Pair:
    """One half weight of shape [4, 3, 2, 2] that is 1, and its master of 1 + SMALL, after a step that moved nothing."""

    def __init__(self, level: str, make: Callable[[Any], torch.optim.Optimizer], scale: float = 1.0) -> None:
        self.model = nn.Conv2d(3, 4, 2, bias=False)
        nn.init.constant_(self.model.weight, 1.0 + SMALL)
        self.optimizer = make(self.model.parameters())
        amp.initialize(self.model, self.optimizer, opt_level=level, loss_scale=scale, verbosity=0)
        self.level = level
        self.step()

    @property
    def param(self) -> Tensor:
        return self.model.weight

    def forward(self) -> Tensor:
        return self.model(torch.ones(1, 3, 2, 2))

    def step(self) -> None:
        """A step with gradients of 0, which changes no weight."""
        self.optimizer.zero_grad()
        backward((self.forward() * 0.0).sum(), self.optimizer)
        self.optimizer.step()

    @property
    def master(self) -> Tensor:
        (master,) = amp.master_params(self.optimizer)
        return master.detach()


def by_version(param: Tensor) -> None:
    with torch.no_grad():
        param[0] = 3.0


def by_other_memory(param: Tensor) -> None:
    value = param.detach().clone()
    value[0] = 3.0
    param.data = value


def by_data(param: Tensor) -> None:
    param.data[0] = 3.0


def by_numpy(param: Tensor) -> None:
    param.detach().view(torch.int16).numpy()[0] = torch.full((), 3.0, dtype=param.dtype).view(torch.int16).item()


WRITES = [by_version, by_other_memory, by_data, by_numpy]


@pytest.fixture(params=["O2", "O5"])
def level(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=OPTIMIZERS)
def pair(request: pytest.FixtureRequest, level: str) -> Pair:
    return Pair(level, OPTIMIZERS[request.param])


# --- the parameter is written -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", WRITES)
def test_who_writes_elements_of_a_parameter_writes_those_of_its_master(
    pair: Pair, write: Callable[[Tensor], None]
) -> None:
    write(pair.param)
    pair.step()
    assert pair.param[0].unique().tolist() == [3.0]
    assert pair.master[0].unique().tolist() == [3.0]
    assert pair.master[1:].unique().tolist() == [1.0 + SMALL], "the others keep their bits"
    assert pair.param[1:].unique().tolist() == [1.0]


@pytest.mark.parametrize("write", WRITES)
def test_weights_that_are_written_before_the_first_step_are_the_masters(
    level: str, write: Callable[[Tensor], None]
) -> None:
    model = nn.Conv2d(3, 4, 2, bias=False)
    optimizer = momentum_sgd(model.parameters())
    before = model.weight.detach().clone()
    amp.initialize(model, optimizer, opt_level=level, loss_scale=1.0, verbosity=0)
    write(model.weight)
    (model(torch.ones(1, 3, 2, 2)) * 0.0).sum().backward()
    optimizer.step()
    (master,) = amp.master_params(optimizer)
    assert master[0].unique().tolist() == [3.0]
    assert torch.equal(master[1:], before[1:])
    assert torch.equal(master.to(model.weight.dtype), model.weight)


@pytest.mark.parametrize("transform", ["memory format", "expanded"])
def test_another_layout_keeps_every_bit_of_the_master(pair: Pair, transform: str) -> None:
    if transform == "memory format":
        pair.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    else:
        wide = torch.ones(4, 3, 2, 4, dtype=pair.param.dtype)
        pair.param.data = wide[..., ::2]  # with gaps
    pair.step()
    assert pair.master.unique().tolist() == [1.0 + SMALL]
    if transform == "memory format":
        assert pair.master.is_contiguous(memory_format=torch.channels_last)
    pair.optimizer.zero_grad()
    pair.forward().sum().backward()
    pair.optimizer.step()
    assert pair.param.unique().tolist() == [float(pair.master.flatten()[0].to(pair.param.dtype))]


def test_a_loaded_value_is_the_master_to_its_last_bit(pair: Pair) -> None:
    pair.model.load_state_dict({"weight": torch.full((4, 3, 2, 2), 3.0 + SMALL)})
    assert pair.master.unique().tolist() == [3.0 + SMALL]
    pair.step()
    assert pair.master.unique().tolist() == [3.0 + SMALL]
    assert pair.model.state_dict()["weight"].unique().tolist() == [3.0 + SMALL]


# --- the master is written --------------------------------------------------------------------------------------------


def write_master(pair: Pair) -> None:
    with torch.no_grad():
        for master in amp.master_params(pair.optimizer):
            master[0] = 3.0 + SMALL


def test_a_master_that_was_written_reaches_the_model_at_the_next_forward(pair: Pair) -> None:
    write_master(pair)
    outputs = pair.forward().flatten().tolist()
    assert outputs == [3.0 * 12, 12.0, 12.0, 12.0]
    assert pair.param[0].unique().tolist() == [3.0]
    assert pair.master[0].unique().tolist() == [3.0 + SMALL], "and keeps its bits"
    version = pair.param._version
    pair.forward()
    assert pair.param._version == version, "it is rounded once"


def test_a_master_that_was_written_reaches_the_model_at_the_next_step(pair: Pair) -> None:
    pair.optimizer.zero_grad()
    (pair.forward() * 0.0).sum().backward()
    write_master(pair)
    pair.optimizer.step()
    assert pair.param[0].unique().tolist() == [3.0]
    assert pair.master[0].unique().tolist() == [3.0 + SMALL]
    assert pair.master[1:].unique().tolist() == [1.0 + SMALL]


@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_no_parameter_is_written_between_a_forward_and_its_backward(level: str, scale: float) -> None:
    pair = Pair(level, momentum_sgd, scale)
    loss = pair.forward().square().sum()
    write_master(pair)
    backward(loss, pair.optimizer)  # of what the forward saved
    assert pair.param[0].unique().tolist() == [1.0]


def test_on_masters_shows_masters_in_groups_and_state_and_rounds_them_at_the_end(pair: Pair) -> None:
    state = pair.optimizer.state[pair.param]
    pair.optimizer.zero_grad()
    pair.forward().sum().backward()
    with amp.on_masters(pair.optimizer):
        (shown,) = pair.optimizer.param_groups[0]["params"]
        assert shown.dtype == torch.float32
        assert shown.grad is not None
        assert shown.grad.dtype == torch.float32
        assert pair.optimizer.state[shown] is state
        with torch.no_grad():
            shown[0] = 3.0 + SMALL
    assert pair.optimizer.param_groups[0]["params"] == [pair.param]
    assert pair.optimizer.state[pair.param] is state
    assert list(pair.optimizer.state) == [pair.param]
    assert pair.param[0].unique().tolist() == [3.0]
    assert pair.master[0].unique().tolist() == [3.0 + SMALL]


# --- who has a master -------------------------------------------------------------------------------------------------


def test_a_parameter_that_joins_gets_a_master(pair: Pair) -> None:
    late = nn.Parameter(torch.ones(2, dtype=pair.param.dtype))
    pair.optimizer.add_param_group({"params": [late]})
    _, master = amp.master_params(pair.optimizer)
    assert (master.dtype, master.tolist()) == (torch.float32, [1.0, 1.0])


def test_a_parameter_that_leaves_and_comes_back_goes_on_from_its_master(pair: Pair) -> None:
    params, before = pair.optimizer.param_groups[0]["params"], pair.master.detach().clone()
    params.clear()
    assert list(amp.master_params(pair.optimizer)) == []
    params.append(pair.model.weight)
    assert torch.equal(pair.master, before)


def test_a_frozen_parameter_has_no_master_until_it_is_trained(level: str) -> None:
    model = nn.Linear(2, 2)
    model.weight.requires_grad_(False)
    optimizer = momentum_sgd(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert [p.dtype for p in amp.master_params(optimizer)] == [HALF[level], torch.float32]
    model.weight.requires_grad_(True)
    assert [p.dtype for p in amp.master_params(optimizer)] == [torch.float32, torch.float32]


def test_a_half_parameter_in_two_optimizers_is_refused_by_name(pair: Pair) -> None:
    other = torch.optim.AdamW([pair.param])
    with pytest.raises(AmpStateError, match="stepped by two optimizers, the second is this AdamW"):
        amp.initialize(pair.model, other, opt_level=pair.level, verbosity=0)
    assert other.param_groups[0]["params"][0] is pair.param
    pair.step()


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_masters_and_moments_begin_at_multiples_of_16_bytes_as_the_kernels_want_them(level: str) -> None:
    """The weights are views of a flat buffer, one behind the other, as those of an LSTM on a GPU."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
    numbers = [p.numel() for p in model.parameters()]
    for p, view in zip(model.parameters(), torch.randn(sum(numbers)).split(numbers), strict=True):
        p.data = view.view_as(p)
    values = [p.detach().clone() for p in model.parameters()]
    assert [p.data_ptr() % 16 for p in model.parameters()] == [0, 12, 0, 12]
    optimizer = torch.optim.AdamW(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, loss_scale=1.0, verbosity=0)
    masters = list(amp.master_params(optimizer))
    assert all(map(torch.equal, masters, values))
    backward(model(torch.ones(2, 3)).sum(), optimizer)
    optimizer.step()
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert len(moments) == 8
    assert {t.data_ptr() % 16 for t in (*masters, *moments, *model.parameters())} == {0}


def test_close_gives_the_exact_master_to_the_model(pair: Pair) -> None:
    amp.close()
    assert pair.param.dtype == torch.float32
    assert pair.param.unique().tolist() == [1.0 + SMALL]


# --- split masters ----------------------------------------------------------------------------------------------------


@pytest.fixture
def split() -> Iterator[nn.Linear]:
    """A weight of 1 whose value in FP32 is 1 + SMALL."""
    model = nn.Linear(4, 4, bias=False)
    nn.init.constant_(model.weight, 1.0 + SMALL)
    optimizer = momentum_sgd(model.parameters())
    amp.initialize(model, optimizer, opt_level="O5", master_weights="split", verbosity=0)
    model(torch.ones(1, 4)).mul(0.0).sum().backward()
    optimizer.step()
    assert model.weight.unique().tolist() == [1.0]
    assert model.state_dict()["weight"].unique().tolist() == [1.0 + SMALL]
    yield model
    del optimizer  # it has the rest


def test_a_split_parameter_that_was_written_is_the_value(split: nn.Linear) -> None:
    by_version(split.weight)
    saved = split.state_dict()["weight"]
    assert saved[0].unique().tolist() == [3.0]
    amp.close()
    assert split.weight[0].unique().tolist() == [3.0]


def test_a_split_parameter_that_was_written_through_data_keeps_a_rest_below_its_last_bit(split: nn.Linear) -> None:
    by_data(split.weight)
    amp.close()
    assert torch.equal(split.weight[0].bfloat16(), torch.full((4,), 3.0, dtype=torch.bfloat16))
    assert split.weight[1:].unique().tolist() == [1.0 + SMALL]
