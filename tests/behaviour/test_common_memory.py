"""Parameters made of views of one tensor, which count their writes together, and parameters tied by `.data`."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_engine import AmpStateError, amp, kernels
from tests.support import assert_bitwise

NARROW = {"master_weights": "24bit", "moment_dtype": "8bit"}
FORMS: dict[str, dict[str, Any]] = {
    "FP32": {},
    "split": {"master_weights": "split"},
    "seven bytes": NARROW,
    "released": {"release_gradients": True},
    "released, seven bytes": {"release_gradients": True, **NARROW},
    "on the CPU": {"masters_on": "cpu"},
}
NATIVE = pytest.mark.skipif(not kernels.has_native(torch.device("cpu")), reason="only compiled kernels step them")


class Attention(nn.Module):
    """Its weights come as views of one tensor, as a conversion of a checkpoint gives them, or each alone."""

    def __init__(self, are_views: bool) -> None:
        super().__init__()
        fused = torch.randn(48, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
        parts = fused.chunk(3) if are_views else [part.clone() for part in fused.chunk(3)]
        self.q, self.k, self.v = (nn.Parameter(part) for part in parts)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.q.t()) * (x @ self.k.t()) + x @ self.v.t()


def trained(are_views: bool, make: Any, **keywords: Any) -> dict[str, Tensor]:
    model = Attention(are_views)
    optimizer = make(model.parameters())
    amp.initialize(model, optimizer, opt_level="O5", verbosity=0, **keywords)
    generator = torch.Generator().manual_seed(1)
    for _ in range(25):
        model(torch.randn(8, 16, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = model.state_dict()
    amp.close()
    return weights


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4)


def rmsprop(params: Any) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(params, lr=1e-4)


@pytest.mark.parametrize(
    ("form", "make"),
    [
        *(pytest.param(form, adamw, marks=[NATIVE] if form not in ("FP32", "split") else []) for form in FORMS),
        ("FP32", rmsprop),
        ("split", rmsprop),
    ],
)
def test_views_of_one_tensor_train_as_tensors_of_their_own(form: str, make: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that parameters were written before steps, too
        views = trained(True, make, **FORMS[form])
    assert_bitwise(views, trained(False, make, **FORMS[form]))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight.data = self.embedding.weight.data


@pytest.mark.parametrize("came", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_weights_tied_by_data_are_refused_where_they_would_part(level: str, came: torch.dtype) -> None:
    model = Tied().to(came)
    model.head.weight.data = model.embedding.weight.data
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(AmpStateError, match=r"head\.weight of Tied has the memory of embedding\.weight of Tied"):
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert model.head.weight.dtype is came
    model.head.weight = model.embedding.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert model.head.weight is model.embedding.weight


def test_autograd_finds_a_write_through_the_tensor_of_the_views() -> None:
    fused = torch.randn(48, 16).bfloat16()
    model = nn.ParameterList([nn.Parameter(part) for part in fused.chunk(3)])
    amp.initialize(model, adamw(model.parameters()), opt_level="O5", verbosity=0)
    loss = sum((weight.square().sum() for weight in model), torch.zeros(()))
    fused.mul_(0.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_norms_tied_by_data_stay_so(level: str) -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[2].weight.data = model[0].weight.data
    amp.initialize(model, adamw(model.parameters()), opt_level=level, verbosity=0)
    assert model[2].weight.data_ptr() == model[0].weight.data_ptr()


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_weights_tied_by_data_train_in_fp32(level: str) -> None:
    model = Tied()
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, verbosity=0)
    assert model.head.weight.data_ptr() == model.embedding.weight.data_ptr()


def test_frozen_weights_tied_by_data_are_left_alone() -> None:
    model = Tied().bfloat16().requires_grad_(False)
    model.head.weight.data = model.embedding.weight.data
    amp.initialize(model, opt_level="O5", verbosity=0)
