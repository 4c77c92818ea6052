"""Complex parameters: each is a pair of FP32 numbers at every level, unscaled, checked, clipped and stepped as such."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_engine import amp
from tests.support import assert_bitwise

SCALED = {"O1": {"loss_scale": 128.0}, "O2": {"loss_scale": 128.0}, "O4": {}}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adagrad": torch.optim.Adagrad,
    "AdamW": torch.optim.AdamW,
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}


class Spectrum(nn.Module):
    """A complex and a real parameter, whose loss no level casts."""

    def __init__(self, dtype: torch.dtype = torch.complex64) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.filter = nn.Parameter(torch.randn(3, 4, dtype=dtype, generator=generator))
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, index: int) -> Tensor:
        x = torch.randn(3, 4, dtype=self.filter.dtype, generator=torch.Generator().manual_seed(index))
        return torch.view_as_real(self.filter * x).float() * self.bias.float().add(1).view(1, 4, 1)


def loss_of(model: nn.Module, index: int) -> Tensor:
    return model(index).mul(model(index + 100)).mean()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("level", SCALED)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_each_optimizer_of_torch_steps_them_as_plain_torch_does(optimizer: str, level: str, dtype: torch.dtype) -> None:
    ours, plain = Spectrum(dtype), Spectrum(dtype)
    one, other = (OPTIMIZERS[optimizer](model.parameters()) for model in (ours, plain))
    amp.initialize(ours, one, opt_level=level, verbosity=0, **SCALED[level])
    for index in range(4):
        with amp.scale_loss(loss_of(ours, index), one) as scaled_loss:
            scaled_loss.backward()
        plain.filter.grad, plain.bias.grad = (p.grad.clone() for p in amp.master_params(one))
        gradient = torch.autograd.grad(loss_of(ours, index), ours.filter)[0]
        assert torch.allclose(plain.filter.grad, gradient, rtol=1e-6)
        one.step()
        other.step()
        one.zero_grad()
    assert_bitwise(ours.filter.detach(), plain.filter.detach())


@pytest.mark.parametrize("level", SCALED)
def test_the_norm_has_both_parts(level: str) -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(1, dtype=torch.complex64))])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, **SCALED[level])
    for _ in range(2):  # two backwards: gradients of the first are set aside and added
        with amp.scale_loss(torch.view_as_real(model[0]).mul(torch.tensor([[3.0, 4.0]])).sum(), optimizer) as loss:
            loss.backward()
    assert amp.clip_grad_norm_(optimizer, 5.0) == 10.0
    optimizer.step()
    assert torch.allclose(model[0].detach(), torch.tensor([-3.0 - 4.0j]))


@pytest.mark.parametrize("part", [torch.complex(torch.tensor(0.0), torch.tensor(float("nan"))), torch.inf], ids=str)
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_an_imaginary_part_that_is_not_finite_skips_the_step(level: str, part: Any) -> None:
    model = Spectrum()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    before = model.filter.detach().clone()
    with amp.scale_loss(loss_of(model, 0), optimizer) as scaled_loss:
        scaled_loss.backward(inputs=[model.filter, model.bias])
        model.filter.grad[0, 0] = part
    optimizer.step()
    assert amp.last_step().skipped
    assert_bitwise(model.filter.detach(), before)


def test_gradients_that_are_taken_by_hand_are_unscaled() -> None:
    model = Spectrum()
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O1", loss_scale=128.0, verbosity=0)
    expected = torch.autograd.grad(loss_of(model, 0), model.filter)[0]
    found = amp.unscale(torch.autograd.grad(amp.scale(loss_of(model, 0)), model.filter))[0]
    assert torch.allclose(found, expected, rtol=1e-6)
