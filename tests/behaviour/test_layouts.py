"""Orders in memory, types and gaps of weights and state that torch's own optimizers step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_engine import amp, kernels
from amp_engine.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedMixedPrecisionLamb, FusedNovoGrad, FusedSGD
from tests.support import MASTER_LEVELS, assert_bitwise, assert_same_step, backward, entries_of, frozen, weights_of

LEVELS = ("O1", "O2", "O5")
MAKES: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "FusedAdam": lambda p: FusedAdam(p, lr=1e-2),
    "FusedSGD": lambda p: FusedSGD(p, lr=1e-2, momentum=0.9),
    "FusedLAMB": lambda p: FusedLAMB(p, lr=1e-2),
    "FusedNovoGrad": lambda p: FusedNovoGrad(p, lr=1e-2),
    "FusedAdagrad": lambda p: FusedAdagrad(p, lr=1e-2),
    "FusedMixedPrecisionLamb": lambda p: FusedMixedPrecisionLamb(p, lr=1e-2),
}
TORCHS = ("AdamW", "SGD")


def network() -> nn.Module:
    """[N, 3, 4, 4] -> [N, 2]."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2))


def iterate(model: nn.Module, optimizer: Optimizer, bare: Optimizer | None, index: int) -> None:
    """Take one step of `optimizer`, and of `bare` with the same gradients."""
    images = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(index))[:, : model[0].weight.shape[1]]
    backward(model(images).float().square().mean(), optimizer)
    if bare is not None:
        for ours, theirs in zip(weights_of(optimizer), weights_of(bare), strict=True):
            theirs.grad = None if ours.grad is None else ours.grad.clone()
        bare.step()
    optimizer.step()
    optimizer.zero_grad()


def beside(optimizer: Optimizer, make: Callable[[Any], Optimizer]) -> Optimizer:
    """A bare optimizer of copies of what `optimizer` steps, in plain order, with its state."""
    bare = make([nn.Parameter(p.detach().clone().contiguous()) for p in weights_of(optimizer)])
    if optimizer.state:
        bare.load_state_dict(frozen_state(optimizer))
    return bare


def frozen_state(optimizer: Optimizer) -> dict[str, Any]:
    saved = optimizer.state_dict()
    return {**saved, "state": {i: {k: frozen(v) for k, v in s.items()} for i, s in saved["state"].items()}}


def check(model: nn.Module, optimizer: Optimizer, bare: Optimizer) -> None:
    for half, ours, theirs in zip(model.parameters(), weights_of(optimizer), weights_of(bare), strict=True):
        assert_same_step(optimizer, ours.detach().contiguous(), theirs.detach())
        assert_bitwise(half.detach(), ours.detach().to(half.dtype))
        for key, value in bare.state[theirs].items():
            assert_same_step(optimizer, optimizer.state[half][key].contiguous(), value.contiguous())


def initialized(name: str, level: str, model: nn.Module) -> Optimizer:
    optimizer = MAKES[name](model.parameters())
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    return optimizer


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", MAKES)
def test_a_contiguous_checkpoint_resumes_in_a_channels_last_model(name: str, level: str) -> None:
    model = network()
    optimizer = initialized(name, level, model)
    iterate(model, optimizer, None, 0)
    saved = {k: v.clone() for k, v in model.state_dict().items()}, frozen_state(optimizer)
    amp.close()

    resumed = network().to(memory_format=torch.channels_last)
    optimizer = initialized(name, level, resumed)
    resumed.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    bare = beside(optimizer, MAKES[name])
    for index in (1, 2):
        iterate(resumed, optimizer, bare, index)
    assert resumed[0].weight.is_contiguous(memory_format=torch.channels_last)
    if name in ("AdamW", "SGD", "FusedSGD"):  # whole-tensor norms are summed in the order in memory
        check(resumed, optimizer, bare)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["AdamW", "SGD", "FusedNovoGrad"])
def test_a_model_is_moved_to_channels_last_and_trains_on(name: str, level: str, steps: int) -> None:
    model = network()
    optimizer = initialized(name, level, model)
    for index in range(steps):
        iterate(model, optimizer, None, index)
    model.to(memory_format=torch.channels_last)
    if level in ("O2", "O5"):
        amp.current_engine()._initialized.record_of(optimizer).look_for_parameters()  # as scale_loss at its entry
    bare = beside(optimizer, MAKES[name])
    for index in (5, 6):
        iterate(model, optimizer, bare, index)
    if name in TORCHS:
        check(model, optimizer, bare)
    for half, master in zip(model.parameters(), weights_of(optimizer), strict=True):
        assert_bitwise(half.detach(), master.detach().to(half.dtype))


@pytest.mark.parametrize("between", ["before initialize", "between exit and step"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("name", ["AdamW", "FusedSGD"])
def test_parameters_with_gaps_are_stepped_with_masters(name: str, level: str, dtype: torch.dtype, between: str) -> None:
    model = network().to(dtype)
    if between == "before initialize":
        model[0].weight = nn.Parameter(model[0].weight.data[:, :1])
    optimizer = initialized(name, level, model)
    if between != "before initialize":
        model[0].weight.data = torch.cat([model[0].weight.data] * 2, 1)[:, :3]
        assert not model[0].weight.is_contiguous()
        amp.current_engine()._initialized.record_of(optimizer).look_for_parameters()
    bare = beside(optimizer, MAKES[name])
    for index in range(2):
        iterate(model, optimizer, bare, index)
    check(model, optimizer, bare)


def relaid(value: Tensor, how: str) -> Tensor:
    if how == "transposed":
        return value.t().contiguous().t() if value.ndim == 2 else value.clone(memory_format=torch.contiguous_format)
    if how == "gaps":
        return torch.stack([value, value], -1)[..., 0]
    if how == "expanded":
        return value.flatten()[:1].mul(0).add(0.01).reshape([1] * value.ndim).expand_as(value)
    return value.to(getattr(torch, how))


@pytest.mark.parametrize("how", ["transposed", "gaps", "expanded", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "level"),
    [(name, level) for name in MAKES for level in ("alone", *LEVELS) if level != "alone" or name not in TORCHS],
)
def test_state_in_another_order_or_type_is_gone_on_with(name: str, level: str, how: str) -> None:
    fails = how == "expanded" or (name != "SGD" and how in ("float64", "float16", "bfloat16"))
    if fails and name in TORCHS and not kernels.has_native(torch.device("cpu")):
        pytest.skip("torch's own step fails on these")
    model = network()
    optimizer = MAKES[name](model.parameters())
    if level != "alone":
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)

    def step(index: int) -> None:
        for i, p in enumerate(weights_of(optimizer)):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * index + i))
        optimizer.step()

    step(0)
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.numel() > 1:
                state[key] = relaid(value, how)
    bare = beside(optimizer, MAKES[name])
    for i, (ours, theirs) in enumerate(zip(entries_of(optimizer), weights_of(bare), strict=True)):
        theirs.grad = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(10 + i))
        for key, value in bare.state[theirs].items():
            dtype = optimizer.state[ours][key].dtype if name == "SGD" else value.dtype  # which torch's keeps
            bare.state[theirs][key] = value.to(dtype).contiguous()
    step(1)
    with amp.disable_casts() if level != "alone" else nullcontext():
        bare.step()
    for ours, theirs in zip(weights_of(optimizer), weights_of(bare), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", TORCHS)
def test_an_expanded_moment_is_taken_for_no_more_memory_than_it_has(name: str) -> None:
    """A moment that lies right before another one, were each of its elements in a place of its own."""
    if not kernels.has_native(torch.device("cpu")):
        pytest.skip("torch's own step fails on these")
    params = [nn.Parameter(torch.ones(8)) for _ in range(2)]
    optimizer = MAKES[name](params)
    amp.initialize(nn.ParameterList(params), optimizer, opt_level="O1", verbosity=0)
    for p in params:
        p.grad = torch.ones(8)
    optimizer.step()
    key = "momentum_buffer" if name == "SGD" else "exp_avg"
    memory = torch.ones(10)
    optimizer.state[params[0]][key] = memory[:1].expand(8)
    optimizer.state[params[1]][key] = memory[2:]
    for p in params:
        p.grad = torch.ones(8)
    optimizer.step()
    assert_bitwise(params[0].detach(), params[1].detach())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_square_weight_that_is_transposed_where_it_lies_keeps_its_state_by_place(name: str, level: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    optimizer = initialized(name, level, model)

    def step(grad: Tensor) -> None:
        for master in amp.master_params(optimizer):
            master.grad = grad.clone()
        optimizer.step()

    step(torch.randn(4, 4))
    (weight,) = entries_of(optimizer)
    bare = beside(optimizer, MAKES[name])
    weights_of(bare)[0].data = weights_of(bare)[0].data.t().contiguous()
    weight.data = weight.data.t()
    grad = torch.randn(4, 4)
    step(grad)
    weights_of(bare)[0].grad = grad
    bare.step()
    # What was written into a half parameter has its digits.
    rtol, atol = (1e-2, 1e-2) if level in MASTER_LEVELS else (1e-5, 1e-6)
    torch.testing.assert_close(weights_of(optimizer), weights_of(bare), rtol=rtol, atol=atol)
