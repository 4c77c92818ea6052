"""Counting values by powers of two: held against what Python says of each value."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from amp_engine.tools.telemetry.magnitudes import LOWEST, Limits, MagnitudeCounter, Magnitudes


def counted(*tensors: Tensor, inv_scale: float = 1.0) -> Magnitudes:
    counter = MagnitudeCounter()
    for tensor in tensors:
        counter.add(tensor, inv_scale)
    return counter.read()


def spread(dtype: torch.dtype, n: int = 4000) -> Tensor:
    """Values over the whole range of a type, subnormal ones and zeros among them."""
    info = torch.finfo(dtype)
    low, high = math.log2(info.smallest_normal) - 12, math.log2(info.max)
    exponents = torch.rand(n, dtype=torch.float64) * (high - low) + low
    values = (torch.randn(n).sign() * torch.exp2(exponents)).to(dtype)
    values[::50] = 0
    return values


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_each_value_is_counted_under_its_power_of_two(dtype: torch.dtype) -> None:
    values = spread(dtype)
    expected: dict[int, int] = {}
    finite = [abs(v) for v in values.tolist() if v and math.isfinite(v)]
    for value in finite:
        e = max(LOWEST, math.frexp(value)[1] - 1)
        expected[e] = expected.get(e, 0) + 1
    found = counted(values)
    assert dict(found.counts) == expected
    assert found.counts == tuple(sorted(found.counts))
    assert found.zeros == sum(v == 0 for v in values.tolist())
    assert (found.nonzero, found.total) == (len(finite), len(values))


def test_what_is_not_finite_is_counted_apart() -> None:
    inf, nan = float("inf"), float("nan")
    found = counted(torch.tensor([inf, -inf, nan, 0.0, -0.0, 1.5]), torch.tensor(3.0))
    assert found == Magnitudes(((0, 1), (1, 1)), zeros=2, nonfinite=3)
    assert found.largest == 1
    assert counted(torch.zeros(3)).largest is None
    assert counted().total == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 1024.0, 2.0**-6])
def test_the_lost_share_is_that_which_a_cast_makes_0(dtype: torch.dtype, scale: float) -> None:
    exponents = torch.rand(20_000, dtype=torch.float64) * 60 - 45 - (110 if dtype is torch.bfloat16 else 0)
    values = torch.exp2(exponents).clamp_min(2.0**-126).float()
    cast = (values * scale).to(dtype)
    found = counted(values)
    assert found.lost(dtype, scale) == pytest.approx((cast == 0).double().mean().item(), abs=1e-4)
    assert dtype is torch.bfloat16 or found.lost(dtype, scale) > 0.05


def test_values_are_unscaled_before_they_are_counted() -> None:
    values = spread(torch.float16)
    assert counted(values, inv_scale=0.25) == counted(values.float() / 4)


def test_views_sparse_gradients_and_scalars_are_counted() -> None:
    values = spread(torch.float32, 24).reshape(4, 6)
    sparse = values.to_sparse()
    assert counted(values.t()[::2]) == counted(values[:, ::2].clone())
    assert counted(sparse).counts == counted(values).counts
    assert counted(torch.tensor(2.0), torch.tensor([4.0])) == counted(torch.tensor([2.0])) + counted(torch.tensor(4.0))


@pytest.mark.parametrize(
    ("dtype", "limits"),
    [
        (torch.float16, Limits(15, -14, -24)),
        (torch.bfloat16, Limits(127, -126, -133)),
        (torch.float32, Limits(127, -126, -149)),
    ],
)
def test_limits_are_those_of_the_type(dtype: torch.dtype, limits: Limits) -> None:
    assert Limits.of(dtype) == limits
    smallest = torch.tensor(2.0**limits.smallest, dtype=torch.float64).to(dtype)
    assert smallest > 0
    assert torch.tensor(2.0 ** (limits.smallest - 1), dtype=torch.float64).to(dtype) == 0
    assert smallest.double().item() == 2.0**limits.smallest
